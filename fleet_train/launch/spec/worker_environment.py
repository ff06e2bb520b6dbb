"""The environment of the stock launcher and the ranks: without leftovers, and without overriding the user's values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet_train.cluster.advice import advice_for_rank
from fleet_train.cluster.network import is_local
from fleet_train.cluster.secret import SECRET_FILE
from fleet_train.cluster.store.protocol.access import JOB_ID
from fleet_train.errors import ProfileError
from fleet_train.launch.spec.machine import Machine
from fleet_train.launch.spec.node import Node

# The stock launcher lets each of these override its flag (launch/context/args_envs.py, env_args_mapping).
_OVERRIDES_OF_FLAGS = """
POD_IP PADDLE_MASTER PADDLE_DEVICES PADDLE_NNODES PADDLE_RUN_MODE PADDLE_LOG_LEVEL PADDLE_LOG_OVERWRITE PADDLE_SORT_IP
PADDLE_NPROC_PER_NODE PADDLE_JOB_ID PADDLE_RANK PADDLE_LOG_DIR PADDLE_MAX_RESTART PADDLE_ELASTIC_LEVEL
PADDLE_ELASTIC_TIMEOUT PADDLE_SERVER_NUM PADDLE_TRAINER_NUM PADDLE_SERVERS_ENDPOINTS PADDLE_TRAINERS_ENDPOINTS
PADDLE_GLOO_PORT PADDLE_WITH_GLOO PADDLE_START_PORT PADDLE_IPS PADDLE_AUTO_PARALLEL_CONFIG PADDLE_AUTO_CLUSTER
"""
# Variables of an outer job (ours, PaddleCloud's, an older launcher's): the inner job is a different one.
_OTHER_JOBS = """
PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT PADDLE_GLOBAL_SIZE
PADDLE_LOCAL_SIZE PADDLE_GLOBAL_RANK PADDLE_LOCAL_RANK PADDLE_RANK_IN_NODE PADDLE_DISTRI_BACKEND PADDLE_XCCL_BACKEND
PADDLE_BACKUP_ENV_PATH PADDLE_TRAINERS PADDLE_PORT PADDLE_PSERVERS_IP_PORT_LIST PADDLE_TRAINING_ROLE
DISTRIBUTED_TRAINER_ENDPOINTS COLLECTIVE_MASTER_IP TRAINER_PORTS_NUM TRAINER_IP_PORT_LIST POD_NAME
FLAGS_selected_gpus FLAGS_selected_cpus FLAGS_selected_xpus FLAGS_START_PORT FLAGS_FIXED_PORT
RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE
PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT
FLEET_TRAIN_MASTER FLEET_TRAIN_NNODES FLEET_TRAIN_NODE_RANK FLEET_TRAIN_ENGINE
FLEET_TRAIN_STORE FLEET_TRAIN_STRATEGY FLEET_TRAIN_JOIN_TIMEOUT FLEET_TRAIN_ATTEMPT FLEET_TRAIN_LAUNCHED
"""
# Prints environments, starts ranks under another program, or changes where the launcher reads its flags from.
_MEDDLERS = "FLAGS_print_launcher_env WITH_COVERAGE PADDLE_LAUNCH_WITH_ARGS"
SCRUBBED = frozenset((_OVERRIDES_OF_FLAGS + _OTHER_JOBS + _MEDDLERS).split())
# On a machine without GPUs this makes the stock launcher assume them.
_DEVICE_VARIABLES = frozenset({"CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "XPULINK_VISIBLE_DEVICES"})


@dataclass(frozen=True)
class LaunchEnvironment:
    """``ours``: variables that we set. ``removed``: those we removed. ``kept``: names whose user value was kept."""

    ours: dict[str, str]
    removed: frozenset[str]
    kept: tuple[str, ...]
    import_path: Path | None = None
    hidden: frozenset[str] = frozenset()
    """Names that the profile's environment section sets: their values may be secrets."""

    def over(self, environ: Mapping[str, str]) -> dict[str, str]:
        merged = {name: value for name, value in environ.items() if name not in self.removed} | self.ours
        if self.import_path is not None:
            merged["PYTHONPATH"] = appended(merged.get("PYTHONPATH", ""), str(self.import_path))
        return merged

    def shown(self) -> dict[str, str]:
        """What we set, without any value of the user's: PYTHONPATH is extended, the profile's values are ``(set)``."""
        added = {"PYTHONPATH": f"...:{self.import_path}"} if self.import_path is not None else {}
        return self.ours | dict.fromkeys(self.hidden & self.ours.keys(), "(set)") | added


@dataclass(frozen=True)
class Wanted:
    """The variables that the profile and the flags request for every rank."""

    profile_environment: Mapping[str, str]
    """Those of its environment section and its knobs."""
    strategy: str | None  # name or absolute path
    join_timeout_seconds: float
    import_path: Path | None  # the package's folder if it is not installed
    job_id: str = ""
    secret_file: Path | None = None
    hidden: frozenset[str] = frozenset()
    """Names of the environment section."""
    strict: bool = False


def build_environment(node: Node, machine: Machine, wanted: Wanted, environ: Mapping[str, str]) -> LaunchEnvironment:
    """What to set and what to remove. The user's own variables override the profile's and our advice."""
    refused = sorted(SCRUBBED & wanted.profile_environment.keys())
    if refused:
        raise ProfileError(
            f"environment: {refused[0]} is set by the launcher for every rank; remove it from the profile"
        )
    removed = SCRUBBED | (frozenset() if node.devices else _DEVICE_VARIABLES)
    users = {name: value for name, value in environ.items() if name not in removed}
    advice = {**_advice(node, machine), **wanted.profile_environment}
    kept = tuple(
        name for name, value in wanted.profile_environment.items() if name in users and users[name] != str(value)
    )
    ours = {name: str(value) for name, value in advice.items() if name not in users}
    ours |= _told_to_ranks(node, wanted)
    return LaunchEnvironment(ours, removed & environ.keys(), kept, wanted.import_path, wanted.hidden)


def _told_to_ranks(node: Node, wanted: Wanted) -> dict[str, str]:
    told = {
        "FLEET_TRAIN_STORE": node.store_endpoint,
        "FLEET_TRAIN_JOIN_TIMEOUT": f"{wanted.join_timeout_seconds:g}",
    }
    if wanted.strict:
        told["FLEET_TRAIN_STRICT"] = "1"
    if wanted.job_id:
        told[JOB_ID] = wanted.job_id
    if wanted.secret_file is not None:
        told[SECRET_FILE] = str(wanted.secret_file)
    return told | ({"FLEET_TRAIN_STRATEGY": wanted.strategy} if wanted.strategy else {})


def _advice(node: Node, machine: Machine) -> dict[str, str]:
    # Without it the stock launcher starts every process with one thread, however many processors there are.
    # Nodes that are emulated on this machine share its processors.
    nodes_here = sum(is_local(address, machine.addresses) for address in node.addresses)
    threads = max(1, machine.processors // (node.processes * max(1, nodes_here)))
    advice = advice_for_rank(threads, node.devices is None, machine.is_amd)
    if node.interface is not None:
        advice |= {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": node.interface}
    return advice


def appended(path: str, folder: str) -> str:
    """A search path with a folder appended, unless it contains it already."""
    parts = [part for part in path.split(":") if part]
    return ":".join(parts if folder in parts else [*parts, folder])
