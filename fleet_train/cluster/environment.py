"""From the launch environment to a Cluster: the only reader of PADDLE_*, POD_*, TRAINER_* and FLEET_TRAIN_*.

The environment is an argument everywhere, so that tests pass a plain dict. Values are cross-checked: on Paddle 3.3
the stock launcher's variables can describe another job than the requested one.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet_train.cluster.cluster import (
    DEFAULT_JOIN_TIMEOUT_SECONDS,
    DEFAULT_STARTED_PORT,
    MOST_SECONDS,
    Cluster,
    assign,
    from_endpoints,
    is_number,
    parse_nodes,
)
from fleet_train.cluster.engines import detect
from fleet_train.cluster.flight.trace import read_steps
from fleet_train.cluster.kubernetes import read_as_rank
from fleet_train.cluster.partial import PartialCluster
from fleet_train.errors import ClusterError

SETTINGS = "FLEET_TRAIN_SET"
"""The variable with the settings of ``--set``: a JSON list of the texts ``knob=value``."""
CHECKS = "FLEET_TRAIN_VERIFY_JOINT_BATCH"
"""The variable with the number of steps of ``--verify_joint_batch``."""
TRACE = "FLEET_TRAIN_TRACE"
"""The variable with the steps of ``--trace``, such as ``100-104``."""


def cluster_from_environ(environ: Mapping[str, str], launcher_command: Sequence[str] = ()) -> Cluster | PartialCluster:
    """The requested cluster; a partial one if an engine (Slurm, MPI, ...) started the ranks.

    ``launcher_command`` is the argument list of the parent process; it matters when that is the stock launcher.
    Raises ClusterError if the variables contradict each other or the launcher started another job than requested.
    """
    asked = None if environ.get("FLEET_TRAIN_STORE") else parse_launch(launcher_command)
    if asked and asked.ips():
        return _old_recipe(asked, environ)
    if asked and "use_paddlecloud" in asked.flags:
        return _paddlecloud(environ)
    if asked:
        refuse_unknown_flags(asked)
    if environ.get("PADDLE_TRAINER_ENDPOINTS"):
        return _modern(environ)
    started = detect(environ)
    if started is not None and started.count > 1:
        return PartialCluster(started)
    if _integer(environ, "PADDLE_TRAINERS_NUM", 1) > 1:
        raise ClusterError(
            f"PADDLE_TRAINERS_NUM={environ['PADDLE_TRAINERS_NUM']} asks for several processes but "
            "PADDLE_TRAINER_ENDPOINTS, which says where they are, is not set; start the job with "
            "fleet_train launch, or set PADDLE_TRAINER_ENDPOINTS=host:port,host:port,..."
        )
    if started is None and (rank := _integer(environ, "PADDLE_TRAINER_ID", 0)) != 0:
        raise ClusterError(
            f"PADDLE_TRAINER_ID={rank} makes this process one of several, but PADDLE_TRAINERS_NUM and "
            "PADDLE_TRAINER_ENDPOINTS, which say of how many and where they are, are not set; start the job with "
            "fleet_train launch, or unset PADDLE_TRAINER_ID to train in this process alone"
        )
    return Cluster.single()


def is_legacy_launch(launcher_command: Sequence[str]) -> bool:
    """Whether the stock launcher got flags that only its legacy mode accepts, and drops."""
    asked = parse_launch(launcher_command)
    return asked is not None and bool(asked.ips() or "use_paddlecloud" in asked.flags)


def join_timeout_seconds(environ: Mapping[str, str]) -> float:
    """How long ``fleet.init`` waits for the other ranks, in seconds."""
    text = environ.get("FLEET_TRAIN_JOIN_TIMEOUT", "")
    try:
        seconds = float(text) if text else DEFAULT_JOIN_TIMEOUT_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MOST_SECONDS:
        raise ClusterError(
            f"FLEET_TRAIN_JOIN_TIMEOUT={text!r} is not a positive number of seconds up to {MOST_SECONDS:g}"
        )
    return seconds


def attempt(environ: Mapping[str, str]) -> int:
    """The attempt of the job, counted from 0 by ``launch --max_restarts`` and by engines that restart a job (Slurm's
    requeue); above 0, resume from a checkpoint.

    Raises ClusterError for a value that the launcher never sets.
    """
    if not environ.get("FLEET_TRAIN_ATTEMPT"):
        started = detect(environ)
        return 0 if started is None else started.restarts
    number = _integer(environ, "FLEET_TRAIN_ATTEMPT", 0)
    if number < 0:
        raise ClusterError(f"FLEET_TRAIN_ATTEMPT={number} is not 0, 1, 2, ...; the launcher sets it, do not set it")
    return number


def launched_job(environ: Mapping[str, str]) -> str:
    """A unique identifier of this launch of the job, the same in all its attempts, also those of an engine (a job that
    Slurm requeues); "" if there is none."""
    job = environ.get("FLEET_TRAIN_LAUNCHED", "")
    started = None if job else detect(environ)
    return job if started is None else started.run


def asked_strategy(environ: Mapping[str, str]) -> str | None:
    """The launcher's profile, by name or path, or None."""
    return environ.get("FLEET_TRAIN_STRATEGY") or None


