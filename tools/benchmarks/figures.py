"""From the records of the rounds to figures: medians, spreads, ratios. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

# Strategies that synchronise every 8th step have no typical step: blocks of 8 are compared.
BLOCK_STEPS = 8
# Building the program and opening connections: the clock of "time to target" leaves these steps out.
SETUP_STEPS = 3

Round = Sequence[Mapping[str, Any]]  # the records of all ranks of one job, by rank


@dataclass(frozen=True)
class Summary:
    """One contestant over all rounds. Times in milliseconds, per step unless named otherwise."""

    step_ms: float
    step_ms_p10: float
    step_ms_p90: float
    single_step_ms: float
    round_step_ms: tuple[float, ...]
    interface_bytes: float  # per step and node, mean of nodes and rounds
    wire_bytes: float
    predicted_bytes: float | None
    synchronous: bool  # every step sends whole gradients
    loss: float
    accuracy: float
    seconds_to_target: tuple[float | None, ...]  # by round
    steps_to_target: tuple[int | None, ...]

    @property
    def median_seconds_to_target(self) -> float | None:
        """None when a round did not reach the target."""
        reached = [seconds for seconds in self.seconds_to_target if seconds is not None]
        return median(reached) if reached and len(reached) == len(self.seconds_to_target) else None


def summarise(rounds: Sequence[Round], warmup_steps: int, ranks_per_node: int, target: float) -> Summary:
    """Figures of one contestant; every round is given as the records of its ranks."""
    blocks = [block_means(job_steps(each)[warmup_steps:]) for each in rounds]
    pooled = [value for each in blocks for value in each]
    measured = len(rounds[0][0]["step_seconds"]) - warmup_steps
    sent = [record["sent"] for each in rounds for record in each[::ranks_per_node]]
    reached = [time_to_target(each, target) for each in rounds]
    return Summary(
        step_ms=1e3 * median(pooled),
        step_ms_p10=1e3 * percentile(pooled, 10),
        step_ms_p90=1e3 * percentile(pooled, 90),
        single_step_ms=1e3 * median([step for each in rounds for step in job_steps(each)[warmup_steps:]]),
        round_step_ms=tuple(1e3 * median(each) for each in blocks),
        interface_bytes=fmean(item["interface"] for item in sent) / measured,
        wire_bytes=fmean(item["wire"] for item in sent) / measured,
        predicted_bytes=predicted(rounds[0][0]["facts"], ranks_per_node),
        synchronous=is_synchronous(rounds[0][0]["facts"]),
        loss=fmean(fmean(record["losses"][-BLOCK_STEPS:]) for each in rounds for record in each),
        accuracy=fmean(each[0]["accuracies"][-1][1] for each in rounds),
        seconds_to_target=tuple(seconds for seconds, _ in reached),
        steps_to_target=tuple(steps for _, steps in reached),
    )


def job_steps(records: Round) -> list[float]:
    """Seconds of every step of a job: the mean over its ranks."""
    return [fmean(times) for times in zip(*(record["step_seconds"] for record in records), strict=True)]


def block_means(seconds: Sequence[float], size: int = BLOCK_STEPS) -> list[float]:
    """Means of consecutive whole blocks; of all steps when there are too few for one."""
    if len(seconds) < size:
        return [fmean(seconds)]
    return [fmean(seconds[start : start + size]) for start in range(0, len(seconds) - size + 1, size)]


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def time_to_target(records: Round, target: float) -> tuple[float | None, int | None]:
    """Seconds of training and steps until an evaluation first reached ``target``; evaluations take no time here."""
    steps = job_steps(records)
    for done, accuracy in records[0]["accuracies"]:
        if accuracy >= target:
            return sum(steps[SETUP_STEPS:done]), int(done)
    return None, None


def predicted(facts: Mapping[str, Any], ranks_per_node: int) -> float | None:
    """What the plan says that a node sends into the network per step; None when it does not say."""
    if facts.get("predicted_link_bytes_per_step") is not None:
        return float(facts["predicted_link_bytes_per_step"])
    # A rank's bytes are the link's bytes only where it has the node to itself.
    figure = facts.get("predicted_bytes_per_step") if ranks_per_node == 1 else None
    return None if figure is None else float(figure)


def is_synchronous(facts: Mapping[str, Any]) -> bool:
    """Whether one of our profiles averages all gradients, uncompressed, in every step."""
    profile = facts.get("profile")
    if profile is None or "gradients" not in facts:
        return False
    return not profile.get("use_local_sgd", False) and profile.get("compression", "none") == "none"


def paired_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of one over other: both ran next to each other, under the same load."""
    return median([one / other for one, other in zip(ones, others, strict=True)])


def paired_difference(ones: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of one minus other."""
    return median([one - other for one, other in zip(ones, others, strict=True)])


_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}


def wire_ms(sent_bytes: float, rate: str) -> float | None:
    """Milliseconds that the link needs for so many bytes; None where it has no limit. tc's units are decimal."""
    for unit, factor in _UNITS.items():
        if rate.endswith(unit):
            return 1e3 * sent_bytes * 8 / (float(rate.removesuffix(unit)) * factor)
    return None
