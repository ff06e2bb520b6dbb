"""The page of a record of strategies: one row per contestant, ratios beside times. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from tools.benchmarks.contestants import ALONE, BEFORE, DDP, OURS, REFERENCE, TORCH, Hook, parse
from tools.benchmarks.figures import SETUP_STEPS, Summary, paired_differences, paired_ratio, wire_ms
from tools.benchmarks.record import table, told_circumstances

Summaries = Mapping[str, Summary]
PICTURE = "milliseconds per step: computing alone, and what communication adds"
_BARS = ("#2f5d8c", "#f2a65a")
_HEADINGS = (
    "contestant", "rounds", "step ms (min to max)", "step / best DDP", "step / its PyTorch twin", "step / before",
    "step / compute alone", "scaling efficiency", "exposed ms", "wire ms", "kB sent per step and node",
    "times fewer than float32", "sent / predicted", "test loss", "test accuracy (min to max)",
    "points from synchronous (min to max)", "s to target (steps)", "best DDP / its s to target",
)  # fmt: skip
_NOTES = (
    "*best DDP*: the fastest of PyTorch DDP's bucket sizes in this table. *PyTorch twin*: the hook of the same kind, "
    "rank or period, the fastest of its settings in this table. *(tuned)*: a file of tools/benchmarks/profiles with "
    "knobs chosen for this benchmark; without it, a profile of the catalogue as it is. *exposed*: the step minus the "
    "compute-only one. *wire*: what the limiter counted, with one header per packet of the link's size, at the link's "
    "rate. *sent / predicted*: the interface's counter, with the headers of TCP, over the plan's bytes. *scaling "
    "efficiency*: the compute-only step, which is one node's, over the step. *times fewer than float32*: bytes of the "
    "first synchronous strategy over its own. [1]: shorter than its own start and one period, the mean over all steps "
    "but the first ones."
)


def rows_of(summaries: Summaries, rate: str) -> dict[str, dict[str, Any]]:
    """By contestant, its comparison with its compute-only run and its rivals; None where these took no part.

    ``ratio``, ``target_ratio``: against the best of PyTorch DDP's bucket sizes; ``twin``: the PyTorch contestant that
    corresponds to this one, the fastest if there are several. ``points_from_synchronous``: mean, smallest and largest
    difference within a round, whose seed is the same.
    """
    return {name: _row(name, summaries, rate) for name in summaries}


def _row(name: str, summaries: Summaries, rate: str) -> dict[str, Any]:
    summary, contestant = summaries[name], parse(name)
    is_alone = contestant.kind == ALONE
    baseline = None if is_alone else summaries.get(contestant.baseline)
    ddp = [] if is_alone else _of_family(DDP, summaries)
    twin = _fastest(_of_family(summary.family, summaries) if summary.family and not is_alone else [], summaries)
    before = summaries.get(f"{BEFORE}:{contestant.variant}") if contestant.kind == OURS else None
    # The first profile that averages all gradients in every step; DDP if there is none.
    synchronous = next((each for each in summaries.values() if each.synchronous), summaries.get(REFERENCE))
    whole = synchronous.interface_bytes if synchronous and not is_alone else None
    sent = summary.interface_bytes
    best = _fastest(ddp, summaries)
    return {
        "contestant": name,
        "tuned": contestant.is_tuned,
        "ratio": _over(summary, summaries[best] if best else None),
        "twin": twin,
        "over_twin": _over(summary, summaries[twin] if twin else None),
        "over_before": _over(summary, before),
        "over_compute": _over(summary, baseline),
        "efficiency": paired_ratio(baseline.round_step_ms, summary.round_step_ms) if baseline else None,
        "exposed_ms": _exposed(summary, baseline),
        "wire_ms": None if is_alone else wire_ms(summary.wire_bytes or sent, rate),
        "times_fewer_bytes": whole / sent if whole and sent else None,
        "sent_over_predicted": sent / summary.predicted_bytes if summary.predicted_bytes else None,
        "points_from_synchronous": None if is_alone else _points(summary, synchronous),
        "target_ratio": _target_ratio(summary, [summaries[each] for each in ddp]),
    }


def _of_family(family: str, summaries: Summaries) -> list[str]:
    """PyTorch's contestants of one family."""
    found = [name for name in summaries if parse(name).kind == TORCH]
    return [name for name in found if Hook.of(parse(name).variant, 0).family == family]


