"""Tries a plan on random gradients: are replicas equal where they should be, how exact are averages, what is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fleet_train.errors import ConversionError
from fleet_train.plan.plan import MEGABYTE, CommPlan
from fleet_train.plan.simulate import Local, Sgd, SimulatedJob, Step, Values
from fleet_train.plan.simulate_methods import Array
from fleet_train.profile import Profile
from fleet_train.profile.methods import compression_of

RATE = 0.1
MOST_VALUES = 2 * 10**8
"""Parameters of all ranks together: float32 values and gradients, float64 sums, a few GB in all."""
_SHORT_WARM_UP = {"local_sgd_is_warm_steps": 2}
_LONG_PERIOD = 20
_NO_LESS_THAN = 8


@dataclass(frozen=True)
class Trial:
    """The result of a trial. Updates count from 1; deviations are relative: |found - exact| / |exact|, Euclidean."""

    ranks: int
    updates: int
    shortened: dict[str, int]
    """Warm-ups that were shortened for the trial, and their lengths."""
    synchronised: tuple[int, ...]
    """Updates after which the plan makes the replicas equal."""
    equal: tuple[int, ...]
    """Updates after which the parameters of all ranks were equal bit by bit."""
    averaged: tuple[int, ...]
    """Updates whose parameters LocalSGD averaged; with an overlap the ranks do not wait for it, and are not equal."""
    drift: float
    """Largest deviation of a rank's movement from that of rank 0 at any time."""
    gradient_deviation: float | None
    """Deviation of the averaged gradients from the exact mean: the median over updates that send gradients."""
    movement_deviation: float
    """Deviation of the parameters' total movement, made equal on all ranks, from that with exact means in every
    update."""
    sent_bytes_per_step: tuple[float, ...]
    """Payload that each rank sent, the mean over all updates."""
    most_sent_bytes: float
    """Payload of the busiest rank in the update that sends most."""
    on_purpose: str = ""
    """Why the movement differs, if the profile intends that."""

    @property
    def holds(self) -> bool:
        """Whether the replicas were equal after every update that makes them so."""
        return set(self.synchronised) <= set(self.equal)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def try_out(plan: CommPlan, profile: Profile, updates: int = 0, seed: int = 0) -> Trial:
    """Run ``updates`` updates of plain SGD on gradients that do not depend on the parameters.

    Each rank's gradient is a direction shared by all plus its own noise of the same size. 0 = enough to show two
    synchronisations (one if periods are long), with shortened warm-ups. Raises ConversionError for a plan with more
    values than one process can hold.
    """
    elements = sum(bucket.elements for bucket in plan.buckets)
    if elements * plan.world_size > MOST_VALUES:
        fit = max(2, MOST_VALUES // max(elements, 1))
        raise ConversionError(
            f"simulate: {plan.world_size} ranks of {elements:,} parameters are {elements * plan.world_size:,} values, "
            f"and one process takes {MOST_VALUES:,}: simulate up to {fit} ranks (--nodes, --ranks_per_node), or a "
            "smaller model"
        )
    shortened = {} if updates else short_warm_ups(profile)
    short = profile.with_settings("the trial", **shortened) if shortened else profile
    trial = _Run(plan, short, seed)
    for _ in range(updates or _updates_to_see(plan, short)):
        trial.update()
    return trial.result(shortened)


def short_warm_ups(profile: Profile) -> dict[str, int]:
    """The knobs whose warm-up is longer than a trial needs, with sufficient values."""
    short = _SHORT_WARM_UP | compression_of(profile.compression).short_warm_up
    return {knob: steps for knob, steps in short.items() if profile.heeds(knob) and getattr(profile, knob) > steps}


def short_periods(profile: Profile, longest: int) -> dict[str, int]:
    """The knobs of LocalSGD's periods longer than ``longest``, with consistent shorter values."""
    names = ("local_sgd_steps", "local_sgd_max_steps", "local_sgd_fragments")
    changed = {knob: longest for knob in names if profile.heeds(knob) and getattr(profile, knob) > longest}
    if profile.use_local_sgd:
        steps, fragments = (changed.get(knob, getattr(profile, knob)) for knob in (names[0], names[2]))
        if profile.local_sgd_overlap_steps >= steps // fragments:
            changed["local_sgd_overlap_steps"] = steps // fragments - 1
    return changed


def _updates_to_see(plan: CommPlan, profile: Profile) -> int:
    if plan.averaging is None:
        return _NO_LESS_THAN
    period = plan.averaging.period
    return profile.local_sgd_is_warm_steps + period * (1 if period > _LONG_PERIOD else 2)


@dataclass
class _Run:
    """The simulated job, and the movement that exact means would give."""

    plan: CommPlan
    profile: Profile
    seed: int
    steps: list[Step] = field(default_factory=list)
    equal: list[int] = field(default_factory=list)
    drift: float = 0.0
    deviations: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        values = [g for bucket in self.plan.buckets for g in bucket.gradients]
        others = self.plan.averaging.statistics if self.plan.averaging else ()
        shapes = {value.name: value.shape for value in (*values, *others)}
        self._start = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        self._shared = {g.name: random.standard_normal(g.shape, np.float32) for g in values}
        self._rows = {g.name: g.rows for g in values if g.rows}
        self._job = SimulatedJob(self.plan, self.profile, self._start, Sgd, RATE)
        self._exact = {name: np.zeros(value.shape) for name, value in self._shared.items()}
        self._runs = 0

    def update(self) -> None:
        """Micro-batches up to and including an update."""
        mean = {name: np.zeros(value.shape) for name, value in self._shared.items()}
        share = 1 / (self.plan.world_size * self.plan.accumulate_steps)

        def backward(rank: int, values: Mapping[str, Array]) -> Local:
            random = np.random.default_rng([self.seed, self._runs, rank])
            gradients = {
                n: shared + random.standard_normal(shared.shape, np.float32) for n, shared in self._shared.items()
            }
            for name, rows in self._rows.items():
                kept = random.choice(len(gradients[name]), rows, replace=False)
                gradients[name] = _only(gradients[name], kept)
            for name, gradient in gradients.items():
                mean[name] += share * gradient
            return Local(gradients, 1.0, {n: v for n, v in values.items() if n not in gradients})

        sent = np.zeros(self.plan.world_size)
        for _ in range(self.plan.accumulate_steps):
            self._runs += 1
            step = self._job.step(backward)
            sent += step.sent
        self.steps.append(Step(True, step.synchronised, step.averaged, tuple(sent), {}))
        for name, gradient in mean.items():
            self._exact[name] -= RATE * gradient
        if step.gradients:
            self.deviations.append(deviation(step.gradients, mean))
        self._compare()

    def _compare(self) -> None:
        first, number = self._job.ranks[0], len(self.steps)
        if all(np.array_equal(first[n], other[n]) for other in self._job.ranks[1:] for n in self._shared):
            self.equal.append(number)
        else:
            moved = self._movement(first)
            self.drift = max(self.drift, *(deviation(self._movement(other), moved) for other in self._job.ranks[1:]))

    def _movement(self, values: Values) -> dict[str, Array]:
        return {name: values[name].astype(np.float64) - self._start[name] for name in self._shared}

    def result(self, shortened: dict[str, int]) -> Trial:
        sent = np.array([step.sent for step in self.steps])
        self._job.synchronise()  # an averaging under way is part of the movement
        return Trial(
            ranks=self.plan.world_size,
            updates=len(self.steps),
            shortened=shortened,
            synchronised=tuple(number for number, step in enumerate(self.steps, 1) if step.synchronised),
            equal=tuple(self.equal),
            averaged=tuple(number for number, step in enumerate(self.steps, 1) if step.averaged),
            drift=self.drift,
            gradient_deviation=float(np.median(self.deviations)) if self.deviations else None,
            movement_deviation=deviation(self._movement(self._job.ranks[0]), self._exact),
            sent_bytes_per_step=tuple(float(nbytes) for nbytes in sent.mean(axis=0)),
            most_sent_bytes=float(sent.max()),
            on_purpose=_purpose(self.profile),
        )


def _only(values: Array, rows: Array) -> Array:
    """``values`` in these rows, zero in the others."""
    kept = np.zeros_like(values)
    kept[rows] = values[rows]
    return kept


def deviation(values: Mapping[str, Array], exact: Mapping[str, Array]) -> float:
    """The Euclidean distance of all values together, relative to the norm of ``exact``."""
    off = sum(float(np.square(values[name] - value).sum()) for name, value in exact.items())
    return float(np.sqrt(off / max(sum(float(np.square(value).sum()) for value in exact.values()), 1e-300)))


def _purpose(profile: Profile) -> str:
    if profile.outer_optimizer != "none":
        return f"{profile.outer_optimizer} adds its own momentum, on purpose"
    return compression_of(profile.compression).on_purpose


def describe(trial: Trial) -> str:
    """The result as readable text."""
    lines = [
        f"simulated in numpy: {trial.ranks} ranks, {trial.updates} updates of SGD on random gradients (half of each "
        "rank's own); nothing was trained or sent"
    ]
    if trial.shortened:
        cut = ", ".join(f"{knob} to {steps}" for knob, steps in trial.shortened.items())
        lines.append(f"  shortened, to show later steps: {cut} (--simulate_steps runs it unshortened)")
    lines.append(f"  replicas: {_replicas(trial)}")
    if trial.gradient_deviation is not None:
        lines.append(
            f"  averaged gradients: {trial.gradient_deviation:.1e} from the exact mean (relative; median over updates)"
        )
    lines += [
        f"  movement of the parameters: {trial.movement_deviation:.1e} from that of exact means in every update"
        + (f" ({trial.on_purpose})" if trial.on_purpose else ""),
        f"  bytes: the busiest rank sent {max(trial.sent_bytes_per_step) / MEGABYTE:.3f} MB per update, at most "
        f"{trial.most_sent_bytes / MEGABYTE:.3f} MB in one",
    ]
    return "\n".join(lines)


def _replicas(trial: Trial) -> str:
    if not trial.holds:
        late = sorted(set(trial.synchronised) - set(trial.equal))
        return f"NOT equal after updates {_numbers(tuple(late))}, where the plan makes them equal"
    if len(trial.synchronised) == trial.updates:
        return "bit-equal after every update"
    without_waiting = tuple(sorted(set(trial.averaged) - set(trial.synchronised)))
    in_background = f"; averaged beside the next steps after {_numbers(without_waiting)}" if without_waiting else ""
    return (
        f"bit-equal after updates {_numbers(trial.synchronised)}, the synchronisation points; between them up to "
        f"{trial.drift:.1e} apart{in_background}"
    )


def _numbers(updates: tuple[int, ...]) -> str:
    return ", ".join(map(str, updates)) if updates else "none"
