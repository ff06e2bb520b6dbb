"""Monitors the ranks of this node until all have succeeded, one has failed, or the job is asked to stop.

`GracefulStop` is the stop of one attempt: who requested it, which nodes are notified, how long ranks may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.network import connections_at
from fleet_train.cluster.store.reports import NO_RANK, FailureReport
from fleet_train.errors import NotSaved, WorkerFailed
from fleet_train.launch.node import Node
from fleet_train.launch.processes import Stopping, request_name
from fleet_train.launch.ranks import Ranks
from fleet_train.launch.rendezvous import Rendezvous, polling_seconds
from fleet_train.launch.report import WorkerResult, choose_root_cause, with_reports
from fleet_train.launch.terminal import Follower


class Cause(Enum):
    ALL_ENDED_WELL = "all ranks of this node ended with 0"
    PREEMPTED = "all ranks of this node ended, and some stopped gracefully because they were asked to"
    STOPPED = "the job was asked to stop, and the ranks of this node did not stop gracefully"
    RANK_FAILED = "a rank of this node failed"
    REPORTED = "another process reported a failure"
    STORE_LOST = "the leader's launcher was lost"


@dataclass(frozen=True)
class Verdict:
    """Why monitoring ended. ``report`` is the report in the store, if there is one."""

    cause: Cause
    report: dict[str, object] | None = None
    message: str = ""
    root_cause: WorkerResult | None = None


class Monitor:
    """Each tick checks rank 0's output, how ranks have ended, signals, and the store."""

    def __init__(
        self,
        ranks: Ranks,
        rendezvous: Rendezvous,
        follower: Follower | None,
        stop: GracefulStop,
        clock: Callable[[], float] = time.monotonic,
        look_at_connections: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks = ranks
        self.rendezvous = rendezvous
        self.follower = follower
        self.stop = stop
        self._clock = clock
        self._look_at_connections = look_at_connections
        self._next_look_at_store = self._next_look_at_connections = 0.0
        self._failed_at: float | None = None
        self._reports: list[FailureReport] = []
        self._finished: set[int] = set()

    def watch(self) -> Verdict:
        while True:
            verdict = self.look()
            if verdict is not None:
                self._show_output()
                return verdict
            time.sleep(timeouts.WATCH_TICK_SECONDS)

    def look(self) -> Verdict | None:
        self._show_output()
        ends = [end for _, end in sorted(self.ranks.ends(self.rendezvous.start).items())]
        self._report_finished(ends)
        all_ended = len(ends) == self.ranks.node.processes
        if all_ended and all(end.succeeded or end.preempted for end in ends):
            return Verdict(Cause.PREEMPTED if any(end.preempted for end in ends) else Cause.ALL_ENDED_WELL)
        failed = any(not end.succeeded and not end.preempted for end in ends)
        if failed or self._reports or self._clock() >= self._next_look_at_store:
            self._next_look_at_store = self._clock() + polling_seconds(self.ranks.node, timeouts.ASK_STORE_SECONDS)
            verdict = self._ask_store()
            if verdict is not None:
                return verdict
        if self._clock() >= self._next_look_at_connections:
            self._next_look_at_connections = self._clock() + timeouts.LIST_CONNECTIONS_SECONDS
            self._look_at_connections()
        self.stop.heed(one_has_stopped=any(end.preempted for end in ends))
        if self.stop.is_over or (self.stop.wanted_here and all_ended):
            return self._unsaved(ends) or Verdict(Cause.STOPPED)
        return self._judge(ends) if (failed or self._reports) and not self.stop.wanted_here else None

    def _show_output(self) -> None:
        if self.follower is not None:
            self.follower.pump()

    def _report_finished(self, ends: list[WorkerResult]) -> None:
        for end in ends:
            if end.succeeded and end.rank not in self._finished:
                self._finished.add(end.rank)
                self.rendezvous.report_finished(end.rank)

    def _unsaved(self, ends: list[WorkerResult]) -> Verdict | None:
        """If a rank that was asked to stop could not save its state: to the job's operator that is a failure."""
        if not self.stop.by_signal or all(end.exit_code != NotSaved.exit_code for end in ends):
            return None
        return Verdict(
            Cause.RANK_FAILED, root_cause=choose_root_cause(with_reports(ends, self._reports, self.ranks.node))
        )

    def _judge(self, ends: list[WorkerResult]) -> Verdict | None:
        node = self.ranks.node
        root_cause = choose_root_cause(with_reports(ends, self._reports, node))
        of_no_rank = next((report for report in self._reports if report.rank == NO_RANK), None)
        if root_cause is None and of_no_rank is None:  # reports of ranks that this job does not have
            return None
        self._failed_at = self._failed_at or self._clock()
        if root_cause is None or (of_no_rank is not None and root_cause.secondary):
            assert of_no_rank is not None
            if self.stop.is_announced or self._clock() < self._failed_at + timeouts.ROOT_CAUSE_SECONDS:
                return None
            # A restart may overcome it.
            report = {"message": of_no_rank.message, "exit_code": WorkerFailed.exit_code, "no_root_cause": True}
            return Verdict(Cause.REPORTED, report)
        is_missed = root_cause.report is not None and not root_cause.report.is_own
        if self.stop.is_announced and (root_cause.secondary or is_missed):
            return None  # other ranks report ranks that have stopped as missing
        if self._clock() < self._failed_at + _patience(root_cause, is_here=root_cause.rank in node.ranks):
            return None
        if root_cause.rank in node.ranks:
            return Verdict(Cause.RANK_FAILED, root_cause=root_cause)
        assert root_cause.report is not None
        return Verdict(Cause.REPORTED, root_cause.report.to_json())

    def _ask_store(self) -> Verdict | None:
        try:
            notice, self._reports = self.rendezvous.failures()
        except WorkerFailed as error:
            return Verdict(Cause.STORE_LOST, message=str(error))
        if notice is not None:
            return Verdict(Cause.REPORTED, notice)
        self.stop.ask_store()
        return None


def _patience(root_cause: WorkerResult, *, is_here: bool) -> float:
    """How long after the first sign of a failure to decide, given the root cause so far."""
    report = root_cause.report
    if report is None:
        return timeouts.ROOT_CAUSE_SECONDS if root_cause.secondary else 0.0
    if is_here and root_cause.has_ended:
        return 0.0 if report.is_own else timeouts.OTHERS_LAST_LINE_SECONDS
    own = timeouts.MISSED_RANK_SECONDS if report.kind == "missing" else timeouts.FAILED_RANK_EXIT_SECONDS
    return own if is_here else own + timeouts.FAILURE_NEWS_SECONDS


class Connections:
    """Whether ranks that have not called ``fleet.init`` connect at the job's endpoints: Paddle's own store, with which
    ``init_parallel_env`` forms a process group, is at rank 0's."""

    def __init__(self, node: Node) -> None:
        ports = range(node.started_port, node.started_port + node.processes)
        self._endpoints = [(address, port) for address in node.addresses for port in ports]
        self._before = connections_at(self._endpoints)
        self.seen = False

    def look(self) -> None:
        self.seen = self.seen or bool(connections_at(self._endpoints) - self._before)


WaitingNodes = Callable[[], str | None]


class GracefulStop:
    """Once a stop has been requested, on any node, the ranks of this node have a bounded time to end.

    A signal to this launcher ends the job. Waiting nodes (the leader sees which have come back and are ready) cause
    another attempt that includes them.
    """

    def __init__(
        self,
        ranks: Ranks,
        rendezvous: Rendezvous,
        stopping: Stopping,
        grace_seconds: float,
        waiting_nodes: WaitingNodes,
        clock: Callable[[], float],
    ) -> None:
        self.by_signal = False
        self.for_waiting_nodes = ""
        self._ranks = ranks
        self._rendezvous = rendezvous
        self._stopping = stopping
        self._grace_seconds = grace_seconds
        self._waiting_nodes = waiting_nodes
        self._clock = clock
        self._until: float | None = None
        self.is_announced = False
        """Announced on some node: ranks that end or are lost within the bound count as part of it."""

    @property
    def wanted_here(self) -> bool:
        return self.by_signal or bool(self.for_waiting_nodes)

    @property
    def signal_number(self) -> int:
        return self._stopping.asked

    @property
    def is_over(self) -> bool:
        """Whether the ranks' time is over."""
        return self._until is not None and self._clock() > self._until

    def heed(self, *, one_has_stopped: bool) -> None:
        """Once per tick: signals, and ranks that another process asked to stop."""
        if self._stopping.asked and not self.by_signal:
            self.by_signal = True
            self._ask(f"{self._ranks.node.describe()} was asked to stop by {request_name(self._stopping.asked)}")
        elif one_has_stopped and self._until is None:
            self._until = self._clock() + self._grace_seconds

    def ask_store(self) -> None:
        """Periodically: what other nodes have announced, and which nodes have come back."""
        if self._until is not None:
            return
        notice: dict[str, Any] | None = self._rendezvous.stop_announced()
        if notice is not None:
            self._until = self._clock() + float(notice["grace_seconds"]) + timeouts.STOP_NEWS_SECONDS
            self.is_announced = True
        elif self._clock() > self._rendezvous.start + timeouts.RANKS_START_SECONDS and (why := self._waiting_nodes()):
            self.for_waiting_nodes = why
            self._ask(why)

    def _ask(self, why: str) -> None:
        self._until = self._clock() + self._grace_seconds
        self.is_announced = True
        self._rendezvous.announce_stop(why, self._grace_seconds, again=not self.by_signal)
        self._ranks.ask_to_stop()
