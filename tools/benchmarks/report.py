"""The table that people read: one row per contestant, ratios beside times. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tools.benchmarks.contestants import ALONE, BEFORE, OURS, REFERENCE, parse
from tools.benchmarks.figures import Summary, paired_difference, paired_ratio, wire_ms

_HEADINGS = {
    "contestant": "contestant",
    "step": "step ms (p10 to p90)",
    "predicted_step": "predicted step ms",
    "ratio": f"step / {REFERENCE}",
    "before": "step / before",
    "efficiency": "scaling efficiency",
    "exposed": "exposed ms",
    "exposed_over_wire": "exposed / wire time",
    "sent": "kB sent per step and node",
    "predicted": "sent / predicted",
    "loss": "loss",
    "accuracy": "test accuracy",
    "points": "points from synchronous",
    "target": "s to target (steps)",
    "target_ratio": f"{REFERENCE} / its s to target",
}
_NOTHING = ""


@dataclass(frozen=True)
class Row:
    """Everything a row says, as numbers; None where there is nothing to say."""

    contestant: str
    ratio: float | None
    over_before: float | None
    efficiency: float | None
    exposed_ms: float | None
    wire_ms: float | None
    exposed_over_wire: float | None
    sent_over_predicted: float | None
    predicted_step_ms: float | None
    points_from_synchronous: float | None
    target_ratio: float | None


def row_of(
    name: str, summaries: Mapping[str, Summary], rate: str, predictions: Mapping[str, float] | None = None
) -> Row:
    """Compares one contestant with its compute-only run and with the reference, where these took part.

    ``predictions``: milliseconds of a step by contestant, where there is a plan.
    """
    summary = summaries[name]
    contestant = parse(name)
    is_alone = contestant.kind == ALONE
    baseline = None if is_alone else summaries.get(contestant.baseline)
    reference = None if is_alone else summaries.get(REFERENCE)
    before = summaries.get(f"{BEFORE}:{contestant.variant}") if contestant.kind == OURS else None
    exposed = paired_difference(summary.round_step_ms, baseline.round_step_ms) if baseline else None
    synchronous = None if is_alone else next((each for each in summaries.values() if each.synchronous), None)
    on_wire = None if is_alone else wire_ms(summary.wire_bytes or summary.interface_bytes, rate)
    return Row(
        contestant=name,
        ratio=paired_ratio(summary.round_step_ms, reference.round_step_ms) if reference else None,
        over_before=paired_ratio(summary.round_step_ms, before.round_step_ms) if before else None,
        efficiency=paired_ratio(baseline.round_step_ms, summary.round_step_ms) if baseline else None,
        exposed_ms=exposed,
        wire_ms=on_wire,
        exposed_over_wire=exposed / on_wire if exposed is not None and on_wire else None,
        sent_over_predicted=summary.interface_bytes / summary.predicted_bytes if summary.predicted_bytes else None,
        predicted_step_ms=(predictions or {}).get(name),
        points_from_synchronous=100 * (summary.accuracy - synchronous.accuracy) if synchronous else None,
        target_ratio=_target_ratio(summary, reference),
    )


def _target_ratio(summary: Summary, reference: Summary | None) -> float | None:
    if reference is None:
        return None
    ours, theirs = summary.median_seconds_to_target, reference.median_seconds_to_target
    return theirs / ours if ours and theirs else None


def table(summaries: Mapping[str, Summary], rate: str, predictions: Mapping[str, float] | None = None) -> str:
    """The markdown table, in the order of ``summaries``."""
    has_before = any(parse(name).kind == BEFORE for name in summaries)
    headings = {key: text for key, text in _HEADINGS.items() if has_before or key != "before"}
    lines = ["| " + " | ".join(headings.values()) + " |", "|" + " --- |" * len(headings)]
    for name, summary in summaries.items():
        cells = _cells(summary, row_of(name, summaries, rate, predictions))
        lines.append("| " + " | ".join(cells[key] for key in headings) + " |")
    return "\n".join(lines)


def _cells(summary: Summary, row: Row) -> dict[str, str]:
    is_alone = parse(row.contestant).kind == ALONE
    return {
        "contestant": row.contestant,
        "step": f"{summary.step_ms:.1f} ({summary.step_ms_p10:.1f} to {summary.step_ms_p90:.1f})",
        "predicted_step": _number(row.predicted_step_ms, 1),
        "ratio": _number(row.ratio, 2),
        "before": _number(row.over_before, 2),
        "efficiency": _number(row.efficiency, 2),
        "exposed": _number(row.exposed_ms, 1),
        "exposed_over_wire": _number(row.exposed_over_wire, 2),
        "sent": _NOTHING if is_alone else f"{summary.interface_bytes / 1e3:,.1f}",
        "predicted": _number(row.sent_over_predicted, 3),
        "loss": f"{summary.loss:.4f}",
        "accuracy": f"{summary.accuracy:.4f}",
        "points": "" if row.points_from_synchronous is None else f"{row.points_from_synchronous:+.1f}",
        "target": _NOTHING if is_alone else _target(summary),
        "target_ratio": _number(row.target_ratio, 2),
    }


def _number(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _target(summary: Summary) -> str:
    seconds = summary.median_seconds_to_target
    if seconds is None:
        missed = sum(each is None for each in summary.seconds_to_target)
        return f"not reached in {missed} of {len(summary.seconds_to_target)} rounds"
    steps = [each for each in summary.steps_to_target if each is not None]
    shown = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    return f"{seconds:.2f} ({shown})"
