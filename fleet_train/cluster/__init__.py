"""Where we are: hosts, ranks, the launch environment, and the store where members meet. No Paddle.

The names are loaded on first use: ``launch --help`` must not pay for the store's asyncio.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleet_train.cluster.cluster import Cluster, Rank, assign
    from fleet_train.cluster.environment import cluster_from_environ
    from fleet_train.cluster.store.client import StoreClient
    from fleet_train.cluster.store.server import StoreServer

__all__ = ["Cluster", "Rank", "StoreClient", "StoreServer", "assign", "cluster_from_environ"]

_HOMES = {
    "Cluster": "cluster",
    "Rank": "cluster",
    "assign": "cluster",
    "cluster_from_environ": "environment",
    "StoreClient": "store.client",
    "StoreServer": "store.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fleet_train.cluster' has no attribute {name!r}")
    value = getattr(import_module(f"fleet_train.cluster.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
