"""This node's share of one attempt: start the ranks, watch them, end them, say how they ended."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet_train.errors import Preempted, WorkerFailed
from fleet_train.launch import processes
from fleet_train.launch.ends import RankEnd, choose_culprit, last_lines, with_reports
from fleet_train.launch.meeting import Meeting, Say
from fleet_train.launch.orderly import Newcomers, OrderlyStop
from fleet_train.launch.prepare import Launch
from fleet_train.launch.report import counted, headline
from fleet_train.launch.restart import Kind, Outcome
from fleet_train.launch.signals import Stopping, StopRequested, signal_name
from fleet_train.launch.stock import make_private_folder, remove_private_folder
from fleet_train.launch.supervise import Cause, Supervisor, Verdict
from fleet_train.launch.watching import Follower, NoFollower, RankFiles

_OTHERS_END_WITHIN_SECONDS = 20.0
# After this node's ranks have ended well: another one may still need them, which makes that end a failure. The others
# may also wait for them in fleet.init, as long as --join_timeout says.
_EXIT_BARRIER_SECONDS = 60.0
_LINGER_AFTER_STOP_SECONDS = 30.0
# Whoever misses a rank has a line to say, before the launchers end it.
_LAST_LINE_SECONDS = 1.0


@dataclass
class _Started:
    """What has to be ended and looked at: the stock launcher and the ranks that it started."""

    launch: Launch
    meeting: Meeting
    files: RankFiles
    stock: subprocess.Popen[bytes]
    private: Path
    follower: Follower | NoFollower
    stop: OrderlyStop
    say: Say

    def end(self) -> list[RankEnd]:
        """Stop everything; how every rank of this node has ended, with its last lines."""
        processes.end_everything(self.stock, self.files.wrapper_pids())
        self.follower.close()
        found = self.files.ends(self.meeting.start)
        for local in self.files.records():
            seconds = max((end.seconds for end in found.values()), default=0.0)
            found.setdefault(local, self.files.end_without_trace(local, seconds))
        return self.tell(found)

    def tell(self, found: Mapping[int, RankEnd]) -> list[RankEnd]:
        """Let the other nodes know how the ranks of this one have ended (by local index)."""
        ends = [replace(end, last_lines=self.files.tail(local)) for local, end in sorted(found.items())]
        self.meeting.tell_ends(ends)
        return ends


def run_attempt(
    launch: Launch,
    meeting: Meeting,
    environ: Mapping[str, str],
    number: int,
    stopping: Stopping,
    newcomers: Newcomers,
    say: Say,
) -> Outcome:
    """Start this node's ranks and stay with them until the attempt is over, here and (within bounds) elsewhere."""
    node = launch.node
    processes.adopt_orphans()
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    launch = _with_own_log_dir(launch, meeting)
    files = RankFiles(node, launch.log_dir, token, number)
    files.prepare()
    private = make_private_folder(node.ranks)
    follower = Follower(files.log_file(0)) if node.index == 0 else NoFollower()
    say(launch.summary() + (f"; attempt {number}" if number else ""))
    stock = processes.start_stock_launcher(launch.command(token, private), environ, private)
    stop = OrderlyStop(files, meeting, stopping, launch.faults.grace_seconds, newcomers, time.monotonic)
    started = _Started(launch, meeting, files, stock, private, follower, stop, say)
    try:
        with stopping.orderly():
            verdict = Supervisor(files, meeting, stock, follower, stop).watch()
        return _CONCLUSIONS[verdict.cause](started, verdict)
    except StopRequested as request:
        return _stopped(started, request.number)
    finally:
        if stock.poll() is None:
            processes.kill_now(stock)
        remove_private_folder(private)


def _with_own_log_dir(launch: Launch, meeting: Meeting) -> Launch:
    """Where nodes share a folder, the first of them keeps it and each other gets one of its own below it."""
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    shared = len(launch.node.addresses) > 1 and meeting.shares_folder(launch.log_dir)
    return replace(launch, log_dir=launch.log_dir / launch.node.address) if shared else launch


def _succeed(started: _Started, _: Verdict) -> Outcome:
    return _end_well(started, Outcome(Kind.DONE, 0))


def _preempted(started: _Started, _: Verdict) -> Outcome:
    notice = _stop_notice(started)
    if notice.get("again"):
        started.say(f"{notice['why']}: the ranks have saved their state")
        return _end_well(started, Outcome(Kind.RESUMES, Preempted.exit_code, f"{notice['why']}"))
    message = f"{notice['why']}; the job has saved its state and stopped: start it again to go on"
    return _end_well(started, Outcome(Kind.PREEMPTED, Preempted.exit_code, message))


def _stop_notice(started: _Started) -> dict[str, Any]:
    return started.meeting.stop_announced() or {"why": "a rank was asked to stop"}


