"""A command that runs on every rank of a cluster: where its ranks start, and how their supervisors meet.

`start_on_ranks` starts the ranks through our launcher, or this process is one, started by any launcher. On each rank
`Peers` is the supervisor among the others, over the project's own store; `Peers.run` runs one job of subjects after the
other: processes that are ranks of a cluster of their own, and may fail, hang or be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.at_import import launch_environment, parent_command
from fleet_train.cluster.cluster import Cluster, parse_nodes
from fleet_train.cluster.environment import cluster_from_environ, rank_variables
from fleet_train.cluster.network import free_port
from fleet_train.cluster.partial import complete
from fleet_train.cluster.store.access import access_of
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.host import StoreHost, endpoint_of, is_host
from fleet_train.errors import ClusterError, WorkerFailed, printable
from fleet_train.files import open_new, write_new
from fleet_train.launch.launcher import run
from fleet_train.launch.node import appended, look_around
from fleet_train.launch.prepare import import_path_for_ranks, prepare
from fleet_train.launch.processes import Process, end_of
from fleet_train.launch.report import last_lines
from fleet_train.launch.request import LaunchRequest
from fleet_train.launch.terminal import beside_stdout

_PROCESSES_WITHOUT_GPUS = 2
_FOLLOW_SECONDS = 5.0
"""How long the other subjects of a job have to end by themselves after one has failed."""


@dataclass(frozen=True)
class RankCommand:
    """``name`` of ``python -m fleet_train``, whose ranks run it with ``arguments``; its logs go below ``folder``."""

    name: str
    arguments: Sequence[str]
    folder: Path
    join_timeout_seconds: float
    as_json: bool
    outcome: Path | None
    """Where a rank that this command has started writes its result; None: it was not."""


@dataclass(frozen=True)
class Where:
    """The ranks to start; None: not given."""

    nproc: int | None = None
    ips: str | None = None
    node_ip: str | None = None
    started_port: int | None = None

    @property
    def is_given(self) -> bool:
        return any(value is not None for value in (self.nproc, self.ips, self.node_ip, self.started_port))


def start_on_ranks(command: RankCommand, where: Where, supervise: Callable[[Peers], dict[str, Any]]) -> int:
    """``supervise`` on every rank; returns the exit code, which is in its result. Raises ClusterError if a launcher
    started this process, and it was told where to start ranks."""
    if not is_rank(os.environ):
        return _launch(command, where)
    if where.is_given:
        raise ClusterError(
            "--nproc, --ips, --node_ip and --started_port start ranks, but a launcher has started this process as one: "
            "give them to the launcher"
        )
    with Peers.join(command) as peers:
        result = supervise(peers)
    if command.outcome is not None:
        if peers.cluster.local_rank == 0:
            command.outcome.write_text(json.dumps(result))
        return 0  # the process that started us evaluates the result
    if command.as_json and peers.cluster.rank == 0:
        print(json.dumps(result, indent=1))
    return int(result["exit_code"])


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of its ranks. PaddleCloud also tells a pod about others."""
    if "PADDLE_LOCAL_RANK" in environ or "PADDLE_RANK_IN_NODE" in environ:
        return True
    return "PADDLE_TRAINER_ENDPOINTS" in environ and "PADDLE_TRAINERS" not in environ


def _launch(command: RankCommand, where: Where) -> int:
    """Run this machine's ranks through our launcher; returns the exit code that they wrote, or their own."""
    outcome = (command.folder / "log" / f".outcome-{secrets.token_hex(8)}.json").absolute()
    launch = prepare(request_of(command, where, outcome), os.environ)
    try:
        with beside_stdout() if command.as_json else contextlib.nullcontext():
            code = run(launch, os.environ)
        if code or not outcome.exists():
            return code or 1
        result: dict[str, Any] = json.loads(outcome.read_text())
    finally:
        outcome.unlink(missing_ok=True)
    if command.as_json:
        print(json.dumps(result, indent=1))
    return int(result["exit_code"])


def request_of(command: RankCommand, where: Where, outcome: Path) -> LaunchRequest:
    """This machine's ranks: what the node list says, every GPU, or two by default."""
    hosts, counts = parse_nodes(where.ips, "--ips") if where.ips is not None else (None, ())
    nproc = where.nproc
    if nproc is None and not counts and look_around(os.environ).gpus is None:
        nproc = _PROCESSES_WITHOUT_GPUS
    return LaunchRequest(
        command=("fleet_train", command.name, "--outcome", str(outcome), *command.arguments),
        is_module=True,
        hosts=hosts,
        counts=counts,
        node_host=where.node_ip,
        started_port=where.started_port,
        processes_per_node=nproc,
        log_dir=command.folder / "log",
        log_flag="--record",
        join_timeout_seconds=command.join_timeout_seconds,
    )


