"""The figures of a record of strategies, and its page: means over seeds with their standard errors, and what is
compared within rounds with intervals of 95 % confidence. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, TypeVar

import numpy as np
from scipy.stats import t as student

from tools.benchmarks.contestants import (
    ALONE,
    AVERAGE_ONCE,
    DDP,
    NOTHING,
    OURS,
    REFERENCE,
    TORCH,
    Hook,
    family_of,
    parse,
)
from tools.benchmarks.record import network_named, table, told_circumstances
from tools.benchmarks.tasks import Score, Task

# At equal time: when so much of the seconds of PyTorch DDP's best have passed.
_SHARE_OF_TIME = 0.5
_CONFIDENCE = 0.95
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}
_T = TypeVar("_T")
Turns = Mapping[int, Mapping[str, Any]]  # of one contestant, by round
Curve = Sequence[tuple[int, float, float]]  # steps, seconds, score


@dataclass(frozen=True)
class Mean:
    """Of several seeds, with its standard error; 0 for a single one."""

    value: float
    error: float
    seeds: int

    @staticmethod
    def of(values: Sequence[float]) -> Mean | None:
        if not values:
            return None
        return Mean(fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0, len(values))

    def told(self, digits: int) -> str:
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


@dataclass(frozen=True)
class Paired:
    """What differences within rounds, of the same seed, come to: their mean with an interval of 95 % confidence by
    Student's t (infinite for a single round), the least and the most. Ratios are taken as differences of logarithms:
    ``value`` is then their geometric mean."""

    value: float
    low: float
    high: float
    least: float
    most: float
    rounds: int

    @staticmethod
    def of(differences: Sequence[float]) -> Paired | None:
        if not differences:
            return None
        count, mean = len(differences), fmean(differences)
        far = float("inf")
        if count > 1:
            far = float(student.ppf((1 + _CONFIDENCE) / 2, count - 1)) * stdev(differences) / count**0.5
        return Paired(mean, mean - far, mean + far, min(differences), max(differences), count)

    @staticmethod
    def of_ratios(ratios: Sequence[float]) -> Paired | None:
        found = Paired.of([math.log(each) for each in ratios])
        if found is None:
            return None
        mean, low, high = (math.exp(each) for each in (found.value, found.low, found.high))
        return Paired(mean, low, high, min(ratios), max(ratios), found.rounds)

    def told(self, digits: int, sign: str = "") -> str:
        if self.rounds < 2:
            return f"{self.value:{sign}.{digits}f}"
        return f"{self.value:{sign}.{digits}f} [{self.low:{sign}.{digits}f}, {self.high:{sign}.{digits}f}]"

    def as_json(self) -> dict[str, Any]:
        """Without the infinite ends of a single round, which JSON does not have."""
        found = dataclasses.asdict(self)
        return found if self.rounds > 1 else found | {"low": None, "high": None}


def score_of(record: Mapping[str, Any]) -> Score | None:
    task = dict(record["task"])
    if task.get("target") is not None:  # of records that were made when there was one
        task["targets"] = [task["target"]]
    return Task(**{name: value for name, value in task.items() if name in Task.__dataclass_fields__}).score


def turns_of(record: Mapping[str, Any]) -> dict[str, Turns]:
    """The turns of every contestant, in order. Ranks that send nothing are there twice: judged each for itself, and
    by the mean of their parameters, as if they averaged them once, when they are judged."""
    found: dict[str, Turns] = {}
    for name in record["contestants"]:
        mine = {each["round"]: each for each in record["rounds"] if each["contestant"] == name}
        if not mine:
            continue
        if name == NOTHING and score_of(record):
            found[name] = {number: each | {"evaluations": each["each"]} for number, each in mine.items()}
            found[AVERAGE_ONCE] = mine
        else:
            found[name] = mine
    return found


def wire_ms(sent_bytes: float, rate: str) -> float | None:
    """Milliseconds that the link takes for so many bytes; None without a limit. tc's units are decimal."""
    for unit, factor in _UNITS.items():
        if rate.endswith(unit):
            return 1e3 * sent_bytes * 8 / (float(rate.removesuffix(unit)) * factor)
    return None


