"""This node's ranks in one attempt: start them, monitor them, stop them, report how they ended."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from fleet_train import timeouts
from fleet_train.errors import ClusterError, ConversionError, Preempted, WorkerFailed
from fleet_train.launch.monitor import Cause, Connections, GracefulStop, Monitor, Verdict, WaitingNodes
from fleet_train.launch.prepare import Launch
from fleet_train.launch.processes import Stopping, StopRequested, adopt_orphans, request_name
from fleet_train.launch.ranks import Ranks, take_log_dir
from fleet_train.launch.rendezvous.coordinator import Kind, RunResult
from fleet_train.launch.rendezvous.round import Rendezvous
from fleet_train.launch.report import WorkerResult, choose_root_cause, counted, headline, with_reports
from fleet_train.launch.terminal import Follower, StartupLines
from fleet_train.log import logger


@dataclass
class _WorkerGroup:
    """What has to be stopped and examined: the ranks of this node."""

    launch: Launch
    rendezvous: Rendezvous
    ranks: Ranks
    follower: Follower | None
    stop: GracefulStop
    connections: Connections

    def end(self) -> list[WorkerResult]:
        """Stop everything; returns how every rank of this node ended, with its last lines."""
        self.ranks.stop()
        return self.tell()

    def tell(self) -> list[WorkerResult]:
        """Show the rest of the output; report to the other nodes how the ranks of this one ended."""
        if self.follower is not None:
            self.follower.close()
        found = self.ranks.ends(self.rendezvous.start)
        ends = [replace(end, last_lines=self.ranks.tail(local)) for local, end in found.items()]
        self.rendezvous.tell_results(ends)
        return ends


def run_worker_group(
    launch: Launch,
    rendezvous: Rendezvous,
    environ: dict[str, str],
    number: int,
    stopping: Stopping,
    waiting_nodes: WaitingNodes,
) -> RunResult:
    """Start this node's ranks and monitor them until the attempt is over, here and (within bounds) elsewhere."""
    node = launch.node
    adopt_orphans()
    with _unwritable_logs_refused(launch, rendezvous, number):
        launch = _with_own_log_dir(launch, rendezvous)
        Ranks(node, launch.log_dir, number).prepare()
    ranks = Ranks(node, launch.log_dir, number, launch.request.verbose)
    passing = None if launch.request.verbose else StartupLines()
    follower = Follower(ranks.log_file(0), passing=passing) if node.index == 0 else None
    logger.info(launch.summary() + (f"; attempt {number}" if number else ""))
    connections = Connections(node)
    stop = GracefulStop(ranks, rendezvous, stopping, launch.request.faults.grace_seconds, waiting_nodes, time.monotonic)
    group = _WorkerGroup(launch, rendezvous, ranks, follower, stop, connections)
    try:
        ranks.start(launch.command(), [environ | launch.variables_of(local) for local in range(node.processes)])
        with stopping.gracefully():
            verdict = Monitor(ranks, rendezvous, follower, stop, look_at_connections=connections.look).watch()
        return _CONCLUSIONS[verdict.cause](group, verdict)
    except ClusterError as error:
        message = f"{node.describe()}: {error}"
        rendezvous.fail(message, error.exit_code, no_root_cause=True, final=True)
        return RunResult(Kind.FAILED, error.exit_code, message, without_root_cause=True, final=True)
    except StopRequested as request:
        return _stopped(group, request.number, request.exit_code)
    finally:
        ranks.close()


@contextmanager
def _unwritable_logs_refused(launch: Launch, rendezvous: Rendezvous, number: int) -> Iterator[None]:
    """The first attempt must be able to write logs: raises ClusterError, on all nodes. Later attempts continue."""
    try:
        yield
    except OSError as error:
        message = f"--log_dir={launch.log_dir}: {error.filename or 'it'} cannot be written: {error.strerror}"
        if number == 0:
            message += "; make room, or choose another folder"
            rendezvous.fail(message, ClusterError.exit_code, no_root_cause=True, final=True)
            raise ClusterError(message) from None
        logger.warning(f"{message}; the job continues, logs are incomplete")


