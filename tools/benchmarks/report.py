"""The table of a record: one row per contestant, ratios beside times. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tools.benchmarks.contestants import ALONE, BEFORE, OURS, REFERENCE, TORCH, is_tuned, parse
from tools.benchmarks.figures import Summary, paired, paired_differences, paired_ratio, wire_ms
from tools.benchmarks.hooks import DDP, Hook

_HEADINGS = {
    "contestant": "contestant",
    "rounds": "rounds",
    "step": "step ms (min to max)",
    "predicted_step": "predicted step ms",
    "ratio": "step / best DDP",
    "twin": "step / its PyTorch twin",
    "before": "step / before",
    "compute": "step / compute alone",
    "efficiency": "scaling efficiency",
    "exposed": "exposed ms",
    "exposed_over_wire": "exposed / wire time",
    "sent": "kB sent per step and node",
    "fewer": "times fewer than float32",
    "predicted": "sent / predicted",
    "test_loss": "test loss",
    "accuracy": "test accuracy (min to max)",
    "points": "points from synchronous (min to max)",
    "target": "s to target (steps)",
    "target_ratio": "best DDP / its s to target",
    "hook_ratio": "best of PyTorch / its s to target",
}
_NOTHING = ""


@dataclass(frozen=True)
class Row:
    """The numbers of a row beside the summary's; None if not applicable.

    ``ratio``, ``target_ratio``: against the best of PyTorch DDP's bucket sizes; ``twin``: the PyTorch contestant that
    corresponds to this one, the fastest if there are several; ``hook_ratio``: against the best of all of PyTorch's.
    ``points_from_synchronous``: mean, smallest and largest difference within a round, whose seed is the same.
    """

    contestant: str
    tuned: bool
    ratio: float | None
    twin: str | None
    over_twin: float | None
    over_before: float | None
    over_compute: float | None
    efficiency: float | None
    exposed_ms: float | None
    wire_ms: float | None
    exposed_over_wire: float | None
    times_fewer_bytes: float | None
    sent_over_predicted: float | None
    predicted_step_ms: float | None
    points_from_synchronous: tuple[float, float, float] | None
    target_ratio: float | None
    hook_ratio: float | None


def row_of(
    name: str, summaries: Mapping[str, Summary], rate: str, predictions: Mapping[str, float] | None = None
) -> Row:
    """Compares one contestant with its compute-only run and its rivals, if these took part.

    ``predictions``: milliseconds of a step by contestant, if it has a plan.
    """
    summary, contestant = summaries[name], parse(name)
    is_alone = contestant.kind == ALONE
    baseline = None if is_alone else summaries.get(contestant.baseline)
    ddp = [] if is_alone else of_family(DDP, summaries)
    twins = of_family(summary.family, summaries) if summary.family and not is_alone else []
    twin = fastest(twins, summaries)
    exposed = median(_differences(summary, baseline)) if baseline and _differences(summary, baseline) else None
    on_wire = None if is_alone else wire_ms(summary.wire_bytes or summary.interface_bytes, rate)
    whole = None if is_alone else _float32_bytes(summaries)
    return Row(
        contestant=name,
        tuned=is_tuned(contestant),
        ratio=_step_ratio(summary, fastest(ddp, summaries), summaries),
        twin=twin,
        over_twin=_step_ratio(summary, twin, summaries),
        over_before=_step_ratio(summary, _before(contestant.kind, contestant.variant, summaries), summaries),
        over_compute=paired_ratio(summary.round_step_ms, baseline.round_step_ms) if baseline else None,
        efficiency=paired_ratio(baseline.round_step_ms, summary.round_step_ms) if baseline else None,
        exposed_ms=exposed,
        wire_ms=on_wire,
        exposed_over_wire=exposed / on_wire if exposed is not None and on_wire else None,
        times_fewer_bytes=whole / summary.interface_bytes if whole and summary.interface_bytes else None,
        sent_over_predicted=summary.interface_bytes / summary.predicted_bytes if summary.predicted_bytes else None,
        predicted_step_ms=(predictions or {}).get(name),
        points_from_synchronous=None if is_alone else _points(summary, _synchronous(summaries)),
        target_ratio=_target_ratio(summary, ddp, summaries),
        hook_ratio=None if is_alone else _target_ratio(summary, of_family(None, summaries), summaries),
    )


def of_family(family: str | None, summaries: Mapping[str, Summary]) -> list[str]:
    """PyTorch's contestants of one family, or all of them."""
    found = [name for name in summaries if parse(name).kind == TORCH]
    return [name for name in found if family in (None, Hook.of(parse(name).variant, 0).family)]


