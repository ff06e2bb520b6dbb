"""The figures of a record of strategies, and its page: means over whole periods, ratios within rounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, median
from typing import Any

from tools.benchmarks.record import table, told_circumstances
from tools.benchmarks.tasks import (
    ALONE,
    BEFORE,
    BF16,
    DDP,
    OURS,
    POST_LOCAL_SGD,
    POWERSGD,
    REFERENCE,
    TORCH,
    Hook,
    parse,
)

# Steps that build the program and open connections: "time to target" leaves them out.
SETUP_STEPS = 3

Round = Sequence[Mapping[str, Any]]  # the records of all ranks of one job, by rank


@dataclass(frozen=True)
class Window:
    """The timed steps ``first`` .. ``last`` - 1, counted from 0; ``whole`` when they are whole periods of a strategy
    that is past its own start.
    """

    first: int
    last: int
    whole: bool

    @property
    def steps(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Summary:
    """One contestant over its rounds. Times in milliseconds per step; dictionaries are by the number of the round.

    ``test_losses`` and ``accuracies`` are those at the end; ``curve`` the mean test accuracy over the rounds after so
    many steps.
    """

    step_ms: float  # median over the rounds
    round_step_ms: dict[int, float]  # mean over the timed steps
    timed_steps: int
    whole_periods: bool
    interface_bytes: float  # per step and node, mean of nodes and rounds
    wire_bytes: float
    predicted_bytes: float | None
    synchronous: bool  # every step sends all gradients uncompressed
    family: str | None  # the corresponding hook of PyTorch
    test_losses: dict[int, float]
    accuracies: dict[int, float]
    curve: list[tuple[int, float]]
    steps_to_target: int | None
    seconds_to_target: dict[int, float]
    paused_share: float  # of the training time: with the clock stopped, to copy the weights

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies.values())

    @property
    def mean_seconds_to_target(self) -> float | None:
        return fmean(self.seconds_to_target.values()) if self.seconds_to_target else None


def summarise(rounds: Mapping[int, Round], warmup_steps: int, ranks_per_node: int, target: float) -> Summary:
    """Figures of one contestant from the records of its ranks, by the number of the round."""
    first = next(iter(rounds.values()))
    facts = first[0]["facts"]
    window = window_of(facts, warmup_steps, len(first[0]["step_seconds"]))
    means = {number: 1e3 * fmean(job_steps(each)[window.first : window.last]) for number, each in rounds.items()}
    nodes = [record for each in rounds.values() for record in each[::ranks_per_node]]
    curve = mean_curve([accuracies_of(each) for each in rounds.values()])
    steps = steps_to_target(curve, target)
    return Summary(
        step_ms=median(means.values()),
        round_step_ms=means,
        timed_steps=window.steps,
        whole_periods=window.whole,
        interface_bytes=fmean(interface_bytes(record, window) for record in nodes),
        wire_bytes=fmean(interface_bytes(record, window) * _wire_share(record) for record in nodes),
        predicted_bytes=predicted(facts, ranks_per_node),
        synchronous=family_of(facts) == DDP,
        family=family_of(facts),
        test_losses={number: _at_end(each, "test_losses") for number, each in rounds.items()},
        accuracies={number: _at_end(each, "accuracies") for number, each in rounds.items()},
        curve=curve,
        steps_to_target=steps,
        seconds_to_target={} if steps is None else {number: trained(each, steps) for number, each in rounds.items()},
        paused_share=fmean(record["paused_seconds"] / sum(record["step_seconds"]) for record in nodes),
    )


def window_of(facts: Mapping[str, Any], warmup_steps: int, steps: int) -> Window:
    """The last whole periods after the strategy's warm-up; all steps but the first if there is no whole period."""
    period = max(1, facts.get("period_steps", 1))
    settled = max(warmup_steps, facts.get("settles_after", 0))
    periods = (steps - settled) // period
    if periods < 1:
        return Window(warmup_steps, steps, whole=False)
    return Window(steps - periods * period, steps, whole=True)


