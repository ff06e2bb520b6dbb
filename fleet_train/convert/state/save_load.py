"""What ``save_persistables`` and ``load_persistables`` do: one program's state between the ranks and rank 0's disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job.job import Job
from fleet_train.collectives.job.transfer import broadcast_arrays
from fleet_train.collectives.methods import state as method_state
from fleet_train.convert.settings.apply_profile import say
from fleet_train.convert.state import persistables
from fleet_train.convert.state.finite import first_not_finite
from fleet_train.convert.state.fitting import Described, fit
from fleet_train.convert.state.local_state import (
    PREFIX,
    compare_replicas,
    make_equal,
    position_of,
    refuse_damaged_position,
    take_position,
)
from fleet_train.convert.state.persistables import State
from fleet_train.convert.state.program_state import PASS, ProgramState
from fleet_train.convert.state.rank_state import gather_own, read_methods, spread_own
from fleet_train.convert.state.velocities import to_dgc, to_momentum
from fleet_train.errors import CheckpointError, FleetTrainError, NotFinite


@dataclass(frozen=True)
class Captured:
    """A program's state at one step, in rank 0's memory. Training may continue while it is written."""

    state: State
    """Copies; empty on every rank except 0."""
    constant: frozenset[str] = frozenset()
    """Parameters that are not trained."""

    def write(self, folder: Path, when: str = "") -> None:
        """Write it into ``folder``, synced to the disk; for rank 0, on any thread. Raises OSError.

        Raises NotFinite instead of writing NaN or infinity; ``when``, such as ``after step 4``, is for its message.
        """
        problem = first_not_finite(self.state, self.constant, when)
        if problem is not None:
            raise NotFinite(
                f"{problem}; this is not saved, and what was saved before is unchanged. Try a lower learning rate, a "
                "clip of the gradients (--clip_norm), or --on_nan skip"
            )
        persistables.write_folder(folder, self.state)


def capture(
    job: Job, program: Any, scope: Any, exchange: GradientExchange | None, memory: Captured | None = None
) -> Captured:
    """Copy the current state; all ranks call it.

    State that drifts under LocalSGD is averaged first; each rank's own state is sent to rank 0.
    Raises ScheduleMismatch on every rank when the replicas have diverged (divergence_check_steps): nothing is saved.
    ``memory``: an earlier capture that is no longer needed; its arrays are overwritten, which saves allocating them.
    """
    state = ProgramState(program, scope)
    beside, ranks = {}, []
    if exchange is not None:
        make_equal(job, state, exchange, with_optimizer=True)
        compare_replicas(state, exchange, with_optimizer=True)
        alike, own = read_methods(exchange)
        beside = {**position_of(exchange), **alike}
        ranks = gather_own(job, state, own)
    if job.cluster.rank != 0:
        return Captured(State({}))
    apart = ranks[0].keys() if ranks else ()
    names = [name for name in state.variables if name not in apart]
    arrays = state.read(names, into=memory.state.arrays if memory else None)
    return Captured(State({**arrays, **beside}, state.kinds, ranks), state.constant)


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
        fitting = fit(_describe(saved), ours, str(folder))
        _refuse_not_finite(saved, {*fitting.names}, state.constant, folder)
        say(fitting.notes, rank=0)
        return {"names": fitting.names, "ranks": len(saved.ranks)}

    answer = on_first_worker(job, f"load from {folder}", read)
    arrays = broadcast_arrays(job, saved.arrays)
    arrays |= spread_own(job, saved.ranks, answer["ranks"])
    state.write({name: arrays[name] for name in answer["names"]}, job.place)
    if exchange is not None:
        take_position(exchange, arrays, job.place)
        memories = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
        method_state.write(exchange.memories, memories, job.place)


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
