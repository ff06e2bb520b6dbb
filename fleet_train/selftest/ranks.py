"""A command that runs on every rank of a cluster: where its ranks start, and how their supervisors meet.

`start_on_ranks` starts the ranks through our launcher, or this process is one, started by any launcher. On each rank
`Peers` is the supervisor among the others, over the project's own store; `Peers.run` runs one subject after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from fleet_train import timeouts
from fleet_train.cluster.at_import import launch_environment, parent_command
from fleet_train.cluster.cluster import Cluster, parse_hosts
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.cluster.network import free_port
from fleet_train.cluster.partial import complete
from fleet_train.cluster.store.access import access_of
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.host import StoreHost, endpoint_of, is_host
from fleet_train.errors import ClusterError, WorkerFailed, printable
from fleet_train.launch.launcher import run
from fleet_train.launch.node import look_around
from fleet_train.launch.prepare import prepare
from fleet_train.launch.request import LaunchRequest
from fleet_train.launch.terminal import beside_stdout
from fleet_train.selftest.child import Child, End, environ_of

_PROCESSES_WITHOUT_GPUS = 2


@dataclass(frozen=True)
class Command:
    """``name`` of ``python -m fleet_train``, whose ranks run it with ``arguments``; its logs go below ``folder``."""

    name: str
    arguments: Sequence[str]
    folder: Path
    join_timeout_seconds: float
    as_json: bool
    outcome: Path | None
    """Where a rank that this command has started writes its result; None: it was not."""


def start_on_ranks(command: Command, where: Where, supervise: Callable[[Peers], dict[str, Any]]) -> int:
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
        click.echo(json.dumps(result, indent=1))
    return int(result["exit_code"])


def _launch(command: Command, where: Where) -> int:
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
        click.echo(json.dumps(result, indent=1))
    return int(result["exit_code"])


def request_of(command: Command, where: Where, outcome: Path) -> LaunchRequest:
    """This machine's ranks: every GPU, or two by default."""
    nproc = where.nproc
    if nproc is None and look_around(os.environ).gpus is None:
        nproc = _PROCESSES_WITHOUT_GPUS
    return LaunchRequest(
        command=("fleet_train", command.name, "--outcome", str(outcome), *command.arguments),
        is_module=True,
        hosts=parse_hosts(where.ips, "--ips") if where.ips is not None else None,
        node_host=where.node_ip,
        started_port=where.started_port,
        processes_per_node=nproc,
        log_dir=command.folder / "log",
        log_flag="--record",
        join_timeout_seconds=command.join_timeout_seconds,
    )


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


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of its ranks. PaddleCloud also tells a pod about others."""
    if "PADDLE_LOCAL_RANK" in environ or "PADDLE_RANK_IN_NODE" in environ:
        return True
    return "PADDLE_TRAINER_ENDPOINTS" in environ and "PADDLE_TRAINERS" not in environ


class Peers:
    """This rank's supervisor among the others. Every wait is bounded and names missing ranks."""

    def __init__(self, command: Command, cluster: Cluster, host: StoreHost | None) -> None:
        self.cluster = cluster
        self._command = command
        self._host = host
        endpoint = endpoint_of(cluster)
        self._address, _, scope = endpoint.partition("/")
        self._scope = f"{scope}.{command.name}"
        try:
            self._client = StoreClient.connect(
                f"{self._address}/{self._scope}",
                cluster.rank,
                group="supervisor",
                access=access_of(cluster),
                timeout_seconds=command.join_timeout_seconds,
                describe=cluster.describe,
            )
        except BaseException:
            self._release_host()
            raise

    @classmethod
    @contextlib.contextmanager
    def join(cls, command: Command) -> Iterator[Peers]:
        """As a rank that a launcher or an engine started: with those of this process's environment. All leave together;
        one that fails is lost for the others."""
        cluster, host = complete(
            cluster_from_environ(launch_environment(), parent_command()), command.join_timeout_seconds
        )
        if host is None and is_host(cluster):
            host = StoreHost.of(cluster, command.join_timeout_seconds)
        peers = cls(command, cluster, host)
        try:
            yield peers
            with contextlib.suppress(WorkerFailed):  # rank 0's store may be gone: all have passed the last barrier
                peers._client.leave()
        finally:
            peers._client.close()
            peers._release_host()

    def show(self, text: str) -> None:
        """A line of the command's output, on rank 0; its names come from other machines, too."""
        if self.cluster.rank == 0:
            click.echo(printable(text), err=self._command.as_json)

    def gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> dict[int, Any]:
        """Barrier of all supervisors, in which each contributes a JSON value."""
        timeout_seconds = timeout_seconds or self._command.join_timeout_seconds
        return self._client.all_gather(name, value, self.cluster.world_size, timeout_seconds)

    def run(
        self,
        job: str,
        argument: Mapping[str, Any],
        limit_seconds: float,
        on_report: Callable[[dict[str, Any]], None],
        why_over: Callable[[], str],
    ) -> tuple[End, Cluster]:
        """Run this rank's subject of a job to its end; returns also the cluster of all its subjects: the same hosts
        with other ports, and a separate scope in the store.

        It is killed after ``limit_seconds``, or when ``why_over`` returns a reason.
        Raises WorkerFailed if another supervisor is gone.
        """
        ports = self.gather(f"ports of {job}", free_port(self.cluster.this.host))
        ranks = tuple(replace(rank, port=int(ports[rank.index])) for rank in self.cluster.ranks)
        endpoint = f"{self._address}/{self._scope}.{job}"
        cluster = Cluster(ranks, self.cluster.rank, endpoint, formed_by=f"the {self._command.name}")
        environ = environ_of(cluster, self._command.join_timeout_seconds, os.environ)
        log = self._command.folder / "log" / f"{job.replace(' ', '_')}.{cluster.rank}.log"
        child = Child(job, argument, environ, log, f"fleet_train.{self._command.name}.subject")
        deadline, next_check = time.monotonic() + limit_seconds, 0.0
        why_killed, began = "", "start"
        try:
            while True:
                has_ended = child.wait(timeouts.WATCH_TICK_SECONDS) is not None
                for report in child.reports():
                    began = report.get("begins", began)
                    on_report(report)
                if has_ended:
                    assert child.status is not None
                    lines = child.last_lines(), child.lines_of_nccl()
                    return End(child.status, self.clock(), why_killed, began, *lines), cluster
                if time.monotonic() > next_check:
                    next_check = time.monotonic() + timeouts.ASK_STORE_SECONDS
                    self._check_others()
                    is_late = time.monotonic() > deadline
                    why_killed = why_killed or (f"did not end within {limit_seconds:.0f} s" if is_late else why_over())
                    if why_killed:
                        child.kill()
        finally:
            child.kill()

    def _check_others(self) -> None:
        """Raise WorkerFailed if another supervisor is gone."""
        gone = self._client.gone()
        if gone:
            member, how = next(iter(gone.items()))
            raise WorkerFailed(f"the supervisor of {self.cluster.describe(member)} is gone ({how})")

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

    def _release_host(self) -> None:
        if self._host is not None:
            self._host.release()