def fastest(names: Sequence[str], summaries: Mapping[str, Summary]) -> str | None:
    """The contestant with the shortest step."""
    return min(names, key=lambda name: summaries[name].step_ms, default=None)


def _step_ratio(summary: Summary, other: str | None, summaries: Mapping[str, Summary]) -> float | None:
    return paired_ratio(summary.round_step_ms, summaries[other].round_step_ms) if other else None


def _before(kind: str, variant: str, summaries: Mapping[str, Summary]) -> str | None:
    name = f"{BEFORE}:{variant}"
    return name if kind == OURS and name in summaries else None


def _differences(summary: Summary, baseline: Summary) -> list[float]:
    return paired_differences(summary.round_step_ms, baseline.round_step_ms)


def _synchronous(summaries: Mapping[str, Summary]) -> Summary | None:
    """The first profile that averages all gradients in every step; DDP if there is none."""
    return next((each for each in summaries.values() if each.synchronous), summaries.get(REFERENCE))


def _float32_bytes(summaries: Mapping[str, Summary]) -> float | None:
    synchronous = _synchronous(summaries)
    return synchronous.interface_bytes if synchronous else None


def _points(summary: Summary, synchronous: Summary | None) -> tuple[float, float, float] | None:
    if synchronous is None or not paired(summary.accuracies, synchronous.accuracies):
        return None
    points = [100 * each for each in paired_differences(summary.accuracies, synchronous.accuracies)]
    return fmean(points), min(points), max(points)


def _target_ratio(summary: Summary, others: Sequence[str], summaries: Mapping[str, Summary]) -> float | None:
    """Seconds to target of the fastest of ``others`` over its own, in their common rounds."""
    reached = [summaries[name] for name in others if summaries[name].seconds_to_target]
    quickest = min(reached, key=lambda each: each.mean_seconds_to_target or 0.0, default=None)
    return paired_ratio(quickest.seconds_to_target, summary.seconds_to_target) if quickest else None


def table(summaries: Mapping[str, Summary], rate: str, predictions: Mapping[str, float] | None = None) -> str:
    """The Markdown table, in the order of ``summaries``; empty columns are left out."""
    rows = [
        _cells(summary, row_of(name, summaries, rate, predictions), len(summary.round_step_ms))
        for name, summary in summaries.items()
    ]
    headings = {key: text for key, text in _HEADINGS.items() if any(row[key] for row in rows)}
    lines = ["| " + " | ".join(headings.values()) + " |", "|" + " --- |" * len(headings)]
    lines += ["| " + " | ".join(row[key] for key in headings) + " |" for row in rows]
    return "\n".join(lines)


def _cells(summary: Summary, row: Row, rounds: int) -> dict[str, str]:
    is_alone = parse(row.contestant).kind == ALONE
    accuracies, steps = summary.accuracies.values(), summary.round_step_ms.values()
    whole = "" if summary.whole_periods else " [1]"
    return {
        "contestant": row.contestant + (" (tuned)" if row.tuned else ""),
        "rounds": str(rounds),
        "step": f"{summary.step_ms:.1f} ({min(steps):.1f} to {max(steps):.1f}){whole}",
        "predicted_step": _number(row.predicted_step_ms, 1),
        "ratio": _number(row.ratio, 2),
        "twin": f"{row.over_twin:.2f} ({row.twin})" if row.over_twin and row.twin else _NOTHING,
        "before": _number(row.over_before, 2),
        "compute": _number(row.over_compute, 2),
        "efficiency": _number(row.efficiency, 2),
        "exposed": _number(row.exposed_ms, 1),
        "exposed_over_wire": _number(row.exposed_over_wire, 2),
        "sent": _NOTHING if is_alone else f"{summary.interface_bytes / 1e3:,.1f}",
        "fewer": _number(row.times_fewer_bytes, 1),
        "predicted": _number(row.sent_over_predicted, 3),
        "test_loss": _NOTHING if is_alone else f"{fmean(summary.test_losses.values()):.4f}",
        "accuracy": _NOTHING
        if is_alone
        else f"{summary.accuracy:.4f} ({min(accuracies):.4f} to {max(accuracies):.4f})",
        "points": _spread(row.points_from_synchronous),
        "target": _NOTHING if is_alone else _target(summary),
        "target_ratio": _number(row.target_ratio, 2),
        "hook_ratio": _number(row.hook_ratio, 2),
    }


def _spread(points: tuple[float, float, float] | None) -> str:
    return _NOTHING if points is None else f"{points[0]:+.2f} ({points[1]:+.2f} to {points[2]:+.2f})"


def _number(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _target(summary: Summary) -> str:
    seconds = summary.mean_seconds_to_target
    return "not reached" if seconds is None else f"{seconds:.2f} ({summary.steps_to_target})"
