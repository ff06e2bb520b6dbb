"""What ``save_persistables`` and ``load_persistables`` do: one program's state between the ranks and rank 0's disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods import registry as method_state
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.collectives.replica_check import digests
from fleet_train.collectives.transfer import broadcast_arrays, gather_arrays, scatter_arrays
from fleet_train.convert import persistables
from fleet_train.convert.persistables import Described, State, fit
from fleet_train.convert.planning import dtype_name
from fleet_train.convert.program_state import (
    OPTIMIZER,
    PARAMETER,
    PASS,
    Array,
    Arrays,
    ProgramState,
    borrowed,
    is_sum,
    not_finite,
)
from fleet_train.errors import CheckpointError, FleetTrainError, NotFinite
from fleet_train.log import log_once
from fleet_train.plan.plan import MEAN_DTYPES

PREFIX = "fleet_train/"
"""Names of state saved in addition to the program's tensors; a program that does not need it ignores it."""


_STEP, _NUMBERS, _ANCHOR, _VELOCITY = (
    PREFIX + name for name in ("step", "local_sgd/numbers", "local_sgd/anchor", "local_sgd/outer_velocity")
)


MAY_BE_NAN = _NUMBERS
"""Its first loss is NaN until there is one."""


@dataclass(frozen=True)
class Captured:
    """A program's state at one step, in rank 0's memory. Training may continue while it is written."""

    state: State
    """Copies; empty on every rank except 0."""
    constant: frozenset[str] = frozenset()
    """Parameters that are not trained."""

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, synced to the disk; for rank 0, on any thread. Raises OSError, and NotFinite
        instead of writing NaN or infinity.
        """
        persistables.publish(folder, self.write_tensors(folder))

    def write_tensors(self, folder: Path, when: str = "") -> dict[str, Any]:
        """The first part of ``write``: what is returned is for `persistables.publish`, which completes it.

        ``when``, such as ``after step 4``, is for NotFinite's message.
        """
        problem = first_not_finite(self.state, self.constant, when)
        if problem is not None:
            raise NotFinite(
                f"{problem}; this is not saved, and what was saved before is unchanged. Try a lower learning rate, a "
                "clip of the gradients (--clip_norm), or --on_nan skip"
            )
        return persistables.write_tensors(folder, self.state)


def capture(
    job: Job, program: Any, scope: Any, exchange: GradientExchange | None, memory: Captured | None = None
) -> Captured:
    """Copy the current state; all ranks call it.

    State that drifts under LocalSGD is averaged first; each rank's own state is sent to rank 0.
    Raises ScheduleMismatch on every rank when the replicas have diverged (divergence_check_steps): nothing is saved.
    ``memory``: an earlier capture that is no longer needed; its arrays are overwritten, which saves allocating them.
    """
    state = ProgramState(program, scope)
    is_first = job.cluster.rank == 0
    sums: list[str] = []
    if exchange is not None:
        make_equal(job, state, exchange, with_optimizer=True)
        sums = state.sums_under_way
    arrays: Arrays = {}
    if is_first:
        names = [name for name in state.variables if name not in sums]
        arrays = state.read(names, into=memory.state.arrays if memory else None)
    ranks: list[Arrays] = []
    if exchange is not None:
        compare_replicas(state, exchange, with_optimizer=True, copies=arrays)
        alike, own = method_state.read_state(exchange.memories)
        arrays |= position_of(exchange) | _with_prefix(alike)
        own = _with_prefix(own) | state.read(sums)
        ranks = gather_arrays(job, own) if own else []
    return Captured(State(arrays, state.kinds, ranks), state.constant) if is_first else Captured(State({}))


def _with_prefix(arrays: Arrays) -> Arrays:
    return {PREFIX + name: array for name, array in arrays.items()}


def save(job: Job, program: Any, scope: Any, exchange: GradientExchange | None, folder: Path) -> None:
    """Capture and write; every rank returns when it is done. Raises CheckpointError or NotFinite on every rank."""
    captured = capture(job, program, scope, exchange)
    on_first_worker(job, f"save to {folder}", lambda: captured.write(folder))


def load(job: Job, program: Any, scope: Any, exchange: GradientExchange | None, folder: Path) -> None:
    """Put saved state into the scope of every rank. Nothing is changed when CheckpointError is raised."""
    state = ProgramState(program, scope)
    saved = State({})

    def read() -> dict[str, Any]:
        nonlocal saved
        ours = state.describe()
        with_dgc = exchange is not None and any(method.kind == "dgc" for _, method in exchange.methods)
        found = persistables.read_folder(folder)
        refuse_damaged_position(found.arrays, str(folder))
        saved = (to_dgc if with_dgc else to_momentum)(found, ours)
        names, notes = fit(_describe(saved), ours, str(folder))
        _refuse_not_finite(saved, {*names}, state.constant, folder)
        log_once(notes, rank=0)
        return {"names": names, "ranks": len(saved.ranks)}

    answer = on_first_worker(job, f"load from {folder}", read)
    arrays = broadcast_arrays(job, saved.arrays)
    arrays |= _spread_own(job, saved.ranks, answer["ranks"])
    state.write({name: arrays[name] for name in answer["names"]}, job.place)
    if exchange is not None:
        take_position(exchange, arrays, job.place)
        memories = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
        method_state.write_state(exchange.memories, memories, job.place)


def _spread_own(job: Job, saved: Sequence[Arrays], number_saved: int) -> Arrays:
    """This rank's own part of the state that rank 0 has read (``number_saved`` ranks; every rank knows that number).

    On the same number of ranks, each restores its own. On another number each takes the mean: the total that is still
    to be added to the average of gradients stays the same.
    """
    if number_saved == 0:
        return {}
    if number_saved == job.world_size:
        return scatter_arrays(job, saved)
    return broadcast_arrays(job, mean_of_ranks(saved) if job.cluster.rank == 0 else {})


def _refuse_not_finite(saved: State, names: set[str], constant: frozenset[str], folder: Path) -> None:
    """Of what this program loads. ``names``: of its own tensors."""
    arrays = {name: array for name, array in saved.arrays.items() if name in names or name.startswith(PREFIX)}
    problem = first_not_finite(replace(saved, arrays=arrays), constant)
    if problem is not None:
        raise CheckpointError(
            f"{folder}: {problem}: it was saved after the training had gone wrong; load an earlier one"
        )


def _describe(saved: State) -> Described:
    """The saved tensors of the program, including those of the ranks."""
    own = saved.ranks[0] if saved.ranks else {}
    return {
        name: (saved.kinds.get(name, PASS), list(array.shape), array.dtype.name)
        for name, array in {**saved.arrays, **own}.items()
        if not name.startswith(PREFIX)
    }


def on_first_worker(job: Job, what: str, action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0; its result (a JSON value) on every rank, or rank 0's NotFinite, or CheckpointError with
    its reason.

    ``what``: for the message; its first word names the broadcast, since each rank may pass a different folder.
    """
    answer: dict[str, Any] = {}
    if job.cluster.rank == 0:
        try:
            answer = {"value": action()}
        except (OSError, FleetTrainError) as error:
            answer = {"problem": f"{what}: {error}", "not_finite": isinstance(error, NotFinite)}
    name = what.partition(" ")[0]
    answer = job.broadcast(f"{name} {job.count(name)}", answer)
    if "problem" in answer:
        raise (NotFinite if answer["not_finite"] else CheckpointError)(answer["problem"])
    return answer["value"]


