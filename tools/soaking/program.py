"""The script of a soak: the reference trainer, with a line in the soak's ledger per step.

    python tools/soaking/program.py --model=mlp --data=digits --epochs=3 ...        (flags of ``fleet_train train``)

The trainer computes what it always does; the ledger is outside the nodes' disks, so it survives them. Environment:

- ``FLEET_TRAIN_SOAK_LEDGER``: the ledger's folder; a file for each process.
- ``FLEET_TRAIN_SOAK_STEP_SECONDS``: a pause before each step, until the ledger has ``hurry``.
- ``FLEET_TRAIN_SOAK_STOP_AT``: ``epoch:samples``; save and end there (a reference run of one stretch).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from fleet_train import fleet
from fleet_train.cli import main
from fleet_train.errors import Preempted
from fleet_train.train import trainer
from fleet_train.train.checkpoint import storage

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # below the imports that a spare process makes

from tools.soaking.ledger import HURRY, LEDGER, STEP_SECONDS, STOP_AT

FOLDER, PAUSE = Path(os.environ[LEDGER]), float(os.environ.get(STEP_SECONDS, "0"))
STOP = [int(part) for part in os.environ.get(STOP_AT, "").split(":") if part]
publish = storage.publish


@cache
def _file() -> tuple[int, dict[str, int]]:
    """This process's file of the ledger, and who it is."""
    who = {"attempt": int(os.environ.get("FLEET_TRAIN_ATTEMPT", "0"))}
    who |= {"rank": fleet.worker_index(), "world": fleet.worker_num()}
    name = f"attempt{who['attempt']:04d}-rank{who['rank']}-{os.getpid()}.jsonl"
    return os.open(FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), who


def write(event: str, **what: Any) -> None:
    """A line of the ledger; it is written before the call returns, in case the process is killed."""
    file, who = _file()
    os.write(file, json.dumps({"event": event, **who, "time": time.time(), **what}).encode() + b"\n")


class NotedTrainer(trainer.Trainer):
    """Records where it starts, each step, and ends where the stretch does."""

    came_from: Path | None = None

    @property
    def place(self) -> list[int]:
        return [self.position.epoch, self.position.consumed_samples]

    def resume(self, checkpoint: Any) -> None:
        super().resume(checkpoint)
        self.came_from = checkpoint.folder

    def fit(self) -> Any:
        found = self.came_from if self.came_from is not None and self.came_from.is_dir() else None
        samples = self._loader.sampler.num_samples  # type: ignore[attr-defined]
        write("begin", place=self.place, came_from=found and digest(found), samples=samples)
        return super().fit()

    def _train_batch(self, index: int, batch: Any, samples: int) -> None:
        if PAUSE and not (FOLDER / HURRY).exists():
            time.sleep(PAUSE)
        before, known = self.place, len(self._of_step.losses)
        super()._train_batch(index, batch, samples)
        loss = next(iter(self._of_step.losses[known:]), None)  # not every step fetches it
        after = [before[0], self._loader.consumed_after(index + 1)]
        indices = [int(sample) for sample in self._loader.indices(index)]
        write("step", before=before, after=after, indices=indices, loss=None if loss is None else loss.hex())

    def _stop_if_asked(self, *, has_saved: bool) -> None:
        if self.place == STOP:
            self._save()
            assert self._checkpoints is not None
            self._checkpoints.finish()
            raise Preempted(f"the stretch ends after step {self.position.step}")
        super()._stop_if_asked(has_saved=has_saved)

    def _last_epoch(self) -> int:
        last = super()._last_epoch()
        return min(last, STOP[0] + (STOP[1] > 0)) if STOP else last


def digest(folder: Path) -> str:
    """SHA-256 of the marker, which has the hash of each tensor."""
    return hashlib.sha256((folder / storage.MARKER).read_bytes()).hexdigest()


def noted_publish(*what: Any) -> Path:
    written = publish(*what)
    place = [what[2]["epoch"], what[2]["consumed_samples"]]
    if fleet.is_first_worker():  # other nodes write the same
        write("save", place=place, name=written.name, digest=digest(written))
    return written


if __name__ == "__main__":
    # Before the reference trainer is imported, which takes the class by its name.
    setattr(trainer, "Trainer", NotedTrainer)  # noqa: B010
    setattr(storage, "publish", noted_publish)  # noqa: B010
    sys.argv.insert(1, "train")
    main()
