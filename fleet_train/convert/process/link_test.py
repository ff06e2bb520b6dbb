"""Measuring a cluster: join the job that the launcher describes, time the links, leave."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from fleet_train.cluster import Cluster
from fleet_train.cluster.environment import join_timeout_seconds
from fleet_train.collectives.job.join import join
from fleet_train.collectives.job.link_probe import probe
from fleet_train.convert.process import exits
from fleet_train.convert.process.role_maker import cluster_of
from fleet_train.errors import ClusterError
from fleet_train.plan.price.measure import MeasuredLink


@dataclass(frozen=True)
class MeasuredCluster:
    """The results, the same on every rank; None for a kind of link that the cluster does not have."""

    cluster: Cluster
    between: MeasuredLink | None
    inside: MeasuredLink | None


def measure_cluster(seconds: float) -> MeasuredCluster:
    """Time allreduces for about ``seconds`` on all ranks of the launcher's job; rank 0 prints the progress to stderr.

    Raises ClusterError when there is no second rank to measure with.
    """
    cluster = cluster_of(None)
    if cluster.world_size == 1:
        raise ClusterError(
            "--measure found one rank; it needs at least two. Start it on every node through "
            "`python -m fleet_train launch --cluster_node_ips=A,B ... -m fleet_train plan --measure`"
        )
    job = join(cluster, join_timeout_seconds(os.environ))
    cluster = job.cluster
    exits.watch(job)

    def say(text: str) -> None:
        if cluster.rank == 0:
            print(text, file=sys.stderr, flush=True)

    say(f"measuring {cluster.world_size} ranks on {cluster.node_num} nodes for about {seconds:g} s")
    found = probe(job, seconds, say)
    exits.watch(None)
    job.leave()
    return MeasuredCluster(cluster, found.get("between nodes"), found.get("inside a node"))