def _end_well(started: _Started, outcome: Outcome) -> Outcome:
    processes.end_idle_launcher(started.stock)
    started.follower.close()
    ends = started.tell(started.files.ends(started.meeting.start))
    patience = max(_LINGER_AFTER_STOP_SECONDS, started.launch.faults.grace_seconds)
    if outcome.kind is Kind.DONE:
        patience = max(patience, started.launch.join_timeout_seconds + _EXIT_BARRIER_SECONDS)
    failure = started.meeting.await_others(patience, started.say)
    if failure is None:
        return replace(outcome, ends=tuple(ends))
    # A job that has failed elsewhere in the meantime has failed, although this node's ranks ended well.
    _own_up(started, ends)
    return _told(started, ends, failure)


def _own_up(started: _Started, ends: list[RankEnd]) -> None:
    """Where a rank of this node has left too early, it is this launcher that says so: others wait for its word."""
    node = started.launch.node
    culprit = choose_culprit(with_reports(ends, started.meeting.reports(), node))
    if culprit is not None and culprit.rank in node.ranks:
        time.sleep(_LAST_LINE_SECONDS)
        started.meeting.fail(headline(culprit), culprit.shell_code)


def _fail(started: _Started, verdict: Verdict) -> Outcome:
    if not started.files.records():
        return _never_started(started)
    assert verdict.culprit is not None
    started.meeting.fail(headline(verdict.culprit), verdict.culprit.shell_code)
    return _over_all_nodes(started, started.end())


def _follow(started: _Started, verdict: Verdict) -> Outcome:
    return _told(started, started.end(), verdict.report or {})


def _told(started: _Started, ends: list[RankEnd], report: Mapping[str, Any]) -> Outcome:
    """What somebody else has reported."""
    message = str(report.get("message", "another rank has reported a failure"))
    final = bool(report.get("final"))
    if not report.get("no_culprit"):
        return replace(_over_all_nodes(started, ends, message), final=final)
    code = int(report.get("exit_code", WorkerFailed.exit_code))
    started.meeting.fail(message, code, no_culprit=True, final=final)
    message = f"{message}; {counted(len(ends), 'rank')} of {started.launch.node.describe()} ended with it"
    return Outcome(Kind.FAILED, code, message, tuple(ends), without_culprit=True, final=final)


def _abandon(started: _Started, verdict: Verdict) -> Outcome:
    ends = started.end()
    message = f"{verdict.message}; stopped {counted(len(ends), 'rank')} of {started.launch.node.describe()}"
    return Outcome(Kind.FAILED, WorkerFailed.exit_code, message, tuple(ends), without_culprit=True, store_lost=True)


def _over_all_nodes(started: _Started, ends: list[RankEnd], fallback: str = "another node has failed") -> Outcome:
    others, silent = started.meeting.ends_of_others(_OTHERS_END_WITHIN_SECONDS)
    every = tuple(with_reports((*ends, *others), started.meeting.reports(), started.launch.node))
    culprit = choose_culprit(every)
    code = culprit.shell_code if culprit is not None else WorkerFailed.exit_code
    return Outcome(Kind.FAILED, code, fallback, every, tuple(silent), culprit)


def _never_started(started: _Started) -> Outcome:
    """The stock launcher has ended before any rank began: only its own words can say why."""
    try:
        words = last_lines((started.private / "stock.log").read_text(errors="replace"), count=12)
    except OSError:
        words = ()
    node = started.launch.node.describe()
    started.meeting.fail(f"paddle.distributed.launch has started no rank on {node}", 1, no_culprit=True, final=True)
    message = f"paddle.distributed.launch ended with code {started.stock.returncode} before it had started a rank"
    return Outcome(Kind.FAILED, 1, f"{message}; it said:", final=True, without_culprit=True, output=words)


def _was_stopped(started: _Started, verdict: Verdict) -> Outcome:
    if started.stop.by_signal:
        return _stopped(started, started.stop.signal_number)
    notice = _stop_notice(started)
    if notice.get("again"):  # without a saved state, the next attempt is a restart like any other
        report = {"message": notice["why"], "no_culprit": True}
        return _follow(started, replace(verdict, report=report))
    return _end_by_force(started, str(notice["why"]), 128 + signal.SIGTERM)


def _stopped(started: _Started, number: int) -> Outcome:
    """Ctrl-C, a second signal, or ranks of this node that did not stop in good order after the first one."""
    message = f"{started.launch.node.describe()} was stopped by {signal_name(number)}"
    return _end_by_force(started, message, 128 + number)


def _end_by_force(started: _Started, message: str, exit_code: int) -> Outcome:
    still_there = len(started.files.wrapper_pids())
    if still_there and started.stop.is_over:
        message += f" ({counted(still_there, 'rank')} did not end within {started.launch.faults.grace_seconds:g} s)"
    started.meeting.fail(message, exit_code, no_culprit=True, final=True)
    ends = started.end()
    message = f"{message}; {counted(len(ends), 'rank')} ended with it" if ends else f"{message}; no rank had started"
    return Outcome(Kind.FAILED, exit_code, message, tuple(ends), final=True, without_culprit=True)


_CONCLUSIONS: dict[Cause, Callable[[_Started, Verdict], Outcome]] = {
    Cause.ALL_ENDED_WELL: _succeed,
    Cause.PREEMPTED: _preempted,
    Cause.STOPPED: _was_stopped,
    Cause.RANK_FAILED: _fail,
    Cause.TOLD: _follow,
    Cause.STORE_LOST: _abandon,
}
