"""Save and load one training run over all ranks. Rank 0's disk is the truth; the folders themselves are `snapshots`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_train import fleet
from fleet_train.train import snapshots
from fleet_train.train.agree import ask_first_worker


@dataclass(frozen=True)
class TrainState:
    """Everything a resumed run needs beside the tensors. Random streams follow from config["seed"] and step."""

    epoch: int
    """Finished epochs."""
    step: int
    """Finished steps (optimizer updates) since the beginning of the run."""
    steps_per_epoch: int
    world_size: int
    scheduler: dict[str, Any]
    config: dict[str, Any]
    profile: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Found:
    """A checkpoint that rank 0 has verified."""

    folder: Path
    state: TrainState


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`. Every method is called on all ranks."""

    def __init__(self, output: Path, keep: int) -> None:
        self.folder = output / "checkpoints"
        self._keep = keep

    def exist(self) -> bool:
        """Whether rank 0 has a published checkpoint."""
        return bool(ask_first_worker(lambda: bool(snapshots.complete(self.folder))))

    def newest(self) -> Found | None:
        """The newest published checkpoint, its files verified; CheckpointError on every rank if they are not whole."""

        def look() -> dict[str, Any] | None:
            published = snapshots.complete(self.folder)
            if not published:
                return None
            return {"folder": str(published[-1]), "state": snapshots.read_state(published[-1])}

        answer = ask_first_worker(look)
        return None if answer is None else Found(Path(answer["folder"]), TrainState(**answer["state"]))

    def save(self, exe: Any, state: TrainState) -> Path:
        """Publish a checkpoint and return its folder; all ranks leave together, after it is on the disk."""
        draft = ask_first_worker(lambda: str(snapshots.begin(self.folder, state.step)))
        fleet.save_persistables(exe, draft)
        ask_first_worker(lambda: str(snapshots.publish(self.folder, state.step, asdict(state))))
        ask_first_worker(lambda: snapshots.prune(self.folder, self._keep))
        return snapshots.folder_of(self.folder, state.step)

    def load(self, exe: Any, found: Found) -> None:
        """Put the tensors into the scope, after the startup program has run; the facade checks names and shapes."""
        fleet.load_persistables(exe, str(found.folder))
