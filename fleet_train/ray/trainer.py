"""``FleetTrainer``: a `DataParallelTrainer` of Ray Train whose workers are the ranks of a fleet_train job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.train import ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from fleet_train.cluster.defaults import DEFAULT_JOIN_TIMEOUT_SECONDS
from fleet_train.errors import ClusterError
from fleet_train.ray.backend import FleetConfig
from fleet_train.spawning.strategies import profile_of


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
