"""Run a job of the benchmarks: its processes, with a timeout and no process left behind; other checkouts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fleet_train.cluster.installed import git
from tools.benchmarks.contestants import ALONE, HOROVOD, NOTHING, OURS, PADDLE, Contestant
from tools.benchmarks.ranks import INTERFACE, Assignment, of_a_turn
from tools.benchmarks.record import ROOT
from tools.lab import Lab
from tools.processes import Process, start, stop

_STOP_SECONDS = 10.0
# Variables of an outer shell or job that a job must not see.
_NOT_INHERITED = ("PADDLE_", "FLAGS_", "POD_", "TRAINER_", "GLOO_", "NCCL_", "FLEET_TRAIN_", "OMP_", "MKL_", "MASTER_")
# Horovod's process sets take the address of the host's name, whatever HOROVOD_GLOO_IFACE says.
_AS_A_HOST = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
Command = tuple[list[str], dict[str, str]]


class JobFailed(click.ClickException):
    """Which job failed and how, with the last lines of its output; exit code 1."""


@dataclass(frozen=True)
class Place:
    """Where a job's ranks run. Every job of a lab gets its own ports: the previous one's may still be closing."""

    lab: Lab
    ranks_per_node: int
    port: int

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.lab.nodes]


def run_contestant(assignment: Assignment, place: Place) -> dict[str, Any]:
    """What a record keeps of the job, with the evaluation of its weights. Raises JobFailed."""
    folder = Path(assignment.folder)
    folder.mkdir(parents=True)
    assignment.write(folder / "assignment.json")
    contestant = assignment.contestant
    commands = commands_of(contestant, folder, place)
    run_commands(contestant.name, commands, folder, assignment.timeout_seconds, place.lab)
    return of_a_turn(assignment, results_of(folder, assignment.world_size))


def results_of(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of a job have written (rank<N>.json). Raises JobFailed."""
    try:
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    except (OSError, ValueError) as error:
        raise JobFailed(f"ended with 0 but without its records: {error}\n{_last_lines(folder)}") from None


def run_commands(name: str, commands: Sequence[Command], folder: Path, timeout: float, lab: Lab) -> None:
    """Start all and wait for all; their output goes to process0.log, ... in ``folder``. Raises JobFailed."""
    with _started(commands, folder, lab) as processes:
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            if time.monotonic() > deadline:
                raise JobFailed(f"{name} did not end within {timeout:g} s\n{_last_lines(folder)}")
            time.sleep(0.05)
        if codes := [process.poll() for process in processes if process.poll()]:
            raise JobFailed(f"{name} ended with exit codes {codes}\n{_last_lines(folder)}")


def commands_of(contestant: Contestant, folder: Path, place: Place) -> list[Command]:
    """Command and added environment of every process to start, with the node's prefix in front."""
    script = [str(ROOT / "tools" / "benchmarks" / "ranks.py"), str(folder / "assignment.json")]
    if contestant.kind == OURS:
        nodes = range(len(place.lab.nodes))
        return [([*launcher(place, node, folder, contestant.variant), *script], {}) for node in nodes]
    commands = []
    for rank in range(len(place.lab.nodes) * place.ranks_per_node):
        node, local = divmod(rank, place.ranks_per_node)
        prefix = as_a_host(place, rank, folder) if contestant.kind == HOROVOD else place.lab.nodes[node].prefix
        added = _environment(contestant, place, rank, local)
        commands.append(([*prefix, sys.executable, *script, str(rank)], added))
    return commands