def _fastest(names: Sequence[str], summaries: Summaries) -> str | None:
    return min(names, key=lambda name: summaries[name].step_ms, default=None)


def _over(summary: Summary, other: Summary | None) -> float | None:
    return paired_ratio(summary.round_step_ms, other.round_step_ms) if other else None


def _exposed(summary: Summary, baseline: Summary | None) -> float | None:
    differences = paired_differences(summary.round_step_ms, baseline.round_step_ms) if baseline else []
    return median(differences) if differences else None


def _points(summary: Summary, synchronous: Summary | None) -> tuple[float, float, float] | None:
    differences = paired_differences(summary.accuracies, synchronous.accuracies) if synchronous else []
    points = [100 * each for each in differences]
    return (fmean(points), min(points), max(points)) if points else None


def _target_ratio(summary: Summary, others: Sequence[Summary]) -> float | None:
    """Seconds to target of the fastest of ``others`` over its own, in their common rounds."""
    reached = [each for each in others if each.seconds_to_target]
    quickest = min(reached, key=lambda each: each.mean_seconds_to_target or 0.0, default=None)
    return paired_ratio(quickest.seconds_to_target, summary.seconds_to_target) if quickest else None


def figures_table(summaries: Summaries, rate: str) -> list[str]:
    """The lines of the table, in the order of ``summaries``; empty columns are left out."""
    rows = [_cells(summaries[name], row) for name, row in rows_of(summaries, rate).items()]
    filled = [column for column in range(len(_HEADINGS)) if any(row[column] for row in rows)]
    return table([_HEADINGS[each] for each in filled], [[row[each] for each in filled] for row in rows])


