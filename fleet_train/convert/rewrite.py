"""Carries out a plan in a program: launch and wait operators, equal start values, the norm of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops

from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import (
    emit_arrive,
    emit_barrier,
    emit_begin,
    emit_broadcast,
    emit_launch,
    emit_loss,
    emit_wait,
    is_barrier,
    is_link,
    is_wait,
    passes_a_token,
    token,
)
from fleet_train.collectives.job import Job
from fleet_train.collectives.transfer import broadcast_arrays
from fleet_train.convert.embeddings import Table
from fleet_train.convert.passes.one_card import mark_lookups
from fleet_train.convert.passes.program import stored_by
from fleet_train.convert.planning import ReadyGradient, agree, dtype_name, positions_of
from fleet_train.convert.updates import BucketUpdates
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket, CommPlan


class HostOperators:
    """The launches and waits of one program's buckets, as host operators.

    ``tables``: the embeddings whose rows are sent, by parameter.
    """

    def __init__(self, exchange: GradientExchange, tables: Mapping[str, Table]) -> None:
        self._exchange, self._tables = exchange, tables

    def launch(self, bucket: Bucket, gradients: Sequence[Any], chain: Any, boundary: Any = None) -> Any:
        """Insert what starts a bucket; returns the next token."""
        tables = [self._tables[gradient.name] for gradient in bucket.gradients if gradient.name in self._tables]
        operands = [value for table in tables for value in table.operands] if tables else gradients
        chain = emit_launch(self._exchange, bucket, operands, chain, boundary)
        if tables:
            mark_lookups(chain.get_defining_op(), [table.described for table in tables])
        return chain

    def wait(self, bucket: Bucket, dtypes: Sequence[Any], chain: Any) -> tuple[Any, list[Any]]:
        """Insert what waits for a bucket; returns the next token and the averaged gradients; indices and values of a
        table whose rows alone are updated."""
        got = bucket.owned_by(self._exchange.member) if bucket.shards else bucket.gradients
        outputs: list[tuple[Sequence[int], Any]] = []
        for gradient in got:
            if self._has_rows(gradient.name):
                outputs += [([-1], paddle.int64), ([-1, *gradient.shape[1:]], dtypes[0])]
            else:
                outputs.append((gradient.shape, dtypes[0]))
        chain, results = emit_wait(self._exchange, bucket, outputs, chain)
        rest = iter(results)
        return chain, [(next(rest), next(rest)) if self._has_rows(each.name) else next(rest) for each in got]

    def _has_rows(self, name: str) -> bool:
        return name in self._tables and self._tables[name].rows_only


def insert_launches(
    exchange: GradientExchange,
    sums: HostOperators,
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
            if exchange.reads_parameters:
                chain = emit_begin(exchange, values.parameters, chain)
        gradients = [member.value for member in members]
        chain = sums.launch(bucket, gradients, chain, boundary if bucket.index == 0 else None)
        behind = max(behind, position)
    paddle.pir.reset_insertion_point_to_end()
    return chain


def insert_mark_of_backward(loss: Any) -> None:
    """Insert the operator that shows a trace where the backward pass begins."""
    paddle.pir.set_insertion_point_after(loss.get_defining_op())
    emit_loss(loss)
    paddle.pir.reset_insertion_point_to_end()


def _chain_of_others(operators: Sequence[Any]) -> tuple[Any, int]:
    """The last token inserted by earlier conversions, and its operator's position; None and -1 for none."""
    links = [position for position, operator in enumerate(operators) if is_link(operator)]
    return (operators[links[-1]].result(0), links[-1]) if links else (None, -1)


def insert_waits(
    sums: HostOperators,
    buckets: Sequence[Bucket],
    ready: Sequence[ReadyGradient],
    chain: Any,
    updates: BucketUpdates,
) -> tuple[list[tuple[Any, Any]], Any]:
    """Append the operators that wait for ``buckets``; return the (parameter, averaged gradient) pairs that this rank
    updates, and the next token."""
    by_name = {item.parameter.name: item for item in ready}
    averaged = []
    for bucket in buckets:
        members = [by_name[gradient.name] for gradient in bucket.gradients]
        chain, results = sums.wait(bucket, [member.value.dtype for member in members], chain)
        averaged += updates.pairs(bucket, results)
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


_SQUARES = "pd_op.squared_l2_norm"


