"""Planning without a cluster: a script runs up to ``minimize`` as rank 0 of a simulated job; and timing a real one."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from fleet_train.cluster import Cluster
from fleet_train.cluster.environment import join_timeout_seconds
from fleet_train.cluster.store.client import Variants
from fleet_train.collectives.job import Array, Job, refuse_unreducible
from fleet_train.collectives.join import join, probe
from fleet_train.convert import fleet, process, session
from fleet_train.convert.role_maker import cluster_of
from fleet_train.errors import ClusterError, ConversionError
from fleet_train.plan import CommPlan
from fleet_train.plan.choose import PAPER, MeasuredLink
from fleet_train.plan.price import Network
from fleet_train.profile import Profile


@dataclass(frozen=True)
class Planned:
    """A plan and the profile that it was made from."""

    plan: CommPlan
    profile: Profile


class _PlanIsReady(BaseException):
    """Ends the script at its first conversion. A BaseException: a script's ``except Exception`` lets it pass."""

    def __init__(self, planned: Planned) -> None:
        super().__init__("plan is ready")
        self.planned = planned


class _ImaginedJob(Job):
    """Rank 0 of a job whose other ranks do not exist; checks between ranks always pass."""

    def __init__(self, cluster: Cluster, place: Any, network: Network) -> None:
        super().__init__(cluster, place)
        self.network, self.network_source = network, "on paper"

    def barrier(self, name: str, timeout_seconds: float | None = None) -> None:
        """Waits for no rank."""

    def all_gather(self, name: str, value: Any, timeout_seconds: float | None = None) -> dict[int, Any]:
        del name, timeout_seconds
        return dict.fromkeys(range(self.world_size), value)

    def broadcast(self, name: str, value: Any, source: int = 0, timeout_seconds: float | None = None) -> Any:
        del name, source, timeout_seconds
        return value

    def compare(self, name: str, value: Any, timeout_seconds: float | None = None) -> Variants:
        del name, value, timeout_seconds
        return []

    def reduce(self, values: Array, op: str) -> Array:
        refuse_unreducible(values, op)
        return values * self.world_size if op == "sum" else values.copy()

    def agreed(self, plan: CommPlan) -> None:
        raise _PlanIsReady(Planned(plan, fleet.profile()))


@contextmanager
def _imagined(cluster: Cluster, network: Network) -> Iterator[None]:
    fleet.shutdown()
    session.join_as(lambda: _ImaginedJob(cluster, paddle.CPUPlace(), network))
    try:
        yield
    finally:
        fleet.shutdown()
        session.join_as(None)


def plan_of(action: Callable[[], Any], cluster: Cluster, network: Network = PAPER) -> Planned:
    """The plan of the first program that ``action`` converts. Nothing is trained or sent. Settings that the profile
    leaves open are chosen for ``network``.

    Raises ConversionError when ``action`` ends without converting a program.
    """
    if cluster.world_size == 1:
        raise ConversionError("one rank communicates nothing: plan for more (--nodes, --ranks_per_node)")
    with _imagined(cluster, network):
        try:
            action()
        except _PlanIsReady as ready:
            return ready.planned
        except SystemExit as end:
            raise ConversionError(f"the script ended (exit {end.code}) before optimizer.minimize was called") from None
    raise ConversionError("the script ended without calling minimize on an optimizer from fleet.distributed_optimizer")


def plan_of_script(script: Path, arguments: Sequence[str], cluster: Cluster, network: Network = PAPER) -> Planned:
    """The plan of a training script, run with these arguments up to its ``minimize``; ``network`` as in `plan_of`."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        return plan_of(lambda: runpy.run_path(str(script), run_name="__main__"), cluster, network)
    finally:
        sys.argv, sys.path[:] = before


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
    process.watch(job)

    def say(text: str) -> None:
        if cluster.rank == 0:
            print(text, file=sys.stderr, flush=True)

    say(f"measuring {cluster.world_size} ranks on {cluster.node_num} nodes for about {seconds:g} s")
    found = probe(job, seconds, say)
    process.leave(job)
    return MeasuredCluster(cluster, found.get("between nodes"), found.get("inside a node"))
