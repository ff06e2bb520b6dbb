"""The backend that Ray Train calls when its workers have started: each of them becomes a rank."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from fleet_train.ray.workers import Attempt, InWorker, endpoints_of, settle_in


@dataclass
class FleetConfig(BackendConfig):  # type: ignore[misc]
    """A run's configuration. ``profile``: the default of the workers' ``fleet``; None: that of the script."""

    profile: Any = None
    join_timeout_seconds: float = 300.0
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
        """Send every worker its rank, the others' addresses, and the attempt's number."""
        number = self._attempts.get(backend_config.launched, -1) + 1
        self._attempts[backend_config.launched] = number
        endpoints = endpoints_of(worker_group.execute(where_we_are))
        attempt = Attempt(
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
                worker_group.execute_single_async(rank, settle_in, endpoints, rank, attempt, environment)
                for rank in range(len(worker_group))
            ]
        )


def where_we_are() -> tuple[str, int]:
    """In a worker: its node's address and a port that is free there."""
    address = str(ray.util.get_node_ip_address())
    with socket.socket() as holder:
        holder.bind((address, 0))
        return address, int(holder.getsockname()[1])
