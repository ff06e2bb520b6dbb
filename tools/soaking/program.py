"""The script of a soak with machine faults: the reference trainer, with a line in the soak's ledger per step.

    python tools/soaking/program.py --model=mlp --data=digits --epochs=3 ...        (flags of ``fleet_train train``)

The trainer computes what it always does; the ledger is outside the nodes' disks, so it survives them. Environment:

- ``FLEET_TRAIN_SOAK_LEDGER``: the ledger's folder; a file for each process.
- ``FLEET_TRAIN_SOAK_STEP_SECONDS``: a pause before each step, until the ledger has ``hurry``.
- ``FLEET_TRAIN_SOAK_STOP_AT``: ``epoch:samples``; save and end there (a reference run of one stretch).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEDGER, STEP_SECONDS, STOP_AT = (f"FLEET_TRAIN_SOAK_{name}" for name in ("LEDGER", "STEP_SECONDS", "STOP_AT"))
HURRY = "hurry"


class Book:
    """One process's file of the ledger: each line is written before the call returns, in case the process is killed."""

    def __init__(self, folder: Path) -> None:
        from fleet_train import fleet

        self._who = {
            "attempt": int(os.environ.get("FLEET_TRAIN_ATTEMPT", "0")),
            "rank": fleet.worker_index(),
            "world": fleet.worker_num(),
        }
        name = "attempt{attempt:04d}-rank{rank}".format(**self._who) + f"-{os.getpid()}.jsonl"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **what: Any) -> None:
        line = {"event": event, **self._who, "time": time.time(), **what}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def keep_a_ledger(folder: Path, step_seconds: float, stop_at: list[int] | None) -> None:
    """Have every trainer of this process record where it starts, each step, and each checkpoint."""
    from fleet_train.errors import Preempted
    from fleet_train.train.checkpoint import storage
    from fleet_train.train.trainer import Trainer

    publish = storage.publish
    fit, resume, train_step, stop_if_asked, last_epoch = (
        Trainer.fit, Trainer.resume, Trainer._train_batch, Trainer._stop_if_asked, Trainer._last_epoch,
    )  # fmt: skip
    books: list[Book] = []

    def noted_resume(self: Trainer, found: Any) -> None:
        resume(self, found)
        self._soak_came_from = found.folder  # type: ignore[attr-defined]

    def noted_fit(self: Trainer) -> Any:
        books.append(Book(folder))
        came_from = getattr(self, "_soak_came_from", None)
        digest = storage.marker_digest(came_from) if came_from is not None and came_from.is_dir() else None
        place = [self.position.epoch, self.position.consumed_samples]
        samples = self._loader.sampler.num_samples  # type: ignore[attr-defined]
        books[0].write("begin", place=place, came_from=digest, samples=samples)
        return fit(self)

    def noted_step(self: Trainer, index: int, batch: Any) -> None:
        if step_seconds and not (folder / HURRY).exists():
            time.sleep(step_seconds)
        place = [self.position.epoch, self.position.consumed_samples]
        known = len(self._of_step.losses)
        train_step(self, index, batch)
        loss = next(iter(self._of_step.losses[known:]), None)  # not every step fetches it
        after = [place[0], self._loader.consumed_after(index + 1)]
        told = {"indices": [int(i) for i in self._loader.indices(index)], "loss": None if loss is None else loss.hex()}
        books[0].write("step", before=place, after=after, **told)

    def noted_publish(*what: Any) -> Path:
        written = publish(*what)
        if books:
            state = what[2]
            place = [state["epoch"], state["consumed_samples"]]
            books[0].write("save", place=place, name=written.name, digest=storage.marker_digest(written))
        return written

    def stop_there(self: Trainer, *, has_saved: bool) -> None:
        if stop_at == [self.position.epoch, self.position.consumed_samples]:
            self._save()
            assert self._checkpoints is not None
            self._checkpoints.finish()
            raise Preempted(f"the stretch ends after step {self.position.step}")
        stop_if_asked(self, has_saved=has_saved)

    def stop_before(self: Trainer) -> int:
        last = last_epoch(self)
        return last if stop_at is None else min(last, stop_at[0] + (stop_at[1] > 0))

    setattr(storage, "publish", noted_publish)  # noqa: B010 (a function of another type, as mypy sees it)
    for name, function in (
        ("fit", noted_fit), ("resume", noted_resume), ("_train_batch", noted_step), ("_stop_if_asked", stop_there),
        ("_last_epoch", stop_before),
    ):  # fmt: skip
        setattr(Trainer, name, function)


def main() -> None:
    from fleet_train.cli import main as command

    stop_at = os.environ.get(STOP_AT)
    keep_a_ledger(
        Path(os.environ[LEDGER]),
        float(os.environ.get(STEP_SECONDS, "0")),
        [int(part) for part in stop_at.split(":")] if stop_at else None,
    )
    sys.argv.insert(1, "train")
    command()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
