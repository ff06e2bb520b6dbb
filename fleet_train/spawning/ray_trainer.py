"""``FleetTrainer``: a `DataParallelTrainer` of Ray Train whose workers are the ranks of a fleet_train job."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from fleet_train.cluster.cluster import DEFAULT_JOIN_TIMEOUT_SECONDS
from fleet_train.errors import ClusterError
from fleet_train.spawning.ray_workers import InWorker, RayAttempt, become_rank
from fleet_train.spawning.spawn import profile_of


class FleetTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Train ``train_fn`` (no argument, or Ray's config) on ``num_workers`` ranks; ``fit()`` starts it.

    ``strategy``: a profile's name or path, a `DistributedStrategy` or a `Profile`, read here: the workers need no file.
    Everything else goes to Ray's `DataParallelTrainer`; ``run_config=RunConfig(failure_config=FailureConfig(...))``
    says how often Ray restarts the workers. From the second attempt on, training resumes as under the launcher.
    Instead of ``num_workers``, a ``scaling_config`` may be given. Raises ClusterError and ProfileError.
    """

    def __init__(
        self,
        train_fn: Callable[..., Any],
        num_workers: int | None = None,
        *,
        strategy: Any = None,
        join_timeout_seconds: float = DEFAULT_JOIN_TIMEOUT_SECONDS,
        scaling_config: Any = None,
        **data_parallel_trainer_arguments: Any,
    ) -> None:
        if (num_workers is None) == (scaling_config is None):
            raise ClusterError(
                "FleetTrainer takes num_workers=2 or scaling_config=ScalingConfig(num_workers=2, ...), one of the two"
            )
        if "backend_config" in data_parallel_trainer_arguments:
            raise ClusterError("FleetTrainer sets its own backend_config; leave it out")
        config = FleetConfig(profile=profile_of(strategy), join_timeout_seconds=join_timeout_seconds)
        super().__init__(
            train_fn,
            backend_config=config,
            scaling_config=scaling_config or ScalingConfig(num_workers=num_workers),
            **data_parallel_trainer_arguments,
        )


@dataclass
class FleetConfig(BackendConfig):  # type: ignore[misc]
    """A run's configuration. ``profile``: the default of the workers' ``fleet``; None: that of the script."""

    profile: Any = None
    join_timeout_seconds: float = DEFAULT_JOIN_TIMEOUT_SECONDS
    launched: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def backend_cls(self) -> type[Backend]:
        return FleetBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(InWorker, self.profile)

    def to_dict(self) -> dict[str, Any]:
        """For Ray's record of the run."""
        name = None if self.profile is None else self.profile.name
        return {"profile": name, "join_timeout_seconds": self.join_timeout_seconds}


class FleetBackend(Backend):  # type: ignore[misc]
    """Exists in Ray's controller for the whole run, with all its attempts."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}

    def on_start(self, worker_group: Any, backend_config: FleetConfig) -> None:
        """Send every worker its rank, where rank 0 is, and the attempt's number."""
        number = self._attempts.get(backend_config.launched, -1) + 1
        self._attempts[backend_config.launched] = number
        places = worker_group.execute(where_we_are)
        attempt = RayAttempt(
            job=f"ray-{backend_config.launched}-{number}",
            secret=secrets.token_hex(24),
            launched=backend_config.launched,
            number=number,
            join_timeout_seconds=backend_config.join_timeout_seconds,
        )
        profile = backend_config.profile
        environment = {} if profile is None else profile.worker_environment()
        ray.get(
            [
                worker_group.execute_single_async(rank, become_rank, places, rank, attempt, environment)
                for rank in range(len(worker_group))
            ]
        )


def where_we_are() -> tuple[str, int]:
    """In a worker: its node's address and a port that is free there."""
    address = str(ray.util.get_node_ip_address())
    with socket.socket() as holder:
        holder.bind((address, 0))
        return address, int(holder.getsockname()[1])
