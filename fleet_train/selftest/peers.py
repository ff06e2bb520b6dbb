"""Communication of the supervisors: over the project's own store, in a separate scope."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.correction import launch_environment, parent_command
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.cluster.partial import complete
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.protocol.access import access_of
from fleet_train.cluster.store.servers.host import StoreHost, endpoint_of, is_host
from fleet_train.errors import WorkerFailed

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