def _with_own_log_dir(launch: Launch, rendezvous: Rendezvous) -> Launch:
    """Nodes that share a folder: the first one keeps it, and each other node gets a folder of its own below it.

    A folder that another job uses is not shared: both would write into the same files.
    """
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    shared = len(launch.node.addresses) > 1 and rendezvous.shares_folder(launch.log_dir)
    return replace(launch, log_dir=take_log_dir(launch.log_dir / launch.node.address if shared else launch.log_dir))


def _succeed(group: _WorkerGroup, _: Verdict) -> RunResult:
    apart = _ranks_apart(group)
    result = _end_well(group, RunResult(Kind.DONE, 0))
    if not apart or result.kind is not Kind.DONE:
        return result
    if group.launch.strict:
        return replace(
            result,
            kind=Kind.FAILED,
            exit_code=ConversionError.exit_code,
            message=apart,
            without_root_cause=True,
            final=True,
        )
    if group.launch.node.index == 0:
        logger.warning(apart)
    return result


def _ranks_apart(group: _WorkerGroup) -> str:
    """The message if no rank has joined the job and none was seen to connect to another; empty otherwise.

    The package's own commands that train nothing (``selftest``, ``doctor``) join it in their own way, or not at all.
    """
    launch = group.launch
    is_ours = launch.request.is_module and launch.request.command[0].partition(".")[0] == "fleet_train"
    group.connections.look()
    if launch.node.world_size == 1 or is_ours or group.connections.seen or group.rendezvous.ranks_have_joined():
        return ""
    return (
        f"the {launch.node.world_size} ranks ran side by side: none called fleet.init, and none was seen to connect to "
        "another. If they were to train one model, call fleet.init(is_collective=True) of fleet_train and wrap the "
        "optimizer with fleet.distributed_optimizer (docs/start.md)"
    )


def _preempted(group: _WorkerGroup, _: Verdict) -> RunResult:
    notice = _stop_notice(group)
    if notice.get("again"):
        logger.warning(f"{notice['why']}: the ranks have saved their state")
        return _end_well(group, RunResult(Kind.RESUMES, Preempted.exit_code, f"{notice['why']}"))
    message = f"{notice['why']}; the job has saved its state and stopped: start it again to continue"
    return _end_well(group, RunResult(Kind.PREEMPTED, Preempted.exit_code, message))


def _stop_notice(group: _WorkerGroup) -> dict[str, Any]:
    return group.rendezvous.stop_announced() or {"why": "a rank was asked to stop"}


def _end_well(group: _WorkerGroup, result: RunResult) -> RunResult:
    ends = group.tell()
    patience = max(timeouts.OTHERS_STOP_SECONDS, group.launch.request.faults.grace_seconds)
    if result.kind is Kind.DONE:
        # Another rank may still need a rank of this node at its next step, at any time: then the end of that rank is a
        # failure. A lost launcher ends the wait.
        patience = math.inf
    failure = group.rendezvous.exit_barrier(patience)
    if failure is None:
        return replace(result, ends=tuple(ends))
    # If the job has failed elsewhere in the meantime, it has failed although this node's ranks succeeded.
    _own_up(group, ends)
    return _told(group, ends, failure)


def _own_up(group: _WorkerGroup, ends: list[WorkerResult]) -> None:
    """If a rank of this node has left too early, this launcher reports it: the others wait for its report."""
    node = group.launch.node
    root_cause = choose_root_cause(with_reports(ends, group.rendezvous.reports(), node))
    if root_cause is not None and root_cause.rank in node.ranks:
        time.sleep(timeouts.OTHERS_LAST_LINE_SECONDS)
        group.rendezvous.fail(headline(root_cause), root_cause.shell_code)


