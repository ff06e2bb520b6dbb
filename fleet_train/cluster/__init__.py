"""Where we are: hosts, ranks, the launch environment, and the store where members meet. No Paddle."""

from fleet_train.cluster.cluster import Cluster, Rank, assign
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.cluster.store_client import StoreClient
from fleet_train.cluster.store_server import StoreServer

__all__ = ["Cluster", "Rank", "StoreClient", "StoreServer", "assign", "cluster_from_environ"]