_FROZEN = (
    "; this is state of the optimizer: where it is infinite, the weights never change again, or become infinite "
    "themselves (a gradient was too large)"
)


def first_not_finite(state: State, constant: Collection[str], when: str = "") -> str | None:
    """What is wrong with the first tensor that holds NaN or infinity, by name; None if there is none.

    May contain them: sums of a gradient merge in the middle of an update, which the update may skip; the first loss of
    an adaptive period; variables that a script has made itself and that belong to no parameter. ``constant``:
    parameters that are not trained, and may be infinite, such as a mask. ``when``: for the text, ``after step 4``.
    """
    parameters = [name for name, kind in state.kinds.items() if kind == PARAMETER]
    named = [("", state.arrays), *((f"rank {rank}'s ", arrays) for rank, arrays in enumerate(state.ranks))]
    for whose, arrays in named:
        for name, values in not_finite(arrays.items(), constant):
            kind = state.kinds.get(name)
            if name == MAY_BE_NAN or is_sum(name):
                continue
            if kind == OPTIMIZER and not any(f"{parameter}_" in name for parameter in parameters):
                continue
            nans = int(np.isnan(values).sum())
            told = f"{whose}'{name}' is {_counted(values, nans)} {when}".rstrip()
            return f"{told}{_FROZEN}" if kind == OPTIMIZER and not nans else told
    return None


