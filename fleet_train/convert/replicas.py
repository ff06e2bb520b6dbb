"""State of converted programs that differs between ranks but is needed once: made equal, and compared before a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.collectives.replica_check import digests
from fleet_train.convert.program_state import PARAMETER, Arrays, ProgramState, borrowed
from fleet_train.convert.session import Converted


def make_equal(job: Job, found: Sequence[Converted], with_optimizer: Sequence[Converted] = ()) -> None:
    """Average state of converted programs that differs between ranks but is needed once; all ranks call it.

    This is batch norm's running statistics and, in LocalSGD's local steps, the parameters; of those in
    ``with_optimizer`` the optimizer's state as well, so that one rank's file is valid for all of them.
    """
    statistics: dict[str, Any] = {}
    for each in found:
        exchange, state = each.exchange, ProgramState(each.main)
        exchange.drain_copies()
        averager = exchange.averager
        if averager is None or averager.schedule.is_synchronous(exchange.step):
            statistics |= dict.fromkeys(state.statistics, state)
        else:
            names = [name for name in state.drifting if each in with_optimizer or state.kinds[name] == PARAMETER]
            with dynamic_mode():
                copies = state.read(names).items()
                tensors = {name: paddle.to_tensor(array, place=job.place) for name, array in copies}
                exchange.synchronise(tensors)
                state.write({name: tensor.numpy() for name, tensor in tensors.items()}, job.place)
        exchange.equal_after = exchange.step
    _average_statistics(job, statistics)


def compare_replicas(
    state: ProgramState,
    exchange: GradientExchange,
    with_optimizer: bool,
    copies: Arrays | None = None,
) -> None:
    """Compare what one rank's file is to hold for all of them; all ranks call it after ``make_equal``.

    The parameters that are trained and, with ``with_optimizer``, what the optimizer keeps of each; not the latter in
    LocalSGD's local steps, where ranks may have skipped different updates, nor of a sharded optimizer. Does nothing
    with divergence_check_steps 0.
    ``copies``: those values that are on the host already. Raises ScheduleMismatch.
    """
    if not exchange.check.is_asked_for:
        return
    names, averager = [name for name in exchange.trained if name in state.variables], exchange.averager
    if with_optimizer and not exchange.owners and (averager is None or averager.schedule.is_synchronous(exchange.step)):
        names += state.kept_of(exchange)
    copied = copies or {}
    if not names:
        return
    values = (copied[name] if name in copied else borrowed(state.variables[name]) for name in names)
    exchange.compare_saved(names, digests(values))


def _average_statistics(job: Job, states: Mapping[str, ProgramState]) -> None:
    """Average the statistics that differ between ranks. ``states``: by the statistics' names, where they are."""
    if not states:
        return
    arrays = {name: states[name].read([name])[name] for name in sorted(states)}
    flat = np.concatenate([array.reshape(-1) for array in arrays.values()])
    mean = job.reduce(flat, "sum") / flat.dtype.type(job.world_size)
    for name, array in arrays.items():
        array.reshape(-1)[:], mean = mean[: array.size], mean[array.size :]
        states[name].write({name: array}, job.place)
