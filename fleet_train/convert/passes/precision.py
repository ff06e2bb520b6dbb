"""Mixed precision: runs forward operators in bfloat16 or float16 where that is fast and safe.

A pass over the operators that the loss depends on, run before gradient operators exist: those are then derived from its
result. Parameters stay float32 (they are the master weights) and are cast where they are used, so every optimizer works
unchanged, and gradients are communicated in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.convert.passes.precision_rules import (
    BATCH_NORMS,
    FLOAT32_RESULT_ON_CPU,
    FOLLOWERS,
    LOW,
    MixedPrecision,
    has_kernels,
    is_emulated,
    refuse_unusable,
)
from fleet_train.convert.passes.walk import operators_behind


def lower_precision(
    loss: Any, settings: MixedPrecision, *, on_gpu: bool, recomputes: bool = False, emulated: bool | None = None
) -> int:
    """Rewrite the operators that ``loss`` depends on; returns how many now compute in ``settings.dtype``.

    ``O1``: operators of ``precision_rules.LOW`` compute in low precision and return float32. ``O2``: operators of
    ``FOLLOWERS`` that get their result continue in low precision. Raises ConversionError for settings that the device
    cannot carry out. ``emulated``: round to ``settings.dtype`` and compute in float32; None = as ``is_emulated`` says,
    which asks for ``recomputes``.
    """
    if settings.level == "O0":
        return 0
    refuse_unusable(settings, on_gpu)
    if emulated is None:
        emulated = is_emulated(settings, on_gpu, recomputes)
    lowering = (_Rounding if emulated else _Lowering)(getattr(paddle, settings.dtype), on_gpu)
    followers = _followers(settings)
    for operator in operators_behind(loss)[:-1]:  # the last one makes the loss, which stays float32 for the caller
        name, tensors = operator.name(), followers.get(operator.name()) or range(operator.num_operands())
        if not has_kernels(name, settings.dtype, on_gpu):
            continue
        if name in LOW or (name in followers and lowering.has_low_source(operator, tensors)):
            lowering.lower(operator, tensors)
    paddle.pir.reset_insertion_point_to_end()
    lowering.drop_unused_casts()
    return lowering.count


def _followers(settings: MixedPrecision) -> dict[str, tuple[int, ...]]:
    if settings.level == "O1":
        return {}
    return FOLLOWERS if settings.keep_batch_norm_fp32 else FOLLOWERS | dict.fromkeys(BATCH_NORMS, (0,))


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
