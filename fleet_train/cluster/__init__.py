"""The cluster of a job: hosts, ranks, the launch environment, and the rendezvous store. No Paddle.

The names are loaded on first use: ``launch --help`` must not import the store's asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_train.lazy import load_on_use

if TYPE_CHECKING:
    from fleet_train.cluster.cluster import Cluster, Rank, assign
    from fleet_train.cluster.environment import cluster_from_environ
    from fleet_train.cluster.store.client import StoreClient
    from fleet_train.cluster.store.server import StoreServer

__all__ = ["Cluster", "Rank", "StoreClient", "StoreServer", "assign", "cluster_from_environ"]

__getattr__ = load_on_use(
    __name__,
    {
        "Cluster": "cluster",
        "Rank": "cluster",
        "assign": "cluster",
        "cluster_from_environ": "environment",
        "StoreClient": "store.client",
        "StoreServer": "store.server",
    },
)
