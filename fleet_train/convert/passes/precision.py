"""Mixed precision: runs forward operators in bfloat16 or float16 where that is fast and safe.

A pass over the operators that the loss depends on, run before gradient operators exist: those are then derived from its
result. Parameters stay float32 (they are the master weights) and are cast where they are used, so every optimizer works
unchanged, and gradients are communicated in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import paddle

from fleet_train.convert import process
from fleet_train.convert.passes.program import BATCH_NORMS, inputs_of, operators_behind
from fleet_train.convert.passes.recompute import recomputes
from fleet_train.errors import ConversionError, DataError
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
        emulated = is_emulated(profile, on_gpu) or (not on_gpu and has_channels_last(loss))
    lowering = _Lowering(getattr(paddle, profile.amp_dtype), on_gpu, emulated)
    followers = _followers(profile)
    operators = operators_behind(loss)[:-1]  # the last one makes the loss, which stays float32 for the caller
    if not (on_gpu or emulated):
        lowering.without_rows = _of_chosen_rows(operators)
        _never_without_rows.add(loss.get_defining_op().get_parent_block().program)
    for operator in operators:
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

    An operator that is not computed in low precision gives the same numbers: its inputs and its results, and with them
    the gradients of both, are rounded by a cast there and back, and it computes in float32, in which low-precision
    kernels accumulate anyway. With ``emulated`` that is every operator.
    """

    def __init__(self, dtype: Any, on_gpu: bool, emulated: bool) -> None:
        self.count = 0
        self._on_gpu, self._emulated = on_gpu, emulated
        self._dtype = dtype
        self._low: dict[int, Any] = {}  # float32 value -> the same in low precision
        self._rounded: dict[int, Any] = {}  # float32 value -> the same, rounded
        self._casts_back: list[Any] = []
        self.without_rows: set[int] = set()
        """Operators that are emulated, because their input may have no rows."""

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
        is_emulated_here = self._emulated or operator.id() in self.without_rows or _is_kept(operator)
        is_native = not is_emulated_here and (self._on_gpu or is_right_on_cpu(operator))
        for index, source in wanted.items():
            cast_input = self._in_low_precision if is_native else self._in_float32
            operator.operand(index).set_source(cast_input(source, operator))
        low_type = operator.operand_source(next(iter(wanted))).type()
        paddle.pir.set_insertion_point_after(operator)
        # Statistics, the other results of batch norm, are float32 for any input dtype.
        results = operator.results()[:1] if operator.name() in BATCH_NORMS else operator.results()
        for result in results:
            if _is_float32(result):
                self._give_back(result, low_type if is_native else None)
                operator.set_bool_attr(LOW_MARK, True)
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

    def _in_float32(self, source: Any, operator: Any) -> Any:
        if source.id not in self._rounded:
            paddle.pir.set_insertion_point(operator)
            self._rounded[source.id] = paddle.cast(paddle.cast(source, self._dtype), paddle.float32)
        return self._rounded[source.id]

    def _give_back(self, result: Any, low_type: Any) -> None:
        """Let all readers of ``result`` read it cast to float32; ``low_type``: what it is now, None for float32."""
        if low_type is None:
            low = paddle.cast(result, self._dtype)
            back = paddle.cast(low, paddle.float32)
            first = low.get_defining_op()
        else:
            result.set_type(paddle.pir.create_shaped_type(low_type, list(result.shape)))
            low, back = result, paddle.cast(result, paddle.float32)
            first = back.get_defining_op()
        cast = back.get_defining_op()
        result.replace_all_uses_with(back)
        first.operand(0).set_source(result)  # the previous line has made it read a later value
        self._rounded[back.id] = back
        if low_type is None or self._on_gpu or result.get_defining_op().name() not in FLOAT32_RESULT_ON_CPU:
            self._low[back.id] = low
            self._casts_back.append(cast)

    def drop_unused_casts(self) -> None:
        for cast in self._casts_back:
            if cast.result(0).use_empty():
                cast.erase()


LOW_MARK = "fleet_train_low_precision"
"""The attribute of a lowered operator."""


def in_float32(value: Any) -> Any:
    """``value``, a script's own, cast to float32 in its program if a conversion has lowered it; else itself.

    A script holds the values that its operators had before they were lowered. Fetched or exported as they are, they
    would be 16 bits in an integer, which numpy has instead of bfloat16.
    """
    maker = value.get_defining_op() if isinstance(value, paddle.pir.Value) else None
    if maker is None or not maker.has_attr(LOW_MARK) or value.dtype not in _LOW_DTYPES:
        return value
    block = maker.get_parent_block()
    for user in value.all_used_ops():
        if user.name() == "pd_op.cast" and user.result(0).dtype == paddle.float32 and user.get_parent_block() == block:
            return user.result(0)
    with paddle.static.program_guard(block.program):
        paddle.pir.set_insertion_point_after(maker)
        cast = paddle.cast(value, paddle.float32)
        paddle.pir.reset_insertion_point_to_end()
    return cast


