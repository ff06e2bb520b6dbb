"""From the command to ranks: started through our launcher, or this process is one, started by any launcher."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from fleet_train.cluster.cluster import Cluster, parse_hosts
from fleet_train.errors import ClusterError, WorkerFailed, printable
from fleet_train.launch.launcher import run
from fleet_train.launch.node import look_around
from fleet_train.launch.prepare import prepare
from fleet_train.launch.request import LaunchRequest
from fleet_train.launch.terminal import beside_stdout
from fleet_train.selftest import record
from fleet_train.selftest.child import End, Peers, Subjects
from fleet_train.selftest.options import FAIL, GROUPS, OK, SKIP, TOGETHER, TOGETHER_GROUPS, Options, Result, verdict

_PROCESSES_WITHOUT_GPUS = 2


@dataclass(frozen=True)
class Where:
    """The ranks to start; None: not given."""

    nproc: int | None = None
    ips: str | None = None
    node_ip: str | None = None
    started_port: int | None = None

    @property
    def is_said(self) -> bool:
        return any(value is not None for value in (self.nproc, self.ips, self.node_ip, self.started_port))


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of its ranks. PaddleCloud also tells a pod about others."""
    if "PADDLE_LOCAL_RANK" in environ or "PADDLE_RANK_IN_NODE" in environ:
        return True
    return "PADDLE_TRAINER_ENDPOINTS" in environ and "PADDLE_TRAINERS" not in environ


def start(options: Options, where: Where, folder: Path, as_json: bool, outcome: Path | None) -> int:
    """Run the selftest; returns the exit code. ``outcome``: given to ranks that were started from here."""
    if starts_ranks(where):
        return launch_ranks(options, where, folder, as_json)
    return supervise(options, folder, as_json, outcome)


def starts_ranks(where: Where) -> bool:
    """Whether this process is to start the ranks: it is none itself. Raises ClusterError if it is, and was told where
    to start them."""
    if not is_rank(os.environ):
        return True
    if where.is_said:
        raise ClusterError(
            "--nproc, --ips, --node_ip and --started_port start ranks, but a launcher has started this process as one: "
            "give them to the launcher"
        )
    return False


def launch_ranks(options: Options, where: Where, folder: Path, as_json: bool) -> int:
    """This machine's ranks, through our launcher; they write their outcome into a file."""
    outcome = outcome_in(folder)
    return run_ranks(request_of(options, where, folder, outcome), outcome, as_json)


def outcome_in(folder: Path) -> Path:
    """A file of this command only, into which ranks write their outcome."""
    return (folder / "log" / f".outcome-{secrets.token_hex(8)}.json").absolute()


def run_ranks(request: LaunchRequest, outcome: Path, as_json: bool) -> int:
    """Run ``request`` to its end; returns the exit code that its ranks wrote into ``outcome``, or their own.

    ``as_json``: print what they wrote.
    """
    launch = prepare(request, os.environ)
    try:
        with beside_stdout() if as_json else contextlib.nullcontext():
            code = run(launch, os.environ)
        if code or not outcome.exists():
            return code or 1
        made: dict[str, Any] = json.loads(outcome.read_text())
    finally:
        outcome.unlink(missing_ok=True)
    if as_json:
        click.echo(json.dumps(made, indent=1))
    return int(made["exit_code"])


def request_of(options: Options, where: Where, folder: Path, outcome: Path) -> LaunchRequest:
    command = ["fleet_train", "selftest", "--outcome", str(outcome), "--record", str(folder.absolute())]
    command += [word for group in GROUPS if group not in options.groups for word in ("--skip", group)]
    command += ["--quick"] if options.is_quick else []
    return request_for(command, where, folder, options.join_timeout_seconds)


def request_for(command: Sequence[str], where: Where, folder: Path, join_timeout_seconds: float) -> LaunchRequest:
    """This machine's ranks of ``python -m command``: every GPU, or two by default."""
    nproc = where.nproc
    if nproc is None and look_around(os.environ).gpus is None:
        nproc = _PROCESSES_WITHOUT_GPUS
    return LaunchRequest(
        command=tuple(command),
        is_module=True,
        hosts=parse_hosts(where.ips, "--ips") if where.ips is not None else None,
        node_host=where.node_ip,
        started_port=where.started_port,
        processes_per_node=nproc,
        log_dir=folder / "log",
        join_timeout_seconds=join_timeout_seconds,
    )


