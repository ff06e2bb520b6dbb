"""Watches the ranks of this node until all have ended well, one has failed, or somebody wants the job to end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fleet_train.errors import WorkerFailed
from fleet_train.launch import processes
from fleet_train.launch.ends import RankEnd, choose_culprit
from fleet_train.launch.meeting import Meeting
from fleet_train.launch.orderly import OrderlyStop
from fleet_train.launch.watching import Follower, NoFollower, RankFiles

_TICK_SECONDS = 0.1
_STORE_EVERY_SECONDS = 0.5
# How long a failure that may only be an echo (another rank was lost) waits for the news of its cause.
_ECHO_SECONDS = 2.0
# A rank that reports its own failure to the store is about to exit: its real exit code is worth this wait.
_CONFESSION_SECONDS = 3.0
# After the stock launcher's end, for records that are being written.
_RECORD_SECONDS = 1.0


class Cause(Enum):
    ALL_ENDED_WELL = "all ranks of this node have ended with 0"
    PREEMPTED = "all ranks of this node have ended, and some stopped in good order because they were asked to"
    STOPPED = "the job was asked to stop, and the ranks of this node have not stopped in good order"
    RANK_FAILED = "a rank of this node has failed"
    TOLD = "somebody else has reported a failure"
    STORE_LOST = "node 0's launcher has vanished"


@dataclass(frozen=True)
class Verdict:
    """Why watching ended. ``report`` is what the store was told, where there is one."""

    cause: Cause
    report: dict[str, object] | None = None
    message: str = ""
    culprit: RankEnd | None = None


class Supervisor:
    """One look per tick at: rank 0's output, the end records, signals, the store, and the stock launcher itself."""

    def __init__(
        self,
        files: RankFiles,
        meeting: Meeting,
        stock: subprocess.Popen[bytes],
        follower: Follower | NoFollower,
        stop: OrderlyStop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self.meeting = meeting
        self.stock = stock
        self.follower = follower
        self.stop = stop
        self._clock = clock
        self._next_look_at_store = 0.0
        self._frozen = False
        self._stock_ended_at: float | None = None
        self._failed_at: float | None = None
        self._told_at: float | None = None

    def watch(self) -> Verdict:
        while True:
            verdict = self.look()
            if verdict is not None:
                self.follower.pump()
                return verdict
            time.sleep(_TICK_SECONDS)

    def look(self) -> Verdict | None:
        self.follower.pump()
        if not self._frozen and self.files.all_have_started():
            processes.freeze(self.stock)
            self._frozen = True
        ends = self.ends()
        all_ended = len(ends) == self.files.node.processes
        if all_ended and all(end.succeeded or end.preempted for end in ends):
            return Verdict(Cause.PREEMPTED if any(end.preempted for end in ends) else Cause.ALL_ENDED_WELL)
        failed = any(not end.succeeded and not end.preempted for end in ends)
        if failed or self._clock() >= self._next_look_at_store:
            self._next_look_at_store = self._clock() + _STORE_EVERY_SECONDS
            verdict = self._ask_store()
            if verdict is not None:
                return verdict
        self.stop.heed(one_has_stopped=any(end.preempted for end in ends))
        if self.stop.is_over or (self.stop.wanted_here and all_ended):
            return Verdict(Cause.STOPPED)
        return self._judge(ends) if failed and not self.stop.wanted_here else None

    def _judge(self, ends: list[RankEnd]) -> Verdict | None:
        culprit = choose_culprit(ends)
        assert culprit is not None
        self._failed_at = self._failed_at or self._clock()
        if culprit.followed and self._clock() < self._failed_at + _ECHO_SECONDS:
            return None
        return Verdict(Cause.RANK_FAILED, culprit=culprit)

    def _ask_store(self) -> Verdict | None:
        try:
            report = self.meeting.failure()
        except WorkerFailed as error:
            return Verdict(Cause.STORE_LOST, message=str(error))
        if report is None:
            self.stop.ask_store()
            return None
        self._told_at = self._told_at or self._clock()
        from_a_rank = "node" not in report
        if from_a_rank and self._clock() < self._told_at + _CONFESSION_SECONDS:
            return None
        return Verdict(Cause.TOLD, report)

    def ends(self) -> list[RankEnd]:
        """How ranks have ended so far; when the stock launcher is gone, the rest has ended without a trace."""
        since_start = self._clock() - self.meeting.start
        ends = self.files.ends(self.meeting.start)
        for local in self.files.without_wrapper():
            ends.setdefault(local, self.files.end_without_trace(local, since_start))
        if self.stock.poll() is not None:
            self._stock_ended_at = self._stock_ended_at or self._clock()
            if self._clock() > self._stock_ended_at + _RECORD_SECONDS:
                for local in range(self.files.node.processes):
                    ends.setdefault(local, self.files.end_without_trace(local, since_start))
        return [ends[local] for local in sorted(ends)]