def give_out_float32() -> None:
    """Give executors that fetch, and Paddle's functions that export, what `in_float32` gives, from now on."""
    process.before_each_run(_fetch_float32)
    process.before_each_run(_refuse_no_rows)
    for module in (paddle.static.io, paddle.static.pir_io):
        if module.normalize_pir_program is not _normalize:
            global _normalize_pir_program
            _normalize_pir_program = process.replace(module, "normalize_pir_program", _normalize)


_normalize_pir_program: Any = None


def _normalize(program: Any, feed_vars: Any, fetch_vars: Any, **options: Any) -> Any:
    return _normalize_pir_program(program, feed_vars, _each_in_float32(fetch_vars), **options)


def _fetch_float32(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    del program
    return feed, _each_in_float32(fetch_list)


def _of_chosen_rows(operators: Sequence[Any]) -> set[int]:
    """The operators that read values with as many rows as the data say, also none. Of a product without rows, oneDNN
    leaves the gradient of the other factor, whose rows are known, as the memory was."""
    chosen: set[int] = set()
    for operator in operators:
        dense = [source for source in inputs_of(operator) if source.is_dense_tensor_type()]
        makers = [source.get_defining_op() for source in dense if -1 in source.shape]
        if operator.name() in _CHOOSE_ROWS or any(maker is not None and maker.id() in chosen for maker in makers):
            chosen.add(operator.id())
    return chosen


_CHOOSE_ROWS = ("pd_op.nonzero", "pd_op.masked_select")

_never_without_rows: weakref.WeakSet[Any] = weakref.WeakSet()
"""Programs with products in bfloat16 on a CPU, of as many rows as are fed."""


def _refuse_no_rows(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    running = paddle.static.default_main_program() if program is None else program
    if running in _never_without_rows and isinstance(feed, dict):
        for name, value in feed.items():
            shape = getattr(value, "shape", ())
            if 0 in (shape() if callable(shape) else shape):
                raise DataError(
                    f"{name!r} is fed without samples: on CPUs the gradients of Paddle's products in bfloat16 are then "
                    "what was in their memory; set amp_level: O0, or feed every rank at least one sample"
                )
    return feed, fetch_list


def _each_in_float32(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_each_in_float32(value) for value in values]
    return in_float32(values)


def _is_float32(value: Any) -> bool:
    return bool(value.initialized() and value.is_dense_tensor_type() and value.dtype == paddle.float32)


def _is_kept(operator: Any) -> bool:
    """Whether the script's own value is used again when gradients are derived: a ``static_pylayer`` keeps its inputs,
    and compares their dtypes."""
    return any(user.name() == "pd_op.pylayer" for result in operator.results() for user in result.all_used_ops())


_LOW_DTYPES = (paddle.bfloat16, paddle.float16)
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
"""Operators whose bfloat16 kernels on CPU return float32 declared as bfloat16: only a cast can read that."""


def is_right_on_cpu(operator: Any) -> bool:
    """Whether this operator of `LOW` or `FOLLOWERS` has the right result and gradient in bfloat16 on a CPU, with a
    batch of one sample, too, which its shapes do not tell.

    oneDNN's kernels fail with scalars, slices and adaptive pooling, and with terms that have unlike numbers of
    dimensions but as many elements.
    """
    name = operator.name()
    values = [*operator.operands_source(), *operator.results()]
    ranks = {len(value.shape) for value in values if value.initialized() and _is_float32(value)}
    return not (
        name == "pd_op.slice"
        or 0 in ranks
        or (name == "pd_op.add" and len(ranks) > 1)
        or (name == "pd_op.matmul" and 1 in ranks)
        or (operator.has_attr("adaptive") and operator.attrs()["adaptive"])
    )


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


def has_channels_last(loss: Any) -> bool:
    """Whether the program of ``loss`` has an operator with the channels last (``data_format="NHWC"``). oneDNN, asked
    for one product in bfloat16, then takes the dimensions of other values for such."""
    operators = loss.get_defining_op().get_parent_block().ops
    layouts = (one.attrs()["data_format"] for one in operators if one.has_attr("data_format"))
    return any(layout in ("NHWC", "NDHWC", "NLC") for layout in layouts)


def notice_of_layout(profile: Profile, on_gpu: bool, loss: Any) -> list[str]:
    """Rank 0's note if the program's layout is why bfloat16 is emulated."""
    if profile.amp_level == "O0" or on_gpu or is_emulated(profile, on_gpu) or not has_channels_last(loss):
        return []
    return [
        f"amp_level: {profile.amp_level} in bfloat16 is emulated on CPUs in a program with the channels last "
        '(data_format="NHWC"), whose values oneDNN reads wrongly: the results are bfloat16\'s, but no time is saved'
    ]


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
    """Whether Paddle's ``kernel`` computes in ``dtype`` on the device; it is like '{data_type[::phi::dtype::bfloat16];
    data_layout[ONEDNN]; place[Place(cpu)]; ...}'."""
    place = "Place(gpu" if on_gpu else "Place(cpu"
    return place in kernel and f"dtype::{dtype}]" in kernel