@dataclass(frozen=True)
class UpdatedGradients:
    """``pairs``: parameter and gradient of one update, averaged over the ranks and micro-batches, before clipping.

    ``boundary``: bool [1], true in the runs that end with an update; None = all do. ``scale``: inserts what the
    gradients still have to be divided by, float32 [1]; returns None for nothing. ``over_owners``: if the pairs are only
    those that this rank owns, inserts the sum of a value over all of them.
    """

    program: Any
    pairs: Sequence[tuple[Any, Any]]
    boundary: Any = None
    scale: Callable[[], Any] = lambda: None
    over_owners: Callable[[Any], Any] | None = None


def insert_gradient_norm(updated: UpdatedGradients) -> Any:
    """Insert operators that compute the L2 norm over all gradients; returns its value, float32, one element.

    Each gradient's squares are summed right after the operator that makes it, so no wait moves forward. If the update
    sums them itself in every step (``ClipGradByGlobalNorm``), its sum is used. In a run without an update the value is
    0.
    """
    gradients = [_dense(parameter, value) for parameter, value in updated.pairs if value is not None]
    with paddle.static.program_guard(updated.program, paddle.static.Program()):
        if updated.over_owners is not None:
            norm = _norm_over_owners(updated, [_sum_of_squares(gradient) for gradient in gradients])
        elif updated.boundary is None:
            squares = [_sum_of_squares(gradient) for gradient in gradients]
            _insert_after_last_of(squares)
            norm = _norm(squares, updated.scale())
        else:
            _insert_after_last_of([*gradients, updated.boundary])
            norm = paddle.static.nn.cond(
                updated.boundary.reshape([]),
                lambda: _norm([_squares(gradient) for gradient in gradients], updated.scale()),
                lambda: paddle.full([1], 0.0, "float32"),
            )
        paddle.pir.reset_insertion_point_to_end()
    return norm


def _norm_over_owners(updated: UpdatedGradients, squares: Sequence[Any]) -> Any:
    """The norm over all owners' gradients, inserted after the last wait, at one place of the chain on all ranks."""
    assert updated.over_owners is not None
    waits = [each for each in updated.program.global_block().ops if is_wait(each)]
    _insert_after_last_of([*squares, waits[-1].result(0)])
    parts = [each.astype("float32") for each in squares]
    total = updated.over_owners(paddle.stack(parts).sum().reshape([1]))
    norm = _norm([total], updated.scale())
    chain_in_program_order(updated.program.global_block().ops)
    return norm


def _dense(parameter: Any, value: Any) -> Any:
    if not value.is_dense_tensor_type():
        raise ConversionError(
            f"the gradient of '{parameter.name}' is sparse (selected rows), and its norm is not computed; build its "
            "layer with sparse=False, or train without the norm of the gradient"
        )
    return value


def _sum_of_squares(gradient: Any) -> Any:
    """The sum of squares of a clip in the main block: one in a conditional block does not exist in every step."""
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
    """The norm from ``squares`` of one element each, by few operators: there may be hundreds of small gradients."""
    parts = [each if each.dtype == paddle.float32 else each.astype("float32") for each in squares]
    norm = paddle.sqrt(paddle.stack(parts).sum()).reshape([1])
    return norm if scale is None else norm / scale.reshape([1])


def _insert_after_last_of(values: Sequence[Any]) -> None:
    """Move the insertion point after the last of the operators that make ``values``."""
    positions = positions_of(values[0])
    operators = [value.get_defining_op() for value in values]
    paddle.pir.set_insertion_point_after(max(operators, key=lambda operator: positions[operator.id()]))


def make_start_equal(
    job: Job, main: Any, startup: Any, others: Sequence[Any], is_own: Callable[[str], bool] | None = None
) -> None:
    """Give every rank the start values of rank 0: those that ``startup`` stores, and all other parameters of ``main``.
    ``is_own``: whether a variable is this rank's alone, by its name.

    A script may create parameters in another startup program than its optimizer's state
    (``minimize(startup_program=...)``). They are searched in ``others``, startup programs that the script may run, and
    in ``scope``, for a startup program that has already run: those values are broadcast now. All ranks call it;
    ScheduleMismatch if they differ in this.
    """
    broadcast_start_state(job, startup, is_own)
    stored = names_stored_by(startup)
    parameters = {parameter.name for parameter in main.global_block().all_parameters()}
    left = {name for name in parameters - stored if is_own is None or not is_own(name)}
    for other in others:
        if other is not startup and left & names_stored_by(other):
            broadcast_start_state(job, other)
    if left:
        _share_now(job, sorted(left))


