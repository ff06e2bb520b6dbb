"""This node's ranks in one attempt: started, monitored, stopped; how they ended is reported."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.flight.stands import merged
from fleet_train.cluster.network import connections_at
from fleet_train.cluster.trained import TRAINED_FILE
from fleet_train.errors import ClusterError, ConversionError, Preempted, WorkerFailed
from fleet_train.launch.attempts import Kind, RunResult
from fleet_train.launch.logs import LogFolder
from fleet_train.launch.node import Node
from fleet_train.launch.prepare import Launch
from fleet_train.launch.processes import (
    Stopping,
    StopRequested,
    adopt_orphans,
    asked_by,
    kill_descendants,
    request_name,
    why_not_started,
)
from fleet_train.launch.rendezvous import Rendezvous
from fleet_train.launch.report import WorkerResult, choose_root_cause, counted, headline, with_reports
from fleet_train.launch.spares import Spares
from fleet_train.launch.supervise import (
    EndCause,
    GracefulStop,
    Monitor,
    RankProcess,
    Ranks,
    Verdict,
    WaitingNodes,
    witness_of,
)
from fleet_train.launch.terminal import Follower, StartupLines, show_lines
from fleet_train.log import logger


class WorkerGroup:
    """This node's ranks in one attempt: started, monitored, stopped; how they ended is reported."""

    def __init__(
        self,
        launch: Launch,
        rendezvous: Rendezvous,
        logs: LogFolder,
        environ: Mapping[str, str],
        stopping: Stopping,
        waiting_nodes: WaitingNodes,
        spares: Spares,
    ) -> None:
        """``environ``: what the ranks' environments have in common."""
        node, request = launch.node, launch.request
        self.launch = launch
        self.rendezvous = rendezvous
        self.logs = logs
        self.environ = environ
        self.stopping = stopping
        self.spares = spares
        self.ranks = Ranks(node, self._start_rank)
        passing = None if request.verbose else StartupLines()
        self.follower = Follower(logs.file(0), passing=passing) if node.index == 0 else None
        self.connections = Connections(node)
        self._stacks_asked = threading.Event()
        self._said_slow_exit = False
        self.witness = witness_of(self.ranks, rendezvous.client, logs.write_stands)
        self.stop = GracefulStop(self.ranks, rendezvous, stopping, request.faults.grace_seconds, waiting_nodes)

    def run(self) -> RunResult:
        """Start the ranks and monitor them until the attempt is over, here and (within bounds) elsewhere."""
        monitor = Monitor(
            self.ranks,
            self.rendezvous,
            self.stop,
            wait=self._wait,
            look_at_connections=self.connections.look,
            witness=self.witness,
        )
        try:
            self._start()
            self.spares.drop_others()
            with self.stopping.gracefully(), asked_by(signal.SIGQUIT) as self._stacks_asked:
                verdict = monitor.watch()
            return replace(self._conclude(verdict), has_trained=self.spares.has_trained())
        except ClusterError as error:
            message = f"{self.launch.node.describe()}: {error}"
            self.rendezvous.fail(message, error.exit_code, no_root_cause=True, final=True)
            return failed(message, error.exit_code, final=True)
        except StopRequested as request:
            return self._stopped(request.number, request.exit_code)
        finally:
            if self.ranks.running():
                self._stop_ranks()
            self.ranks.close()
            self.witness.close()

    def _start(self) -> None:
        """This process starts nothing but ranks: what they start ends with them."""
        adopt_orphans()
        self.spares.watch(self.launch.node.processes, self._environ_of, self.launch.log_dir / TRAINED_FILE)
        try:
            self.ranks.start()
        except OSError as error:
            raise why_not_started(error, self.launch.command(), self._environ_of(0)) from error

    def _start_rank(self, local: int) -> RankProcess:
        return self.logs.start_rank(local, self.launch.command(), self._environ_of(local), self.spares.take)

    def _environ_of(self, local: int) -> dict[str, str]:
        return {**self.environ, **self.launch.variables_of(local)}

    def _wait(self, seconds: float) -> None:
        if self.follower is not None:
            self.follower.pump()
        if self._stacks_asked.is_set():
            self._stacks_asked.clear()
            stands = self.witness.look()
            show_lines("\n".join([merged(stands), *(line for stand in stands for line in stand.lines())]))
        self._report_slow_exit()
        self.spares.tick()
        time.sleep(seconds)

    def _report_slow_exit(self) -> None:
        """Say once which ranks still run, and where, long after another one of this node has ended well."""
        ended = [rank.ended_at for rank in self.ranks.started if rank.status == 0 and rank.ended_at is not None]
        if not ended or self._said_slow_exit or len(ended) == len(self.ranks.started):
            return
        seconds = time.monotonic() - max(ended)
        if seconds >= timeouts.SLOW_EXIT_SECONDS:
            self._said_slow_exit = True
            logger.info(f"{counted(len(ended), 'rank')} ended {seconds:.0f} s ago; {merged(self.witness.look())}")

    def _conclude(self, verdict: Verdict) -> RunResult:
        match verdict.cause:
            case EndCause.ALL_ENDED_WELL:
                return self._succeed()
            case EndCause.PREEMPTED:
                return self._preempted()
            case EndCause.STOPPED:
                return self._was_stopped()
            case EndCause.RANK_FAILED:
                assert verdict.root_cause is not None
                self.rendezvous.fail(headline(verdict.root_cause), verdict.root_cause.shell_code)
                return self._over_all_nodes(self._end())
            case EndCause.REPORTED:
                return self._reported(self._end(), verdict.report or {})
            case EndCause.STORE_LOST:
                ends = self._end()
                message = f"{verdict.message}; stopped {counted(len(ends), 'rank')} of {self.launch.node.describe()}"
                return failed(message, WorkerFailed.exit_code, ends, store_lost=True)

    def _end(self) -> list[WorkerResult]:
        """Stop everything; returns how every rank of this node ended, with its last lines and where it stood."""
        self.witness.look(resume=True)
        self._stop_ranks()
        return self._report_ends()

    def _stop_ranks(self) -> None:
        self.ranks.stop()
        kill_descendants(besides=self.spares.pids)

    def _report_ends(self) -> list[WorkerResult]:
        """Show the rest of the output; report to the other nodes how the ranks of this one ended."""
        if self.follower is not None:
            self.follower.close()
        ended = self.ranks.ends(self.rendezvous.start)
        ends = [
            replace(end, last_lines=self.logs.tail(local, end.asked_to_stop), stand=self.witness.stands.get(end.rank))
            for local, end in ended.items()
        ]
        self.rendezvous.report_results(ends)
        return ends

    def _succeed(self) -> RunResult:
        apart = self._ranks_apart()
        result = self._end_well(RunResult(Kind.DONE, 0))
        if not apart or result.kind is not Kind.DONE:
            return result
        if self.launch.strict:
            return failed(apart, ConversionError.exit_code, result.ends, final=True)
        if self.launch.node.index == 0:
            logger.warning(apart)
        return result

    def _ranks_apart(self) -> str:
        """The message if no rank has joined the job and none was seen to connect to another; empty otherwise.

        The package's own commands that train nothing (``selftest``, ``doctor``) join it in their own way, or not.
        """
        launch = self.launch
        is_ours = launch.request.is_module and launch.request.command[0].partition(".")[0] == "fleet_train"
        self.connections.look()
        if launch.node.world_size == 1 or is_ours or self.connections.seen or self.rendezvous.ranks_have_joined():
            return ""
        return (
            f"the {launch.node.world_size} ranks ran side by side: none called fleet.init, and none was seen to "
            "connect to another. If they were to train one model, call fleet.init(is_collective=True) of fleet_train "
            "and wrap the optimizer with fleet.distributed_optimizer (docs/start.md)"
        )

    def _preempted(self) -> RunResult:
        notice = self._stop_notice()
        if notice.get("again"):
            logger.warning(f"{notice['why']}: the ranks have saved their state")
            return self._end_well(RunResult(Kind.RESUMES, Preempted.exit_code, f"{notice['why']}"))
        message = f"{notice['why']}; the job has saved its state and stopped: start it again to continue"
        return self._end_well(RunResult(Kind.PREEMPTED, Preempted.exit_code, message))

    def _stop_notice(self) -> dict[str, Any]:
        return self.rendezvous.stop_announced() or {"why": "a rank was asked to stop"}

    def _end_well(self, result: RunResult) -> RunResult:
        ends = self._report_ends()
        patience = max(timeouts.OTHERS_STOP_SECONDS, self.launch.request.faults.grace_seconds)
        if result.kind is Kind.DONE:
            # Another rank may still need a rank of this node at its next step, at any time: then the end of that rank
            # is a failure. A lost launcher ends the wait.
            patience = math.inf
        failure = self.rendezvous.exit_barrier(patience)
        if failure is None:
            return replace(result, ends=tuple(ends))
        # If the job has failed elsewhere in the meantime, it has failed although this node's ranks succeeded.
        self._own_up(ends)
        return self._reported(ends, failure)

    def _own_up(self, ends: list[WorkerResult]) -> None:
        """If a rank of this node has left too early, this launcher reports it: the others wait for its report."""
        node = self.launch.node
        root_cause = choose_root_cause(with_reports(ends, self.rendezvous.reports(), node))
        if root_cause is not None and root_cause.rank in node.ranks:
            time.sleep(timeouts.OTHERS_LAST_LINE_SECONDS)
            self.rendezvous.fail(headline(root_cause), root_cause.shell_code)

    def _reported(self, ends: list[WorkerResult], report: Mapping[str, Any]) -> RunResult:
        """The result of a failure that another process reported."""
        message = str(report.get("message", "another rank reported a failure"))
        final = bool(report.get("final"))
        if not report.get("no_root_cause"):
            return replace(self._over_all_nodes(ends, message), final=final)
        code = int(report.get("exit_code", WorkerFailed.exit_code))
        self.rendezvous.fail(message, code, no_root_cause=True, final=final)
        message = f"{message}; {counted(len(ends), 'rank')} of {self.launch.node.describe()} ended with it"
        return failed(message, code, ends, final=final)

    def _over_all_nodes(self, ends: list[WorkerResult], fallback: str = "another node failed") -> RunResult:
        others, silent = self.rendezvous.results_of_others(timeouts.OTHER_RESULTS_SECONDS)
        every = tuple(with_reports((*ends, *others), self.rendezvous.reports(), self.launch.node))
        root_cause = choose_root_cause(every)
        code = root_cause.shell_code if root_cause is not None else WorkerFailed.exit_code
        return RunResult(Kind.FAILED, code, fallback, every, tuple(silent), root_cause)

    def _was_stopped(self) -> RunResult:
        if self.stop.by_signal:
            return self._stopped(self.stop.signal_number, 128 + self.stop.signal_number)
        notice = self._stop_notice()
        if notice.get("again"):  # without a saved state, the next attempt is an ordinary restart
            return self._reported(self._end(), {"message": notice["why"], "no_root_cause": True})
        return self._end_by_force(str(notice["why"]), 128 + signal.SIGTERM)

    def _stopped(self, number: int, exit_code: int) -> RunResult:
        """Ctrl-C, a second signal, or ranks of this node that did not stop gracefully after the first one."""
        message = f"{self.launch.node.describe()} was stopped by {request_name(number)}"
        return self._end_by_force(message, exit_code)

    def _end_by_force(self, message: str, exit_code: int) -> RunResult:
        still_there = self.ranks.running()
        if still_there and self.stop.is_over:
            message += (
                f" ({counted(still_there, 'rank')} did not end within {self.launch.request.faults.grace_seconds:g} s: "
                f"{merged(self.witness.look())})"
            )
        self.rendezvous.fail(message, exit_code, no_root_cause=True, final=True)
        ends = self._end()
        message = (
            f"{message}; {counted(len(ends), 'rank')} ended with it" if ends else f"{message}; no rank had started"
        )
        return failed(message, exit_code, ends, final=True)


def failed(
    message: str, exit_code: int, ends: Sequence[WorkerResult] = (), *, final: bool = False, store_lost: bool = False
) -> RunResult:
    """One without a root cause in a rank: the message is complete."""
    return RunResult(
        Kind.FAILED, exit_code, message, tuple(ends), final=final, without_root_cause=True, store_lost=store_lost
    )


class Connections:
    """Whether ranks that have not called ``fleet.init`` connect at the job's endpoints: Paddle's own store, with which
    ``init_parallel_env`` forms a process group, is at rank 0's."""

    def __init__(self, node: Node) -> None:
        self._endpoints = [(rank.host, rank.port) for rank in node.cluster(0).ranks]
        self._before = connections_at(self._endpoints)
        self.seen = False

    def look(self) -> None:
        self.seen = self.seen or bool(connections_at(self._endpoints) - self._before)