class Peers:
    """This rank's supervisor among the others. Every wait is bounded and names missing ranks."""

    def __init__(self, command: RankCommand, cluster: Cluster, client: StoreClient, endpoint: str) -> None:
        self.cluster = cluster
        self._command = command
        self._client = client
        self._endpoint = endpoint

    @classmethod
    @contextlib.contextmanager
    def join(cls, command: RankCommand) -> Iterator[Peers]:
        """As a rank that a launcher or an engine started: with those of this process's environment. All leave together;
        one that fails is lost for the others."""
        timeout = command.join_timeout_seconds
        cluster, host = complete(cluster_from_environ(launch_environment(), parent_command()), timeout)
        if host is None and is_host(cluster):
            host = StoreHost.of(cluster, timeout)
        address, _, scope = endpoint_of(cluster).partition("/")
        endpoint = f"{address}/{scope}.{command.name}"
        with contextlib.ExitStack() as stack:
            if host is not None:
                stack.callback(host.release)
            client = StoreClient.connect(
                endpoint,
                cluster.rank,
                group="supervisor",
                access=access_of(cluster),
                timeout_seconds=timeout,
                describe=cluster.describe,
            )
            stack.callback(client.close)
            yield cls(command, cluster, client, endpoint)
            with contextlib.suppress(WorkerFailed):  # rank 0's store may be gone: all have passed the last barrier
                client.leave()

    def show(self, text: str) -> None:
        """A line of the command's output, on rank 0; its names come from other machines, too."""
        if self.cluster.rank == 0:
            print(printable(text), file=sys.stderr if self._command.as_json else sys.stdout, flush=True)

    def gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> dict[int, Any]:
        """Barrier of all supervisors, in which each contributes a JSON value."""
        timeout_seconds = timeout_seconds or self._command.join_timeout_seconds
        return self._client.all_gather(name, value, self.cluster.world_size, timeout_seconds)

    def note(self, key: str) -> None:
        """Record, for all supervisors, when ``key`` happened."""
        self._client.set(key, self.clock())

    def noted(self, key: str) -> float | None:
        """When ``key`` happened, in the seconds of ``clock``; None if it has not."""
        seconds: float | None = self._client.get(key)
        return seconds

    def clock(self) -> float:
        """One clock for all machines, in seconds."""
        return self._client.clock()

    def run(
        self,
        job: str,
        argument: Mapping[str, Any],
        limit_seconds: float,
        on_report: Callable[[dict[str, Any]], None] = lambda _: None,
        why_over: Callable[[], str] | None = None,
    ) -> tuple[dict[int, SubjectEnd], Cluster]:
        """Run this rank's subject of a job to its end; returns how those of all ranks ended, and their cluster: the
        same hosts with other ports, and a separate scope in the store.

        It is killed after ``limit_seconds``, or when ``why_over`` returns a reason (None: soon after another one has
        failed). The end of each is noted as ``end of JOB RANK``. Raises WorkerFailed if another supervisor is gone.
        """
        ports = self.gather(f"ports of {job}", free_port(self.cluster.this.host))
        ranks = tuple(replace(rank, port=int(ports[rank.index])) for rank in self.cluster.ranks)
        cluster = Cluster(ranks, self.cluster.rank, f"{self._endpoint}.{job}", formed_by=f"the {self._command.name}")
        environ = environ_of(cluster, self._command.join_timeout_seconds, os.environ)
        log = self._command.folder / "log" / f"{job.replace(' ', '_')}.{cluster.rank}.log"
        failure = f"failure of {job}"
        subject = Subject(job, argument, environ, log, f"fleet_train.{self._command.name}.subject")
        try:
            reports, why_killed = self._watch(
                subject, limit_seconds, on_report, why_over or (lambda: self._lost_another(failure))
            )
        finally:
            subject.kill()
        assert subject.status is not None
        lines = subject.last_lines(), subject.lines_of_nccl()
        end = SubjectEnd(subject.status, self.clock(), why_killed, tuple(reports), *lines)
        self.note(f"end of {job} {cluster.rank}")
        if end.failure and self.noted(failure) is None:
            self.note(failure)
        ends = self.gather(f"ends of {job}", asdict(end), limit_seconds + self._command.join_timeout_seconds)
        return {rank: SubjectEnd.from_json(content) for rank, content in ends.items()}, cluster

    def _watch(
        self,
        subject: Subject,
        limit_seconds: float,
        on_report: Callable[[dict[str, Any]], None],
        why_over: Callable[[], str],
    ) -> tuple[list[dict[str, Any]], str]:
        """Until it has ended; returns its reports, and why it was killed."""
        deadline, next_check = time.monotonic() + limit_seconds, 0.0
        reports: list[dict[str, Any]] = []
        why_killed = ""
        while True:
            has_ended = subject.wait(timeouts.WATCH_TICK_SECONDS) is not None
            for report in subject.reports():
                reports.append(report)
                on_report(report)
            if has_ended:
                return reports, why_killed
            if time.monotonic() > next_check:
                next_check = time.monotonic() + timeouts.ASK_STORE_SECONDS
                self._check_others()
                is_late = time.monotonic() > deadline
                why_killed = why_killed or (f"did not end within {limit_seconds:.0f} s" if is_late else why_over())
                if why_killed:
                    subject.kill()

    def _lost_another(self, failure: str) -> str:
        failed_at = self.noted(failure)
        return _LOST if failed_at is not None and self.clock() > failed_at + _FOLLOW_SECONDS else ""

    def _check_others(self) -> None:
        """Raise WorkerFailed if another supervisor is gone."""
        gone = self._client.gone()
        if gone:
            member, how = next(iter(gone.items()))
            raise WorkerFailed(f"the supervisor of {self.cluster.describe(member)} is gone ({how})")


