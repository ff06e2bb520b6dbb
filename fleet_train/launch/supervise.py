"""The one supervisor of ranks: starts the processes of this node's ranks, watches them, and ends them.

`GracefulStop` is the stop of one attempt: who requested it, which nodes are notified, how long ranks may take.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from fleet_train import timeouts
from fleet_train.cluster.flight.stands import Stand
from fleet_train.cluster.flight.witness import Seen, Witness, ranks_here, session_of
from fleet_train.cluster.store.reports import NO_RANK, FailureReport
from fleet_train.errors import NotSaved, WorkerFailed
from fleet_train.launch.node import Node
from fleet_train.launch.processes import (
    Guard,
    Process,
    Stopping,
    request_name,
    stop,
)
from fleet_train.launch.rendezvous import Rendezvous, polling_seconds
from fleet_train.launch.report import WorkerResult, choose_root_cause, with_reports
from fleet_train.log import logger

if TYPE_CHECKING:
    from fleet_train.cluster.store.client import StoreClient


class RankProcess(Process):
    """The process of one rank. ``write`` gets the record of its start, and of its end."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: Any,
        log_file: str,
        write: Callable[[dict[str, Any]], None],
        spare: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """``spare``: the process that has become this rank, instead of a new one."""
        self.log_file = log_file
        self._write = write
        self._writing = threading.Lock()
        super().__init__(command, environ, output, started=spare)

    def write_record(self) -> None:
        with self._writing:
            record: dict[str, Any] = {"pid": self.pid, "began_monotonic": self.began_at}
            if self.status is not None:
                assert self.ended_at is not None
                record |= {
                    "ended_monotonic": self.ended_at,
                    "wall_seconds": round(self.ended_at - self.began_at, 3),
                    "exit_code": self.status if self.status >= 0 else None,
                    "signal": -self.status if self.status < 0 else None,
                    "asked_to_stop": self.asked_to_stop or None,
                }
            self._write(record)

    def await_record(self, seconds: float) -> None:
        self._waiter.join(seconds)

    def _await_end(self) -> None:
        """No process of a failed rank stays; those of a rank that succeeded may (a server, on purpose)."""
        status, at = self._waited()
        if status and not self.asked_to_stop:
            time.sleep(timeouts.SIGNAL_RACE_SECONDS)
        if status or self.asked_to_stop:
            self.kill_group()
        self._set_ended(status, at)
        self.write_record()