def asked_settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The launcher's ``--set``, as the texts ``knob=value``. Raises ClusterError for what the launcher never sets."""
    text = environ.get(SETTINGS) or "[]"
    try:
        texts = json.loads(text)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise ClusterError(f'{SETTINGS} is not a JSON list of texts such as ["nccl_comm_num=2"]; give --set instead')
    return tuple(texts)


def ask_here(environ: MutableMapping[str, str], strategy: str | None, settings: Sequence[str]) -> str:
    """Put flags of a program that a launcher may have started over the launcher's. Returns the sentence about what they
    overrule, on rank 0; or nothing.
    """
    launched = environ.get("FLEET_TRAIN_STRATEGY")
    if strategy:
        environ["FLEET_TRAIN_STRATEGY"] = strategy
    own = {text.partition("=")[0] for text in settings}
    kept = [text for text in asked_settings(environ) if text.partition("=")[0] not in own]
    lost = [text.partition("=")[0] for text in asked_settings(environ) if text not in (*kept, *settings)]
    if kept or settings:
        environ[SETTINGS] = json.dumps([*kept, *settings])
    is_other = strategy and launched not in (strategy, os.path.abspath(strategy))
    words = [f"--strategy {launched}"] if launched and is_other else []
    words += [f"--set {knob}" for knob in lost]
    is_first = environ.get("PADDLE_TRAINER_ID", "0") == "0"
    return f"the launcher's {' and '.join(words)} is not used: the program has its own" if words and is_first else ""


def asked_checks(environ: Mapping[str, str]) -> int:
    """The number of steps in which the ranks' gradient is compared with the joint batch's
    (``--verify_joint_batch``)."""
    steps = _integer(environ, CHECKS, 0)
    if steps < 0:
        raise ClusterError(f"{CHECKS}={steps} is not a number of steps; give --verify_joint_batch instead")
    return steps


