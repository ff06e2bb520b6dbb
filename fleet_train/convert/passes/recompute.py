"""Recompute: forward values are computed a second time instead of being kept for the backward pass.

Works on a program that has its gradient operators. The forward operators are split into segments; values that cross a
boundary are kept. Before the gradient operators of a segment, its operators are cloned, and the gradient operators read
the clones' results, so that the first results are freed early.

A value may be a vector of tensors: what ``builtin.combine`` makes for operators such as ``concat``, and what ``split``
and ``unbind`` return. No host operator can take one (it would end the process), so a vector itself is never kept: a
``builtin.combine`` is cloned wherever a clone reads it, and of what takes apart another segment's vector, the results
are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.collectives.host_ops import emit_hold
from fleet_train.convert.passes.program import BATCH_NORMS, all_inputs_of, draws, inputs_of, operators_behind
from fleet_train.convert.passes.sync_norm import FORWARD_MARK
from fleet_train.errors import ConversionError
from fleet_train.profile import Profile

_HOLDS_STATE = ("pd_op.data", "pd_op.feed")
_COMBINE = "builtin.combine"


def recomputes(profile: Profile) -> bool:
    """Whether a profile asks for recompute: ``recompute_segments`` equal pieces (by operators) of the forward program;
    or a piece from every operator on that is the first to read one of the parameters ``recompute_checkpoints``
    (values have no names in PIR programs, parameters do); or one from every ``recompute_every_blocks``-th block on,
    which begins with an operator that reads a parameter of two or more dimensions. The last piece is never recomputed:
    its backward pass follows at once.
    """
    return profile.recompute_segments > 1 or bool(profile.recompute_checkpoints or profile.recompute_every_blocks)


def recompute_segments(loss: Any, profile: Profile) -> int:
    """Rewrite the current program, after the backward pass and before everything else; returns how many operators run
    twice. Results are the same bit by bit: random operators, operators that write in place (batch norm's running
    statistics) and host operators run once, and their results are kept.
    """
    if not recomputes(profile):
        return 0
    forward = operators_behind(loss)
    block = loss.get_defining_op().get_parent_block()
    positions = {operator.id(): position for position, operator in enumerate(block.ops)}
    last_forward = max(positions[operator.id()] for operator in forward)
    backward = list(block.ops)[last_forward + 1 :]
    pieces = _cut([operator for operator in forward if operator.name() != "builtin.parameter"], profile)
    count = sum(_recompute(piece, forward, backward) for piece in reversed(pieces[:-1]))
    paddle.pir.reset_insertion_point_to_end()
    return count


def _cut(operators: Sequence[Any], profile: Profile) -> list[Sequence[Any]]:
    if profile.recompute_checkpoints:
        cuts = sorted({_first_reader(operators, name) for name in profile.recompute_checkpoints} - {0})
    elif profile.recompute_every_blocks:
        starts = [position for position, operator in enumerate(operators) if _reads_weight(operator)]
        cuts = starts[profile.recompute_every_blocks :: profile.recompute_every_blocks]
    else:
        cuts = list(range(0, len(operators), -(-len(operators) // profile.recompute_segments)))[1:]
    return [operators[first:last] for first, last in zip([0, *cuts], [*cuts, len(operators)], strict=True)]


def _reads_weight(operator: Any) -> bool:
    return any(source.is_parameter and len(source.shape) > 1 for source in inputs_of(operator))


def _first_reader(operators: Sequence[Any], parameter: str) -> int:
    for position, operator in enumerate(operators):
        if any(source.is_parameter and source.name == parameter for source in inputs_of(operator)):
            return position
    raise ConversionError(f"recompute checkpoint {parameter!r}: the loss does not depend on a parameter of that name")


def _recompute(piece: Sequence[Any], forward: Sequence[Any], backward: Sequence[Any]) -> int:
    inside = {operator.id() for operator in piece}
    outside = [operator for operator in forward if operator.id() not in inside]
    crossing = {source.id for operator in outside for source in all_inputs_of(operator)}
    piece = [*_combined_outside(piece, inside), *piece]
    makers: dict[int, Any] = {}
    for operator in piece:
        if _is_repeatable(operator) and all(
            source.id in makers for source in inputs_of(operator) if _is_vector(source)
        ):
            for result in operator.results():
                if result.initialized() and (result.id not in crossing or operator.name() == _COMBINE):
                    makers[result.id] = operator
    readers = [operator for operator in backward if any(source.id in makers for source in _needed_by(operator))]
    if not readers:
        return 0
    clones, values = _clone(piece, makers, readers, backward)
    for operator in readers:
        for index in range(operator.num_operands()):
            source = operator.operand_source(index)
            if source.initialized() and source.id in values:
                operator.operand(index).set_source(values[source.id])
    return clones


def _combined_outside(piece: Sequence[Any], inside: set[int]) -> list[Any]:
    """The operators of other segments that combine tensors for operators of this one, each once."""
    vectors = [source for operator in piece for source in inputs_of(operator) if _is_vector(source)]
    makers = {source.id: source.get_defining_op() for source in vectors}
    return [maker for maker in makers.values() if maker.name() == _COMBINE and maker.id() not in inside]


def _is_vector(value: Any) -> bool:
    return value.get_defining_op() is not None and value.type().as_vec_type() is not None


def _clone(
    piece: Sequence[Any], makers: dict[int, Any], readers: Sequence[Any], backward: Sequence[Any]
) -> tuple[int, dict[int, Any]]:
    """Clone what ``readers`` need before the first of them: how many operators, and {old value: its clone}."""
    wanted = _closure([source for reader in readers for source in _needed_by(reader)], makers)
    chosen = [operator for operator in piece if operator.id() in wanted]
    first = readers[0]
    paddle.pir.set_insertion_point(first)
    values = _held_inputs(chosen, makers, first, backward)
    mapping = paddle.pir.IrMapping()
    for operator in chosen:
        for source in inputs_of(operator):
            if not mapping.has(source):
                mapping.add(source, values.get(source.id, source))
        clone = operator.clone(mapping, paddle.pir.CloneOptions(False, True, True))
        for old, new in zip(operator.results(), clone.results(), strict=True):
            if old.initialized() and old.id in makers:
                values[old.id] = new
    made = {value: new for value, new in values.items() if value in makers}
    return len(chosen), made


def _closure(values: Sequence[Any], makers: dict[int, Any]) -> set[int]:
    """The operators that must run again for ``values``."""
    wanted: set[int] = set()
    waiting = list(values)
    while waiting:
        maker = makers.get(waiting.pop().id)
        if maker is not None and maker.id() not in wanted:
            wanted.add(maker.id())
            waiting += inputs_of(maker)
    return wanted


def _held_inputs(chosen: Sequence[Any], makers: dict[int, Any], first: Any, backward: Sequence[Any]) -> dict[int, Any]:
    """The kept values that the clones start from, delayed until the backward pass arrives: {value: delayed value}.

    Otherwise the executor would run the clones as soon as it can: in the forward pass.
    """
    trigger = _trigger(first, {operator.id() for operator in backward})
    kept = {
        source.id: source
        for operator in chosen
        for source in inputs_of(operator)
        if source.id not in makers and source.is_dense_tensor_type() and not _is_cheap(source.get_defining_op())
    }
    if trigger is None or not kept:
        return {}
    return dict(zip(kept, emit_hold(list(kept.values()), trigger), strict=True))


def _trigger(first: Any, in_backward: set[int]) -> Any:
    """A tensor of the backward pass that ``first`` waits for; None if there is none. Behind a vector, one of those that
    it is made of."""
    waiting = inputs_of(first)
    while waiting:
        value = waiting.pop(0)
        maker = value.get_defining_op()
        if maker.id() not in in_backward:
            continue
        if value.is_dense_tensor_type():
            return value
        waiting += inputs_of(maker)
    return None


def _is_cheap(operator: Any) -> bool:
    """Whether a value is a parameter or a constant: they always exist, and nothing starts from them alone."""
    return str(operator.name()).startswith(("builtin.parameter", "pd_op.full"))


def _is_repeatable(operator: Any) -> bool:
    name = operator.name()
    return bool(
        name.startswith(("pd_op.", "builtin."))
        and (not name.endswith("_") or _moves_no_average(operator))
        and name not in _HOLDS_STATE
        and not draws(operator)  # random values must not be drawn again
        and not operator.num_regions()
        and not _touches_array(operator)
        and not operator.has_attr("parameter_name")
    )


def _moves_no_average(operator: Any) -> bool:
    """Whether an operator is a synchronised batch norm, which writes nothing in place."""
    return operator.name() in BATCH_NORMS and operator.has_attr(FORWARD_MARK)


def _touches_array(operator: Any) -> bool:
    """Whether an operator has a tensor array, filled in place, also by loops: a second one would stay empty."""
    results = [result for result in operator.results() if result.initialized()]
    return any(value.is_dense_tensor_array_type() for value in (*inputs_of(operator), *results))


def _needed_by(operator: Any) -> list[Any]:
    """The inputs whose contents are read; of the others (an addition's terms, in its gradient), only the shape is
    read."""
    return [source for source in all_inputs_of(operator) if not operator.is_no_need_buffer(source)]
