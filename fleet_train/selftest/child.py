"""A subject as a child of its supervisor: its environment, its log, its reports, its end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.correction import launch_environment, parent_command
from fleet_train.cluster.environment import cluster_from_environ, rank_variables
from fleet_train.cluster.partial import complete
from fleet_train.cluster.store.access import access_of
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.host import StoreHost, endpoint_of, is_host
from fleet_train.errors import WorkerFailed
from fleet_train.files import open_new, write_new
from fleet_train.launch.node import appended
from fleet_train.launch.prepare import import_path_for_ranks
from fleet_train.launch.processes import Process, end_of
from fleet_train.launch.report import last_lines

SUBJECT = "fleet_train.selftest.subject"
LOOK_SECONDS = 0.5
"""How often a supervisor looks at the others."""

_TICK_SECONDS = 0.05
_LAST_LINES = 8
_LONGEST_LINE = 16 * 1024
# Variables of the selftest's own launch that the subject must not see: its profiles come from the checks.
# Its ranks train on their own, too, to compare.
_NOT_PASSED_ON = frozenset(
    """
    FLEET_TRAIN_STRATEGY FLEET_TRAIN_SET FLEET_TRAIN_STRICT FLEET_TRAIN_ATTEMPT PADDLE_MASTER MASTER_ADDR MASTER_PORT
    """.split()
)


def free_port(host: str) -> int:
    """A port of this machine without a listener now; it identifies a subject, whose rank may open it or not."""
    with socket.socket() as holder:
        holder.bind((host, 0))
        return int(holder.getsockname()[1])


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


class Child(Process):
    """A running subject. The kernel ends it with its supervisor, also while it is stopped."""

    def __init__(
        self, job: str, argument: Mapping[str, Any], environ: Mapping[str, str], log: Path, module: str = SUBJECT
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
        """The subject's reports since the last call."""
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
        return last_lines(end_of(self._log), _LAST_LINES, _LONGEST_LINE)


@dataclass(frozen=True)
class End:
    """How one rank's subject ended. ``exit_code`` is negative for a signal."""

    exit_code: int
    ended_at: float
    """On the clock of all supervisors."""
    why_killed: str
    """Why its supervisor has killed it; empty if it has ended by itself."""
    began: str
    """What it had begun last, by its reports; empty if it had done all."""
    last_lines: tuple[str, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> End:
        return cls(**data | {"last_lines": tuple(data["last_lines"])})


class Subjects:
    """Runs this rank's subject of one job after the other, together with the other supervisors."""

    def __init__(self, peers: Peers, folder: Path, join_timeout_seconds: float, module: str = SUBJECT) -> None:
        self._peers = peers
        self._folder = folder
        self._join_timeout_seconds = join_timeout_seconds
        self._module = module

    def run(
        self,
        job: str,
        argument: Mapping[str, Any],
        limit_seconds: float,
        on_report: Callable[[dict[str, Any]], None],
        why_over: Callable[[], str],
    ) -> tuple[End, Cluster]:
        """Start it, and wait for its end; returns also the cluster of all subjects of the job.

        It is killed after ``limit_seconds``, or when ``why_over`` returns a reason.
        Raises WorkerFailed if another supervisor is gone.
        """
        cluster = self._peers.subjects(job, free_port(self._peers.cluster.this.host))
        environ = environ_of(cluster, self._join_timeout_seconds, os.environ)
        log = self._folder / "log" / f"{job.replace(' ', '_')}.{cluster.rank}.log"
        child = Child(job, argument, environ, log, self._module)
        deadline, look_at = time.monotonic() + limit_seconds, 0.0
        why_killed, began = "", "start"
        try:
            while True:
                has_ended = child.wait(_TICK_SECONDS) is not None
                for report in child.reports():
                    began = report.get("begins", began)
                    on_report(report)
                if has_ended:
                    assert child.status is not None
                    end = End(child.status, self._peers.clock(), why_killed, began, child.last_lines())
                    return end, cluster
                if time.monotonic() > look_at:
                    look_at = time.monotonic() + LOOK_SECONDS
                    self._peers.look()
                    is_late = time.monotonic() > deadline
                    why_killed = why_killed or (f"did not end within {limit_seconds:.0f} s" if is_late else why_over())
                    if why_killed:
                        child.kill()
        finally:
            child.kill()


# Communication of the supervisors: over the project's own store, in a separate scope.


_GROUP = "supervisor"


class Peers:
    """This rank's supervisor among the others. Every wait is bounded and names missing ranks."""

    def __init__(
        self, cluster: Cluster, timeout_seconds: float, command: str = "selftest", host: StoreHost | None = None
    ) -> None:
        self.cluster = cluster
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._host = host
        if host is None and is_host(cluster):
            self._host = StoreHost.of(cluster, timeout_seconds)
        endpoint = endpoint_of(cluster)
        self._address, _, scope = endpoint.partition("/")
        self._scope = f"{scope}.{command}"
        try:
            self._client = StoreClient.connect(
                f"{self._address}/{self._scope}",
                cluster.rank,
                group=_GROUP,
                access=access_of(cluster),
                timeout_seconds=timeout_seconds,
                describe=cluster.describe,
            )
        except BaseException:
            self.close_host()
            raise

    @classmethod
    def join(cls, timeout_seconds: float, command: str = "selftest") -> Peers:
        """As a rank that a launcher or an engine started: with those of this process's environment."""
        cluster, host = complete(cluster_from_environ(launch_environment(), parent_command()), timeout_seconds)
        return cls(cluster, timeout_seconds, command, host)

    def gather(self, name: str, value: Any = None, timeout_seconds: float | None = None) -> dict[int, Any]:
        """Barrier of all supervisors, in which each contributes a JSON value."""
        return self._client.all_gather(name, value, self.cluster.world_size, timeout_seconds or self._timeout_seconds)

    def subjects(self, job: str, port: int) -> Cluster:
        """The cluster of a job's subjects: the same hosts with other ports, and a separate scope in the store."""
        ports = self.gather(f"ports of {job}", port)
        ranks = tuple(replace(rank, port=int(ports[rank.index])) for rank in self.cluster.ranks)
        endpoint = f"{self._address}/{self._scope}.{job}"
        return Cluster(ranks, self.cluster.rank, endpoint, formed_by=f"the {self._command}")

    def look(self) -> None:
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

    @contextlib.contextmanager
    def leaving_together(self) -> Iterator[None]:
        """All supervisors leave together; one that fails is lost for the others."""
        try:
            yield
            self.leave()
        finally:
            self.close()

    def leave(self) -> None:
        """Disconnect properly. Rank 0's store may be gone already: all have passed the last barrier."""
        with contextlib.suppress(WorkerFailed):
            self._client.leave()

    def close(self) -> None:
        self._client.close()
        self.close_host()

    def close_host(self) -> None:
        if self._host is not None:
            self._host.release()
