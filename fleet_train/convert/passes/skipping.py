"""Updates that are left out because a gradient is NaN or infinite, and what such a step leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import _C_ops

from fleet_train.collectives.finite import not_finite_on_device
from fleet_train.collectives.samples import array_of
from fleet_train.convert.passes.program import persistable, run_if

Pairs = list[tuple[Any, Any]]


class SkipNotFinite:
    """Skips an update whose averaged gradients hold NaN or infinity, and counts it.

    One rank's NaN is in the average, which is equal on all ranks, so all skip the same update without a message.
    `spoilt` says so where there is no average that does: in LocalSGD's local steps, and with compressions that keep
    what they do not send. With gradient merge the update of all its micro-batches is skipped.
    """

    def __init__(self) -> None:
        self._skipped = ""
        self.spoilt: Any = None
        """float32 [1]: above 0 in the steps that all ranks skip; None if the averages alone decide."""

    def guard(self, update: Callable[[Pairs], Any], pairs: Pairs) -> Any:
        """Skip an update with NaN or infinity; for `DistributedOptimizer.around_update`. Add it last, so that nothing
        else sees such gradients."""
        present = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        values, is_broken = checked_values([gradient for _, gradient in present])
        if self.spoilt is not None:
            is_broken = paddle.logical_or(is_broken, self.spoilt > 0)
        skipped = _counter(_SKIPPED)
        paddle.assign(skipped + is_broken.reshape([1]).astype("int64"), skipped)
        self._skipped = skipped.name
        checked = [(parameter, value) for (parameter, _), value in zip(present, values, strict=True)]
        return run_if(paddle.logical_not(is_broken), lambda: update(checked))

    guard.is_for_owners = True  # type: ignore[attr-defined]

    def count(self) -> int:
        """Updates that this rank has skipped since the beginning of the run; a checkpoint keeps the number."""
        variable = paddle.static.global_scope().find_var(self._skipped)
        return int(np.array(variable.get_tensor()).item())


_SKIPPED = "skipped_updates"


def checked_values(gradients: list[Any]) -> tuple[list[Any], Any]:
    """The gradients in their order, and whether one of them holds NaN or infinity: bool [1]. Paddle's operator for it
    takes gradients of one dtype, which is that of its scale."""
    values, found = list(gradients), []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        if dtype not in (paddle.float32, paddle.float64):
            found.append(not_finite_on_device([gradients[place] for place in places]))
            continue
        scale = paddle.full([1], 1.0, dtype)
        own, broken = _C_ops.check_finite_and_unscale_([gradients[place] for place in places], scale)
        for place, value in zip(places, own, strict=True):
            values[place] = value
        found.append(broken.reshape([1]))
    if not found:
        return values, paddle.full([1], False, "bool")
    return values, found[0] if len(found) == 1 else paddle.stack(found).any(axis=0)


def _counter(name: str) -> Any:
    """The program's persistable count of this name, int64 [1]; it is made if there is none."""
    for operator in paddle.static.default_main_program().global_block().ops:
        if operator.name() == "builtin.parameter" and operator.attrs().get("parameter_name") == name:
            return operator.result(0)
    return persistable(name, paddle.int64)


def of_feeds(feed: Any) -> str:
    """The fed arrays that hold NaN or infinity, or that none does, as the end of a message; "" if that is not known."""
    given = feed[0] if isinstance(feed, list | tuple) and feed else feed
    if not isinstance(given, Mapping):
        return ""
    broken = []
    for name, value in given.items():
        array = array_of(value)
        if array is None or array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        rows: Any = np.flatnonzero(~finite_rows(array)) if array.ndim else []
        listed = ", ".join(map(str, rows[:_NAMED_ROWS])) + (", ..." if len(rows) > _NAMED_ROWS else "")
        broken.append(f"'{name}'{f' in rows {listed}' if listed else ''}")
    return f". What was fed is not finite itself: {'; '.join(broken)}" if broken else ". What was fed is finite"


_NAMED_ROWS = 8


def finite_rows(values: NDArray[Any]) -> NDArray[np.bool_]:
    """The rows of an array that hold neither NaN nor infinity, as bool [rows]."""
    finite = np.isfinite(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
    return np.asarray(finite.reshape(len(values), -1).all(axis=1))


def keep_statistics_finite(program: Any) -> None:
    """Append to a finished program: untrained values (batch norm's running statistics) that would end a run of the
    program with NaN or infinity keep their previous values.

    The forward pass updates them before any gradient is checked.
    """
    block = program.global_block()
    names = untrained_floats_of(program)
    kept = [each for each in block.all_parameters() if each.name in names]
    with paddle.static.program_guard(program, paddle.static.Program()):
        for value in kept:
            paddle.pir.set_insertion_point_after(value.get_defining_op())
            before = paddle.assign(value)
            paddle.pir.reset_insertion_point_to_end()
            paddle.assign(paddle.where(paddle.isfinite(value).all(), value, before), value)


def untrained_floats_of(program: Any) -> list[str]:
    """Names of the float parameters of `program` that are not trained, sorted."""
    values = program.global_block().all_parameters()
    # The learning rate is also such a parameter, but has no dimensions.
    return sorted(
        each.name for each in values if not each.trainable and each.shape and "float" in str(each.dtype).lower()
    )