def _cells(summary: Summary, row: Mapping[str, Any]) -> list[str]:
    accuracies, steps = summary.accuracies.values(), summary.round_step_ms.values()
    seconds, points = summary.mean_seconds_to_target, row["points_from_synchronous"]
    of_training = [
        f"{fmean(summary.test_losses.values()):.4f}",
        f"{summary.accuracy:.4f} ({min(accuracies):.4f} to {max(accuracies):.4f})",
        f"{points[0]:+.2f} ({points[1]:+.2f} to {points[2]:+.2f})" if points else "",
        "not reached" if seconds is None else f"{seconds:.2f} ({summary.steps_to_target})",
    ]
    is_alone = parse(row["contestant"]).kind == ALONE
    whole = "" if summary.whole_periods else " [1]"
    return [
        row["contestant"] + (" (tuned)" if row["tuned"] else ""),
        str(len(steps)),
        f"{summary.step_ms:.1f} ({min(steps):.1f} to {max(steps):.1f}){whole}",
        _number(row["ratio"], 2),
        f"{row['over_twin']:.2f} ({row['twin']})" if row["over_twin"] else "",
        *(_number(row[name], 2) for name in ("over_before", "over_compute", "efficiency")),
        *(_number(row[name], 1) for name in ("exposed_ms", "wire_ms")),
        "" if is_alone else f"{summary.interface_bytes / 1e3:,.1f}",
        _number(row["times_fewer_bytes"], 1),
        _number(row["sent_over_predicted"], 3),
        *([""] * len(of_training) if is_alone else of_training),
        _number(row["target_ratio"], 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def page(record: Mapping[str, Any], summaries: Summaries) -> list[str]:
    lab, task, before = record["lab"], record["task"], record["before_commit"]
    seeds = sorted({each["seed"] for each in record["rounds"]})
    paused = max((each.paused_share for each in summaries.values()), default=0.0)
    limit = "no limit" if lab["rate"] == "none" else lab["rate"]
    return [
        f"# Strategies, {record['circumstances']['date'][:10]}: {task['name']}, {lab['nodes']} nodes x "
        f"{lab['ranks_per_node']} ranks, {limit}",
        "",
        *([f"- *before*: commit {before}."] if before else []),
        f"- **{record['whole_rounds']} of {record['repeats']} rounds**, every contestant once per round in turn, "
        f"{task['steps']} steps each; seeds of start weights and data order: {', '.join(map(str, seeds))}.",
        f"- Network: {task['description']}; batch {task['global_batch_size']} over all ranks, SGD with momentum "
        f"{task['momentum']}, constant learning rate {task['learning_rate']}, scikit-learn's digits, float32, one "
        "thread per rank.",
        f"- Step: the mean over the last whole periods of a strategy, behind its own start and the first "
        f"{task['warmup_steps']} steps; the median of these means over the rounds, with the smallest and largest. "
        "Ratios and differences: of what ran in the same round, and the median over the rounds.",
        f"- Target: the first evaluation from which the mean test accuracy over the rounds stays at or above "
        f"{record['target']} to the end; the mean of the seconds of training until there, without the first "
        f"{SETUP_STEPS} steps.",
        f"- Off the clock: every {task['evaluate_every']} steps each rank copies its weights while its clock stands "
        "still. After the training the mean of all ranks' weights (and running statistics) is evaluated: replicas of "
        f"strategies with local steps differ. Copies took at most {paused:.1%} of a contestant's training time.",
        *(line for each in record["sittings"] for line in _sitting(each)),
        "",
        *figures_table(summaries, lab["rate"]),
        "",
        _NOTES,
        "",
        f"The turns took {sum(each['seconds'] for each in record['rounds']) / 60:.0f} minutes.",
        *(f"- **Failed**: {each['contestant']} in round {each['round']}: {each['reason']}"
          for each in record["failures"]),
    ]  # fmt: skip


def picture(summaries: Summaries) -> str:
    """Milliseconds per step of each contestant as SVG: computing alone, and what communication adds to it."""
    shown = [(name, each.step_ms) for name, each in summaries.items() if parse(name).kind != ALONE]
    scale = 440 / max(step for _, step in shown)
    rows = []
    for number, (name, step) in enumerate(shown):
        baseline, top = summaries.get(parse(name).baseline), 40 + 24 * number
        alone = min(step, baseline.step_ms) if baseline else 0.0
        rows += [
            f'<text x="240" y="{top + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="250" y="{top}" width="{scale * step:.1f}" height="17" fill="{_BARS[1]}"/>',
            f'<rect x="250" y="{top}" width="{scale * alone:.1f}" height="17" fill="{_BARS[0]}"/>',
            f'<text x="{256 + scale * step:.1f}" y="{top + 13}">{step:.1f}</text>',
        ]
    words = ("computing alone", "what communication adds, ms per step")
    for number, (colour, meaning) in enumerate(zip(_BARS, words, strict=True)):
        left = 250 + 150 * number
        rows.append(f'<rect x="{left}" y="12" width="14" height="14" fill="{colour}"/>')
        rows.append(f'<text x="{left + 20}" y="24">{meaning}</text>')
    height = 48 + 24 * len(shown)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" height="{height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{PICTURE}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *rows,
        "</svg>",
        "",
    ])  # fmt: skip


def _sitting(at: Mapping[str, Any]) -> list[str]:
    numbers = ", ".join(map(str, at["rounds"])) or "none"
    after = (at["load_average_after"] or ["?"])[0]
    return [
        f"- Rounds {numbers}, {at['date']}, load average {after} after them:",
        *(f"  {line}" for line in told_circumstances(at, "an emulated network")),
    ]
