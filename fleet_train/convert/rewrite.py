"""Carries out a plan in a program: launch and wait operators in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.cluster.store.client import Variants
from fleet_train.collectives.averaging import Held
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import (
    emit_arrive,
    emit_begin,
    emit_launch,
    emit_wait,
    is_barrier,
    is_link,
    passes_a_token,
    token,
)
from fleet_train.collectives.job import Job
from fleet_train.collectives.join import refuse_other_ranks
from fleet_train.errors import ConversionError, ScheduleMismatch
from fleet_train.plan import Bucket, CommPlan, TensorSpec, first_difference
from fleet_train.profile import Profile
from fleet_train.profile.profile import comparable, first_differing_knob

# Operators whose second and third operand are a running mean and variance.
_HAS_STATISTICS = ("pd_op.batch_norm_", "pd_op.sync_batch_norm_")


def insert_launches(
    exchange: GradientExchange,
    plan: CommPlan,
    ready: Sequence[ReadyGradient],
    values: Held,
    boundary: Any = None,
) -> Any:
    """Insert the operators that start the plan's buckets into the current program; returns the token of the last
    operator.

    A bucket's launch comes right after its last gradient, so that it is sent during the backward pass. The chain
    continues that of an earlier optimizer of the same program, so that all ranks communicate in one order. The step's
    barrier begins at the very start of a step, if every run of the program is one (``boundary`` is None)
    and the program has no other barrier: two concurrent barriers could be interleaved.
    """
    by_name = {item.parameter.name: item for item in ready}
    operators = list(ready[0].value.get_defining_op().get_parent_block().ops)
    chain, behind = _chain_of_others(operators)
    if chain is None and boundary is None and not any(is_barrier(operator) for operator in operators):
        paddle.pir.set_insertion_point(operators[0])
        chain = emit_arrive(exchange, token())
    for bucket in plan.buckets:
        members = [by_name[gradient.name] for gradient in bucket.gradients]
        position = max(member.position for member in members)
        # Two buckets can end at one operator: the second launch then follows the first.
        anchor = operators[position] if position > behind else chain.get_defining_op()
        paddle.pir.set_insertion_point_after(anchor)
        if bucket.index == 0:
            chain = token() if chain is None else chain
            if exchange.looks_at_parameters:
                chain = emit_begin(exchange, values.parameters, chain)
        gradients = [member.value for member in members]
        chain = emit_launch(exchange, bucket, gradients, chain, boundary if bucket.index == 0 else None)
        behind = max(behind, position)
    paddle.pir.reset_insertion_point_to_end()
    return chain


def _chain_of_others(operators: Sequence[Any]) -> tuple[Any, int]:
    """The last token inserted by earlier conversions, and its operator's position; None and -1 for none."""
    links = [position for position, operator in enumerate(operators) if is_link(operator)]
    return (operators[links[-1]].result(0), links[-1]) if links else (None, -1)


def insert_waits(
    exchange: GradientExchange, buckets: Sequence[Bucket], ready: Sequence[ReadyGradient], chain: Any
) -> tuple[list[tuple[Any, Any]], Any]:
    """Append the operators that wait for ``buckets``; return (parameter, averaged gradient) pairs and the next
    token."""
    by_name = {item.parameter.name: item for item in ready}
    averaged = []
    for bucket in buckets:
        members = [by_name[gradient.name] for gradient in bucket.gradients]
        chain, results = emit_wait(exchange, bucket, [member.value.dtype for member in members], chain)
        averaged += [(member.parameter, value) for member, value in zip(members, results, strict=True)]
    return averaged, chain


def chain_in_program_order(operators: Sequence[Any]) -> None:
    """Put all communicating operators into one chain, in program order.

    Operators that a pass has inserted into the backward pass have their own chain, which may run before or after a
    bucket's: each rank's executor would choose independently.
    """
    behind = None
    for operator in operators:
        if passes_a_token(operator):
            if behind is not None:
                operator.operand(0).set_source(behind)
            behind = operator.result(0)


def held_values(program: Any, trained: Sequence[Any], accumulators: Sequence[Any]) -> Held:
    """The values of ``program`` that LocalSGD and the divergence sentinel read."""
    statistics = {}
    for operator in program.global_block().ops:
        if operator.name() in _HAS_STATISTICS:
            for source in operator.operands_source()[1:3]:
                statistics[source.get_defining_op().id()] = source
    return Held(list(trained), list(statistics.values()), list(accumulators))