class Ranks:
    """``start_rank`` starts the process of a local rank; it may raise OSError."""

    def __init__(self, node: Node, start_rank: Callable[[int], RankProcess]) -> None:
        self.node = node
        self.started: list[RankProcess] = []
        self._start_rank = start_rank
        self._guard: Guard | None = None

    def start(self) -> None:
        """Start them all. Raises OSError if the kernel refuses that."""
        self._guard = Guard()
        for local in range(self.node.processes):
            rank = self._start_rank(local)
            self.started.append(rank)
            self._guard.add(rank.pid)
            rank.write_record()

    def running(self) -> int:
        return sum(not rank.has_ended for rank in self.started)

    def ask_to_stop(self) -> None:
        """SIGTERM to those that have not had it, without a bound on how long they take to end."""
        for rank in self.started:
            if not rank.asked_to_stop:
                rank.ask_to_stop()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL: all have ended afterwards."""
        stop(self.started)

    def ends(self, start: float) -> dict[int, WorkerResult]:
        """Local rank -> its end, for those that have ended; ``start`` is on the monotonic clock."""
        return {local: self._result(local, rank, start) for local, rank in enumerate(self.started) if rank.has_ended}

    def _result(self, local: int, process: RankProcess, start: float) -> WorkerResult:
        rank, status = self.node.ranks[local], process.status
        assert status is not None
        assert process.ended_at is not None
        return WorkerResult(
            rank=rank,
            endpoint=self.node.endpoint_of(rank),
            node_index=self.node.index,
            exit_code=status if status >= 0 else None,
            signal_number=-status if status < 0 else None,
            seconds=round(process.ended_at - start, 3),
            asked_to_stop=bool(process.asked_to_stop),
            log_file=process.log_file,
        )

    def close(self) -> None:
        """No rank runs afterwards. Processes that a rank left running, and which succeeded, continue."""
        if self.running():
            self.stop()
        deadline = time.monotonic() + timeouts.END_RECORD_SECONDS
        for rank in self.started:
            rank.await_record(max(0.0, deadline - time.monotonic()))
            rank.wait(0.0)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None


class EndCause(Enum):
    ALL_ENDED_WELL = "all ranks of this node ended with 0"
    PREEMPTED = "all ranks of this node ended, and some stopped gracefully because they were asked to"
    STOPPED = "the job was asked to stop, and the ranks of this node did not stop gracefully"
    RANK_FAILED = "a rank of this node failed"
    REPORTED = "another process reported a failure"
    STORE_LOST = "the leader's launcher was lost"


def witness_of(ranks: Ranks, client: StoreClient, write: Callable[[Iterable[Stand], Iterable[Seen]], None]) -> Witness:
    """Of the ranks that this process has started, each in a session of its own, also below a wrapper of the script."""

    def find() -> list[Seen]:
        sessions = {rank.pid for rank in ranks.started}
        return ranks_here(lambda pid: session_of(pid) in sessions)

    def running() -> dict[int, int]:
        return {
            rank: each.pid for rank, each in zip(ranks.node.ranks, ranks.started, strict=False) if not each.has_ended
        }

    return Witness(client, ranks.node.index, ranks.node.processes, find, running, write)


@dataclass(frozen=True)
class Verdict:
    """Why monitoring ended. ``report`` is the report in the store, if there is one."""

    cause: EndCause
    report: dict[str, object] | None = None
    message: str = ""
    root_cause: WorkerResult | None = None


class Monitor:
    """Each look checks how ranks have ended, signals, and the store. ``wait`` gets the seconds until the next look."""

    def __init__(
        self,
        ranks: Ranks,
        rendezvous: Rendezvous,
        stop: GracefulStop,
        *,
        wait: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        look_at_connections: Callable[[], None] = lambda: None,
        witness: Witness | None = None,
    ) -> None:
        self.ranks = ranks
        self.rendezvous = rendezvous
        self.stop = stop
        self._wait = wait
        self._clock = clock
        self._look_at_connections = look_at_connections
        self._answer = (lambda: None) if witness is None else witness.answer
        self._next_look_at_store = self._next_look_at_connections = 0.0
        self._failed_at: float | None = None
        self._in_store: list[FailureReport] = []
        self._finished: set[int] = set()
        self._has_told_end = False

    def watch(self) -> Verdict:
        while (verdict := self.look()) is None:
            self._wait(timeouts.WATCH_TICK_SECONDS)
        return verdict

    def look(self) -> Verdict | None:
        ends = [end for _, end in sorted(self.ranks.ends(self.rendezvous.start).items())]
        self._report_finished(ends)
        all_ended = len(ends) == self.ranks.node.processes
        if all_ended and all(end.succeeded or end.preempted for end in ends):
            return Verdict(EndCause.PREEMPTED if any(end.preempted for end in ends) else EndCause.ALL_ENDED_WELL)
        failed = any(not end.succeeded and not end.preempted for end in ends)
        if failed or self._in_store or self._clock() >= self._next_look_at_store:
            self._next_look_at_store = self._clock() + polling_seconds(self.ranks.node, timeouts.ASK_STORE_SECONDS)
            verdict = self._ask_store()
            if verdict is not None:
                return verdict
        if self._clock() >= self._next_look_at_connections:
            self._next_look_at_connections = self._clock() + timeouts.LIST_CONNECTIONS_SECONDS
            self._look_at_connections()
        self.stop.heed(one_has_stopped=any(end.preempted for end in ends))
        if self.stop.is_over or (self.stop.wanted_here and all_ended):
            return self._unsaved(ends) or Verdict(EndCause.STOPPED)
        return self._judge(ends) if (failed or self._in_store) and not self.stop.wanted_here else None

    def _report_finished(self, ends: list[WorkerResult]) -> None:
        for end in ends:
            if end.succeeded and end.rank not in self._finished:
                self._finished.add(end.rank)
                self.rendezvous.report_finished(end.rank)

    def _unsaved(self, ends: list[WorkerResult]) -> Verdict | None:
        """If a rank that was asked to stop could not save its state: to the job's operator that is a failure."""
        if not self.stop.by_signal or all(end.exit_code != NotSaved.exit_code for end in ends):
            return None
        root_cause = choose_root_cause(with_reports(ends, self._in_store, self.ranks.node))
        return Verdict(EndCause.RANK_FAILED, root_cause=root_cause)

    def _judge(self, ends: list[WorkerResult]) -> Verdict | None:
        node, reports = self.ranks.node, self._in_store
        root_cause = choose_root_cause(with_reports(ends, reports, node))
        of_no_rank = next((report for report in reports if report.rank == NO_RANK), None)
        if root_cause is None and of_no_rank is None:  # reports of ranks that this job does not have
            return None
        self._failed_at = self._failed_at or self._clock()
        if root_cause is None or (of_no_rank is not None and root_cause.secondary):
            assert of_no_rank is not None
            if self.stop.is_announced or self._clock() < self._failed_at + timeouts.ROOT_CAUSE_SECONDS:
                return None
            # A restart may overcome it.
            report = {"message": of_no_rank.message, "exit_code": WorkerFailed.exit_code, "no_root_cause": True}
            return Verdict(EndCause.REPORTED, report)
        is_missed = root_cause.report is not None and not root_cause.report.is_own
        if self.stop.is_announced and (root_cause.secondary or is_missed):
            return None  # other ranks report ranks that have stopped as missing
        is_here, all_over = root_cause.rank in node.ranks, self._all_over(ends)
        patience = 0.0 if is_here and all_over else _patience(root_cause, is_here=is_here)
        if self._clock() < self._failed_at + patience:
            return None
        if root_cause.rank in node.ranks:
            return Verdict(EndCause.RANK_FAILED, root_cause=root_cause)
        assert root_cause.report is not None
        return Verdict(EndCause.REPORTED, root_cause.report.to_json())

    def _all_over(self, ends: list[WorkerResult]) -> bool:
        """Whether no rank of the job is left to wait for; the other nodes learn it of those of this one."""
        if len(ends) < self.ranks.node.processes:
            return False
        if not self._has_told_end:
            self._has_told_end = True
            self.rendezvous.report_ranks_over()
        return self.rendezvous.all_ranks_are_over()

    def _ask_store(self) -> Verdict | None:
        try:
            notice, self._in_store = self.rendezvous.failures(self._answer)
        except WorkerFailed as error:
            return Verdict(EndCause.STORE_LOST, message=str(error))
        if notice is not None:
            return Verdict(EndCause.REPORTED, notice)
        self.stop.ask_store()
        return None


def _patience(root_cause: WorkerResult, *, is_here: bool) -> float:
    """How long after the first sign of a failure to decide, given the root cause so far."""
    report = root_cause.report
    if report is None:
        return timeouts.ROOT_CAUSE_SECONDS if root_cause.secondary else 0.0
    if is_here and root_cause.has_ended:
        return 0.0 if report.is_own else timeouts.OTHERS_LAST_LINE_SECONDS
    own = timeouts.FOLLOWERS_SECONDS if report.kind == "missing" else timeouts.FAILED_RANK_EXIT_SECONDS
    return own if is_here else own + timeouts.FAILURE_NEWS_SECONDS


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
        waiting_nodes: WaitingNodes = lambda: None,
        clock: Callable[[], float] = time.monotonic,
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
            if self._stopping.asked == signal.SIGINT:
                logger.info(
                    f"Ctrl-C: the ranks have up to {self._grace_seconds:g} s to save their state (--grace_seconds); a "
                    "second one ends them at once"
                )
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
