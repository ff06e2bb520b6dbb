"""Mixed precision: runs forward operators in bfloat16 or float16 where that is fast and safe.

A pass over the operators that the loss depends on, run before gradient operators exist: those are then derived from its
result. Parameters stay float32 (they are the master weights) and are cast where they are used, so every optimizer works
unchanged, and gradients are communicated in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import paddle

from fleet_train.convert.passes.program import BATCH_NORMS, operators_behind
from fleet_train.convert.passes.recompute import recomputes
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile


def lower_precision(loss: Any, profile: Profile, *, on_gpu: bool, emulated: bool | None = None) -> int:
    """Rewrite the operators that ``loss`` depends on; returns how many now compute in ``amp_dtype``.

    ``amp_level`` O1: operators of `LOW` compute in low precision and return float32. O2: operators of `FOLLOWERS` that
    get their result continue in low precision. Raises ConversionError for settings that the device cannot carry out.
    ``emulated``: round to ``amp_dtype`` and compute in float32; None = as `is_emulated` says.
    """
    if profile.amp_level == "O0":
        return 0
    refuse_unusable(profile, on_gpu)
    if emulated is None:
        emulated = is_emulated(profile, on_gpu)
    lowering = (_Rounding if emulated else _Lowering)(getattr(paddle, profile.amp_dtype), on_gpu)
    followers = _followers(profile)
    for operator in operators_behind(loss)[:-1]:  # the last one makes the loss, which stays float32 for the caller
        name, tensors = operator.name(), followers.get(operator.name()) or range(operator.num_operands())
        if not has_kernels(name, profile.amp_dtype, on_gpu):
            continue
        if name in LOW or (name in followers and lowering.has_low_source(operator, tensors)):
            lowering.lower(operator, tensors)
    paddle.pir.reset_insertion_point_to_end()
    lowering.drop_unused_casts()
    return lowering.count


def _followers(profile: Profile) -> dict[str, tuple[int, ...]]:
    if profile.amp_level == "O1":
        return {}
    return FOLLOWERS if profile.amp_keep_batch_norm_fp32 else FOLLOWERS | dict.fromkeys(BATCH_NORMS, (0,))


class _Lowering:
    """Lowers operators one by one, in program order.

    Each low result is cast back to float32 at once for all readers; an operator that is lowered later reads the low
    value instead, and a cast without readers is dropped.
    """

    def __init__(self, dtype: Any, on_gpu: bool) -> None:
        self.count = 0
        self._on_gpu = on_gpu
        self._dtype = dtype
        self._low: dict[int, Any] = {}  # float32 value -> the same in low precision
        self._casts_back: list[Any] = []

    def has_low_source(self, operator: Any, tensors: Sequence[int]) -> bool:
        """Whether an input was computed in low precision (a parameter that was cast for another does not count)."""
        computed = {cast.result(0).id for cast in self._casts_back}
        sources = [operator.operand_source(index) for index in tensors]
        return any(source.initialized() and source.id in computed for source in sources)

    def lower(self, operator: Any, tensors: Sequence[int]) -> None:
        sources = {index: operator.operand_source(index) for index in tensors}
        wanted = {index: source for index, source in sources.items() if _is_float32(source)}
        if not wanted:
            return
        for index, source in wanted.items():
            operator.operand(index).set_source(self._in_low_precision(source, operator))
        low_type = operator.operand_source(next(iter(wanted))).type()
        paddle.pir.set_insertion_point_after(operator)
        # Statistics, the other results of batch norm, are float32 for any input dtype.
        results = operator.results()[:1] if operator.name() in BATCH_NORMS else operator.results()
        for result in results:
            if _is_float32(result):
                self._give_back(result, low_type)
        self.count += 1

    def _in_low_precision(self, source: Any, operator: Any) -> Any:
        low = self._low.get(source.id)
        # Paddle's bfloat16 matmul on CPU crashes in the gradient of a product whose input needs no gradient: data, or
        # what a frozen layer has computed in low precision.
        if low is None or (low.stop_gradient and not self._on_gpu):
            paddle.pir.set_insertion_point(operator)
            low = self._low[source.id] = paddle.cast(source, self._dtype)
            if not self._on_gpu:
                low.stop_gradient = False
        return low

    def _give_back(self, result: Any, low_type: Any) -> None:
        result.set_type(paddle.pir.create_shaped_type(low_type, list(result.shape)))
        back = paddle.cast(result, paddle.float32)
        cast = back.get_defining_op()
        result.replace_all_uses_with(back)
        cast.operand(0).set_source(result)  # the previous line has made the cast read itself
        if self._on_gpu or result.get_defining_op().name() not in FLOAT32_RESULT_ON_CPU:
            self._low[back.id] = result
            self._casts_back.append(cast)

    def drop_unused_casts(self) -> None:
        for cast in self._casts_back:
            if cast.result(0).use_empty():
                cast.erase()


class _Rounding(_Lowering):
    """The same numbers without an operator in low precision: its inputs and results, and with them the gradients of
    both, are rounded by a cast there and back, and it computes in float32, in which low-precision kernels accumulate
    anyway."""

    def _in_low_precision(self, source: Any, operator: Any) -> Any:
        if source.id not in self._low:
            paddle.pir.set_insertion_point(operator)
            self._low[source.id] = paddle.cast(paddle.cast(source, self._dtype), paddle.float32)
        return self._low[source.id]

    def _give_back(self, result: Any, low_type: Any) -> None:  # noqa: ARG002
        low = paddle.cast(result, self._dtype)
        back = paddle.cast(low, paddle.float32)
        result.replace_all_uses_with(back)
        low.get_defining_op().operand(0).set_source(result)  # the previous line has made it read its own result
        self._low[back.id] = back
        self._casts_back.append(back.get_defining_op())


def _is_float32(value: Any) -> bool:
    return bool(value.initialized() and value.is_dense_tensor_type() and value.dtype == paddle.float32)


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


def refuse_unusable(profile: Profile, on_gpu: bool) -> None:
    """Raise ConversionError for settings that this pass does not know, or this device has no kernels for."""
    if profile.amp_level not in LEVELS:
        raise ConversionError(f"amp level {profile.amp_level!r} is unknown; use {', '.join(LEVELS)}")
    if profile.amp_dtype not in DTYPES:
        raise ConversionError(f"amp dtype {profile.amp_dtype!r} is unknown; use {' or '.join(DTYPES)}")
    if on_gpu:
        return
    if profile.amp_dtype == "float16":
        raise ConversionError("amp dtype float16 needs a GPU: Paddle has no float16 matmul on CPU; use bfloat16")
    if not profile.amp_keep_batch_norm_fp32:
        raise ConversionError(
            "keep_batch_norm_fp32: false needs a GPU: Paddle has no bfloat16 batch norm on CPU; leave it on"
        )


def is_emulated(profile: Profile, on_gpu: bool) -> bool:
    """Whether values are rounded to ``amp_dtype`` and computed in float32.

    oneDNN has bfloat16 from AVX-512 on and raises an exception without a message below it (Paddle's own tests make the
    same check). Beside recompute it gave wrong gradients with AVX-512, because values that are kept
    reached it in its own memory layout; ``collectives/host_ops.py`` has mended that, which has not run on AVX-512 yet.
    """
    in_bfloat16 = profile.amp_level != "O0" and profile.amp_dtype == "bfloat16"
    return in_bfloat16 and not on_gpu and (recomputes(profile) or not paddle.base.core.supports_bfloat16())


def notices_of(profile: Profile, on_gpu: bool) -> list[str]:
    """Rank 0's notes on how mixed precision is carried out on this device."""
    if not is_emulated(profile, on_gpu):
        return []
    where = "on this processor, which has no AVX-512"
    if paddle.base.core.supports_bfloat16():
        where = "on CPUs beside recompute, whose values oneDNN may read wrongly in bfloat16"
    return [
        f"amp_level: {profile.amp_level} in bfloat16 is emulated {where}: values are rounded to bfloat16 and computed "
        "in float32; the results are bfloat16's, but no time is saved"
    ]


@cache
def has_kernels(operator_name: str, dtype: str, on_gpu: bool) -> bool:
    """Whether this Paddle computes ``pd_op.<name>`` and its gradient in ``dtype`` on this kind of device."""
    name = operator_name.removeprefix("pd_op.").rstrip("_")
    registered = _registered_kernels()
    # The registry lists some kernels under names of Paddle 1.x (add: elementwise_add). FOLLOWERS that it does not list
    # under the current name were tried on CPU: they exist.
    named = [registered[each] for each in (name, f"{name}_grad") if each in registered]
    return all(any(_serves(kernel, dtype, on_gpu) for kernel in kernels) for kernels in named)


@cache
def _registered_kernels() -> dict[str, Any]:
    kernels: dict[str, Any] = paddle.base.core._get_all_register_op_kernels("phi")
    return kernels


def _serves(kernel: str, dtype: str, on_gpu: bool) -> bool:
    """``kernel``: '{data_type[::phi::dtype::bfloat16]; data_layout[ONEDNN]; place[Place(cpu)]; ...}'."""
    place = "Place(gpu" if on_gpu else "Place(cpu"
    return place in kernel and f"dtype::{dtype}]" in kernel