# Where a program computes its gradients, and the order in which the backward pass finishes them.


@dataclass(frozen=True)
class ReadyGradient:
    """A parameter, its gradient's value, and where in the block that value is made."""

    parameter: Any
    value: Any
    position: int

    @property
    def gradient(self) -> TensorSpec:
        return TensorSpec(
            self.parameter.name, tuple(int(size) for size in self.value.shape), dtype_name(self.value.dtype)
        )


def summed_over_uses(params_grads: Sequence[tuple[Any, Any]]) -> tuple[list[tuple[Any, Any]], list[str]]:
    """One pair per parameter, in the order of first appearance, and the names of those that had several.

    PIR makes a value for each use of a name (``ParamAttr(name="w")`` in two places), so ``backward`` gives a gradient
    for each. Their sum is the gradient of the parameter; Paddle 3.3.1 alone updates once per use, which is the same
    for plain SGD only.
    """
    uses: dict[str, list[tuple[Any, Any]]] = {}
    for parameter, value in params_grads:
        uses.setdefault(parameter.name, []).append((parameter, value))
    several = [name for name, pairs in uses.items() if len(pairs) > 1]
    return [(pairs[0][0], _sum(pairs)) for pairs in uses.values()], several


def _sum(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Appended after the last of the values; a single value unchanged, None for no value."""
    values = [value for _, value in pairs if value is not None]
    if len(values) < 2:
        return values[0] if values else None
    positions = positions_of(values[0])
    last = max(
        (_locate(parameter, value, positions) for parameter, value in pairs if value is not None),
        key=lambda item: item.position,
    )
    paddle.pir.set_insertion_point_after(last.value.get_defining_op())
    total = paddle.add_n(values)
    paddle.pir.reset_insertion_point_to_end()
    return total


def uses_a_name_twice(program: Any) -> bool:
    """Whether ``program`` has several values for one parameter."""
    names = [op.attrs()["parameter_name"] for op in program.global_block().ops if op.name() == "builtin.parameter"]
    return len(set(names)) < len(names)


def positions_of(value: Any) -> dict[int, int]:
    """The position of each operator in the block that makes ``value``, by its id."""
    return {op.id(): position for position, op in enumerate(value.get_defining_op().get_parent_block().ops)}


def in_ready_order(params_grads: Sequence[tuple[Any, Any]]) -> list[ReadyGradient]:
    """The gradients by the position of the operator that makes each; parameters without a gradient are left out.

    Raises ConversionError for gradients that cannot be averaged as dense tensors.
    """
    present = [(parameter, value) for parameter, value in params_grads if value is not None]
    if not present:
        raise ConversionError("no parameter has a gradient: does the loss depend on a parameter that is not frozen?")
    positions = positions_of(present[0][1])
    ready = [_locate(parameter, value, positions) for parameter, value in present]
    return sorted(ready, key=lambda item: (item.position, item.parameter.name))


def _locate(parameter: Any, value: Any, positions: dict[int, int]) -> ReadyGradient:
    if not value.is_dense_tensor_type():
        raise ConversionError(
            f"the gradient of '{parameter.name}' is sparse (selected rows); build its layer with sparse=False, so that "
            "it can be averaged over the ranks"
        )
    if any(size < 0 for size in value.shape):
        raise ConversionError(f"the gradient of '{parameter.name}' has the unknown shape {list(value.shape)}")
    position = positions.get(value.get_defining_op().id())
    if position is None:
        raise ConversionError(
            f"the gradient of '{parameter.name}' is computed inside a control-flow block; compute the loss in the "
            "main block"
        )
    return ReadyGradient(parameter, value, position)


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``paddle.float32``."""
    return str(dtype).rsplit(".", 1)[-1]


# What all ranks must share before the first step: compared over the store; errors name both ranks.


def agree(job: Job, name: str, value: Any) -> None:
    """Raise ScheduleMismatch on every rank unless all of them pass the same JSON value for ``name``."""
    brought = job.compare(f"agree on {name} {job.count(f'agree on {name}')}", {name: value})
    refuse_other_ranks(brought, job.cluster)


def agree_on_plan(job: Job, plan: CommPlan, profile: Profile) -> None:
    """Raise ScheduleMismatch on every rank unless all have the same plan and profile.

    Digests are exchanged first; full plans and profiles only if the digests differ.
    """
    number = job.count("plan")
    if job.compare(f"plan {number}", plan.digest):
        brought = job.compare(f"plan {number} in full", {"plan": plan.to_json(), "profile": comparable(profile)})
        raise ScheduleMismatch(_explain(job, brought))


def _explain(job: Job, brought: Variants) -> str:
    (zero, ours), (others, theirs) = brought[:2]
    other = others[0][0]
    differing = job.world_size - sum(last - first + 1 for first, last in zero)
    where = first_differing_knob(ours["profile"], theirs["profile"]) or first_difference(ours["plan"], theirs["plan"])
    return (
        f"{job.cluster.describe(0)} and {job.cluster.describe(other)} would communicate differently: {where} "
        f"(here = rank 0, there = rank {other}); {differing} of {job.world_size} ranks differ from rank 0. "
        "Start every rank with the same script, arguments and profile"
    )


# The global norm of the gradient that an optimizer uses: operators inserted into a finished program on demand.


_SQUARES = "pd_op.squared_l2_norm"


@dataclass(frozen=True)
class UpdatedGradients:
    """``pairs``: parameter and gradient of one update, averaged over the ranks and micro-batches, before clipping.

    ``boundary``: bool [1], true in the runs that end with an update; None = all do. ``scale``: float32 [1], the loss
    scale still in the gradients; None = no scale.
    """

    program: Any
    pairs: Sequence[tuple[Any, Any]]
    boundary: Any = None
    scale: Any = None


def insert_gradient_norm(updated: UpdatedGradients) -> Any:
    """Insert operators that compute the L2 norm over all gradients; returns its value, float32, one element.

    Each gradient's squares are summed right after the operator that makes it, so no wait moves forward. If the update
    sums them itself in every step (``ClipGradByGlobalNorm``), its sum is used. In a run without an update the value is
    0.
    """
    gradients = [_dense(parameter, value) for parameter, value in updated.pairs if value is not None]
    with paddle.static.program_guard(updated.program, paddle.static.Program()):
        if updated.boundary is None:
            squares = [_sum_of_squares(gradient) for gradient in gradients]
            _go_behind(squares)
            norm = _norm(squares, updated.scale)
        else:
            _go_behind([*gradients, updated.boundary])
            norm = paddle.static.nn.cond(
                updated.boundary.reshape([]),
                lambda: _norm([_squares(gradient) for gradient in gradients], updated.scale),
                lambda: paddle.full([1], 0.0, "float32"),
            )
        paddle.pir.reset_insertion_point_to_end()
    return norm


def _dense(parameter: Any, value: Any) -> Any:
    if not value.is_dense_tensor_type():
        raise ConversionError(
            f"the gradient of '{parameter.name}' is sparse (selected rows), and its norm is not computed; build its "
            "layer with sparse=False, or train without the norm of the gradient"
        )
    return value


def _sum_of_squares(gradient: Any) -> Any:
    """The clip's sum, if it is in the main block: one in a conditional block does not exist in every step."""
    block = gradient.get_defining_op().get_parent_block()
    for user in gradient.all_used_ops():
        if user.name() == _SQUARES and user.get_parent_block() == block:
            return user.result(0)
    paddle.pir.set_insertion_point_after(gradient.get_defining_op())
    return _squares(gradient)


def _squares(gradient: Any) -> Any:
    is_low = dtype_name(gradient.dtype) in ("float16", "bfloat16")
    return _C_ops.squared_l2_norm(gradient.astype("float32") if is_low else gradient)


def _norm(squares: Sequence[Any], scale: Any) -> Any:
    """Each of ``squares`` has one element; uses few operators, because there may be hundreds of small gradients."""
    parts = [each if each.dtype == paddle.float32 else each.astype("float32") for each in squares]
    norm = paddle.sqrt(paddle.stack(parts).sum()).reshape([1])
    return norm if scale is None else norm / scale.reshape([1])


def _go_behind(values: Sequence[Any]) -> None:
    """Move the insertion point after the last of the operators that make ``values``."""
    positions = positions_of(values[0])
    operators = [value.get_defining_op() for value in values]
    paddle.pir.set_insertion_point_after(max(operators, key=lambda operator: positions[operator.id()]))
