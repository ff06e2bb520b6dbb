"""One node's launch from start to end: check, meet, start, watch, stop, report. The verbs in the order they happen."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from fleet_train.errors import WorkerFailed
from fleet_train.launch import processes
from fleet_train.launch.ends import RankEnd, choose_culprit, last_lines, signal_name
from fleet_train.launch.meeting import Meeting
from fleet_train.launch.prepare import Launch
from fleet_train.launch.report import counted, failure_report, headline
from fleet_train.launch.stock import make_private_folder, remove_private_folder
from fleet_train.launch.supervise import Cause, Supervisor, Verdict
from fleet_train.launch.watching import Follower, NoFollower, RankFiles

_OTHERS_END_WITHIN_SECONDS = 10.0
_LINGER_AFTER_SUCCESS_SECONDS = 30.0
_LINGER_AFTER_FAILURE_SECONDS = 12.0
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """Ctrl-C, kill, or a closed terminal. Not an Exception: nothing may swallow it on its way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def say(text: str) -> None:
    print(f"fleet_train: {text}", file=sys.stderr, flush=True)


def run(launch: Launch, environ: Mapping[str, str]) -> int:
    """Carry out the launch; returns the exit code for the shell. Raises FleetTrainError before the first rank."""
    node = launch.node
    with stopping_signals():
        meeting: Meeting | None = None
        try:
            meeting = Meeting.open(node, launch.join_timeout_seconds)
            meeting.join(launch.facts, launch.join_timeout_seconds, say)
            return _run_ranks(launch, meeting, environ)
        except StopRequested as stop:
            return _stopped(launch, meeting, stop.number, ranks=0)
        finally:
            if meeting is not None:
                meeting.linger(_LINGER_AFTER_FAILURE_SECONDS)
                meeting.close()