def pairs_of(ones: Turns, others: Turns, of: Callable[[Mapping[str, Any]], float | None]) -> list[tuple[float, float]]:
    """What ``of`` finds in one's turn and in the other's of the same round, where it finds something in both."""
    found = [(of(one), of(others[number])) for number, one in ones.items() if number in others]
    return [(one, other) for one, other in found if one is not None and other is not None]


def paired_ratio(ones: Turns, others: Turns) -> Paired | None:
    """One's step over the other's, which ran under the same load."""
    return Paired.of_ratios([one / other for one, other in pairs_of(ones, others, lambda turn: turn["step_ms"])])


def score_at(curve: Curve, seconds: float) -> float:
    """The score after so many seconds of training, between evaluations in a straight line; that of the first or of the
    last evaluation outside them."""
    _, times, scores = zip(*curve, strict=True)
    return float(np.interp(seconds, times, scores))


def score_at_steps(turn: Mapping[str, Any], steps: int) -> float:
    """The mean score over the last period that ends with so many steps: replicas of local steps are apart in it and
    together, and a single moment would be a crest."""
    period = max(1, turn["facts"].get("period_steps", 1))
    return fmean(value for step, _, value in turn["evaluations"] if steps - period < step <= steps)


def seconds_to(curve: Curve, score: Score, target: float) -> float | None:
    """When the score is first as good as the target, between evaluations in a straight line; None for never."""
    before: tuple[int, float, float] | None = None
    for each in curve:
        if score.sign * (each[2] - target) >= 0:
            if before is None:
                return each[1]
            part = (target - before[2]) / (each[2] - before[2])
            return before[1] + part * (each[1] - before[1])
        before = each
    return None


def ddp_of(turns: Mapping[str, Turns]) -> str | None:
    """The fastest of PyTorch DDP's settings: bucket sizes, and sparse gradients of tables."""
    return _fastest(DDP, turns)


def shown(wanted: str, record: Mapping[str, Any]) -> str:
    """The contestant that a word of `PICTURED` stands for in a record; the word itself where there is none."""
    if wanted == REFERENCE:
        return ddp_of(turns_of(record)) or wanted
    summary = record["summary"]
    rivals = [name for name in summary if name != AVERAGE_ONCE and parse(name).rival_kind == wanted]
    return min(rivals, key=lambda name: _order(summary[name]), default=wanted)


