"""Save and load one training run over all ranks. Rank 0's disk is the truth; the folders themselves are `snapshots`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
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
    consumed_samples: int = 0
    """Samples of the epoch under way that all ranks together have trained on; 0 between epochs."""
    epoch_losses: list[list[float]] = field(default_factory=list)
    """By rank: sum and number of the losses that were fetched in the epoch under way."""


@dataclass(frozen=True)
class Found:
    """A checkpoint of rank 0, whole but for its tensors: `Checkpoints.load` checks these."""

    folder: Path
    state: TrainState
    score: float | None = None


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`. Every method is called on all ranks.

    Args:
        keep: newest checkpoints that are kept.
        keep_best: also keep the one with the highest score, however old it is.
        background: write in a thread while training goes on; one at a time.
        say: gets the message when one could not be written, on rank 0. None = standard error.
    """

    def __init__(
        self,
        output: Path,
        keep: int = 2,
        *,
        keep_best: bool = False,
        background: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = output / "checkpoints"
        self._keep = keep
        self._keep_best = keep_best
        self._background = background
        self._say = say or (lambda message: print(message, file=sys.stderr, flush=True))
        self._attempt: _Attempt | None = None
        self._memory: Any = None

    def exist(self) -> bool:
        """Whether rank 0 has a published checkpoint."""
        return bool(ask_first_worker(lambda: bool(snapshots.complete(self.folder))))

    def newest(self) -> Found | None:
        """The newest published checkpoint; CheckpointError on every rank if what is not a tensor was altered."""
        return self._find(lambda: next(reversed(snapshots.complete(self.folder)), None))

    def best(self) -> Found | None:
        """The published checkpoint with the highest score, of equal ones the newest; checked like `newest`."""
        return self._find(lambda: snapshots.best(self.folder))

    def save(self, exe: Any, state: TrainState, score: float | None = None) -> Path | None:
        """Publish a checkpoint; its folder, or None when rank 0 could not write it: said once, training goes on.

        In the background the folder is where it will be, and what goes wrong is said by the next `save` or `finish`.
        `score`: higher is better; None or NaN = not a candidate for the best one.
        """
        del exe  # the state is read from the scope
        if self._attempt is not None:
            self._attempt.wait(self._say)
        captured = fleet.capture_persistables(memory=self._memory)
        self._memory = captured if self._background else None  # new memory would take longer than the copy

        def write() -> Path:
            draft = snapshots.begin(self.folder, state.step)
            captured.write(draft)
            return snapshots.publish(self.folder, state.step, asdict(state), score)

        if fleet.is_first_worker():
            self._attempt = _Attempt(
                state.step,
                write,
                lambda: snapshots.prune(self.folder, self._keep, self._keep_best),
                lambda: snapshots.discard(self.folder, state.step),
            )
            self._attempt.start(in_thread=self._background)
        if self._background:
            return snapshots.folder_of(self.folder, state.step)
        return self.finish()

    def finish(self) -> Path | None:
        """Wait for a write in the background. The folder of the last `save` that this process made, None if it failed.

        Call it before the process ends.
        """
        attempt = self._attempt

        def wait() -> str | None:
            path = None if attempt is None else attempt.wait(self._say)
            return None if path is None else str(path)

        answer = ask_first_worker(wait)
        return None if answer is None else Path(answer)

    def load(self, exe: Any, found: Found) -> None:
        """Put the tensors into the scope, after the startup program has run.

        CheckpointError on every rank names the first tensor that is cut off, altered, missing or of another shape.
        """
        fleet.load_persistables(exe, str(found.folder))

    def _find(self, which: Callable[[], Path | None]) -> Found | None:
        def look() -> dict[str, Any] | None:
            folder = which()
            if folder is None:
                return None
            state = snapshots.read_state(folder)
            return {"folder": str(folder), "state": state, "score": snapshots.score_of(folder)}

        answer = ask_first_worker(look)
        if answer is None:
            return None
        return Found(Path(answer["folder"]), TrainState(**answer["state"]), answer["score"])


class _Attempt:
    """One write on rank 0. A disk that cannot take it is said once; every other error is raised where it is awaited."""

    def __init__(
        self, step: int, write: Callable[[], Path], tidy: Callable[[], None], discard: Callable[[], None]
    ) -> None:
        self._step = step
        self._write, self._tidy, self._discard = write, tidy, discard
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def start(self, in_thread: bool) -> None:
        if not in_thread:
            self._run()
            return
        # Not a daemon: a process that ends for another reason finishes its checkpoint first.
        self._thread = threading.Thread(target=self._run, name="fleet_train checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = self._write()
            self._tidy()
        except BaseException as error:
            self._error = error
            self._discard()

    def wait(self, say: Callable[[str], None]) -> Path | None:
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if isinstance(error, OSError):
            say(self._message(error))
        elif error is not None:
            raise error
        return self._path

    def _message(self, error: OSError) -> str:
        if self._path is not None:
            return f"the checkpoint of step {self._step} is written, but older ones could not be removed: {error}"
        return (
            f"the checkpoint of step {self._step} could not be written: {error}; training goes on, "
            "the checkpoints before it are as they were"
        )
