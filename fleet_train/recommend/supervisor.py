"""One rank of a recommendation: starts a subject per trial, with a timeout, and synchronizes with other supervisors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train import timeouts
from fleet_train.errors import ConversionError, FleetTrainError
from fleet_train.launch.on_ranks import Peers, first_to_fail
from fleet_train.plan import TensorSpec
from fleet_train.plan.choose import MOST_COMMUNICATORS
from fleet_train.plan.trial import short_periods, short_warm_ups
from fleet_train.profile import Profile
from fleet_train.profile.catalogue import with_assignments
from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.recommend.candidates import Candidate, Measurements, RuledOut, consider, network_of
from fleet_train.recommend.options import RecommendOptions

_COMPUTING = "computing"
_COMPUTE_STEPS, _FEWEST_STEPS, _MOST_STEPS, _MOST_LOCAL_STEPS = 40, 8, 40, 100
_UNTIMED_STEPS = 3
_SHORT_PERIOD = 4
"""Steps between averagings in a trial that is shorter than two of the profile's own periods; the cost of an averaging
is then spread over that period."""

_OF_COMPUTING = ("amp_", "accumulate_", "recompute_")
"""Beginnings of the names of knobs that change what a rank computes."""
_OF_OTHER_SCHEDULES = ("local_sgd_max_steps",)
"""Knobs without meaning for a constant period."""


@dataclass(frozen=True)
class Tried:
    """A trial's result: milliseconds of a step after its warm-up on the slowest rank, or the failure."""

    name: str
    step_ms: float = 0.0
    exposed_ms: float = 0.0
    memory_bytes: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Results:
    """The basis of a recommendation."""

    measured: Measurements
    spread: float
    """Of the ranks' computing: the slowest over the fastest."""
    link_error: float
    memory_bytes: int
    candidates: tuple[Candidate, ...]
    ruled_out: tuple[RuledOut, ...]
    tried: Mapping[str, Tried]
    seconds: float


class TrialFailed(Exception):
    """A trial ended before its last step; the message says how."""


class RecommendSupervisor:
    """Runs a recommendation for one rank; rank 0 shows its progress."""

    def __init__(self, peers: Peers, options: RecommendOptions) -> None:
        self.cluster = peers.cluster
        self._options = options
        self.peers = peers
        self._began = time.monotonic()

    def run(self) -> Results:
        """Measure, predict, try; the same on every rank. Raises FleetTrainError if the script cannot be measured."""
        self.peers.show(f"measuring the computing of {self._options.script} and the links")
        task = self._task(_local_only(self._options.settings), _COMPUTE_STEPS, timeouts.RECOMMEND_COMPUTE_SECONDS) | {
            "measure_seconds": timeouts.RECOMMEND_MEASURE_SECONDS
        }
        try:
            work = timeouts.RECOMMEND_MEASURE_SECONDS + timeouts.RECOMMEND_COMPUTE_SECONDS
            reports = self._trial(_COMPUTING, task, timeouts.RECOMMEND_START_SECONDS + 2 * work)
        except TrialFailed as failed:
            raise FleetTrainError(f"{self._options.script} could not be measured: {failed}") from None
        measured, spread, error = read_computing(reports)
        most = MOST_COMMUNICATORS if measured.is_gloo else 1
        candidates, ruled_out = consider(measured, self.cluster, most, self._options.settings)
        self.peers.show(
            f"computing {measured.compute_seconds * 1e3:.1f} ms; {len(candidates)} profiles priced, "
            f"{len(ruled_out)} ruled out; trying the best of those that --allow permits"
        )
        tried = dict(self._tries(candidates))
        memory = max(report["memory"] for report in reports.values())
        seconds = time.monotonic() - self._began
        return Results(measured, spread, error, memory, tuple(candidates), tuple(ruled_out), tried, seconds)

    def _tries(self, candidates: Sequence[Candidate]) -> Iterator[tuple[str, Tried]]:
        """The most promising ones in turn, until the time is over."""
        allowed = [candidate for candidate in candidates if self._options.allows(candidate.risk)][
            : self._options.trials
        ]
        for number, candidate in enumerate(allowed):
            steps = steps_for(candidate)
            elapsed = self.peers.gather(f"time {number}", time.monotonic() - self._began)[0]
            expected = elapsed / (number + 1)
            if number > 1 and elapsed + expected > self._options.seconds:
                self.peers.show(f"{candidate.name}: not tried, the time is over")
                return
            tried = self._try(f"trial {number}", candidate, steps)
            self.peers.show(
                f"{candidate.name}: "
                + (tried.failure or f"{tried.step_ms:.1f} ms, {candidate.step * 1e3:.1f} predicted")
            )
            yield candidate.name, tried

    def _try(self, job: str, candidate: Candidate, steps: int) -> Tried:
        profile = short(candidate.profile, steps)
        limit = timeouts.RECOMMEND_START_SECONDS + 5 * steps * max(candidate.step, 0.01)
        try:
            reports = self._trial(job, self._task(profile, steps + _UNTIMED_STEPS, limit), limit)
        except TrialFailed as failed:
            return Tried(candidate.name, failure=f"failed: {failed}")
        period = candidate.plan.averaging.period if candidate.plan.averaging else 1
        step = max(step_of(report["steps"], profile, period) for report in reports.values())
        exposed = max(report["exposed_ms"] for report in reports.values())
        return Tried(candidate.name, 1e3 * step, exposed, max(report["memory"] for report in reports.values()))

    def _task(self, profile: Profile, steps: int, longest_seconds: float) -> dict[str, Any]:
        return {
            "script": self._options.script,
            "arguments": list(self._options.arguments),
            "profile": profile.settings(),
            "steps": steps,
            "longest_seconds": longest_seconds,
        }

    def _trial(self, job: str, task: Mapping[str, Any], limit_seconds: float) -> dict[int, dict[str, Any]]:
        """The reports of every rank's subject. Raises TrialFailed if one did not complete, ConversionError for a script
        that is not converted."""
        ends, _ = self.peers.run(job, task, limit_seconds)
        for end in ends.values():
            for report in end.reports:
                if "refused" in report:
                    raise ConversionError(report["refused"])
        rank = first_to_fail(ends)
        if rank is not None:
            words = f"{self.cluster.describe(rank)} {ends[rank].failure}"
            if ends[rank].why_killed:
                words += f"; the {task['steps']} steps of a trial, and what the script does before them, have to"
            raise TrialFailed(words)
        found = {rank: [report for report in end.reports if "steps" in report] for rank, end in ends.items()}
        for rank, reports in found.items():
            if not reports:
                raise TrialFailed(f"{self.cluster.describe(rank)} ended without a step of a converted program")
        return {rank: reports[-1] for rank, reports in found.items()}