def supervise(options: Options, folder: Path, as_json: bool, outcome: Path | None) -> int:
    """As one rank: every check; rank 0 prints, and writes the record."""
    began = time.monotonic()
    peers = Peers.join(options.join_timeout_seconds)
    cluster = peers.cluster
    is_first = cluster.rank == 0

    def say(text: str) -> None:
        if is_first:
            click.echo(printable(text), err=as_json)  # of other machines, too

    def found(result: Result) -> None:
        say(result.line)

    supervisor = Supervisor(peers, options, folder, found)
    with supervisor.peers.leaving_together():
        results, machines = supervisor.run()
        seconds = time.monotonic() - began
        made = supervisor.shared(record.make(cluster, options, machines, results, seconds) if is_first else None)
        if is_first:
            path = record.write(folder, made)
            say(verdict(results, seconds))
            say(f"record: {path} (and .md); logs: {folder / 'log'}")
    return hand_over(made, cluster, as_json, outcome)


def hand_over(made: dict[str, Any], cluster: Cluster, as_json: bool, outcome: Path | None) -> int:
    """At the end of a rank: its result for the process that started it, or for the user; returns the exit code."""
    if outcome is not None:
        if cluster.local_rank == 0:
            outcome.write_text(json.dumps(made))
        return 0  # the process that started us evaluates the result
    if as_json and cluster.rank == 0:
        click.echo(json.dumps(made, indent=1))
    return int(made["exit_code"])


# One rank of a selftest: starts a subject per job, monitors it, and synchronizes with the other supervisors.


TOGETHER_SECONDS, TOGETHER_SECONDS_PER_RANK = 900.0, 10.0
"""How long the checks that share a job may take. Nothing in them waits for longer than its own timeout; the simulation
takes longer with more ranks."""
FAULT_COMES_WITHIN_SECONDS = 180.0
"""For the start of a job that fails on purpose: importing Paddle, joining, a few steps."""
_KILLED_LATER_SECONDS = 5.0
"""Subjects that have not ended this long after the bound will not."""

Say = Callable[[Result], None]


class Supervisor:
    """Runs a selftest for one rank. ``say`` is called with every result, on rank 0."""

    def __init__(self, peers: Peers, options: Options, folder: Path, say: Say) -> None:
        self.cluster = peers.cluster
        self.options = options
        self.peers = peers
        self.results: list[Result] = []
        self._say = say
        self._shared = 0
        self._subjects = Subjects(peers, folder, options.join_timeout_seconds)

    def run(self) -> tuple[list[Result], list[dict[str, Any]]]:
        """Runs every job. Returns the results, and the facts of each node; the same on all ranks."""
        facts = self.peers.gather("facts", record.facts())
        if set(self.options.groups) & set(TOGETHER_GROUPS):
            limit = TOGETHER_SECONDS + TOGETHER_SECONDS_PER_RANK * self.cluster.world_size
            ends, subjects = self.run_job(TOGETHER, limit)
            for result in judge_ends(subjects, ends):
                self.found([result, *not_done(self.options.groups, result.group)])
        if "faults" in self.options.groups:
            self._run_faults()
        shared = self.shared([result.to_json() for result in self.results])
        firsts = [self.cluster.ranks_on_node(node)[0] for node in range(self.cluster.node_num)]
        return [Result.from_json(one) for one in shared], [facts[rank] for rank in firsts]

    def shared(self, value: Any) -> Any:
        """Rank 0's value, on all ranks, after a barrier."""
        self._shared += 1
        return self.peers.gather(f"shared {self._shared}", value)[0]

    def found(self, results: Iterable[Result]) -> None:
        """Final results; rank 0's count."""
        for result in results:
            self.results.append(result)
            if self.cluster.rank == 0:
                self._say(result)

    def _run_faults(self) -> None:
        if self.cluster.world_size == 1:
            self.found([Result("faults", "faults", SKIP, "one rank has no peer that could fail")])
            return
        for kind in FAULT_KINDS:
            began = time.monotonic()
            ends, subjects = self.run_job(kind, FAULT_COMES_WITHIN_SECONDS)
            fault_at = self.peers.noted(f"fault of {kind}")
            others = {rank: end for rank, end in ends.items() if rank != self._at_fault}
            if fault_at is None:
                self.found([_no_fault(subjects, kind, others)])
                continue
            self.found([judge_faults(subjects, kind, self.options, others, fault_at, time.monotonic() - began)])

    @property
    def _at_fault(self) -> int:
        return self.cluster.world_size - 1

    def run_job(self, job: str, limit_seconds: float) -> tuple[dict[int, End], Cluster]:
        """Start this rank's subject and wait for its end; returns how all ranks' subjects ended, and their cluster.

        ``limit_seconds``: when it is killed, unless a fault has been recorded: then soon after the bound for that.
        """

        def on_report(report: dict[str, Any]) -> None:
            if "result" in report:
                self.found([Result.from_json(report["result"])])
            if "fault" in report:
                self.peers.note(f"fault of {job}")

        def why_over() -> str:
            return "its time after a fault is over" if self._is_over(job) else ""

        end, subjects = self._subjects.run(job, self.options.to_json(), limit_seconds, on_report, why_over)
        self.peers.note(f"end of {job} {self.cluster.rank}")
        ends = self.peers.gather(f"ends of {job}", asdict(end), limit_seconds)
        return {rank: End.from_json(one) for rank, one in ends.items()}, subjects

    def _is_over(self, job: str) -> bool:
        """Whether this rank's subject can be stopped: all others have ended, or its time after a fault is over."""
        fault_at = self.peers.noted(f"fault of {job}")
        if fault_at is None:
            return False
        bound = self.options.fault_timeout_seconds + FAULT_GRACE_SECONDS + _KILLED_LATER_SECONDS
        if self.peers.clock() > fault_at + bound:
            return True
        others = (rank for rank in range(self.cluster.world_size) if rank != self._at_fault)
        return self.cluster.rank == self._at_fault and all(
            self.peers.noted(f"end of {job} {rank}") is not None for rank in others
        )