def job_steps(records: Round) -> list[float]:
    """Seconds of every step of a job: the mean over its ranks."""
    return [fmean(times) for times in zip(*(record["step_seconds"] for record in records), strict=True)]


def interface_bytes(record: Mapping[str, Any], window: Window) -> float:
    """Bytes per step that the node's interface sent in the window."""
    after = dict(record["interface_after"])
    return float(after[window.last] - after[window.first]) / window.steps


def _wire_share(record: Mapping[str, Any]) -> float:
    """The limiter's bytes per byte of the interface's counter; 0 without a limiter."""
    sent = record["sent"]
    return float(sent["wire"] / sent["interface"]) if sent["interface"] else 0.0


def _at_end(records: Round, key: str) -> float:
    return float(max((int(step), value) for record in records for step, value in record[key])[1])


def accuracies_of(records: Round) -> dict[int, float]:
    """Test accuracy after so many steps; the ranks share the evaluations."""
    return dict(sorted((int(step), float(value)) for record in records for step, value in record["accuracies"]))


def mean_curve(curves: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    """The mean over rounds, at steps that all of them evaluated."""
    common = set(curves[0]).intersection(*curves)
    return [(step, fmean(curve[step] for curve in curves)) for step in sorted(common)]


def steps_to_target(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    """The first evaluation from which the curve stays at or above ``target`` to its end."""
    reached = None
    for step, accuracy in curve:
        if accuracy < target:
            reached = None
        elif reached is None:
            reached = step
    return reached


def trained(records: Round, steps: int) -> float:
    """Seconds of training up to a step, without the set-up, evaluations and copies."""
    return sum(job_steps(records)[SETUP_STEPS:steps])


def predicted(facts: Mapping[str, Any], ranks_per_node: int) -> float | None:
    """The bytes per step that a node sends into the network by the plan; None if the plan does not say."""
    if facts.get("predicted_link_bytes_per_step") is not None:
        return float(facts["predicted_link_bytes_per_step"])
    # A rank's bytes are the link's bytes only if it is alone on its node.
    figure = facts.get("predicted_bytes_per_step") if ranks_per_node == 1 else None
    return None if figure is None else float(figure)


def family_of(facts: Mapping[str, Any]) -> str | None:
    """The family of PyTorch's hooks that corresponds to one of our profiles, or None."""
    profile = facts.get("profile")
    if profile is None or "gradients" not in facts or profile.get("accumulate_steps", 1) > 1:
        return None
    compression = profile.get("compression", "none")
    if profile.get("use_local_sgd", False):
        is_plain = compression == "none" and profile.get("outer_optimizer", "none") == "none"
        return f"{POST_LOCAL_SGD}_{facts['period_steps']}" if is_plain else None
    return {"none": DDP, "bf16": BF16, "powersgd": f"{POWERSGD}_{profile.get('powersgd_rank', 1)}"}.get(compression)


def paired(ones: Mapping[int, float], others: Mapping[int, float]) -> dict[int, tuple[float, float]]:
    """The values of both in their common rounds, which ran one after the other under the same load."""
    return {number: (one, others[number]) for number, one in ones.items() if number in others}


def paired_ratio(ones: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    """Median over the rounds of one over other; None without a common round."""
    pairs = paired(ones, others).values()
    return median([one / other for one, other in pairs]) if pairs else None


def paired_differences(ones: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """One minus other, of every common round."""
    return [one - other for one, other in paired(ones, others).values()]


_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}


def wire_ms(sent_bytes: float, rate: str) -> float | None:
    """Milliseconds that the link takes for so many bytes; None without a limit. tc's units are decimal."""
    for unit, factor in _UNITS.items():
        if rate.endswith(unit):
            return 1e3 * sent_bytes * 8 / (float(rate.removesuffix(unit)) * factor)
    return None


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
    """Milliseconds per step of each contestant as SVG: computing alone, and what communication adds to it.
    Nothing as long as only compute-only runs are there."""
    shown = [(name, each.step_ms) for name, each in summaries.items() if parse(name).kind != ALONE]
    if not shown:
        return ""
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