@contextmanager
def stopping_signals() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises StopRequested in the main thread; later ones change nothing."""

    def on_signal(number: int, _: FrameType | None) -> None:
        for each in _STOPPING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise StopRequested(number)

    before = {number: signal.getsignal(number) for number in _STOPPING_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN or number == signal.SIGTERM:  # nohup ignores SIGHUP: let it
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Started:
    """What has to be ended and looked at: the stock launcher and the ranks that it started."""

    launch: Launch
    meeting: Meeting
    files: RankFiles
    stock: subprocess.Popen[bytes]
    private: Path
    follower: Follower | NoFollower

    def end(self) -> list[RankEnd]:
        """Stop everything; how every rank of this node has ended, with the last lines of those that failed."""
        processes.end_everything(self.stock, self.files.wrapper_pids())
        self.follower.close()
        found = self.files.ends(self.meeting.start)
        for local in self.files.records():
            seconds = max((end.seconds for end in found.values()), default=0.0)
            found.setdefault(local, self.files.end_without_trace(local, seconds))
        return [
            end if end.succeeded else replace(end, last_lines=self.files.tail(local))
            for local, end in sorted(found.items())
        ]


def _run_ranks(launch: Launch, meeting: Meeting, environ: Mapping[str, str]) -> int:
    node = launch.node
    processes.adopt_orphans()
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    launch = _with_own_log_dir(launch, meeting)
    files = RankFiles(node, launch.log_dir, token)
    files.prepare()
    private = make_private_folder(node.ranks)
    follower = Follower(files.log_file(0)) if node.index == 0 else NoFollower()
    say(launch.summary())
    stock = processes.start_stock_launcher(launch.command(token, private), launch.environment.over(environ), private)
    started = _Started(launch, meeting, files, stock, private, follower)
    try:
        verdict = Supervisor(files, meeting, stock, follower).watch()
        return _conclude(started, verdict)
    except StopRequested as stop:
        meeting.fail(_stop_message(launch, stop.number), 128 + stop.number, no_culprit=True)
        ends = started.end()
        meeting.tell_ends(ends)
        return _stopped(launch, meeting, stop.number, len(ends))
    finally:
        if stock.poll() is None:
            processes.kill_now(stock)
        remove_private_folder(private)


def _with_own_log_dir(launch: Launch, meeting: Meeting) -> Launch:
    """Where nodes share a folder, the first of them keeps it and each other gets one of its own below it."""
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    shared = len(launch.node.addresses) > 1 and meeting.shares_folder(launch.log_dir)
    return replace(launch, log_dir=launch.log_dir / launch.node.address) if shared else launch


def _conclude(started: _Started, verdict: Verdict) -> int:
    handlers: dict[Cause, Callable[[_Started, Verdict], int]] = {
        Cause.ALL_ENDED_WELL: _succeed,
        Cause.RANK_FAILED: _fail,
        Cause.TOLD: _follow,
        Cause.STORE_LOST: _abandon,
    }
    return handlers[verdict.cause](started, verdict)


def _succeed(started: _Started, _: Verdict) -> int:
    processes.end_idle_launcher(started.stock)
    started.follower.close()
    ends = list(started.files.ends(started.meeting.start).values())
    started.meeting.tell_ends(ends)
    failure = started.meeting.linger(_LINGER_AFTER_SUCCESS_SECONDS, say)
    # A job that has failed elsewhere in the meantime has failed, although this node's ranks ended well.
    return 0 if failure is None else _tell(started, ends, failure)


def _fail(started: _Started, verdict: Verdict) -> int:
    if not started.files.records():
        return _never_started(started)
    culprit = verdict.culprit
    assert culprit is not None
    started.meeting.fail(headline(culprit), culprit.shell_code)
    return _report(started, started.end())


def _follow(started: _Started, verdict: Verdict) -> int:
    return _tell(started, started.end(), verdict.report or {})


def _tell(started: _Started, ends: list[RankEnd], report: Mapping[str, Any]) -> int:
    """Say what somebody else has reported; returns the exit code that goes with it."""
    message = str(report.get("message", "another rank has reported a failure"))
    if not report.get("no_culprit"):
        return _report(started, ends, fallback=message)
    code = int(report.get("exit_code", WorkerFailed.exit_code))
    started.meeting.tell_ends(ends)
    started.meeting.fail(message, code, no_culprit=True)
    say(f"{message}; {counted(len(ends), 'rank')} of {started.launch.node.describe()} ended with it")
    return code


def _abandon(started: _Started, verdict: Verdict) -> int:
    ends = started.end()
    stopped = f"{counted(len(ends), 'rank')} of {started.launch.node.describe()}"
    raise WorkerFailed(f"{verdict.message}; stopped {stopped}")


def _report(started: _Started, ends: list[RankEnd], fallback: str = "") -> int:
    """Print the table over all nodes; returns the culprit's exit code."""
    started.meeting.tell_ends(ends)
    others, silent = started.meeting.ends_of_others(_OTHERS_END_WITHIN_SECONDS)
    culprit = choose_culprit([*ends, *others])
    if culprit is None:
        say(f"the job has failed: {fallback or 'another node has failed'}")
        return WorkerFailed.exit_code
    say(f"the job has failed: {headline(culprit)}")
    print(failure_report([*ends, *others], silent), file=sys.stderr, flush=True)
    return culprit.shell_code


def _never_started(started: _Started) -> int:
    """The stock launcher has ended before any rank began: only its own words can say why."""
    try:
        words = last_lines((started.private / "stock.log").read_text(errors="replace"), count=12)
    except OSError:
        words = ()
    node = started.launch.node.describe()
    started.meeting.fail(f"paddle.distributed.launch has started no rank on {node}", 1, no_culprit=True)
    say(f"paddle.distributed.launch ended with code {started.stock.returncode} before it had started a rank; it said:")
    print("\n".join(f"  | {line}" for line in words), file=sys.stderr, flush=True)
    return 1


def _stop_message(launch: Launch, number: int) -> str:
    how = "Ctrl-C" if number == signal.SIGINT else signal_name(number)
    return f"{launch.node.describe()} was stopped by {how}"


def _stopped(launch: Launch, meeting: Meeting | None, number: int, ranks: int) -> int:
    message = _stop_message(launch, number)
    if meeting is not None:
        meeting.fail(message, 128 + number, no_culprit=True)
    say(f"{message}; " + (f"{counted(ranks, 'rank')} ended with it" if ranks else "no rank had started"))
    return 128 + number
