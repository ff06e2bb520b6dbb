"""Save and load one training run over all ranks. Rank 0's disk is the truth; the folders themselves are `snapshots`.

With copies, rank 0's disk has become the truth when the newest checkpoint of all nodes was brought to it (`copies`).
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fleet_train import fleet
from fleet_train.errors import CheckpointError
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copies.kept import FINISH_SECONDS, Copies
from fleet_train.train.components.rank0 import ask_first_worker
from fleet_train.train.components.settings import DEFAULT_CHECKPOINT_TIMEOUT_SECONDS, at_least

# How often rank 0 says that it still waits for its disk; other ranks would take a longer silence for its loss.
_ROUND_SECONDS = 1.0


@dataclass(frozen=True)
class TrainState:
    """Everything a resumed run needs beside the tensors. Random streams follow from config["seed"] and batches."""

    epoch: int
    """Finished epochs."""
    step: int
    """Finished steps (optimizer updates) since the beginning of the run."""
    steps_per_epoch: int
    """Batches that each rank has in an epoch; a step takes ``accumulate_steps`` of them."""
    world_size: int
    scheduler: dict[str, Any]
    config: dict[str, Any]
    profile: dict[str, str]
    versions: dict[str, str]
    consumed_samples: int = 0
    """Samples of the epoch under way that all ranks together have trained on; 0 between epochs."""
    epoch_losses: list[list[float]] = field(default_factory=list)
    """By rank: sum and number of the losses that were fetched in the epoch under way."""
    batches: int | None = None
    """Batches (micro-batches) of each rank since the beginning of the run. None: ``step`` counts them, as that of
    earlier versions did with gradient merge, too."""
    pending_batches: int = 0
    """Those of them whose gradients are summed and wait for their update."""
    accumulate_steps: int = 1
    """Batches of an update."""


_NUMBERS = (
    *("epoch", "step", "steps_per_epoch", "world_size"),
    *("consumed_samples", "pending_batches", "accumulate_steps"),
)
_LATER = ("consumed_samples", "epoch_losses", "batches", "pending_batches", "accumulate_steps")
"""What checkpoints of earlier versions may lack."""
_SECTIONS = ("scheduler", "config", "profile", "versions")


def _checked(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """A state.json that was read, unless it is none of a run: CheckpointError names the entry that is wrong."""
    known = [one.name for one in fields(TrainState)]
    missing = [name for name in known if name not in state and name not in _LATER]
    wrong = [name for name in _NUMBERS if name in state and not _is_count(state[name])]
    wrong += [name for name in ("batches",) if state.get(name) is not None and not _is_count(state[name])]
    wrong += [name for name in _SECTIONS if name in state and not isinstance(state[name], dict)]
    wrong += [name for name in ("epoch_losses",) if name in state and not _are_losses(state[name])]
    if damage := [*missing, *wrong, *sorted(state.keys() - known)]:
        raise CheckpointError(
            f"{folder / storage.STATE} is damaged in '{damage[0]:.60}'; remove this folder to resume from the "
            "checkpoint before it"
        )
    return state


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _are_losses(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, float) and _is_count(pair[1])
        for pair in value
    )


@dataclass(frozen=True)
class Found:
    """A checkpoint of rank 0, whole but for its tensors: `Checkpoints.load` checks these."""

    folder: Path
    state: TrainState
    score: float | None = None
    run_id: str = ""


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`. Every method is called on all ranks.

    Args:
        keep: newest checkpoints that are kept.
        keep_best: also keep the one with the highest score, however old it is.
        background: write while training goes on; one at a time.
        timeout_seconds: how long a write may be waited for: by the next one, at the end, and at a graceful shutdown.
        copies: nodes that keep each checkpoint, each in its own `output`: rank 0's and those behind it in the order of
            the nodes. 1 = rank 0's alone. Training does not wait for the transfers.
        say: gets the message when one could not be written, on rank 0. None = standard error.
    """

    def __init__(
        self,
        output: Path,
        keep: int = 2,
        *,
        keep_best: bool = False,
        background: bool = False,
        timeout_seconds: float = DEFAULT_CHECKPOINT_TIMEOUT_SECONDS,
        copies: int = 1,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = output / "checkpoints"
        self._keep = keep
        self._keep_best = keep_best
        self._background = background
        self._timeout_seconds = timeout_seconds
        self._say = say or (lambda message: print(message, file=sys.stderr, flush=True))
        at_least("checkpoint_copies", copies, 1)
        self._copies = Copies(self.folder, copies, keep_best, self._say, timeout_seconds) if copies > 1 else None
        self._run: storage.Run | None = None
        self._attempt: _Attempt | None = None
        self._is_under_way = False
        self._memory: Any = None

    def exist(self) -> bool:
        """Whether rank 0, or with copies any node, has a published checkpoint."""
        return bool(self.holders())

    def holders(self) -> list[str]:
        """Who has published checkpoints: ``rank 0``, or with copies the first ranks of nodes with their addresses."""
        if self._copies is not None:
            return self._copies.holders()
        return ["rank 0"] if ask_first_worker(lambda: bool(storage.complete(self.folder))) else []

    def begin_anew(self) -> None:
        """What is saved from now on is another run. With copies the checkpoints of all nodes are removed."""
        self._run = None
        if self._copies is not None:
            self._copies.begin_anew()
            self._run = self._copies.run

    def newest(self) -> Found | None:
        """The newest published checkpoint; CheckpointError on every rank if what is not a tensor was altered.

        With copies: the newest whole one of all nodes, which is brought to rank 0 first.
        """
        return self._find(lambda: next(reversed(storage.complete(self.folder)), None))

    def best(self) -> Found | None:
        """The published checkpoint with the highest score, of equal ones the newest; checked like `newest`."""
        return self._find(lambda: storage.best(self.folder))

    def save(self, exe: Any, state: TrainState, score: float | None = None) -> Path | None:
        """Publish a checkpoint; its folder, or None when rank 0 could not write it: said once, training goes on.

        In the background the folder is where it will be, and what goes wrong is said by the next `save` or `finish`.
        `score`: higher is better; None or NaN = not a candidate for the best one.

        CheckpointError on every rank when a write, this one or the one before it, does not end in time.
        """
        del exe  # the state is read from the scope
        if self._is_under_way:
            self._written()
        if self._copies is not None:
            self._copies.begin_saving()
        captured = fleet.capture_persistables(memory=self._memory)
        self._memory = captured if self._background else None  # new memory would take longer than the copy

        run = self._run = self._run or storage.Run.new()

        def write() -> Path:
            draft = storage.begin(self.folder, state.step)
            captured.write(draft)
            return storage.publish(self.folder, state.step, asdict(state), score, run)

        if fleet.is_first_worker():
            self._attempt = _Attempt(
                state.step,
                write,
                self._tidy,
                lambda: storage.discard(self.folder, state.step),
            )
            self._attempt.start(self._timeout_seconds)
        self._is_under_way = True
        if self._background:
            return storage.folder_of(self.folder, state.step)
        return self._written()

    def finish(self, copy_seconds: float = FINISH_SECONDS) -> Path | None:
        """Wait for a write in the background. The folder of the last `save` that this process made, None if it failed.

        Call it before the process ends. CheckpointError on every rank when the write does not end in time.
        `copy_seconds`: the most that it waits for copies on other nodes.
        """
        written = self._written()
        if self._copies is not None:
            self._copies.finish(copy_seconds)
        return written

    def scalars(self) -> dict[str, float]:
        """What the metrics have of copies, on rank 0; nothing where nothing is sent."""
        return {} if self._copies is None else self._copies.scalars()

    def close(self) -> None:
        """Take no more copies of other nodes; talks to nobody. Without it that ends with the process."""
        if self._copies is not None:
            self._copies.close()

    def _tidy(self) -> None:
        try:
            storage.prune(self.folder, self._keep, self._keep_best)
        finally:
            if self._copies is not None:
                self._copies.offer()

    def _written(self) -> Path | None:
        answer = None
        while answer is None:  # rank 0 says again and again that it is alive: a disk may be slow
            answer = ask_first_worker(self._look)
        self._is_under_way = False
        return None if answer["path"] is None else Path(answer["path"])

    def _look(self) -> dict[str, Any] | None:
        """On rank 0: how the write has ended; None while it has not."""
        attempt = self._attempt
        if attempt is None:
            return {"path": None}
        if attempt.ends_within(_ROUND_SECONDS):
            path = attempt.result(self._say)
            return {"path": None if path is None else str(path)}
        if attempt.is_over_due():
            draft = storage.draft_of(self.folder, attempt.step)
            raise CheckpointError(
                f"the checkpoint of step {attempt.step} was not written within {self._timeout_seconds:g} s: rank 0's "
                f"disk does not answer, or is too slow, at {draft}; the checkpoints before it are as they were. Give "
                "a slow disk longer (--checkpoint_timeout)"
            )
        return None

    def load(self, exe: Any, found: Found) -> None:
        """Put the tensors into the scope, after the startup program has run.

        CheckpointError on every rank names the first tensor that is cut off, altered, missing or of another shape.
        """
        fleet.load_persistables(exe, str(found.folder))

    def _find(self, which: Callable[[], Path | None]) -> Found | None:
        if self._copies is not None:
            self._copies.bring_newest()
            self._run = self._copies.run

        def look() -> dict[str, Any] | None:
            folder = which()
            if folder is None:
                return None
            state = _checked(folder, storage.read_state(folder))
            self._run = storage.run_of(folder)
            score, run = storage.score_of(folder), self._run.id
            return {"folder": str(folder), "state": state, "score": score, "run": run}

        answer = ask_first_worker(look)
        if answer is None:
            return None
        return Found(Path(answer["folder"]), TrainState(**answer["state"]), answer["score"], answer["run"])


class _Attempt:
    """One write on rank 0. A disk that cannot take it is said once; every other error is raised where it is awaited."""

    def __init__(
        self, step: int, write: Callable[[], Path], tidy: Callable[[], None], discard: Callable[[], None]
    ) -> None:
        self.step = step
        self._write, self._tidy, self._discard = write, tidy, discard
        # A daemon: a disk that hangs must not keep the process. One that ends for another reason finishes its
        # checkpoint all the same, see `start`.
        self._thread = threading.Thread(target=self._run, name="fleet_train checkpoint", daemon=True)
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._due = math.inf
        self._timeout_seconds = 0.0

    def start(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._thread.start()
        atexit.register(self._finish_at_exit)

    def _run(self) -> None:
        try:
            self._path = self._write()
            self._tidy()
        except BaseException as error:
            self._error = error
            self._discard()

    def ends_within(self, seconds: float) -> bool:
        """Wait so long, and no longer than the timeout since the first time."""
        now = time.monotonic()
        self._due = min(self._due, now + self._timeout_seconds)
        self._thread.join(max(0.0, min(seconds, self._due - now)))
        return not self._thread.is_alive()

    def is_over_due(self) -> bool:
        return time.monotonic() >= self._due

    def _finish_at_exit(self) -> None:
        self.ends_within(self._timeout_seconds)

    def result(self, say: Callable[[str], None]) -> Path | None:
        """Of a write that has ended."""
        atexit.unregister(self._finish_at_exit)
        error, self._error = self._error, None
        if isinstance(error, OSError):
            say(self._message(error))
        elif error is not None:
            raise error
        return self._path

    def _message(self, error: OSError) -> str:
        if self._path is not None:
            return f"the checkpoint of step {self.step} is written, but older ones could not be removed: {error}"
        return (
            f"the checkpoint of step {self.step} could not be written: {error}; training goes on, "
            "the checkpoints before it are as they were"
        )
