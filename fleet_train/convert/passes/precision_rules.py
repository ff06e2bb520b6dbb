"""Mixed precision: the valid settings, and which operators compute in low precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import paddle

from fleet_train.errors import ConversionError

LEVELS, DTYPES = ("O0", "O1", "O2"), ("bfloat16", "float16")

LOW = frozenset(
    f"pd_op.{name}"
    for name in (
        "matmul",
        "bmm",
        "addmm",
        "conv2d",
        "depthwise_conv2d",
        "conv3d",
        "conv2d_transpose",
        "depthwise_conv2d_transpose",
        "conv3d_transpose",
    )
)
"""Sums of products: fast in low precision, and their kernels accumulate in float32. Paddle's white list, without the
fused operators, which only later passes create."""

FLOAT32_RESULT_ON_CPU = frozenset({"pd_op.conv2d", "pd_op.depthwise_conv2d"})
"""On CPU their bfloat16 kernels return float32 declared as bfloat16: a cast can read that, other operators fail."""

BATCH_NORMS = ("pd_op.batch_norm_", "pd_op.sync_batch_norm_")

_ALL: tuple[int, ...] = ()
_FIRST = (0,)  # the other operands are scalars that the kernel reads as float32

FOLLOWERS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((f"pd_op.{name}" for name in ("relu", "relu6", "leaky_relu", "gelu", "silu", "swish")), _ALL),
    **dict.fromkeys((f"pd_op.{name}" for name in ("tanh", "sigmoid", "hardswish", "pool2d", "slice")), _ALL),
    **dict.fromkeys((f"pd_op.{name}" for name in ("add", "subtract", "multiply", "maximum", "minimum")), _ALL),
    **dict.fromkeys((f"pd_op.{name}" for name in ("reshape", "flatten", "transpose", "squeeze", "unsqueeze")), _ALL),
    "pd_op.scale": _FIRST,
    "pd_op.dropout": _FIRST,
}
"""Operators that continue in low precision after one of LOW, and the operands that are cast for it (all if none is
named). All others compute in float32: normalisation, softmax, losses, sums, exponentials, powers, and joining and
splitting of tensors. So does an operator without a kernel for the dtype on this device."""


@dataclass(frozen=True)
class MixedPrecision:
    """``level``: O0 = float32, O1 = sums of products in low precision, O2 = also the operators that follow them.

    ``dtype``: bfloat16 needs no loss scaling; float16 needs it, and a GPU. ``keep_batch_norm_fp32``: batch norm
    computes in float32 (always so in O1).
    """

    level: str = "O0"
    dtype: str = "bfloat16"
    keep_batch_norm_fp32: bool = True

    def __post_init__(self) -> None:
        if self.level == "O3":
            raise ConversionError(
                "amp level O3 (Apex: parameters and updates in low precision too) is not supported: updates smaller "
                "than 1/256 of a bfloat16 parameter are lost; use O2, which keeps float32 parameters"
            )
        if self.level not in LEVELS:
            raise ConversionError(f"amp level {self.level!r} is unknown; use {', '.join(LEVELS)}")
        if self.dtype not in DTYPES:
            raise ConversionError(f"amp dtype {self.dtype!r} is unknown; use {' or '.join(DTYPES)}")


def refuse_unusable(settings: MixedPrecision, on_gpu: bool) -> None:
    """Raise ConversionError for settings that this device has no kernels for."""
    if on_gpu:
        return
    if settings.dtype == "float16":
        raise ConversionError("amp dtype float16 needs a GPU: Paddle has no float16 matmul on CPU; use bfloat16")
    if not settings.keep_batch_norm_fp32:
        raise ConversionError(
            "keep_batch_norm_fp32: false needs a GPU: Paddle has no bfloat16 batch norm on CPU; leave it on"
        )


def is_emulated(settings: MixedPrecision, on_gpu: bool, recomputes: bool = False) -> bool:
    """Whether values are rounded to ``settings.dtype`` and computed in float32.

    oneDNN has bfloat16 from AVX-512 on and raises an exception without a message below it (Paddle's own tests make the
    same check). ``recomputes``: beside recompute it gave wrong gradients with AVX-512, because values that are kept
    reached it in its own memory layout; ``collectives/host_ops.py`` has mended that, which has not run on AVX-512 yet.
    """
    asked = settings.level != "O0" and settings.dtype == "bfloat16"
    return asked and not on_gpu and (recomputes or not paddle.base.core.supports_bfloat16())


def said_of(settings: MixedPrecision, on_gpu: bool, recomputes: bool = False) -> list[str]:
    """Rank 0's notes on how ``settings`` are carried out."""
    if not is_emulated(settings, on_gpu, recomputes):
        return []
    where = "on this processor, which has no AVX-512"
    if not is_emulated(settings, on_gpu):
        where = "on CPUs beside recompute, whose values oneDNN may read wrongly in bfloat16"
    return [
        f"amp_level: {settings.level} in bfloat16 is emulated {where}: values are rounded to bfloat16 and computed in "
        "float32; the results are bfloat16's, but no time is saved"
    ]


@cache
def has_kernels(operator_name: str, dtype: str, on_gpu: bool) -> bool:
    """Whether this Paddle computes ``pd_op.<name>`` and its gradient in ``dtype`` on this kind of device."""
    name = operator_name.removeprefix("pd_op.").rstrip("_")
    registered = _registered_kernels()
    # The registry lists some kernels under names of Paddle 1.x (add: elementwise_add). FOLLOWERS that it does not list
    # # under the current name were tried on CPU: they exist.
    found = [registered[one] for one in (name, f"{name}_grad") if one in registered]
    return all(any(_serves(kernel, dtype, on_gpu) for kernel in kernels) for kernels in found)


@cache
def _registered_kernels() -> dict[str, Any]:
    kernels: dict[str, Any] = paddle.base.core._get_all_register_op_kernels("phi")
    return kernels


def _serves(kernel: str, dtype: str, on_gpu: bool) -> bool:
    """``kernel``: '{data_type[::phi::dtype::bfloat16]; data_layout[ONEDNN]; place[Place(cpu)]; ...}'."""
    place = "Place(gpu" if on_gpu else "Place(cpu"
    return place in kernel and f"dtype::{dtype}]" in kernel
