"""Ranks as real processes: with the stock launcher's variables, or by a launcher on each node, as users start it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.ports import free_ports
from tests.support.processes import RESULTS_VARIABLE, ROOT, Ended, Job, clean_environ, python, write_script

_UNDER_STREAMS = ROOT / "tests/support/late.py"


@dataclass(frozen=True)
class RanksResult:
    """How every rank ended, by rank, and what it reported through ``tests.support.worker.report``."""

    ranks: list[Ended]
    values: dict[int, dict[str, Any]]
    folder: Path

    @property
    def exit_codes(self) -> list[int]:
        return [rank.exit_code for rank in self.ranks]

    def of_all(self, name: str) -> list[Any]:
        """The value that each rank reported under ``name``, by rank."""
        return [self.values[rank][name] for rank in range(len(self.ranks))]

    def report(self) -> str:
        return "\n".join(
            f"--- {rank.name}: exit {rank.exit_code}{', killed by the test' if rank.killed else ''} ---\n{rank.output}"
            for rank in self.ranks
        )


def read_results(folder: Path) -> dict[int, dict[str, Any]]:
    """rank -> everything it reported; later reports of a rank replaced earlier values of the same name."""
    results: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("rank*.json")):
        results[int(path.stem.removeprefix("rank"))] = json.loads(path.read_text())
    for path in sorted(folder.glob("rank*.npz")):
        with np.load(path) as arrays:
            results.setdefault(int(path.stem.removeprefix("rank")), {}).update({name: arrays[name] for name in arrays})
    return results


def node_sizes(world_size: int, nodes: int | Sequence[int]) -> list[int]:
    """Processes per node; a number of nodes shares the ranks out evenly, earlier nodes get the odd ones."""
    if not isinstance(nodes, int):
        assert sum(nodes) == world_size, f"nodes={list(nodes)} do not add up to world_size={world_size}"
        return list(nodes)
    return [world_size // nodes + (node < world_size % nodes) for node in range(nodes)]


def stock_environs(sizes: Sequence[int]) -> list[dict[str, str]]:
    """What the stock launcher sets for each rank on CPU, and Gloo's interface; node i is 127.0.0.(2+i)."""
    hosts = [f"127.0.0.{2 + node}" for node in range(len(sizes))]
    first_port = free_ports(max(sizes) + 1, hosts)
    endpoints = [f"{hosts[node]}:{first_port + local}" for node, size in enumerate(sizes) for local in range(size)]
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    return [
        {
            "PADDLE_MASTER": f"{hosts[0]}:{first_port + max(sizes)}",
            "PADDLE_GLOBAL_SIZE": str(len(endpoints)),
            "PADDLE_LOCAL_SIZE": str(sizes[node]),
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_LOCAL_RANK": str(local),
            "PADDLE_NNODES": str(len(sizes)),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(endpoints)),
            "PADDLE_RANK_IN_NODE": str(local),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_DISTRI_BACKEND": "gloo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank, (node, local) in enumerate(places)
    ]


def run_ranks(
    script: str | Path,
    world_size: int,
    *,
    folder: Path,
    nodes: int | Sequence[int] = 1,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    env_of_rank: Mapping[int, Mapping[str, str]] | None = None,
    timeout_seconds: float = 120.0,
    patience_after_failure_seconds: float | None = 20.0,
    check: bool = True,
    late_streams: bool = False,
) -> RanksResult:
    """Run ``script`` (text or path) as ``world_size`` processes and wait for all of them.

    ``folder`` is the working directory and receives logs and reports. ``nodes=0``: one process without a launcher's
    variables. With ``check``, an exit code other than 0 fails the test with all output. ``late_streams``: collectives
    are enqueued and end late, as on GPUs, and whatever reads a value in a step raises (`tests.support.late`).
    """
    sizes = node_sizes(world_size, nodes) if nodes != 0 else []
    environs = stock_environs(sizes) if sizes else [{}]
    reports = folder / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    path = write_script(script, folder)
    command = python(*([str(_UNDER_STREAMS)] if late_streams else []), str(path), *args)
    with Job(folder) as job:
        for rank, environ in enumerate(environs):
            own = {RESULTS_VARIABLE: str(reports), **environ, **(env or {}), **(env_of_rank or {}).get(rank, {})}
            job.start(f"rank{rank}", command, clean_environ(own))
        ended = job.wait(timeout_seconds, patience_after_failure_seconds)
    result = RanksResult(ended, read_results(reports), folder)
    if check:
        assert result.exit_codes == [0] * len(environs), result.report()
    return result


@dataclass(frozen=True)
class LaunchersResult:
    """What each node's launcher printed and what the ranks reported; ``folders``: of the nodes."""

    nodes: list[Ended]
    values: dict[int, dict[str, Any]]
    folders: list[Path]

    def of_all(self, name: str) -> list[Any]:
        """The value that each rank reported under ``name``, by rank."""
        return [self.values[rank][name] for rank in sorted(self.values)]

    def report(self) -> str:
        """The launchers' output and every log file below the nodes' folders."""
        parts = [f"--- {node.name}: exit {node.exit_code} ---\n{node.output}" for node in self.nodes]
        for folder in self.folders:
            parts += [f"--- {p} ---\n{p.read_text(errors='replace')}" for p in sorted(folder.rglob("workerlog.*"))]
        return "\n".join(parts)


def run_launchers(
    commands: Sequence[Sequence[str]],
    *,
    folder: Path,
    env_of_node: Sequence[Mapping[str, str]] = (),
    prefixes: Sequence[Sequence[str]] = (),
    timeout_seconds: float = 120.0,
) -> LaunchersResult:
    """Start ``commands[i]`` as node i in ``folder/node<i>`` and wait for all; each has to end well and leave nobody.

    ``prefixes[i]`` goes before a node's command (``ip netns exec ...``).
    """
    reports = folder / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    folders = [folder / f"node{node}" for node in range(len(commands))]
    with Job(folder) as job:
        for node, command in enumerate(commands):
            own = {RESULTS_VARIABLE: str(reports), **(env_of_node[node] if env_of_node else {})}
            prefix = prefixes[node] if prefixes else ()
            job.start(f"node{node}", [*prefix, *command], clean_environ(own), cwd=folders[node])
        ended = job.wait(timeout_seconds, 40.0)
        orphans = job.orphans()
    result = LaunchersResult(ended, read_results(reports), folders)
    assert {one.exit_code for one in ended} == {0}, result.report()
    assert orphans == [], result.report()
    return result


def run_launched(
    script: Path,
    nodes: int,
    *,
    folder: Path,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> LaunchersResult:
    """Run ``script`` by ``launch`` without further flags, one rank on each node; node i is 127.0.0.(2+i)."""
    hosts = [f"127.0.0.{2 + node}" for node in range(nodes)]
    where = [f"--cluster_node_ips={','.join(hosts)}", f"--started_port={free_ports(2, hosts)}"]
    commands = [
        python("-m", "fleet_train", "launch", *where, f"--node_ip={host}", str(script), *args) for host in hosts
    ]
    return run_launchers(commands, folder=folder, env_of_node=[env or {}] * nodes, timeout_seconds=timeout_seconds)
