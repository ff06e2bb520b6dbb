"""Saves and loads one training run over all ranks. Rank 0's disk is authoritative; `storage` handles the folders.

With copies, rank 0's disk is authoritative once it has the newest checkpoint of all nodes (`copies`).
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fleet_train import fleet, timeouts
from fleet_train.errors import CheckpointError, NotSaved
from fleet_train.log import logger
from fleet_train.train.agree import ask_first_worker, share
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.claim import claim, release
from fleet_train.train.checkpoint.copies import Copies
from fleet_train.train.checkpoint.newest import latest_run, report_of
from fleet_train.train.settings import at_least

_COPIES_FINISH_SECONDS = 300.0
"""How long other nodes have to write their checkpoints at the end of a training."""


@dataclass(frozen=True)
class TrainState:
    """Everything a resumed run needs in addition to the tensors. Random streams depend only on config["seed"] and
    batches."""

    epoch: int
    """The number of finished epochs."""
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
    """Samples of the current epoch that all ranks together have trained on; 0 between epochs."""
    epoch_losses: list[list[float]] = field(default_factory=list)
    """The sum and the number of the losses fetched in the current epoch, by rank."""
    batches: int | None = None
    """Batches (micro-batches) of each rank since the beginning of the run. None: those of its steps."""
    pending_batches: int = 0
    """The batches whose gradients are summed and wait for their update."""
    accumulate_steps: int = 1
    """Batches of an update."""
    updates: int | None = None
    """Updates that led here, which is the `step` of metrics. ``step`` is another number after a resume with other
    batches per epoch (other ranks, another batch size). None: the same."""
    data: dict[str, Any] | None = None
    """Class names, and the lists of samples (see `position.RunData`). None = unknown."""
    compared: bool | None = None
    """Whether all ranks held the same values when it was saved: compared just before (divergence_check_steps), or of
    one rank alone. False: not compared. None: not known."""
    shares: list[float] | None = None
    """The parts of the joint batch that ranks took (batch_shares), by rank. None: equal ones."""

    @property
    def recorded_step(self) -> int:
        """The `step` of the last metric record that belongs to this checkpoint: for `open_sinks`."""
        return self.step if self.updates is None else self.updates


def _checked(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint; CheckpointError names the first invalid entry."""
    missing = [each.name for each in fields(TrainState) if each.name not in state and each.name not in _LATER]
    wrong = [name for name, is_valid in _ENTRIES.items() if name in state and not is_valid(state[name])]
    if damage := [*missing, *wrong, *sorted(state.keys() - _ENTRIES.keys())]:
        raise CheckpointError(
            f"{folder / storage.MARKER} is damaged in '{damage[0]:.60}'; remove this folder to resume from the "
            "checkpoint before it"
        )
    return state


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_data(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"classes", "lists"}
        and isinstance(value["classes"], list)
        and all(isinstance(name, str) for name in value["classes"])
        and isinstance(value["lists"], dict)
        and all(
            isinstance(each, dict)
            and each.keys() == {"samples", "ranks", "done"}
            and all(_is_count(each[name]) for name in ("samples", "ranks"))
            and (each["done"] is None or _is_count(each["done"]))
            for each in value["lists"].values()
        )
    )


def _are_losses(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, float) and _is_count(pair[1])
        for pair in value
    )


def _or_none(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


_LATER = frozenset({"shares"})
"""Entries that checkpoints of earlier versions do not have."""


def _are_shares(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is float and 0 < each <= 1 for each in value)


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("epoch", "step", "steps_per_epoch", "world_size"), _is_count),
    **dict.fromkeys(("consumed_samples", "pending_batches", "accumulate_steps"), _is_count),
    **dict.fromkeys(("batches", "updates"), _or_none(_is_count)),
    **dict.fromkeys(("scheduler", "config", "profile", "versions"), lambda value: isinstance(value, dict)),
    "compared": lambda value: isinstance(value, bool | None),
    "epoch_losses": _are_losses,
    "data": _or_none(_is_data),
    "shares": _or_none(_are_shares),
}
"""What each entry of a `TrainState` may be."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of rank 0, verified except for its tensors, which `Checkpoints.load` checks."""

    folder: Path
    state: TrainState
    score: float | None = None
    run_id: str = ""