def _counted(values: Array, nans: int) -> str:
    """``NaN in 2 and infinite in 1 of 12 elements``."""
    infinite = int(np.isinf(values).sum())
    parts = [f"{what} in {count}" for what, count in (("NaN", nans), ("infinite", infinite)) if count]
    return f"{' and '.join(parts)} of {values.size} elements"


_OF_MOMENTUM, _OF_DGC = "_velocity_0", ".velocity"
_DGC = f"{PREFIX}dgc/"


def to_momentum(saved: State, ours: Described) -> State:
    """State saved with DGC, plus the velocities that a program with Momentum needs: the means over the ranks.

    DGC takes over the optimizer's momentum only on several ranks; this way one card can continue a checkpoint of many
    ranks, and vice versa. Updates that DGC has not sent yet are dropped.
    """
    missing = [name for name in ours if name.endswith(_OF_MOMENTUM) and name not in saved.arrays]
    if not missing or f"{_DGC}step" not in saved.arrays:
        return saved
    means = mean_of_ranks(saved.ranks) if saved.ranks else {}
    velocities = {}
    for name in missing:
        _, shape, dtype = ours[name]
        flat = means.get(_dgc_name(name, ours))
        if flat is not None and flat.size != math.prod(shape):
            raise CheckpointError(
                f"the velocity of '{name}' was saved with {flat.size} elements, this program has {shape}"
            )
        velocities[name] = np.zeros(shape, dtype) if flat is None else flat.reshape(shape).astype(dtype)
    kinds = saved.kinds | dict.fromkeys(velocities, OPTIMIZER)
    return replace(saved, arrays={**saved.arrays, **velocities}, kinds=kinds)


def to_dgc(saved: State, ours: Described) -> State:
    """State saved with Momentum, with its velocities under the names that a program with DGC reads."""
    left_over = [
        name for name in saved.kinds if name.endswith(_OF_MOMENTUM) and name not in ours and name in saved.arrays
    ]
    arrays = {name: array for name, array in saved.arrays.items() if name not in left_over}
    for name in left_over:
        velocity = saved.arrays[name].reshape(-1).astype(np.float32)
        arrays[_dgc_name(name, ours)] = velocity
    return replace(saved, arrays=arrays)


def _dgc_name(velocity: str, ours: Described) -> str:
    """DGC's name of what Momentum calls ``velocity``: its parameter's, without the prefix of a name guard that Paddle
    has added a second time.
    """
    stem = velocity.removesuffix(_OF_MOMENTUM)
    owners = [name for name, (kind, _, _) in ours.items() if kind == PARAMETER and stem.endswith(name)]
    return f"{_DGC}{max(owners, key=len, default=stem)}{_OF_DGC}"


def mean_of_ranks(saved: Sequence[Arrays]) -> Arrays:
    """The mean over ranks of each array, in its dtype."""
    return {
        name: np.mean([arrays[name] for arrays in saved], axis=0, dtype=np.float64).astype(array.dtype)
        for name, array in saved[0].items()
    }


def make_equal(job: Job, state: ProgramState, exchange: GradientExchange, with_optimizer: bool) -> None:
    """Average state that differs between ranks but is needed once; all ranks call it.

    This is batch norm's running statistics and, in LocalSGD's local steps, the parameters, and with ``with_optimizer``
    the optimizer's state, so that one rank's file is valid for all of them.
    """
    exchange.drain_copies()
    averager = exchange.averager
    if averager is None or averager.schedule.is_synchronous(exchange.step):
        _average_statistics(job, state)
        return
    names = [name for name in state.drifting if with_optimizer or state.kinds[name] == PARAMETER]
    with dynamic_mode():
        tensors = {name: paddle.to_tensor(array, place=job.place) for name, array in state.read(names).items()}
        exchange.synchronise(tensors)
        state.write({name: tensor.numpy() for name, tensor in tensors.items()}, job.place)