def broadcast_start_state(job: Job, startup: Any, is_own: Callable[[str], bool] | None = None) -> None:
    """Make ``startup`` give every rank the start values of rank 0, unless they are its own, in the variables that there
    are.

    Covers all that the startup program stores: parameters, statistics, moments, beta powers, the learning rate.
    Operators that an earlier call has handled are left unchanged.
    """
    _keep_variables(startup)
    stores = [operator for operator in _stores(startup) if not _is_done(operator)]
    if is_own is not None:
        stores = [operator for operator in stores if not is_own(_name(operator))]
    if stores:
        with paddle.static.program_guard(startup, startup):
            _emit_broadcasts(job, stores)
        chain_in_program_order(startup.global_block().ops)  # after those of an earlier call: one order for all ranks


def _keep_variables(startup: Any) -> None:
    """Let a startup program write into the variables that a scope has already.

    Paddle stores optimizers' state with ``shadow_output``, which puts new variables into the scope whenever the program
    is compiled (by another executor, as a copy, or since it has grown); programs that were compiled before go on with
    the old ones, whose memory is freed. ``set_parameter`` keeps them. Of several stores into one variable, as the
    learning rates of two programs may be, the last one counts; Paddle makes no second ``set_parameter`` of a name.
    """
    block = startup.global_block()
    stores = _stores(startup)
    kept = {_name(each): each for each in stores if each.name() == "builtin.set_parameter"}
    last = {_name(each): each for each in stores}
    with paddle.static.program_guard(startup, startup):
        for operator in stores:
            if operator.name() != "builtin.shadow_output":
                continue
            name = _name(operator)
            if last[name] is operator and name in kept:
                kept[name].operand(0).set_source(operator.operand_source(0))
                kept[name].move_before(operator)
            elif last[name] is operator:
                paddle.pir.set_insertion_point(operator)
                _C_ops.set_parameter(operator.operand_source(0), name)  # type: ignore[no-untyped-call]
            block.remove_op(operator)
        paddle.pir.reset_insertion_point_to_end()


def _emit_broadcasts(job: Job, stores: Sequence[Any]) -> None:
    paddle.pir.set_insertion_point(stores[0])
    chain = emit_barrier(job, "startup program", token())
    for operator in stores:
        paddle.pir.set_insertion_point(operator)
        value, chain = emit_broadcast(job, _name(operator), operator.operand_source(0), chain)
        value.persistable = True
        operator.operand(0).set_source(value)
    paddle.pir.reset_insertion_point_to_end()


def _share_now(job: Job, names: Sequence[str]) -> None:
    scope = paddle.static.global_scope()
    begun = {name: tensor for name in names if (tensor := initialized_tensor(scope, name)) is not None}
    agree(job, "the parameters that have values before minimize", sorted(begun))
    if begun:
        for name, array in broadcast_arrays(job, {name: np.array(tensor) for name, tensor in begun.items()}).items():
            begun[name].set(array, job.place)


def names_stored_by(startup: Any) -> set[str]:
    """The variables that a startup program initializes: parameters, and everything else that it stores."""
    return {_name(operator) for operator in _stores(startup)}


def initialized_tensor(scope: Any, name: str) -> Any:
    """The tensor of a variable that has a value in ``scope``; None if it has none."""
    variable = scope.find_var(name)
    tensor = None if variable is None else variable.get_tensor()
    return tensor if tensor is not None and tensor._is_initialized() else None


def _stores(startup: Any) -> list[Any]:
    return [operator for operator in startup.global_block().ops if stored_by(operator) is not None]


def _name(operator: Any) -> str:
    """The variable that one of the `_stores` stores into."""
    return str(stored_by(operator))


def _is_done(operator: Any) -> bool:
    source = operator.operand_source(0).get_defining_op()
    return source is not None and "fleet_train_broadcast" in source.name()


def refuse_foreign_startup(main: Any, startups: Sequence[Any]) -> None:
    """Raise ConversionError if ``startups``, that of minimize and the default one, initialize no parameter of ``main``,
    and nothing else has.

    This happens with ``minimize(loss)`` outside the ``program_guard`` in which the network was built: learning rate and
    accumulators would go into a program that the script never runs, and start values would not be made equal.
    """
    names = {parameter.name for parameter in main.global_block().all_parameters()}
    scope = paddle.static.global_scope()
    if not names or any(names & names_stored_by(startup) for startup in startups):
        return
    if any(initialized_tensor(scope, name) is not None for name in names):
        return
    raise ConversionError(
        f"the startup program of minimize initializes no parameter of the loss (such as '{min(names)}'): "
        "call minimize inside `with paddle.static.program_guard(main, startup)`, or pass startup_program=startup"
    )