def asked_trace(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """First and last of the steps to trace (``--trace``), or None."""
    text = environ.get(TRACE, "")
    return read_steps(text, TRACE) if text else None


def log_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder in which the launcher, ours or Paddle's, keeps this rank's log; None if it has said none."""
    folder = environ.get("PADDLE_LOG_DIR", "")
    return Path(folder) if folder else None


def is_strict(environ: Mapping[str, str]) -> bool:
    """Whether a script's probable mistakes are errors (``launch --strict``)."""
    text = environ.get("FLEET_TRAIN_STRICT", "")
    if text not in ("", "0", "1"):
        raise ClusterError(f"FLEET_TRAIN_STRICT={text!r} is not 1 (a script's probable mistakes are errors) or 0")
    return text == "1"


def rank_variables(cluster: Cluster) -> dict[str, str]:
    """The variables from which Paddle forms this cluster's process groups."""
    return {
        "PADDLE_TRAINER_ID": str(cluster.rank),
        "PADDLE_TRAINERS_NUM": str(cluster.world_size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(cluster.endpoints),
        "PADDLE_CURRENT_ENDPOINT": cluster.this.endpoint,
        "PADDLE_RANK_IN_NODE": str(cluster.local_rank),
    }


def _paddlecloud(environ: Mapping[str, str]) -> Cluster:
    """The cluster of a pod whose ranks were started by the stock launcher with ``--use_paddlecloud``."""
    pod = read_as_rank(environ)
    local_index, processes = _started(environ)
    if pod.ports_per_node is not None and pod.ports_per_node < processes:
        raise ClusterError(f"TRAINER_PORTS_NUM={pod.ports_per_node} is too few for {processes} processes per pod")
    first_port = DEFAULT_STARTED_PORT if pod.started_port is None else pod.started_port
    ranks = assign(pod.hosts, processes, first_port)
    return Cluster(ranks, pod.hosts.index(pod.node_host) * processes + local_index, formed_by="PaddleCloud variables")


def _started(environ: Mapping[str, str]) -> tuple[int, int]:
    """Local index and number of the processes that the launcher actually started on this machine."""
    local_index = _integer(environ, "PADDLE_RANK_IN_NODE", _integer(environ, "PADDLE_TRAINER_ID", 0))
    return local_index, _integer(environ, "PADDLE_TRAINERS_NUM", 1)


def _old_recipe(asked: AskedLaunch, environ: Mapping[str, str]) -> Cluster:
    hosts, counts = parse_nodes(",".join(asked.ips()))
    node_ip = asked.flags.get("node_ip") or asked.flags.get("host") or (hosts[0] if len(hosts) == 1 else "")
    if node_ip not in hosts:
        raise ClusterError(
            f"--node_ip={node_ip or '(not given)'} is not one of --cluster_node_ips={','.join(hosts)}; "
            "give each machine its own address of that list"
        )
    local_index, started = _started(environ)
    asked_for, node = _asked_processes(asked, started), hosts.index(node_ip)
    numbers = [count or _asked_number(asked, "nproc_per_node") or 1 for count in counts] or [asked_for] * len(hosts)
    first_port = _asked_number(asked, "started_port") or DEFAULT_STARTED_PORT
    if started != numbers[node]:
        raise ClusterError(_fewer_than_asked(asked, node_ip, first_port, numbers[node], started))
    refuse_unknown_flags(asked)
    ranks = assign(hosts, numbers, first_port)
    rank = sum(numbers[:node]) + local_index
    return Cluster(ranks, rank, formed_by="the launcher's --cluster_node_ips")


def _asked_processes(asked: AskedLaunch, started: int) -> int:
    processes = _asked_number(asked, "nproc_per_node")
    if processes is not None:
        return processes
    devices = [device for device in asked.flags.get("devices", "").split(",") if device.strip()]
    return len(devices) or started


def _asked_number(asked: AskedLaunch, flag: str) -> int | None:
    text = asked.flags.get(flag, "").strip()
    if text and not is_number(text):
        raise ClusterError(f"--{flag}={text} of paddle.distributed.launch is not a whole number")
    return int(text) if text else None


def _fewer_than_asked(asked: AskedLaunch, node_ip: str, first_port: int, asked_for: int, started: int) -> str:
    nodes = ",".join(asked.ips())
    script = " ".join(asked.script) or "train.py"
    return (
        f"paddle.distributed.launch was asked for {asked_for} processes on this machine and started {started} "
        "(on a CPU build it ignores --selected_gpus). The command that works: fleet_train launch "
        f"--cluster_node_ips={nodes} --node_ip={node_ip} --started_port={first_port} "
        f"{'' if ':' in nodes else f'--nproc_per_node={asked_for} '}{script}"
    )


def _modern(environ: Mapping[str, str]) -> Cluster:
    endpoints = [text.strip() for text in environ["PADDLE_TRAINER_ENDPOINTS"].split(",") if text.strip()]
    ranks = from_endpoints(endpoints, _integer(environ, "PADDLE_NNODES", 0) or None)
    rank = _integer(environ, "PADDLE_TRAINER_ID", 0)
    count = _integer(environ, "PADDLE_TRAINERS_NUM", len(ranks))
    if count != len(ranks):
        raise ClusterError(
            f"PADDLE_TRAINERS_NUM={count}, but PADDLE_TRAINER_ENDPOINTS lists {len(ranks)} processes; they must agree"
        )
    if not 0 <= rank < len(ranks):
        raise ClusterError(f"PADDLE_TRAINER_ID={rank} is not in 0 .. {len(ranks) - 1}, the ranks of this job")
    current = environ.get("PADDLE_CURRENT_ENDPOINT", ranks[rank].endpoint)
    if len(ranks) > 1 and current != ranks[rank].endpoint:
        raise ClusterError(
            f"PADDLE_CURRENT_ENDPOINT={current}, but rank {rank} of the job is {ranks[rank].endpoint}; "
            "the launcher has confused two jobs"
        )
    store = environ.get("FLEET_TRAIN_STORE", "")
    return Cluster(ranks, rank, store, "the launcher's PADDLE_TRAINER_ENDPOINTS")


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name}={text!r} is not a whole number") from None


# Reads the requested job from the stock launcher's own command line.
#
# On Paddle 3.3 an unknown flag (every flag of the 1.8 recipe, and every typo) makes ``python -m
# paddle.distributed.launch`` switch to a legacy launcher that drops it and starts a job of this machine alone. The
# requested job is then only in the launcher's argument list.


# Old and new spellings -> one name.
_SPELLINGS = {
    "cluster_node_ips": "node_ips",
    "ips": "ips",
    "node_ip": "node_ip",
    "host": "host",
    "started_port": "started_port",
    "start_port": "started_port",
    "selected_gpus": "devices",
    "devices": "devices",
    "gpus": "devices",
    "nproc_per_node": "nproc_per_node",
    "log_dir": "log_dir",
    "use_paddlecloud": "use_paddlecloud",
}
# Flags of the modern launcher that do not affect which nodes take part, and one of the 1.8 launcher's.
_OTHERS = (
    "master rank log_level log_overwrite sort_ip enable_gpu_log nnodes run_mode job_id servers trainers workers "
    "trainer_num worker_num server_num gloo_port with_gloo max_restart elastic_level elastic_timeout legacy "
    "auto_parallel_config auto_tuner_json auto_cluster_config print_config backend xpus npus mlus ipus"
).split()
_SWITCHES = {"use_paddlecloud", "print_config"}  # 1.8: store_true, no value


@dataclass(frozen=True)
class AskedLaunch:
    """The stock launcher's flags: known ones under one name each, and unknown ones."""

    flags: dict[str, str]
    unknown: tuple[str, ...]
    script: tuple[str, ...]

    def ips(self) -> list[str]:
        text = self.flags.get("node_ips", "")
        return [ip.strip() for ip in text.split(",") if ip.strip()]


def parse_launch(command: Sequence[str]) -> AskedLaunch | None:
    """The launch that an argument list requests, or None if it is not ``paddle.distributed.launch``."""
    arguments = _after_launcher(list(command))
    if arguments is None:
        return None
    flags: dict[str, str] = {}
    unknown: list[str] = []
    position = 0
    while position < len(arguments) and arguments[position].startswith("--"):
        name, has_value, value = arguments[position][2:].partition("=")
        known = name in _SPELLINGS or name in _OTHERS
        position += 1
        if not has_value and known and name not in _SWITCHES and position < len(arguments):
            value = arguments[position]
            position += 1
        if name in _SPELLINGS:
            flags[_SPELLINGS[name]] = value
        elif not known:
            unknown.append(name)
    return AskedLaunch(flags, tuple(unknown), tuple(arguments[position:]))


def _after_launcher(command: list[str]) -> list[str] | None:
    for position, word in enumerate(command):
        if word == "-m" and command[position + 1 : position + 2] in (
            ["paddle.distributed.launch"],
            ["paddle.distributed.fleet.launch"],
        ):
            return command[position + 2 :]
        if word.endswith(("distributed/launch/main.py", "distributed/launch/__main__.py", "/fleetrun")):
            return command[position + 1 :]
    return None


def refuse_unknown_flags(asked: AskedLaunch) -> None:
    """Report that an unknown flag made the stock launcher start a job of one machine.

    Raises ClusterError with the nearest known flag.
    """
    if not asked.unknown:
        return
    name = asked.unknown[0]
    near = difflib.get_close_matches(name, [*_SPELLINGS, *_OTHERS], n=1)
    hint = f"; did you mean '--{near[0]}'?" if near else ""
    raise ClusterError(
        f"paddle.distributed.launch does not know '--{name}'{hint} It dropped the flag and started the processes of "
        "this machine alone, so this is not the requested job"
    )
