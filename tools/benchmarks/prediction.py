"""Predicted step times, from links measured in the lab and the compute-only run."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.price import Compute, Link, Network, predict
from fleet_train.profile import load_profile
from tools.benchmarks.jobs import Command, JobFailed, Place, run_commands

_FLAGS = r"--{0}latency_us=([0-9.]+) --{0}bandwidth_mbps=([0-9.]+)"
# For links that a cluster of one rank per node does not use.
_UNUSED = Link(0.0, 1e12)


def measure_links(place: Place, folder: Path, seconds: float, timeout_seconds: float) -> Network:
    """Run ``plan --measure`` on the lab's nodes. Raises JobFailed."""
    folder.mkdir(parents=True)
    run_commands("plan --measure", [_command(place, folder, node, seconds) for node in range(len(place.lab.nodes))],
                 folder, place.lab, timeout_seconds)  # fmt: skip
    output = (folder / "process0.log").read_text(errors="replace")
    between, inside = (_link(output, prefix) for prefix in ("", "inside_"))
    if between is None:
        raise JobFailed(f"plan --measure printed no link between the nodes:\n{output[-2000:]}")
    return Network(between, inside or _UNUSED)


def _command(place: Place, folder: Path, node: int, seconds: float) -> Command:
    flags = {
        "cluster_node_ips": ",".join(place.addresses),
        "node_ip": place.addresses[node],
        "started_port": place.port,
        "nproc_per_node": place.ranks_per_node,
        "log_dir": folder / f"log{node}",
        "join_timeout": 120,
    }
    launch = [sys.executable, "-m", "fleet_train", "launch", *(f"--{name}={value}" for name, value in flags.items())]
    measure = ["-m", "fleet_train", "plan", "--measure", f"--measure_seconds={seconds:g}"]
    return [*place.lab.nodes[node].prefix, *launch, *measure], {}


def _link(output: str, prefix: str) -> Link | None:
    found = re.search(r"(?<=\s)" + _FLAGS.format(prefix), output)
    return Link(float(found[1]) / 1e6, float(found[2]) * 1e6 / 8) if found else None


def predicted_step_ms(
    profile_name: str, facts: Mapping[str, Any], nodes: int, ranks_per_node: int, network: Network, compute_ms: float
) -> float | None:
    """Milliseconds of a step by the plan of ``facts`` (a rank's record); None without a plan."""
    if "gradients" not in facts:
        return None
    cluster = Cluster.imagined(nodes, ranks_per_node)
    gradients = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in facts["gradients"]]
    plan = build_plan(gradients, cluster, load_profile(profile_name))
    return 1e3 * predict(plan, cluster, network, Compute.of(compute_ms / 1e3)).step
