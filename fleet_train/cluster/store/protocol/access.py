"""Distinguishes a job's connections from foreign ones: the job's id, its secret, and the addresses of its nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.secret import job_secret

JOB_ID = "FLEET_TRAIN_JOB_ID"


@dataclass(frozen=True)
class Access:
    """``source``: this node's own address, from which its connections come (empty: the kernel chooses)."""

    job: str = ""
    secret: bytes | None = field(default=None, repr=False)
    source: str = ""

    @classmethod
    def of(
        cls,
        environ: Mapping[str, str] | None = None,
        source: str = "",
        job: str = "",
        say: Callable[[str], None] = lambda _: None,
    ) -> Access:
        """From this process's environment. ``say``: see ``job_secret``. Raises ClusterError for an unusable secret."""
        environ = os.environ if environ is None else environ
        return cls(environ.get(JOB_ID, "") or job, job_secret(environ, say), source)


def access_of(cluster: Cluster, environ: Mapping[str, str] | None = None) -> Access:
    """For one rank of a job: its launcher, ours or the stock one, has given it the job's id."""
    environ = os.environ if environ is None else environ
    return Access.of(environ, cluster.this.host, environ.get("PADDLE_JOB_ID", ""))