class Checkpoints:
    """The checkpoints of one run, in `<output>/checkpoints`. Every method is called on all ranks.

    Args:
        keep: number of newest checkpoints to keep.
        keep_best: also keep the one with the highest score, however old it is.
        background: write during training; one at a time.
        timeout_seconds: the longest wait for a write: before the next one, at the end, and at a graceful shutdown.
        copies: number of nodes that keep each checkpoint, each in its own `output`: rank 0's and the next ones in node
        order. 1 = only rank 0's. Training does not wait for the other nodes' disks. say: gets the message when one
        could not be written, on rank 0. None = standard error.
    """

    def __init__(
        self,
        output: Path,
        keep: int = 2,
        *,
        keep_best: bool = False,
        background: bool = False,
        timeout_seconds: float = timeouts.CHECKPOINT_SECONDS,
        copies: int = 1,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = output / "checkpoints"
        self._keep = keep
        self._keep_best = keep_best
        self._background = background
        self._timeout_seconds = timeout_seconds
        self._report = say or logger.warning
        at_least("checkpoint_copies", copies, 1)
        self._copies = Copies(self.folder, copies, keep_best, self._report, timeout_seconds) if copies > 1 else None
        self._run: storage.TrainingRun | None = None
        self._attempt: _Attempt | None = None
        """This rank's write: rank 0's, with copies also one rank's on each node that keeps them."""
        self._is_skipped = False
        """Whether another node has skipped the last checkpoint, because its disk was busy with the one before."""
        self._is_under_way = False
        self._memory: Any = None
        self._is_claimed = False
        self._replaced: Callable[[], None] | None = None
        """Called on rank 0 before an earlier run is removed, which waits for this run's first checkpoint; None if none
        waits."""

    def claim(self, *, must_be_writable: bool = True) -> None:
        """Lock the folder for this process, until it ends or `close` is called; `save` and the trainers do it.

        CheckpointError on every rank names the process that uses it, or the reason why nothing can be written there.
        """
        if not self._is_claimed:
            is_mine = fleet.is_first_worker() if self._copies is None else self._copies.is_member()
            self._is_claimed = claim(self.folder, is_mine, self._timeout_seconds, must_be_writable=must_be_writable)

    def exist(self) -> bool:
        """Whether rank 0, or with copies any node, has a published checkpoint."""
        return bool(self.holders())

    def holders(self) -> list[str]:
        """Who has published checkpoints: ``rank 0``, or with copies the first ranks of nodes with their addresses."""
        if self._copies is not None:
            return self._copies.holders()
        return ["rank 0"] if ask_first_worker(lambda: bool(storage.complete(self.folder))) else []

    def start_new_run(self, replaced: Callable[[], None] = lambda: None) -> None:
        """Begin another run. The checkpoints of earlier ones, with copies on all nodes, are removed after the first
        checkpoint of this one is published; before that, rank 0 calls ``replaced``, perhaps on a thread.
        """
        if self._is_under_way:
            self._written()
        self._run, self._attempt, self._replaced = None, None, replaced
        if self._copies is not None:
            self._copies.start_new_run()
            self._run = self._copies.run

    def newest(self) -> StoredCheckpoint | None:
        """The newest published checkpoint; CheckpointError on every rank if anything except the tensors was altered.

        With copies: the newest whole one of all nodes, which is first sent to the nodes that lack it.
        """
        return self._find(lambda: next(reversed(storage.of_latest_run(self.folder)), None))

    def best(self) -> StoredCheckpoint | None:
        """The published checkpoint with the highest score (of equal ones, the newest); checked like `newest`."""
        return self._find(lambda: storage.best(self.folder))

    def save(self, exe: Any, state: TrainState, score: float | None = None) -> Path | None:
        """Publish a checkpoint; its folder, or None if rank 0 could not write it: reported once, training goes on.

        In the background, the folder is its future path, and problems are reported by the next `save` or `finish`.
        `score`: higher is better; None or NaN = not a candidate for the best one.

        CheckpointError on every rank if this write or the previous one does not end in time, or if another process uses
        the folder. NotFinite instead of saving NaN or infinity.
        """
        del exe  # the state is read from the scope
        if self._is_under_way:
            self._written()
        self.claim(must_be_writable=False)
        writers, entries = [0], asdict(state)
        score = None if score is None or math.isnan(score) else float(score)
        if self._copies is not None:
            writers, self._run = self._copies.writers(), self._copies.begin_saving()
            self._tell_copies(timeouts.RANKS_SYNC_SECONDS)  # a disk that is slower misses this one
            entries, score = share([entries, score])  # equal bytes on all nodes
        rank, attempt = fleet.worker_index(), self._attempt
        self._is_skipped = rank != 0 and attempt is not None and not attempt.ends_within(0.0)
        memory = None if self._is_skipped else self._memory  # what is being written is not overwritten
        captured = fleet.capture_persistables(memory=memory, ranks=writers)
        schedule = captured.schedule if self._copies is None else share(captured.schedule)
        if rank in writers and not self._is_skipped:
            self._begin(captured, schedule, state.step, entries, score)
            self._memory = captured if self._background else None  # new memory would take longer than the copy
        self._is_under_way = True
        if self._background:
            return storage.folder_of(self.folder, state.step)
        return self._written()

    def _begin(self, captured: Any, schedule: Any, step: int, state: dict[str, Any], score: float | None) -> None:
        """Write a checkpoint on this rank, in a thread."""
        is_first, replaced = fleet.is_first_worker(), self._replaced

        def write() -> Path:
            draft = storage.begin(self.folder, step)
            self._run = self._run or storage.TrainingRun.new(latest_run([report_of(self.folder)]))
            tensors = captured.write_tensors(draft, f"after step {step}")
            if schedule is not None and not state["scheduler"]:  # who saves none leaves it to the program's
                tensors["schedule"] = schedule
            return storage.publish(self.folder, step, state, score, self._run, tensors)

        def tidy() -> None:
            if replaced is not None:
                if is_first:
                    replaced()
                storage.remove_others(self.folder, self._run or storage.TrainingRun())
            storage.prune(self.folder, self._keep, self._keep_best)

        self._attempt = _Attempt(self.folder, step, write, tidy, self._timeout_seconds, self._report)

    def finish(self, copy_seconds: float = _COPIES_FINISH_SECONDS) -> Path | None:
        """Wait for a write in the background. Returns the folder of this process's last `save`, None without one.

        Call it before the process ends. NotSaved on every rank if the last `save` failed, or if a node lacks its copy
        of the last checkpoint. CheckpointError if the write does not end in time. `copy_seconds`: the longest wait for
        copies on other nodes.
        """
        written, lacking = self.wait(copy_seconds)
        if lacking:
            raise NotSaved(lacking)
        return written

    def wait(self, copy_seconds: float) -> tuple[Path | None, str]:
        """Wait as `finish` does, for a job that may end without copies: returns which nodes lack the last checkpoint
        and why, the same on every rank; empty if none does."""
        written = self._written()
        lacking = "" if self._copies is None else self._await_copies(self._copies, copy_seconds)
        ask_first_worker(self._refuse_unsaved)
        return written, lacking

    def _tell_copies(self, seconds: float = 0.0) -> list[int]:
        """Tell all ranks how the other nodes' last writes went; returns the ranks whose writes have not ended after
        waiting this long."""
        assert self._copies is not None
        outcome, is_busy = None, False
        if not fleet.is_first_worker() and self._attempt is not None:
            is_busy = not self._attempt.ends_within(seconds)
            if self._is_skipped:
                outcome, self._is_skipped = "its disk is still taking the checkpoint before", False
                self._attempt.is_outdated = True
            elif not is_busy:
                outcome, self._attempt = None if self._attempt.is_outdated else self._attempt.problem, None
        told = fleet.gather([outcome, is_busy])
        self._copies.wrote([outcome for outcome, _ in told])
        return [rank for rank, (_, is_busy) in enumerate(told) if is_busy]

    def _await_copies(self, copies: Copies, seconds: float) -> str:
        """Wait for the other nodes' writes; which of them lack the last checkpoint and why, the same on every rank."""
        deadline = time.monotonic() + seconds
        while busy := self._tell_copies(min(timeouts.RANKS_SYNC_SECONDS, seconds)):
            if share(time.monotonic() >= deadline):
                copies.is_late(busy)
                break

        def last() -> str:
            try:
                published = storage.complete(self.folder)
            except (OSError, CheckpointError):  # rank 0's own disk, of which the save has a message
                return ""
            return storage.name_of(published[-1]) if published else ""

        name = str(ask_first_worker(last))
        return copies.lacking(name) if name else ""

    def _refuse_unsaved(self) -> None:
        """Raise NotSaved on rank 0 if the last write failed."""
        if self._attempt is None or not self._attempt.problem:
            return
        try:
            published = storage.published(self.folder)
            own = [path for path, saved in published.items() if saved is not None and saved.run == self._run]
        except (OSError, CheckpointError):  # the disk that has failed
            own = []
        newest = f"the newest one is {own[-1]}: resume from it" if own else "there is no other one of this run"
        raise NotSaved(
            f"{self._attempt.problem}, and nothing was saved after it; {newest}. Make rank 0's disk take files"
        )

    def scalars(self) -> dict[str, float]:
        """The metrics of copies, on rank 0; empty if nothing is sent."""
        return {} if self._copies is None else self._copies.scalars()

    def close(self) -> None:
        """Let other processes have the folder, as the end of the process does; does not communicate."""
        if self._is_claimed:
            self._is_claimed = False
            release(self.folder)

    def _written(self) -> Path | None:
        answer = None
        while answer is None:  # rank 0 repeatedly reports that it is alive: a disk may be slow
            answer = ask_first_worker(lambda: self._attempt.poll() if self._attempt else {"path": None})
        self._is_under_way = False
        if answer["path"] is not None and self._replaced is not None:
            self._replaced = None
            if self._copies is not None:
                self._copies.remove_earlier()
        return None if answer["path"] is None else Path(answer["path"])

    def load(self, exe: Any, checkpoint: StoredCheckpoint) -> None:
        """Put the tensors into the scope, after the startup program has run.

        CheckpointError on every rank names the first tensor that is cut off, altered, missing or of another shape.
        """
        fleet.load_persistables(exe, str(checkpoint.folder))

    def _find(self, which: Callable[[], Path | None]) -> StoredCheckpoint | None:
        if self._copies is not None:
            self._copies.bring_newest()
            self._run = self._copies.run

        def read() -> dict[str, Any] | None:
            folder = which()
            if folder is None:
                return None
            saved = storage.read(folder)
            self._run = saved.run
            state = _checked(folder, saved.state)
            return {"folder": str(folder), "state": state, "score": saved.score, "run": saved.run.id}

        answer = ask_first_worker(read)
        if answer is None:
            return None
        return StoredCheckpoint(Path(answer["folder"]), TrainState(**answer["state"]), answer["score"], answer["run"])


class _Attempt:
    """One write on rank 0, begun at once in a thread. Disk errors are reported once; every other error is raised where
    the write is awaited.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        write: Callable[[], Path],
        tidy: Callable[[], None],
        timeout_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        self._folder, self._step, self._write, self._tidy = folder, step, write, tidy
        self._timeout_seconds, self._report = timeout_seconds, report
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.problem = ""
        """What could not be written, and why; empty if it was written."""
        self.is_outdated = False
        """Whether there is a later checkpoint, which this node has skipped."""
        self._due = math.inf
        # A daemon: a hanging disk must not block the exit. A process that ends without `finish` still finishes it.
        self._thread = threading.Thread(target=self._run, name="fleet_train checkpoint", daemon=True)
        self._thread.start()
        atexit.register(self._finish_at_exit)

    def _run(self) -> None:
        try:
            self._path = self._write()
            self._tidy()
        except BaseException as error:
            self._error = error
            if self._path is None:
                self.problem = f"the checkpoint of step {self._step} could not be written: {error}"
            storage.discard(self._folder, self._step)

    def poll(self) -> dict[str, Any] | None:
        """How the write ended, after a short wait for it; None if it has not. CheckpointError if it is late."""
        if self._ends_within(timeouts.RANKS_SYNC_SECONDS):
            atexit.unregister(self._finish_at_exit)
            error, self._error = self._error, None
            if isinstance(error, OSError):
                self._report(self._message(error))
            elif error is not None:
                raise error
            return {"path": None if self._path is None else str(self._path)}
        if time.monotonic() >= self._due:
            draft = storage.draft_of(self._folder, self._step)
            raise CheckpointError(
                f"the checkpoint of step {self._step} was not written within {self._timeout_seconds:g} s: rank 0's "
                f"disk does not answer, or is too slow, at {draft}; the checkpoints before it are as they were. Give "
                "a slow disk longer (--checkpoint_timeout)"
            )
        return None

    def ends_within(self, seconds: float) -> bool:
        """Whether another node's write has ended, after waiting this long; it is never late."""
        self._thread.join(seconds)
        if not self._thread.is_alive():
            atexit.unregister(self._finish_at_exit)
        return not self._thread.is_alive()

    def _ends_within(self, seconds: float) -> bool:
        """Wait this long, but no longer than the timeout since the first wait."""
        now = time.monotonic()
        self._due = min(self._due, now + self._timeout_seconds)
        self._thread.join(max(0.0, min(seconds, self._due - now)))
        return not self._thread.is_alive()

    def _finish_at_exit(self) -> None:
        """Finish the last write at the exit of a script that does not call `finish`."""
        if self._ends_within(self._timeout_seconds) and self._error is not None:
            self._report(self._message(self._error))

    def _message(self, error: BaseException) -> str:
        if self._path is not None:
            return f"the checkpoint of step {self._step} is written, but older ones could not be removed: {error}"
        return f"{self.problem}; training goes on, the checkpoints before it are as they were"
