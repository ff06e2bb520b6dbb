"""All ranks of one spawn: started together, monitored until they have ended, and always stopped."""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from fleet_train.cluster.failure_report import FailureReport
from fleet_train.spawning.outcome import RankOutcome
from fleet_train.spawning.rank_process import RankProcess
from fleet_train.spawning.store import SpawnStore

_TICK_SECONDS = 0.05
_STORE_EVERY_SECONDS = 0.5
# After a rank has failed by itself: time for the others to print their last line, and for it to exit.
_FOLLOWERS_SECONDS = 2.0
# After a failure that may be secondary (another rank was lost): time for the root cause to arrive.
_ECHO_SECONDS = 4.0
# After SIGTERM; then SIGKILL.
_GRACE_SECONDS = 3.0
# A rank whose call has returned may wait for its threads, but not forever.
_EXIT_SECONDS = 20.0


class Ranks:
    """``forward`` shows rank 0's output; called on the waiting thread, so that a notebook's cell gets it."""

    def __init__(self, store: SpawnStore, forward: Callable[[str], None]) -> None:
        self._ranks: list[RankProcess] = []
        self._store = store
        self._forward = forward
        self._began = time.monotonic()
        self._failing_since: float | None = None
        self._reports: list[FailureReport] = []
        self._look_at_store = 0.0
        self._selector = selectors.DefaultSelector()

    def add(self, rank: RankProcess) -> None:
        """A rank that was just started; from now on `end` stops it."""
        self._ranks.append(rank)
        self._selector.register(rank.output, selectors.EVENT_READ, (rank, "output"))
        self._selector.register(rank.channel.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, (rank, "channel"))

    def wait(self) -> None:
        """Wait until all have ended, or one has failed and the others had time to report."""
        while not self._is_over():
            self._turn()

    def _is_over(self) -> bool:
        now = time.monotonic()
        if all(rank.ended_at is not None for rank in self._ranks):
            return True
        if self._failing_since is not None:
            return now > self._failing_since + (_FOLLOWERS_SECONDS if self._knows_root_cause() else _ECHO_SECONDS)
        return all(rank.result is not None and now > rank.heard_at + _EXIT_SECONDS for rank in self._ranks)

    def _turn(self) -> None:
        for key, events in self._selector.select(_TICK_SECONDS):
            rank, what = key.data
            if what == "output":
                self._read_output(rank)
            else:
                self._talk(rank, events)
        for rank in self._ranks:
            self._look(rank)
        if time.monotonic() > self._look_at_store:
            self._look_at_store = time.monotonic() + _STORE_EVERY_SECONDS
            self._reports = self._store.reports()
        if self._failing_since is None and (self._reports or any(map(_has_failed, self._ranks))):
            self._failing_since = time.monotonic()

    def _look(self, rank: RankProcess) -> None:
        if rank.ended_at is None and rank.look():
            rank.read_messages()
            if rank.result is not None:
                self._store.tell_ended(rank.index)

    def _read_output(self, rank: RankProcess) -> None:
        text, goes_on = rank.read_output()
        if rank.index == 0 and text and not rank.asked_to_stop:  # Paddle prints a lot on SIGTERM
            self._forward(text)
        if not goes_on:
            self._selector.unregister(rank.output)

    def _talk(self, rank: RankProcess, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            rank.channel.send_some()
            if not rank.channel.has_more_to_send:
                self._selector.modify(rank.channel.sock, selectors.EVENT_READ, (rank, "channel"))
        if events & selectors.EVENT_READ and not rank.read_messages():
            self._selector.unregister(rank.channel.sock)

    def _knows_root_cause(self) -> bool:
        """Whether a rank has failed by itself and has reported it, or was ended by a signal."""
        told = [*self._reports, *(report for rank in self._ranks for report in rank.reports)]
        return any(report.is_own for report in told) or any(
            rank.ended_at is not None and rank.told is None and rank.result is None for rank in self._ranks
        )

    def end(self) -> list[RankOutcome]:
        """Stop all running ranks: SIGTERM, then SIGKILL after 3 s, or at once on Ctrl-C. Returns how each ended."""
        with interrupts_held() as interrupted:
            try:
                if self._ask_to_stop():
                    deadline = time.monotonic() + _GRACE_SECONDS
                    while not interrupted() and time.monotonic() < deadline and not self._all_ended():
                        self._turn()
                self._reports = self._store.reports()
            finally:
                outcomes = [self._collect(rank) for rank in self._ranks]
                self._selector.close()
            return outcomes

    def _ask_to_stop(self) -> bool:
        running = [rank for rank in self._ranks if not rank.look()]
        for rank in running:
            # A rank whose call has returned is done; only its process has not ended.
            rank.asked_to_stop = rank.result is None
            rank.signal(signal.SIGTERM)
        return bool(running)

    def _all_ended(self) -> bool:
        return all(rank.ended_at is not None for rank in self._ranks)

    def _collect(self, rank: RankProcess) -> RankOutcome:
        still_ran = not rank.look()
        if still_ran or rank.result is None:
            rank.kill_all()
        status = rank.collect()
        rank.read_messages()
        while (found := rank.read_output())[0]:
            if rank.index == 0 and not rank.asked_to_stop:
                self._forward(found[0])
        rank.close()
        assert rank.ended_at is not None
        if rank.result is not None and still_ran:
            status = 0
        told = rank.told or {}
        if rank.asked_to_stop and "exit_code" in told:  # it was exiting with that, slower than we waited
            status = int(told["exit_code"])
        return RankOutcome(
            rank=rank.index,
            status=status,
            seconds=rank.ended_at - self._began,
            asked_to_stop=rank.asked_to_stop,
            result=rank.result,
            kind=str(told.get("kind", "")),
            message=str(told.get("message", "")),
            traceback=str(told.get("traceback", "")),
            reports=tuple(report.at(rank.heard_at - self._began) for report in rank.reports),
            tail=rank.tail,
        )

    @property
    def reports(self) -> list[FailureReport]:
        """The ranks' reports in the store."""
        return self._reports


def _has_failed(rank: RankProcess) -> bool:
    if rank.told is not None:
        return bool(rank.told["kind"] != "preempted")
    return rank.ended_at is not None and rank.result is None


@contextlib.contextmanager
def interrupts_held() -> Iterator[Callable[[], bool]]:
    """Within the block a Ctrl-C is only recorded (the given function tells); it is raised at the block's end."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # no other thread is interrupted
        return

    def note(number: int, _: FrameType | None) -> None:
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if noted:
        raise KeyboardInterrupt


def show(text: str) -> None:
    """Write to the Python-level stdout, which in a notebook is the cell's output and not a file descriptor."""
    stream = sys.stdout
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        pass  # the reader is gone; the job continues