def _local_only(settings: Sequence[str] = ()) -> Profile:
    """A step of this profile sends nothing, on all ranks at the same time. It has those of ``settings`` that change
    what a rank computes."""
    silent = Profile(
        use_local_sgd=True,
        local_sgd_is_warm_steps=0,
        local_sgd_steps=1_000_000,
        local_sgd_momentum="average",
        divergence_check_steps=0,
        fuse_grad_size_in_MB=4096.0,
        last_comm_group_size_MB=4096.0,
        nccl_comm_num=1,
    )
    return with_assignments(silent, [text for text in settings if text.startswith(_OF_COMPUTING)])


def read_computing(reports: Mapping[int, Mapping[str, Any]]) -> tuple[Measurements, float, float]:
    """The result of the ranks' local steps and links: measurements, the spread between ranks, the error of the fit."""
    plan = reports[0]["plan"]
    gradients = tuple(_gradient(gradient) for bucket in plan["buckets"] for gradient in bucket["gradients"])
    averaging = plan["averaging"]
    averaged = tuple(_gradient(value) for value in (*averaging["values"], *averaging["statistics"]))
    statistics_ = tuple(CollectiveSpec(**content) for content in plan["statistics"])
    own = [_timed(report["steps"]) for report in reports.values()]
    medians = [statistics.median(steps) for steps in own]
    links = reports[0]["links"]
    error = max((float(link["error"]) for link in links.values()), default=0.0)
    network = network_of(links)
    state = int(averaging["state_values_per_parameter"])
    # A rank that exchanges gradients waits for the slowest rank of each step, not for the slowest one on average.
    slowest = max(statistics.median(max(steps) for steps in zip(*own, strict=False)), *medians)
    measured = Measurements(gradients, averaged, statistics_, state, slowest, network, bool(reports[0]["is_gloo"]))
    return measured, max(medians) / max(min(medians), 1e-9), error


def steps_for(candidate: Candidate) -> int:
    """How many steps a trial times: more if most of them send nothing."""
    most = _MOST_LOCAL_STEPS if candidate.profile.use_local_sgd else _MOST_STEPS
    return max(_FEWEST_STEPS, min(most, int(timeouts.RECOMMEND_TRIAL_SECONDS / candidate.step)))


def short(profile: Profile, steps: int) -> Profile:
    """The profile with warm-ups, and two periods of equal length, that fit into this many steps."""
    changed: dict[str, Any] = dict(short_warm_ups(profile))
    changed |= short_periods(profile, max(_SHORT_PERIOD, steps // 2 - _UNTIMED_STEPS))
    if profile.use_local_sgd and profile.local_sgd_schedule != "constant":
        changed["local_sgd_schedule"] = "constant"
    settings = profile.settings() | changed
    return Profile(**{knob: value for knob, value in settings.items() if knob not in _OF_OTHER_SCHEDULES})


def step_of(steps: Sequence[float], tried: Profile, period_asked: int) -> float:
    """Seconds of a step after the warm-up; LocalSGD: the cost of an averaging is spread over the requested period."""
    timed = _timed(steps)
    if not tried.use_local_sgd:
        return statistics.median(timed)
    period = tried.local_sgd_steps
    whole = timed[len(timed) % period :] or timed
    local = statistics.median(whole)
    blocks = [sum(whole[start : start + period]) for start in range(0, len(whole), period)]
    return local + max(0.0, statistics.median(blocks) - period * local) / period_asked


def _timed(steps: Sequence[float]) -> list[float]:
    """Without the first ones, which compile and connect."""
    return list(steps[_UNTIMED_STEPS:] or steps)


def _gradient(content: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(content["name"], tuple(content["shape"]), content["dtype"])
