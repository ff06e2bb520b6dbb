"""The cost of the control plane: the root's CPU time and bytes per barrier, joins, latency, lost relays, attacks.

    python tools/bench_control_plane.py --before CHECKOUT --record docs/benchmarks/2026-11-22-control-plane

Servers and relays are real, each kind in its own process; ranks are event-driven simulations that speak the real
protocol. All share this machine, so wall-clock times of large jobs are upper bounds; the root's CPU time is measured
for its process alone. All traffic is over loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.benchmarks.record import circumstances
from tools.control_plane.page import page
from tools.control_plane.processes import HERE, Talking
from tools.control_plane.tree import Job

ROOT = Path(__file__).resolve().parents[1]
# (nodes, ranks per node, over relays)
SIZES = ((4, 8, False), (16, 8, False), (64, 8, False), (64, 8, True), (512, 1, True), (125, 8, True), (1250, 8, True))
_SILENCE_SECONDS = 5.0
_ATTACK_SECONDS = 15.0


@contextmanager
def talking() -> Iterator[list[Talking]]:
    processes: list[Talking] = []
    try:
        yield processes
    finally:
        for each in processes:
            each.end()


def measure_barriers(nodes: int, ranks_per_node: int, barriers: int, *, relays: bool) -> dict[str, Any]:
    """One job: join, then ``barriers`` barriers; returns what they cost the root."""
    job = Job(nodes, ranks_per_node)
    asked: dict[str, Any] = {"nodes": nodes, "ranks_per_node": ranks_per_node, "silence": 120.0}
    with talking() as processes:
        root = Talking("servers.py", {**asked, "first": 0, "last": 0, "ports": {}})
        processes.append(root)
        ports = root.first
        if relays:
            processes.append(Talking("servers.py", {**asked, "first": 1, "last": nodes - 1, "ports": ports}))
            ports = processes[-1].first
        where = [ports[str(node if relays else 0)] for node in range(nodes) for _ in range(ranks_per_node)]
        start = root.next()
        ranks = Talking("stand_ins.py", {"ports": where, "barriers": barriers})
        processes.append(ranks)
        joined, after_join = ranks.next(), root.next()
        ranks.next()
        before, told, after = root.next(), ranks.next(), root.next()
    if told["failed"]:
        raise SystemExit(f"{told['failed']} ranks were answered with an error")
    return {
        "ranks": job.world_size,
        "nodes": nodes,
        "relays": relays,
        "children_of_root": job.children_of_root() + ranks_per_node if relays else job.world_size,
        "root_cpu_ms_per_gate": 1e3 * (after["cpu_seconds"] - before["cpu_seconds"]) / barriers,
        "root_bytes_per_gate": (after["bytes"] - before["bytes"]) / barriers,
        "gate_ms_wall": 1e3 * told["barrier_seconds"],
        "join_seconds_wall": joined["joined_seconds"],
        "join_root_cpu_seconds": after_join["cpu_seconds"] - start["cpu_seconds"],
    }


def measure_lost_relay(how: signal.Signals) -> dict[str, Any]:
    """Three nodes of eight ranks; node 2's relay gets this signal while all others wait for its ranks."""
    asked: dict[str, Any] = {"nodes": 3, "ranks_per_node": 8, "silence": _SILENCE_SECONDS}
    with talking() as processes:
        ports: dict[str, int] = {}
        for node in range(3):
            processes.append(Talking("servers.py", {**asked, "first": node, "last": node, "ports": ports}))
            ports = processes[-1].first
        where = [ports[str(node)] for node in range(3) for _ in range(8)]
        lost = list(range(16, 24))
        ranks = Talking("stand_ins.py", {"ports": where, "lost": lost})
        processes.append(ranks)
        victim = processes[2].process
        os.kill(victim.pid, how)
        began = time.monotonic()
        told = ranks.next()
        os.kill(victim.pid, signal.SIGCONT)
    return {
        "signal": how.name,
        "seconds_until_all_were_told": told["at"] - began,
        "told": told["told"],
        "timeout_seconds": _SILENCE_SECONDS,
        "words": told["words"],
    }


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server of the checkout in ``folder``, in its own process; yields its endpoint."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, str(HERE / "latency.py"), "server"]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield str(json.loads(server.stdout.readline())["endpoint"])
        finally:
            server.kill()


def measure_latency(folder: Path, barriers: int, attack: str = "") -> dict[str, float]:
    """Two real clients; median, 95th percentile and maximum of their barriers, in milliseconds."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    with served(folder) as endpoint:
        attacker = None
        if attack:
            command = [sys.executable, str(HERE / "hostile.py"), endpoint, attack, str(_ATTACK_SECONDS)]
            attacker = subprocess.Popen(command)
            time.sleep(1)
        command = [sys.executable, str(HERE / "latency.py"), "member", endpoint]
        other = subprocess.Popen([*command, "1", str(barriers)], env=environ)
        told = subprocess.run(
            [*command, "0", str(barriers)], env=environ, stdout=subprocess.PIPE, text=True, check=True
        )
        other.wait()
        if attacker is not None:
            attacker.kill()
            attacker.wait()
    measured: dict[str, float] = json.loads(told.stdout)
    return measured


def median_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of numbers over rounds; other values are the last round's."""
    merged: dict[str, Any] = {}
    for name, value in rounds[-1].items():
        is_number = isinstance(value, float)
        merged[name] = round(statistics.median(each[name] for each in rounds), 4) if is_number else value
    return merged


def measure(rounds: int, barriers: int, before: Path | None) -> dict[str, Any]:
    """Every part, ``rounds`` times, interleaved."""
    turns: dict[str, list[dict[str, Any]]] = {}

    def note(part: str, measured: dict[str, Any]) -> None:
        turns.setdefault(part, []).append(measured)
        print(f"{part}: {json.dumps(measured)}", file=sys.stderr, flush=True)

    for _ in range(rounds):
        for nodes, per_node, relays in SIZES:
            few = max(5, barriers // 4) if nodes * per_node > 2000 else barriers
            name = f"{nodes} x {per_node} {'over relays' if relays else 'at the root'}"
            note(name, measure_barriers(nodes, per_node, few, relays=relays))
        note("latency", measure_latency(ROOT, 3000))
        if before is not None:
            note("latency before", measure_latency(before, 3000))
        for attack in ("idle", "large", "deep"):
            note(f"latency under attack: {attack}", measure_latency(ROOT, 10_000, attack))
        for how in (signal.SIGKILL, signal.SIGSTOP):
            note(f"relay {how.name}", measure_lost_relay(how))
    return {"rounds": turns, "medians": {part: median_of(each) for part, each in turns.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--barriers", type=int, default=60, help="Barriers per job and round.")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds; each measures every part once.")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="Also measure the latency of this checkout.")
    parser.add_argument("--record", type=Path, metavar="PATH", help="Write PATH.json and PATH.md.")
    options = parser.parse_args()
    before = options.before.resolve() if options.before else None
    result = circumstances() | measure(options.rounds, options.barriers, before)
    if options.record is None:
        print(json.dumps(result["medians"], indent=1))
        return
    result["command"] = f"python tools/bench_control_plane.py --record {options.record}"
    options.record.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.record.with_suffix(".md").write_text(page(result))


if __name__ == "__main__":
    main()
