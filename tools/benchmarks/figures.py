"""Figures from the records of rounds: means over whole periods, spreads over rounds. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tools.benchmarks.contestants import BF16, DDP, POST_LOCAL_SGD, POWERSGD

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
