"""Role makers: how a process finds out which rank it is. Fleet's names, kept for the scripts that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet_train.cluster import Cluster, cluster_from_environ
from fleet_train.cluster.at_import import launch_environment, parent_command
from fleet_train.cluster.cluster import from_endpoints
from fleet_train.cluster.partial import PartialCluster
from fleet_train.errors import ClusterError

__all__ = ["PaddleCloudRoleMaker", "Role", "UserDefinedCollectiveRoleMaker", "UserDefinedRoleMaker", "cluster_of"]


class Role:
    """Fleet's numbers for what a process does. Only WORKER exists here."""

    WORKER = 1
    SERVER = 2
    HETER_WORKER = 3
    ALL = 4
    COORDINATOR = 5


class PaddleCloudRoleMaker:
    """Reads the rank from the variables set by the launcher (ours, Paddle's, or PaddleCloud's).

    Only collective training exists here: ``is_collective=False`` (parameter servers) is refused.
    """

    def __init__(self, is_collective: bool = False, **options: Any) -> None:
        _refuse_parameter_servers(type(self).__name__, is_collective)
        # Fleet's own Gloo, for parameter servers; PaddleClas and others write init_gloo=False.
        if options.pop("init_gloo", False):
            raise ClusterError(
                "PaddleCloudRoleMaker(init_gloo=True) starts a Gloo for parameter servers; leave it out, fleet.init "
                "forms the process groups"
            )
        if options:
            raise ClusterError(
                f"PaddleCloudRoleMaker does not know {', '.join(sorted(options))}; it takes is_collective"
            )

    def cluster(self, environ: Mapping[str, str] | None = None) -> Cluster | PartialCluster:
        """The cluster described by the launch environment or the launcher's command line; a partial one if Slurm, MPI
        or the like has started the ranks."""
        return cluster_from_environ(launch_environment() if environ is None else environ, parent_command())


class UserDefinedRoleMaker:
    """The cluster as described by the script: this process is ``worker_endpoints[current_id]``.

    A launcher that has started several processes must describe the same cluster. Raises ClusterError if the two differ,
    for parameter servers, and for arguments that describe no cluster.
    """

    def __init__(
        self,
        is_collective: bool = False,
        init_gloo: bool = False,
        *,
        current_id: int = 0,
        role: int = Role.WORKER,
        worker_endpoints: Sequence[str] = (),
        worker_num: int = 0,
        server_endpoints: Sequence[str] = (),
        **options: Any,
    ) -> None:
        name = type(self).__name__
        _refuse_parameter_servers(name, is_collective and role == Role.WORKER and not server_endpoints)
        if init_gloo or options:
            unknown = ", ".join(sorted([*options, *(["init_gloo"] if init_gloo else [])]))
            raise ClusterError(f"{name} does not know {unknown}; it takes current_id, worker_endpoints and worker_num")
        self._endpoints = list(worker_endpoints)
        self._number = len(self._endpoints) or worker_num
        self._current = current_id
        if self._endpoints and worker_num not in (0, len(self._endpoints)):
            raise ClusterError(
                f"{name}: worker_num={worker_num}, but worker_endpoints names {len(self._endpoints)} processes; they "
                "must agree"
            )
        if self._number < 1:
            raise ClusterError(f"{name} needs worker_endpoints=['host:port', ...], one for each rank")
        if not 0 <= current_id < self._number:
            raise ClusterError(
                f"{name}: current_id={current_id} is not in 0 .. {self._number - 1}, the ranks of this job"
            )

    def cluster(self, environ: Mapping[str, str] | None = None) -> Cluster | PartialCluster:
        """The cluster that was described, cross-checked with the launcher's."""
        launched = PaddleCloudRoleMaker(is_collective=True).cluster(environ)
        if launched.world_size == 1 and self._endpoints:
            return Cluster(from_endpoints(self._endpoints), self._current, formed_by="UserDefinedRoleMaker")
        endpoints = launched.endpoints if isinstance(launched, Cluster) else self._endpoints
        for what, ours, theirs in (
            ("current_id", self._current, launched.rank),
            ("the number of ranks", self._number, launched.world_size),
            ("worker_endpoints", self._endpoints or endpoints, endpoints),
        ):
            if ours != theirs:
                raise ClusterError(
                    f"UserDefinedRoleMaker: {what} is {ours}, but {launched.formed_by} says {theirs}; start the script "
                    "without a launcher, or use PaddleCloudRoleMaker(is_collective=True), which reads its values"
                )
        return launched


class UserDefinedCollectiveRoleMaker(UserDefinedRoleMaker):
    """Fleet 1.8's name for collective training."""

    def __init__(self, current_id: int = 0, worker_endpoints: Sequence[str] = ()) -> None:
        super().__init__(is_collective=True, current_id=current_id, worker_endpoints=worker_endpoints)


def _refuse_parameter_servers(name: str, is_collective: bool) -> None:
    if not is_collective:
        raise ClusterError(
            f"{name}(is_collective=False), or with a server's role or endpoints, asks for parameter servers; "
            f"fleet_train is for collective training: write {name}(is_collective=True)"
        )


def cluster_of(role: Any) -> Cluster | PartialCluster:
    """The cluster for the argument of ``fleet.init``: our role makers, None, or Paddle's own role makers."""
    if role is None:
        return PaddleCloudRoleMaker(is_collective=True).cluster()
    if isinstance(role, (PaddleCloudRoleMaker, UserDefinedRoleMaker)):
        return role.cluster()
    kind, is_paddles = type(role).__name__, type(role).__module__.startswith("paddle.")
    if is_paddles and kind == "PaddleCloudRoleMaker":
        return PaddleCloudRoleMaker(is_collective=bool(getattr(role, "_is_collective", False))).cluster()
    if is_paddles and kind == "UserDefinedRoleMaker":
        return UserDefinedRoleMaker(bool(role._is_collective), **role._kwargs).cluster()
    raise ClusterError(
        f"fleet.init was given {kind}; it takes role_maker.PaddleCloudRoleMaker(is_collective=True), "
        "UserDefinedRoleMaker(is_collective=True, ...) or nothing"
    )