def judge_ends(cluster: Cluster, ends: Mapping[int, End]) -> list[Result]:
    """The failures of subjects that should have ended with 0: names the first one that ended without having lost

    another. The failed group is ``began`` of its end.
    """
    wrong = {rank: end for rank, end in ends.items() if end.exit_code != 0}
    if not wrong:
        return []
    rank, end = min(wrong.items(), key=lambda one: (one[1].exit_code == WorkerFailed.exit_code, one[1].ended_at))
    how = "did not end and was killed" if end.why_killed else f"ended with {describe_code(end.exit_code)}"
    return [Result(end.began, end.began, FAIL, f"{cluster.describe(rank)} {how}: {last_words(end.last_lines)}")]


def not_done(groups: Sequence[str], failed: str) -> list[Result]:
    """The checks of the same job after the one in which it ended; ``start`` comes before all."""
    behind = TOGETHER_GROUPS[TOGETHER_GROUPS.index(failed) + 1 :] if failed in TOGETHER_GROUPS else TOGETHER_GROUPS
    return [Result(one, one, SKIP, f"not run: the ranks ended in '{failed}'") for one in behind if one in groups]


def _no_fault(cluster: Cluster, kind: str, others: dict[int, End]) -> Result:
    """The ranks did not reach the fault."""
    found = judge_ends(cluster, others)
    why = found[0].words if found else "no rank reported why"
    return Result("faults", f"a rank {kind}", FAIL, f"the ranks did not reach the fault: {why}")


# Check 4 in the supervisors: how soon the others end when one rank fails, and whether they name it.


FAULT_KINDS = ("skips a collective", "is stopped", "is killed")
FAULT_GRACE_SECONDS = 10.0
"""In addition to the profile's collective_timeout_seconds: the time for detection, diagnosis and exit."""


def judge_faults(
    cluster: Cluster, kind: str, options: Options, ends: Mapping[int, End], fault_at: float, seconds: float
) -> Result:
    """``cluster``: the subjects', whose last rank failed at ``fault_at``; ``ends``: those of all others."""
    bound = options.fault_timeout_seconds + FAULT_GRACE_SECONDS
    root_cause = cluster.describe(cluster.world_size - 1)
    label = f"a rank {kind}"
    took = {rank: end.ended_at - fault_at for rank, end in ends.items()}
    figures = {
        "seconds": {str(rank): round(each, 2) for rank, each in took.items()},
        "exit_codes": {str(rank): end.exit_code for rank, end in ends.items()},
        "bound_seconds": bound,
    }
    for rank, end in ends.items():
        wrong = _wrong(end, took[rank], root_cause, bound)
        if wrong:
            words = f"{cluster.describe(rank)} {wrong}; {root_cause} {kind.replace('is ', 'was ')}"
            return Result("faults", label, FAIL, words, seconds, figures)
    slowest = max(took.values())
    words = f"{len(ends)} other rank(s) ended within {slowest:.1f} s ({bound:g} s allowed) and named {root_cause}"
    return Result("faults", label, OK, words, seconds, figures)


def _wrong(end: End, seconds: float, root_cause: str, bound: float) -> str:
    said = last_words(end.last_lines)
    if end.why_killed:
        return f"had not ended {seconds:.1f} s after the fault and was killed"
    if end.exit_code != WorkerFailed.exit_code:
        return f"ended with {describe_code(end.exit_code)}, expected {WorkerFailed.exit_code}: {said}"
    if root_cause not in said:
        return f"does not name {root_cause}: {said}"
    if seconds > bound:
        return f"ended after {seconds:.1f} s, {bound:g} s are allowed"
    return ""


def last_words(lines: Sequence[str]) -> str:
    """A rank's message about its end: its last line of ours, or its last one."""
    ours = [line for line in lines if line.startswith("fleet_train:")]
    return (ours or list(lines) or ["it printed nothing"])[-1]


def describe_code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