# Variables of the command's own launch that a subject must not see: its profiles come from the supervisor. It may train
# on its own, too, to compare.
_NOT_PASSED_ON = frozenset(
    """
    FLEET_TRAIN_STRATEGY FLEET_TRAIN_SET FLEET_TRAIN_STRICT FLEET_TRAIN_TRACE FLEET_TRAIN_ATTEMPT PADDLE_MASTER
    MASTER_ADDR MASTER_PORT
    """.split()
)


def environ_of(cluster: Cluster, join_timeout_seconds: float, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of this rank's subject: its supervisor's, with the subjects' cluster."""
    kept = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    kept |= rank_variables(cluster) | {
        "PADDLE_NNODES": str(cluster.node_num),
        "FLEET_TRAIN_STORE": cluster.store_endpoint,
        "FLEET_TRAIN_JOIN_TIMEOUT": f"{join_timeout_seconds:g}",
        "PYTHONUNBUFFERED": "1",
    }
    home = import_path_for_ranks()
    if home is not None:
        kept["PYTHONPATH"] = appended(kept.get("PYTHONPATH", ""), str(home))
    return kept


_LOST = "waited for a rank that had failed"
_LAST_LINES = 8
_LINES_OF_NCCL = 10
_CHATTER = " NCCL INFO "
_LONGEST_LINE = 16 * 1024


class Subject(Process):
    """A running process under test, ``python -m MODULE JOB REPORTS ARGUMENT``: it writes one JSON object per line into
    the file of reports. The kernel ends it with its supervisor, also while it is stopped."""

    def __init__(
        self, job: str, argument: Mapping[str, Any], environ: Mapping[str, str], log: Path, module: str
    ) -> None:
        self._log = log
        self._reports = log.with_suffix(".reports")
        self._read = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        write_new(self._reports, b"")
        command = [sys.executable, "-m", module, job, str(self._reports), json.dumps(argument)]
        with open_new(log) as sink:
            super().__init__(command, environ, sink)

    def reports(self) -> Iterator[dict[str, Any]]:
        """Its reports since the last call."""
        with self._reports.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # the rest is being written
                self._read += len(line)
                yield json.loads(line)

    def kill(self) -> None:
        """It has ended afterwards, and what it has started."""
        self.kill_group()
        self.wait()

    def last_lines(self) -> tuple[str, ...]:
        """The end of its output, to explain a failure."""
        lines = (line for line in end_of(self._log).split("\n") if _CHATTER not in line)
        return last_lines("\n".join(lines), _LAST_LINES, _LONGEST_LINE)

    def lines_of_nccl(self) -> tuple[str, ...]:
        """NCCL's last lines (NCCL_DEBUG)."""
        lines = (line for line in end_of(self._log).split("\n") if "NCCL" in line)
        return last_lines("\n".join(lines), _LINES_OF_NCCL)


@dataclass(frozen=True)
class SubjectEnd:
    """How one rank's subject ended. ``exit_code`` is negative for a signal."""

    exit_code: int
    ended_at: float
    """On the clock of all supervisors."""
    why_killed: str
    """Why its supervisor has killed it; empty if it has ended by itself."""
    reports: tuple[dict[str, Any], ...] = ()
    last_lines: tuple[str, ...] = ()
    lines_of_nccl: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SubjectEnd:
        return cls(**data | {name: tuple(data[name]) for name in ("reports", "last_lines", "lines_of_nccl")})

    @property
    def began(self) -> str:
        """What it had begun last, by its reports; empty if it had done all."""
        return next((report["begins"] for report in reversed(self.reports) if "begins" in report), "start")

    @property
    def how(self) -> str:
        return f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"

    @property
    def last_words(self) -> str:
        """A rank's message about its end: its last line of ours, or its last one."""
        ours = [line for line in self.last_lines if line.startswith("fleet_train:")]
        return (ours or list(self.last_lines) or ["it printed nothing"])[-1]

    @property
    def failure(self) -> str:
        """In words that follow the rank's name; empty if it has ended with 0."""
        if not self.exit_code:
            return ""
        how = f"{self.why_killed} and was killed" if self.why_killed else f"ended with {self.how}"
        return f"{how}: {self.last_words}"

    @property
    def is_secondary(self) -> bool:
        """It had lost another rank, or waited for one."""
        return self.exit_code == WorkerFailed.exit_code or self.why_killed == _LOST


def first_to_fail(ends: Mapping[int, SubjectEnd]) -> int | None:
    """The rank whose subject failed first, a secondary one only if there is no other; None if all ended with 0."""
    wrong = {rank: end for rank, end in ends.items() if end.failure}
    return min(wrong, key=lambda rank: (wrong[rank].is_secondary, wrong[rank].ended_at), default=None)
