"""Fits a link's latency and bandwidth to timed allreduces, and gives the command that uses them. Pure arithmetic."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fleet_train.errors import ClusterError
from fleet_train.plan.backend_bytes import flows, rounds
from fleet_train.plan.price.predict import Link

MEASURED_BYTES = tuple(4**power * 1024 for power in range(1, 8))
"""Timed buffer sizes: 4 KiB to 16 MiB, each four times the previous one."""

_ROUNDS_OF_FITTING = 50
_BANDWIDTH_STEP, _LATENCY_STEP, _LEAST_LATENCY = 1.25, 2.0, 1e-5


@dataclass(frozen=True)
class Sample:
    """The median time of an allreduce: bytes of one rank's buffer, seconds on the slowest rank."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class MeasuredLink:
    """The result of a sweep over one kind of link. ``group_size``: ranks in each allreduce."""

    group_size: int
    samples: tuple[Sample, ...]
    link: Link
    error: float
    """Median of |fitted - measured| / measured over the samples."""


def fit(samples: Sequence[Sample], group_size: int) -> MeasuredLink:
    """Latency and bandwidth in ``seconds = rounds * latency + bytes sent / bandwidth``.

    Medians, latency over the smaller half of the sizes and bandwidth over the others, alternating until both converge:
    one disturbed size changes neither. Raises ClusterError for fewer than two sizes.
    """
    ordered = sorted(samples, key=lambda sample: sample.nbytes)
    if len({sample.nbytes for sample in ordered}) < 2:
        raise ClusterError(
            f"{len(samples)} buffer size{'' if len(samples) == 1 else 's'} measured: latency and bandwidth need two at "
            "least; raise --measure_seconds"
        )
    steps = rounds("allreduce", group_size)
    rows = [(_sent_bytes(sample.nbytes, group_size), sample.seconds) for sample in ordered]
    # Of the usual seven: 4 KiB to 256 KiB, and 1 to 16 MiB, as large as buckets are.
    middle = (len(rows) + 1) // 2
    small, large = rows[:middle], rows[middle:]
    latency = rate = 0.0
    for _ in range(_ROUNDS_OF_FITTING):
        # If latency alone would explain the whole time, count at least a tenth as transfer.
        rate = statistics.median(sent / max(seconds - steps * latency, seconds / 10) for sent, seconds in large)
        latency = statistics.median(max(0.0, seconds - sent / rate) / steps for sent, seconds in small)
    errors = [abs(steps * latency + sent / rate - seconds) / seconds for sent, seconds in rows]
    return MeasuredLink(group_size, tuple(ordered), Link(latency, rate), statistics.median(errors))


def coarse(link: Link) -> Link:
    """A link on a grid: bandwidths in steps of a quarter, latencies in steps of two.

    Short measurements differ from run to run; the choice based on them should not.
    """
    return Link(
        _LATENCY_STEP ** round(math.log(max(link.latency_seconds, _LEAST_LATENCY), _LATENCY_STEP)),
        _BANDWIDTH_STEP ** round(math.log(link.bytes_per_second, _BANDWIDTH_STEP)),
    )


def _sent_bytes(nbytes: int, group_size: int) -> float:
    return max(flow.nbytes for flow in flows("allreduce", range(group_size), nbytes).values())


def link_flags(link: Link, prefix: str = "") -> list[str]:
    """The flags of ``plan`` for this link; ``prefix``: "" between nodes, "inside_" inside them."""
    return [
        f"--{prefix}latency_us={link.latency_seconds * 1e6:.1f}",
        f"--{prefix}bandwidth_mbps={link.bytes_per_second * 8 / 1e6:.1f}",
    ]


def plan_command(
    nodes: int,
    ranks_per_node: int,
    between: MeasuredLink | None,
    inside: MeasuredLink | None,
    rest: Sequence[str],
) -> str:
    """The command that predicts with the measured values; ``rest``: strategy and what to plan for."""
    words = ["python", "-m", "fleet_train", "plan", f"--nodes={nodes}", f"--ranks_per_node={ranks_per_node}"]
    words += link_flags(between.link) if between else []
    words += link_flags(inside.link, "inside_") if inside else []
    return shlex.join([*words, *rest])


def describe(where: str, measured: MeasuredLink) -> str:
    """A readable table of one sweep."""
    lines = [
        f"{where}: allreduce over {measured.group_size} ranks",
        f"{'KiB':>8} {'measured ms':>12} {'fitted ms':>10}",
    ]
    steps = rounds("allreduce", measured.group_size)
    for sample in measured.samples:
        sent = _sent_bytes(sample.nbytes, measured.group_size)
        fitted = steps * measured.link.latency_seconds + sent / measured.link.bytes_per_second
        lines.append(f"{sample.nbytes / 1024:>8.0f} {sample.seconds * 1e3:>12.3f} {fitted * 1e3:>10.3f}")
    lines.append(
        f"latency {measured.link.latency_seconds * 1e6:.1f} us per message, bandwidth "
        f"{measured.link.bytes_per_second * 8 / 1e6:.1f} Mb/s; median error of the fit {measured.error:.0%}"
    )
    return "\n".join(lines)