def _fail(group: _WorkerGroup, verdict: Verdict) -> RunResult:
    assert verdict.root_cause is not None
    group.rendezvous.fail(headline(verdict.root_cause), verdict.root_cause.shell_code)
    return _over_all_nodes(group, group.end())


def _follow(group: _WorkerGroup, verdict: Verdict) -> RunResult:
    return _told(group, group.end(), verdict.report or {})


def _told(group: _WorkerGroup, ends: list[WorkerResult], report: Mapping[str, Any]) -> RunResult:
    """The result of a failure that another process reported."""
    message = str(report.get("message", "another rank reported a failure"))
    final = bool(report.get("final"))
    if not report.get("no_root_cause"):
        return replace(_over_all_nodes(group, ends, message), final=final)
    code = int(report.get("exit_code", WorkerFailed.exit_code))
    group.rendezvous.fail(message, code, no_root_cause=True, final=final)
    message = f"{message}; {counted(len(ends), 'rank')} of {group.launch.node.describe()} ended with it"
    return RunResult(Kind.FAILED, code, message, tuple(ends), without_root_cause=True, final=final)


def _abandon(group: _WorkerGroup, verdict: Verdict) -> RunResult:
    ends = group.end()
    message = f"{verdict.message}; stopped {counted(len(ends), 'rank')} of {group.launch.node.describe()}"
    return RunResult(
        Kind.FAILED, WorkerFailed.exit_code, message, tuple(ends), without_root_cause=True, store_lost=True
    )


def _over_all_nodes(group: _WorkerGroup, ends: list[WorkerResult], fallback: str = "another node failed") -> RunResult:
    others, silent = group.rendezvous.results_of_others(timeouts.OTHER_RESULTS_SECONDS)
    every = tuple(with_reports((*ends, *others), group.rendezvous.reports(), group.launch.node))
    root_cause = choose_root_cause(every)
    code = root_cause.shell_code if root_cause is not None else WorkerFailed.exit_code
    return RunResult(Kind.FAILED, code, fallback, every, tuple(silent), root_cause)


def _was_stopped(group: _WorkerGroup, verdict: Verdict) -> RunResult:
    if group.stop.by_signal:
        return _stopped(group, group.stop.signal_number, 128 + group.stop.signal_number)
    notice = _stop_notice(group)
    if notice.get("again"):  # without a saved state, the next attempt is an ordinary restart
        report = {"message": notice["why"], "no_root_cause": True}
        return _follow(group, replace(verdict, report=report))
    return _end_by_force(group, str(notice["why"]), 128 + signal.SIGTERM)


def _stopped(group: _WorkerGroup, number: int, exit_code: int) -> RunResult:
    """Ctrl-C, a second signal, or ranks of this node that did not stop gracefully after the first one."""
    message = f"{group.launch.node.describe()} was stopped by {request_name(number)}"
    return _end_by_force(group, message, exit_code)


def _end_by_force(group: _WorkerGroup, message: str, exit_code: int) -> RunResult:
    still_there = group.ranks.running()
    if still_there and group.stop.is_over:
        message += (
            f" ({counted(still_there, 'rank')} did not end within {group.launch.request.faults.grace_seconds:g} s)"
        )
    group.rendezvous.fail(message, exit_code, no_root_cause=True, final=True)
    ends = group.end()
    message = f"{message}; {counted(len(ends), 'rank')} ended with it" if ends else f"{message}; no rank had started"
    return RunResult(Kind.FAILED, exit_code, message, tuple(ends), final=True, without_root_cause=True)


_CONCLUSIONS: dict[Cause, Callable[[_WorkerGroup, Verdict], RunResult]] = {
    Cause.ALL_ENDED_WELL: _succeed,
    Cause.PREEMPTED: _preempted,
    Cause.STOPPED: _was_stopped,
    Cause.RANK_FAILED: _fail,
    Cause.TOLD: _follow,
    Cause.STORE_LOST: _abandon,
}