def middle(targets: Sequence[_T]) -> _T:
    """Of targets, or of what a summary has of each."""
    return targets[len(targets) // 2]


def _order(figures: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds to the middle target, infinite where a round does not reach it; then milliseconds of a step."""
    to = middle(figures["targets"])["seconds"] if figures.get("targets") else None
    return to["value"] if to else math.inf, figures["step_ms"]


def _fastest(family: str | None, turns: Mapping[str, Turns]) -> str | None:
    names = [name for name in turns if name.startswith(f"{TORCH}:")]
    mine = [name for name in names if Hook.of(parse(name).variant).family == family]
    return min(mine, key=lambda name: step_ms(turns[name]), default=None)


def step_ms(turns: Turns) -> float:
    return float(median(each["step_ms"] for each in turns.values()))


def summarised(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every contestant's figures; None where there is nothing to compare with.

    ``ratio``: its step over that of the best of PyTorch DDP's settings; ``twin``: the fastest PyTorch contestant of the
    same kind. ``compute_ms``, ``exposed_ms``, ``hidden_ms``: of a step, computing alone, what communication adds, and
    what of the wire's time computing hides. Scores, and seconds to the targets, are means with standard errors, and
    ``score_over``, ``time_over`` what they are beside DDP's best of the same round.
    """
    turns = turns_of(record)
    best = ddp_of(turns)
    return {name: _figures(name, turns, best, record) for name in turns}


def _figures(name: str, turns: Mapping[str, Turns], best: str | None, record: Mapping[str, Any]) -> dict[str, Any]:
    mine = turns[name]
    last = list(mine.values())[-1]
    baseline = NOTHING if name == AVERAGE_ONCE else parse(name).baseline
    is_alone = name in (AVERAGE_ONCE, baseline)
    exposed = None
    if not is_alone and baseline in turns:
        pairs = pairs_of(mine, turns[baseline], lambda turn: turn["step_ms"])
        exposed = Paired.of([one - alone for one, alone in pairs])
    wire = None if is_alone else wire_ms(fmean(each["wire_bytes"] for each in mine.values()), record["lab"]["rate"])
    twin = _fastest(family_of(last["facts"].get("profile")), turns) if name.startswith(f"{OURS}:") else None
    found: dict[str, Any] = {
        "step_ms": step_ms(mine),
        "steps_ms": {number: each["step_ms"] for number, each in mine.items()},
        "timed_steps": last["timed_steps"],
        "whole_periods": last["whole_periods"],
        "ratio": _as_json(paired_ratio(mine, turns[best]) if best and not is_alone else None),
        "twin": twin,
        "over_twin": _as_json(paired_ratio(mine, turns[twin]) if twin else None),
        "compute_ms": step_ms(turns[baseline]) if baseline in turns else None,
        "exposed_ms": _as_json(exposed),
        "wire_ms": wire,
        "hidden_ms": None if wire is None or exposed is None else max(0.0, wire - max(0.0, exposed.value)),
        "sent_bytes": fmean(each["sent_bytes"] for each in mine.values()),
        "sent_over_predicted": _over_predicted(mine),
        "paused_share": fmean(each["paused_share"] for each in mine.values()),
    }
    score = score_of(record)
    # A compute-only run of few steps is there for its step times.
    if score is None or (is_alone and name not in (NOTHING, AVERAGE_ONCE)):
        return found
    return found | _of_training(mine, turns.get(best or ""), score, record["task"]["steps"], equal_time(turns))


def _over_predicted(turns: Turns) -> float | None:
    shares = [each["sent_bytes"] / each["facts"]["predicted_bytes"]
              for each in turns.values() if each["facts"].get("predicted_bytes")]  # fmt: skip
    return fmean(shares) if shares else None


def equal_time(turns: Mapping[str, Turns]) -> float | None:
    """Half the seconds that PyTorch DDP's best trains, at which all are compared."""
    best = ddp_of(turns)
    ends = [each["evaluations"][-1][1] for each in turns[best].values()] if best else []
    return _SHARE_OF_TIME * fmean(ends) if ends else None


def _of_training(turns: Turns, best: Turns | None, score: Score, steps: int, seconds: float | None) -> dict[str, Any]:
    curves = [each["evaluations"] for each in turns.values()]
    highest = [score.sign * max(score.sign * value for _, _, value in curve) for curve in curves]
    scores = pairs_of(turns, best or {}, lambda turn: score_at_steps(turn, steps))
    return {
        "at_equal_steps": _as_json(Mean.of([score_at_steps(each, steps) for each in turns.values()])),
        "score_over": _as_json(Paired.of([mine - other for mine, other in scores])),
        "at_equal_time": _as_json(Mean.of([score_at(curve, seconds) for curve in curves]) if seconds else None),
        "best": _as_json(Mean.of(highest)),
        "targets": [_to_target(turns, best, score, target) for target in score.targets],
    }


def _to_target(turns: Turns, best: Turns | None, score: Score, target: float) -> dict[str, Any]:
    """Seconds are there if all rounds reach the target; beside DDP's best if both do in all rounds."""

    def seconds(turn: Mapping[str, Any]) -> float | None:
        return seconds_to(turn["evaluations"], score, target)

    reached = [found for found in map(seconds, turns.values()) if found is not None]
    pairs = pairs_of(turns, best or {}, seconds)
    has_all = len(reached) == len(turns)
    return {
        "target": target,
        "seconds": _as_json(Mean.of(reached) if has_all else None),
        "time_over": _as_json(Paired.of_ratios([mine / other for mine, other in pairs]) if has_all else None),
        "reached": len(reached),
    }


def _as_json(found: Mean | Paired | None) -> dict[str, Any] | None:
    if isinstance(found, Paired):
        return found.as_json()
    return None if found is None else dataclasses.asdict(found)


def paired(found: Mapping[str, Any] | None) -> Paired | None:
    """What a summary has of a `Paired`."""
    if found is None:
        return None
    ends = {name: math.copysign(math.inf, way) for name, way in (("low", -1), ("high", 1)) if found[name] is None}
    return Paired(**{**found, **ends})


def figures_table(record: Mapping[str, Any]) -> list[str]:
    """The lines of the table, a contestant that failed with its reason; empty columns are left out."""
    summary, score = record["summary"], score_of(record)
    headings = [
        "contestant", "step ms (min to max)", "exposed ms", "/ DDP's best (min to max)", "/ its PyTorch twin",
        "hidden ms", "kB sent per step and node", "sent / planned",
    ]  # fmt: skip
    if score:
        headings += [f"{score.name} after {record['task']['steps']} steps", "minus DDP's best's",
                     f"{score.name} at equal time", f"its best {score.name}"]  # fmt: skip
        headings += [word for target in score.targets for word in (f"s to {target:g}", "/ DDP's best's")]
    rows = [_cells(name, figures, score) for name, figures in summary.items()]
    filled = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    return table([headings[each] for each in filled], [[row[each] for each in filled] for row in rows])


def _cells(name: str, figures: Mapping[str, Any], score: Score | None) -> list[str]:
    steps = figures["steps_ms"].values()
    is_alone = name == AVERAGE_ONCE or parse(name).kind == ALONE
    whole = "" if figures["whole_periods"] else " [1]"
    ratio = paired(figures["ratio"])
    cells = [
        name,
        f"{figures['step_ms']:.1f} ({min(steps):.1f} to {max(steps):.1f}){whole}",
        _told(figures["exposed_ms"], 1),
        f"{ratio.told(2)} ({ratio.least:.2f} to {ratio.most:.2f})" if ratio else "",
        f"{_told(figures['over_twin'], 2)} ({figures['twin']})" if figures["over_twin"] else "",
        _number(figures["hidden_ms"], 1),
        "" if is_alone else f"{figures['sent_bytes'] / 1e3:,.1f}",
        _number(figures["sent_over_predicted"], 3),
    ]
    if score is None:
        return cells
    if "at_equal_steps" not in figures:
        return [*cells, "", "", "", "", *([""] * (2 * len(score.targets)))]
    at_steps, at_time, best = (
        Mean(**figures[key]).told(score.digits) if figures[key] else ""
        for key in ("at_equal_steps", "at_equal_time", "best")
    )
    cells += [at_steps, _told(figures["score_over"], score.digits, "+"), at_time, best]
    rounds = len(figures["steps_ms"])
    return [*cells, *(word for each in figures["targets"]
                      for word in (told_target(each, rounds), _told(each["time_over"], 2)))]  # fmt: skip


def _told(found: Mapping[str, Any] | None, digits: int, sign: str = "") -> str:
    compared = paired(found)
    return "" if compared is None else compared.told(digits, sign)


def told_target(to: Mapping[str, Any], rounds: int) -> str:
    """Seconds to a target; in how many rounds if not in all."""
    if to["seconds"]:
        return Mean(**to["seconds"]).told(1)
    return f"in {to['reached']} of {rounds} rounds" if to["reached"] else "never"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def worth(record: Mapping[str, Any]) -> list[str]:
    """Whether ranks that send nothing are clearly worse than synchronous training: by how many standard errors."""
    summary, score = record["summary"], score_of(record)
    synchronous = summary.get(f"{OURS}:multi_node")
    if score is None or synchronous is None:
        return []
    lines = []
    for name in (each for each in (NOTHING, AVERAGE_ONCE) if each in summary):
        off, errors = distance(summary[name], synchronous, score)
        lines.append(
            f"- *{name}* is {abs(off):.{score.digits}f} {score.name} {'worse' if off > 0 else 'better'} than "
            f"`multi_node` at equal steps ({errors:.0f} standard errors), and reaches {score.targets[-1]:g} in "
            f"{summary[name]['targets'][-1]['reached']} of {len(summary[name]['steps_ms'])} rounds in twice the steps."
        )
    return lines


def distance(figures: Mapping[str, Any], other: Mapping[str, Any], score: Score) -> tuple[float, float]:
    """How much worse the first is at equal steps, and that in standard errors of the difference."""
    mine, theirs = figures["at_equal_steps"], other["at_equal_steps"]
    off = score.sign * (theirs["value"] - mine["value"])
    error = (mine["error"] ** 2 + theirs["error"] ** 2) ** 0.5
    return off, abs(off) / error if error else float("inf")


def page(record: Mapping[str, Any]) -> list[str]:
    lab, task, score = record["lab"], record["task"], score_of(record)
    limit = "no limit" if lab["rate"] == "none" else network_named(lab)
    seeds = list(dict.fromkeys(each["seed"] for each in record["rounds"]))
    seconds = equal_time(turns_of(record)) if score else None
    optimizer = "Adam" if task["momentum"] is None else f"momentum {task['momentum']}"
    return [
        f"# Strategies, {record['circumstances']['date'][:10]}: {task['name']}, {lab['nodes']} nodes x "
        f"{lab['ranks_per_node']} ranks, {limit}",
        "",
        f"- **{record['whole_rounds']} of {record['repeats']} rounds**, every contestant once per round in turn, "
        f"{task['steps']} steps each; ranks that send nothing go on for twice as many where they are judged.",
        f"- Seeds, of start weights, batches and data order: {', '.join(map(str, seeds))}; they follow from commit "
        f"{record['frozen'][:10]}, which froze what is compared.",
        "- In brackets: intervals of 95 % confidence of what was compared within rounds, of the same seed.",
        f"- Network: {task['network']} over all ranks, "
        f"{optimizer}, constant learning rate "
        f"{task['learning_rate']}, float32, one thread per rank; data {task['data']}.",
        *(_of_score(score, task, seconds) if score else []),
        *(line for each in record["sittings"] for line in _sitting(each)),
        "",
        *worth(record),
        "",
        *figures_table(record),
        "",
        *(f"- **Failed**: {each['contestant']} in round {each['round']}: {each['reason']}"
          for each in record["failures"]),
        "",
        f"The turns took {sum(each['seconds'] for each in record['rounds']) / 60:.0f} minutes. "
        "[What the columns are](README.md#columns).",
    ]  # fmt: skip


def _of_score(score: Score, task: Mapping[str, Any], seconds: float | None) -> list[str]:
    equal = "" if seconds is None else f" Equal time is {seconds:.1f} s, half of what PyTorch DDP's best trains."
    better = "more" if score.sign > 0 else "less"
    return [
        f"- Judged: {score.name} on data that nobody trains on, {better} is better, every "
        f"{task['evaluate_every']} steps, off the clock, of the mean of all ranks' parameters; means over the seeds "
        f"with their standard error. Targets {', '.join(f'{each:g}' for each in score.targets)}.{equal}",
    ]


def _sitting(at: Mapping[str, Any]) -> list[str]:
    numbers = ", ".join(map(str, at["rounds"])) or "none"
    after = (at["load_average_after"] or ["?"])[0]
    return [
        f"- Rounds {numbers}, {at['date']}, load average {after} after them:",
        *(f"  {line}" for line in told_circumstances(at, "an emulated network")),
    ]
