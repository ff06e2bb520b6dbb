"""Makes all ranks start from rank 0's values, wherever a script creates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.host_ops import emit_barrier, emit_broadcast, token
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.transfer import broadcast_arrays
from fleet_train.convert.program.consistency import agree
from fleet_train.convert.program.rewrite import chain_in_program_order

_STORES_START_VALUE = ("builtin.set_parameter", "builtin.shadow_output")


def make_start_equal(job: Job, main: Any, startup: Any, others: Sequence[Any], scope: Any) -> None:
    """Give every rank the start values of rank 0: those that ``startup`` stores, and all other parameters of ``main``.

    A script may create parameters in another startup program than its optimizer's state
    (``minimize(startup_program=...)``). They are searched in ``others``, startup programs that the script may run, and
    in ``scope``, for a startup program that has already run: those values are broadcast now. All ranks call it;
    ScheduleMismatch if they differ in this.
    """
    broadcast_start_state(job, startup)
    stored = names_stored_by(startup)
    left = {parameter.name for parameter in main.global_block().all_parameters()} - stored
    for other in others:
        if other is not startup and left & names_stored_by(other):
            broadcast_start_state(job, other)
    if left:
        _share_now(job, sorted(left), scope)


def broadcast_start_state(job: Job, startup: Any) -> None:
    """Make ``startup`` give every rank the start values of rank 0.

    Covers all that the startup program stores: parameters, statistics, moments, beta powers, the learning rate.
    Operators that an earlier call has handled are left unchanged.
    """
    stores = [operator for operator in _stores(startup) if not _is_done(operator)]
    if stores:
        with paddle.static.program_guard(startup, startup):
            _emit_broadcasts(job, stores)
        chain_in_program_order(startup.global_block().ops)  # after those of an earlier call: one order for all ranks


def _emit_broadcasts(job: Job, stores: Sequence[Any]) -> None:
    paddle.pir.set_insertion_point(stores[0])
    chain = emit_barrier(job, "startup program", token())
    for operator in stores:
        paddle.pir.set_insertion_point(operator)
        value, chain = emit_broadcast(job, _name(operator), operator.operand_source(0), chain)
        value.persistable = True
        operator.operand(0).set_source(value)
    paddle.pir.reset_insertion_point_to_end()


def _share_now(job: Job, names: Sequence[str], scope: Any) -> None:
    begun = {name: tensor for name in names if (tensor := begun_tensor(scope, name)) is not None}
    agree(job, "the parameters that have values before minimize", sorted(begun))
    if begun:
        for name, array in broadcast_arrays(job, {name: np.array(tensor) for name, tensor in begun.items()}).items():
            begun[name].set(array, job.place)


def names_stored_by(startup: Any) -> set[str]:
    """The variables that a startup program initializes: parameters, and everything else that it stores."""
    return {_name(operator) for operator in _stores(startup)}


def begun_tensor(scope: Any, name: str) -> Any:
    """The tensor of a variable that has a value in ``scope``; None if it has none."""
    variable = scope.find_var(name)
    tensor = None if variable is None else variable.get_tensor()
    return tensor if tensor is not None and tensor._is_initialized() else None


def _stores(startup: Any) -> list[Any]:
    return [operator for operator in startup.global_block().ops if operator.name() in _STORES_START_VALUE]


def _name(operator: Any) -> str:
    return str(operator.attrs().get("parameter_name") or operator.attrs().get("output_name"))


def _is_done(operator: Any) -> bool:
    source = operator.operand_source(0).get_defining_op()
    return source is not None and "fleet_train_broadcast" in source.name()
