"""Run one contestant once: its ranks as processes on the lab's nodes, with a timeout and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchmarks.contestants import ALONE, BEFORE, OURS, PADDLE, TORCH, Contestant
from tools.benchmarks.link import INTERFACE
from tools.benchmarks.loop import Assignment
from tools.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
_STOP_SECONDS = 10.0
# Variables of an outer shell or job that a contestant must not see.
_NOT_INHERITED = ("PADDLE_", "FLAGS_", "POD_", "TRAINER_", "GLOO_", "NCCL_", "FLEET_TRAIN_", "OMP_", "MKL_", "MASTER_")
Command = tuple[list[str], dict[str, str]]


class JobFailed(Exception):
    """Which contestant failed and how, with the last lines of its output."""


@dataclass(frozen=True)
class Place:
    """Where a job's ranks run. Every job of a lab gets its own ports: the previous one's may still be closing.

    ``before``: another checkout of the project, whose package and workers the contestants of that name run.
    """

    lab: Lab
    ranks_per_node: int
    port: int
    before: Path = ROOT

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.lab.nodes]

    @property
    def world_size(self) -> int:
        return len(self.lab.nodes) * self.ranks_per_node


def run_job(contestant: Contestant, assignment: Assignment, place: Place) -> list[dict[str, Any]]:
    """The records of all ranks, by rank. Raises JobFailed."""
    folder = Path(assignment.folder)
    folder.mkdir(parents=True)
    assignment.write(folder / "assignment.json")
    run_commands(contestant.name, commands_of(contestant, folder, place), folder, place.lab, assignment.timeout_seconds)
    try:
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(place.world_size)]
    except (OSError, ValueError) as error:
        raise JobFailed(
            f"{contestant.name} ended with 0 but without its records: {error}\n{_last_lines(folder)}"
        ) from None


def run_commands(name: str, commands: Sequence[Command], folder: Path, lab: Lab, timeout_seconds: float) -> None:
    """Start all and wait for all; their output goes to process0.log, ... in ``folder``. Raises JobFailed."""
    with _started(commands, folder, lab) as processes:
        _wait(name, processes, folder, timeout_seconds)


def commands_of(contestant: Contestant, folder: Path, place: Place) -> list[Command]:
    """Command and added environment of every process to start, with the node's prefix in front."""
    checkout = place.before if contestant.kind == BEFORE else ROOT
    worker = str(checkout / "tools" / "benchmarks" / f"worker_{contestant.framework}.py")
    if contestant.kind in (OURS, BEFORE):
        return [_launcher(contestant, worker, folder, place, node) for node in range(len(place.lab.nodes))]
    ranks = [divmod(rank, place.ranks_per_node) for rank in range(place.world_size)]
    return [
        (
            [*place.lab.nodes[node].prefix, sys.executable, worker, str(folder / "assignment.json"), str(rank)],
            _environment(contestant, place, rank, local),
        )
        for rank, (node, local) in enumerate(ranks)
    ]


def _launcher(contestant: Contestant, worker: str, folder: Path, place: Place, node: int) -> Command:
    flags = {
        "cluster_node_ips": ",".join(place.addresses),
        "node_ip": place.addresses[node],
        "started_port": place.port,
        "nproc_per_node": place.ranks_per_node,
        "strategy": _from_anywhere(contestant.variant),
        "log_dir": folder / f"log{node}",
        "join_timeout": 120,
    }
    command = [sys.executable, "-m", "fleet_train", "launch", *(f"--{name}={value}" for name, value in flags.items())]
    added = {"PYTHONPATH": str(place.before)} if contestant.kind == BEFORE else {}
    return [*place.lab.nodes[node].prefix, *command, worker, str(folder / "assignment.json")], added


def _from_anywhere(profile: str) -> str:
    """A profile's name unchanged, a file's path made absolute, since the ranks run in another folder."""
    return str(Path(profile).resolve()) if Path(profile).is_file() else profile


def _environment(contestant: Contestant, place: Place, rank: int, local_rank: int) -> dict[str, str]:
    """The variables that our launcher, torchrun and paddle.distributed.launch would set for this rank."""
    added = {"GLOO_SOCKET_IFNAME": INTERFACE}
    if contestant.kind == TORCH:
        added |= {"MASTER_ADDR": place.addresses[0], "MASTER_PORT": str(place.port)}
        added |= {"RANK": str(rank), "WORLD_SIZE": str(place.world_size), "LOCAL_RANK": str(local_rank)}
    elif contestant.kind == PADDLE:
        ends = [
            f"{address}:{place.port + local}" for address in place.addresses for local in range(place.ranks_per_node)
        ]
        added |= {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": str(place.world_size)}
        added |= {"PADDLE_TRAINER_ENDPOINTS": ",".join(ends), "PADDLE_CURRENT_ENDPOINT": ends[rank]}
        added |= {"PADDLE_DISTRI_BACKEND": "gloo", "PADDLE_MASTER": f"{place.addresses[0]}:{place.port + 15}"}
    elif contestant.kind == ALONE and contestant.framework == OURS:
        added |= {"FLAGS_new_executor_serial_run": "1"}
    return added


def shared_environment(environ: dict[str, str], is_amd: bool) -> dict[str, str]:
    """The same for every contestant: one thread per rank, and on AMD what our launcher sets for MKL."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    mkl = {"MKL_DEBUG_CPU_TYPE": "5"} if is_amd else {}
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOG_minloglevel": "2"}
    return kept | own | mkl


@contextlib.contextmanager
def _started(commands: Sequence[Command], folder: Path, lab: Lab) -> Iterator[list[subprocess.Popen[bytes]]]:
    shared = shared_environment(dict(os.environ), "AuthenticAMD" in Path("/proc/cpuinfo").read_text())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, (command, added) in enumerate(commands):
            with (folder / f"process{index}.log").open("wb") as log:
                environ = shared | added
                processes.append(
                    subprocess.Popen(
                        command, env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
                    )
                )
        yield processes
    finally:
        _stop(processes)
        lab.end_processes()  # also processes that a launcher left


def _wait(name: str, processes: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Wait until all have ended with 0. One failure ends the job."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        if time.monotonic() > deadline:
            raise JobFailed(f"{name} did not end within {timeout:g} s\n{_last_lines(folder)}")
        time.sleep(0.1)
    if any(process.poll() for process in processes):
        codes = [process.poll() for process in processes]
        raise JobFailed(f"{name} ended with exit codes {codes}\n{_last_lines(folder)}")


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
        deadline = time.monotonic() + seconds
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _last_lines(folder: Path, lines: int = 12) -> str:
    parts = []
    for log in sorted(folder.glob("process*.log")):
        parts += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-lines:]]
    return "\n".join(parts)
