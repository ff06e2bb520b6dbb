"""The environment of spawned ranks: the same as under the launcher, and nothing of another job."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from fleet_train.cluster.cluster import Cluster, assign
from fleet_train.cluster.environment import rank_variables
from fleet_train.cluster.secret import SECRET, SECRET_FILE
from fleet_train.cluster.store.protocol.access import JOB_ID
from fleet_train.launch.spec.node import Node
from fleet_train.launch.spec.worker_environment import LaunchEnvironment
from fleet_train.spawning.store import SpawnStore


def environs(
    base: LaunchEnvironment, node: Node, store: SpawnStore, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """One environment per rank, in their order."""
    common = base.over({name: value for name, value in environ.items() if name not in (SECRET, SECRET_FILE)})
    common |= {
        "FLEET_TRAIN_STORE": store.endpoint,
        "FLEET_TRAIN_ATTEMPT": "0",
        "FLEET_TRAIN_LAUNCHED": secrets.token_hex(8),
        JOB_ID: store.job,
        SECRET: store.secret,
        "PADDLE_NNODES": "1",
        "PADDLE_GLOBAL_SIZE": str(node.processes),
        "PADDLE_LOCAL_SIZE": str(node.processes),
        "PYTHONUNBUFFERED": "1",
    }
    ranks = assign(node.addresses, node.processes, node.started_port)
    return [common | _of_rank(Cluster(ranks, index), node) for index in node.ranks]


def _of_rank(cluster: Cluster, node: Node) -> dict[str, str]:
    own = rank_variables(cluster) | {
        "PADDLE_GLOBAL_RANK": str(cluster.rank),
        "PADDLE_LOCAL_RANK": str(cluster.local_rank),
    }
    if node.devices is not None:
        # By position among the visible ones: CUDA_VISIBLE_DEVICES stays as it is.
        own["FLAGS_selected_gpus"] = str(cluster.local_rank)
    return own
