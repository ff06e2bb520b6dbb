"""What ``save_persistables`` and ``load_persistables`` do: one program's state between the ranks and rank 0's disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.convert import persistables
from fleet_train.convert.local_state import position_of, share_arrays, synchronise, take_position
from fleet_train.errors import CheckpointError, FleetTrainError


@dataclass(frozen=True)
class Captured:
    """A program's state at one step, in memory. Training may go on while it is written."""

    arrays: persistables.Arrays
    """Copies, by name; empty on every rank but 0."""
    dtypes: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, synced to the disk; for rank 0, on any thread. Raises OSError."""
        persistables.write_folder(folder, self.arrays, self.dtypes)


def capture(job: Job, program: Any, scope: Any, exchange: GradientExchange | None) -> Captured:
    """Copy the state as it is now; all ranks call it. With LocalSGD it is averaged over the ranks first."""
    if exchange is not None:
        synchronise(exchange, program, scope, job.place, with_optimizer=True)
    if job.cluster.rank != 0:
        return Captured({}, {})
    arrays, dtypes = persistables.read_scope(program, scope)
    position = position_of(exchange) if exchange is not None else {}
    return Captured({**arrays, **position}, dtypes)


def save(job: Job, program: Any, scope: Any, exchange: GradientExchange | None, folder: Path) -> None:
    """Capture and write; every rank returns when it is done. Raises CheckpointError on every rank."""
    captured = capture(job, program, scope, exchange)
    on_first_worker(job, f"save to {folder}", lambda: captured.write(folder))


def load(job: Job, program: Any, scope: Any, exchange: GradientExchange | None, folder: Path) -> None:
    """Put saved state into the scope of every rank. Raises CheckpointError on every rank."""
    loaded: persistables.Arrays = {}

    def read() -> None:
        loaded.update(persistables.read_folder(folder))
        persistables.refuse_other_model(loaded, program, scope, folder)

    on_first_worker(job, f"load from {folder}", read)
    arrays = share_arrays(job, loaded)
    persistables.write_scope(arrays, program, scope, job.place)
    if exchange is not None:
        take_position(exchange, arrays, job.place)


def on_first_worker(job: Job, what: str, action: Callable[[], None]) -> None:
    """Do ``action`` on rank 0; every rank returns when it is done, or raises CheckpointError with rank 0's reason."""
    problem = None
    if job.cluster.rank == 0:
        try:
            action()
        except (OSError, FleetTrainError) as error:
            problem = f"{what}: {error}"
    problem = job.gather(f"{what} {job.count(what)}", problem)[0]
    if problem:
        raise CheckpointError(problem)
