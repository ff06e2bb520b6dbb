"""Carries out a plan in a program: launch and wait operators in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import (
    HeldValues,
    emit_arrive,
    emit_begin,
    emit_launch,
    emit_wait,
    is_barrier,
    is_link,
    passes_a_token,
    token,
)
from fleet_train.convert.program.gradients import ReadyGradient
from fleet_train.plan import Bucket, CommPlan

# Operators whose second and third operand are a running mean and variance.
_HAS_STATISTICS = ("pd_op.batch_norm_", "pd_op.sync_batch_norm_")


def insert_launches(
    exchange: GradientExchange,
    plan: CommPlan,
    ready: Sequence[ReadyGradient],
    values: HeldValues,
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


def held_values(program: Any, trained: Sequence[Any], accumulators: Sequence[Any]) -> HeldValues:
    """The values of ``program`` that LocalSGD and the divergence sentinel read."""
    statistics = {}
    for operator in program.global_block().ops:
        if operator.name() in _HAS_STATISTICS:
            for source in operator.operands_source()[1:3]:
                statistics[source.get_defining_op().id()] = source
    return HeldValues(list(trained), list(statistics.values()), list(accumulators))