def compare_replicas(
    state: ProgramState,
    exchange: GradientExchange,
    with_optimizer: bool,
    copies: Arrays | None = None,
) -> None:
    """Compare what one rank's file is to hold for all of them; all ranks call it after ``make_equal``.

    The parameters that are trained and, with ``with_optimizer``, what the optimizer keeps of each. Not the latter in
    LocalSGD's local steps, where ranks may have skipped different updates. Does nothing with divergence_check_steps 0.
    ``copies``: those values that are on the host already. Raises ScheduleMismatch.
    """
    if not exchange.check.is_asked_for:
        return
    names, averager = exchange.trained, exchange.averager
    if with_optimizer and (averager is None or averager.schedule.is_synchronous(exchange.step)):
        names += state.kept_of(names)
    copied = copies or {}
    values = (copied[name] if name in copied else borrowed(state.variables[name]) for name in names)
    exchange.compare_saved(names, digests(values))


def _average_statistics(job: Job, state: ProgramState) -> None:
    arrays = state.read(state.statistics)
    if not arrays:
        return
    flat = np.concatenate([array.reshape(-1) for array in arrays.values()])
    mean = job.reduce(flat, "sum") / flat.dtype.type(job.world_size)
    for array in arrays.values():
        array.reshape(-1)[:], mean = mean[: array.size], mean[array.size :]
    state.write(arrays, job.place)


def position_of(exchange: GradientExchange) -> Arrays:
    """The positions of the exchange and LocalSGD, as arrays to save; equal on every rank."""
    arrays: Arrays = {_STEP: np.array([exchange.step])}
    averager = exchange.averager
    if averager is not None:
        averager.drain_copies()
        arrays[_NUMBERS] = np.array(averager.schedule.numbers())
        with dynamic_mode():
            for name, buffers in ((_ANCHOR, averager.anchor), (_VELOCITY, averager.velocity)):
                for buffer in buffers or ():
                    arrays[_of_dtype(name, dtype_name(buffer.dtype))] = np.array(buffer.numpy())
    return arrays


def _of_dtype(name: str, dtype: str) -> str:
    return name if dtype == MEAN_DTYPES[0] else f"{name}.{dtype}"


def _buffers(arrays: Arrays, name: str, place: Any) -> list[Any] | None:
    names = [_of_dtype(name, dtype) for dtype in MEAN_DTYPES]
    return [paddle.to_tensor(arrays[one], place=place) for one in names if one in arrays] or None


def refuse_damaged_position(arrays: Arrays, source: str) -> None:
    """Raise CheckpointError for invalid saved numbers: checked before anything is changed."""
    for name, array in arrays.items():
        is_step = name == _STEP or (name.startswith(PREFIX) and name.endswith("/step"))
        if is_step and not (array.size == 1 and array.dtype.kind in "iuf" and 0 <= float(array.reshape(-1)[0]) < 2**53):
            raise CheckpointError(f"{source}: '{name}' is not a single number of steps; load another saved state")
    numbers = arrays.get(_NUMBERS)
    if numbers is not None and not _are_of_a_schedule(numbers):
        raise CheckpointError(f"{source}: '{_NUMBERS}' is not the state of a period; load another saved state")


def _are_of_a_schedule(numbers: Array) -> bool:
    """Period, steps since the averaging, first rate and first loss (which may be NaN)."""
    if numbers.shape != (4,) or numbers.dtype.kind != "f":
        return False
    period, steps = float(numbers[0]), float(numbers[1])
    return 1 <= period < 2**53 and 0 <= steps < 2**53


def take_position(exchange: GradientExchange, arrays: Arrays, place: Any) -> None:
    """Continue from a saved position. With state saved without LocalSGD, periods start at the loaded parameters."""
    exchange.drop_averaging()
    if _STEP in arrays:
        exchange.step = int(arrays[_STEP][0])
    averager = exchange.averager
    if averager is None:
        return
    if _NUMBERS in arrays:
        averager.schedule.restore([float(number) for number in arrays[_NUMBERS]])
    with dynamic_mode():
        averager.restore(_buffers(arrays, _ANCHOR, place), _buffers(arrays, _VELOCITY, place))