def as_a_host(place: Place, rank: int, folder: Path) -> list[str]:
    """What to put before a command so that it runs on a rank's node under a host name of its own."""
    node, hosts = place.lab.nodes[rank // place.ranks_per_node], folder / f"hosts{rank}"
    hosts.write_text(f"127.0.0.1 localhost\n{node.address} host{rank}\n")
    return [*node.prefix, "unshare", "--mount", "--uts", "sh", "-ec", _AS_A_HOST, "sh", f"host{rank}", str(hosts)]


def launcher(place: Place, node: int, folder: Path, strategy: str) -> list[str]:
    """Our launch command on a node, up to the script. A file's path is made absolute: ranks run in another folder."""
    flags = {
        "cluster_node_ips": ",".join(place.addresses),
        "node_ip": place.addresses[node],
        "started_port": place.port,
        "nproc_per_node": place.ranks_per_node,
        "strategy": Path(strategy).resolve() if Path(strategy).is_file() else strategy,
        "log_dir": folder / f"log{node}",
        "join_timeout": 120,
    }
    command = [sys.executable, "-m", "fleet_train", "launch", *(f"--{name}={value}" for name, value in flags.items())]
    return [*place.lab.nodes[node].prefix, *command]


def _environment(contestant: Contestant, place: Place, rank: int, local_rank: int) -> dict[str, str]:
    """The variables that torchrun, or Paddle's own launcher, would set for this rank."""
    if contestant.kind == ALONE:
        # As a profile has it: one thread executes the program.
        return {"FLAGS_new_executor_serial_run": "1"} if contestant.name == NOTHING else {}
    addresses = [each for each in place.addresses for _ in range(place.ranks_per_node)]
    added = {"GLOO_SOCKET_IFNAME": INTERFACE}
    if contestant.kind == PADDLE:
        endpoints = [f"{address}:{place.port + 1 + number}" for number, address in enumerate(addresses)]
        return added | {
            "PADDLE_MASTER": f"{addresses[0]}:{place.port}",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(addresses)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
    added |= {"MASTER_ADDR": addresses[0], "MASTER_PORT": str(place.port), "BENCH_ADDRESS": addresses[rank]}
    return added | {"RANK": str(rank), "WORLD_SIZE": str(len(addresses)), "LOCAL_RANK": str(local_rank)}


def shared_environment(environ: dict[str, str], is_amd: bool) -> dict[str, str]:
    """The same for every contestant: one thread per rank, and on AMD what our launcher sets for MKL. Python's compiled
    files are in use, as for users."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOG_minloglevel": "2"}
    return kept | own | ({"MKL_DEBUG_CPU_TYPE": "5"} if is_amd else {})


@contextlib.contextmanager
def _started(commands: Sequence[Command], folder: Path, lab: Lab) -> Iterator[list[Process]]:
    shared = shared_environment(dict(os.environ), "AuthenticAMD" in Path("/proc/cpuinfo").read_text())
    processes: list[Process] = []
    try:
        for index, (command, added) in enumerate(commands):
            processes.append(start(command, folder / f"process{index}.log", shared | added, folder))
        yield processes
    finally:
        stop(processes, _STOP_SECONDS)
        lab.end_processes()  # also processes that a launcher left


def _last_lines(folder: Path, lines: int = 12) -> str:
    """Of each log, after the line that names Python's error, which a long message may be below."""
    parts = []
    for log in sorted(folder.glob("process*.log")):
        found = log.read_text(errors="replace").splitlines()
        errors = [line[:300] for line in found if ERROR.match(line)]
        parts += [f"--- {log.name}", *errors[-1:], *found[-lines:]]
    return "\n".join(parts)


@contextlib.contextmanager
def checkout_of(folder_or_revision: str) -> Iterator[Path]:
    """The folder, or a work tree of the commit, branch or tag that is removed at the end."""
    if Path(folder_or_revision).is_dir():
        yield Path(folder_or_revision).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="checkout-") as name:
        command, folder = ["git", "-C", str(ROOT), "worktree"], Path(name, "checkout")
        subprocess.run([*command, "add", "--detach", "--quiet", str(folder), folder_or_revision], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*command, "remove", "--force", str(folder)], check=True)


def revision_of(checkout: Path) -> str:
    changes = " with changes" if git(checkout, "status", "--porcelain") else ""
    return git(checkout, "rev-parse", "--short=10", "HEAD") + changes
