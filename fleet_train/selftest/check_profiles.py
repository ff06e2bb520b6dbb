"""Check 2: every profile of the catalogue trained on real ranks with random delays, compared with the simulator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from safetensors.numpy import load, save

from fleet_train import fleet, timeouts
from fleet_train.collectives.engines import CALC, OWN, StreamEngine
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import backend_name, dynamic_mode
from fleet_train.convert.passes.precision import lower_precision, refuse_unusable
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.files import read_regular, write_new
from fleet_train.plan.build import group_size_of
from fleet_train.plan.simulate import Adam, Local, Momentum, NumpyOptimizer, Sgd, SimulatedJob, Step
from fleet_train.plan.trial import deviation, short_periods, short_warm_ups
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.profile.profile import COMMUNICATORS, EDGE, SIZE, open_knobs
from fleet_train.selftest.options import FAIL, OK, SKIP, Result, SelftestOptions
from fleet_train.selftest.training import (
    BATCH_NORM,
    SAMPLES_PER_RANK,
    SEVERAL_BUCKETS,
    Array,
    SmallProgram,
    Trained,
    TriedNetwork,
    advance_rate,
    batches,
    computes_on_gpu,
    digest,
    relative_difference,
    share,
)

EXACT = 1e-5
"""Largest distance of the parameters from the reference, relative to how far they have moved (Euclidean, all together),
if only the order of float32 sums differs. Measured: 1e-6."""
APPROXIMATED = 5e-3
"""For gradients or differences that are rounded or approximated, and on GPUs. The last bit of a float32 sometimes
decides to which side a value is rounded; such an element is then off by a whole level, and counts with its share of
the movement. Measured: up to 6e-4; averages that are 1 % too large give 1e-2 and more."""
_COMPARED_EVERY = 10
_MOST_KERNELS = 20
_KERNEL_SIDE = 2048
_NUMBERS = {COMMUNICATORS: 2, SIZE: 16.0, EDGE: 1.0}
"""The choice for a fast link is one bucket; these settings make several, to test their order and communicators."""
_STEPS_PER_PERIOD = 4
"""A period of LocalSGD is at most the steps divided by this, so that several occur."""

Values = dict[str, Array]


@dataclass(frozen=True)
class Fitted:
    """A profile as it is tested here, and what was changed for that."""

    profile: Profile
    changed: Mapping[str, int]
    network: TriedNetwork


@dataclass(frozen=True)
class TriedRun:
    """This rank's parameters every few steps, and at the end, when all must be equal."""

    start: Values
    seen: Mapping[int, Values]
    end: Values
    moved: float

    def difference(self, ours: Values, expected: Values) -> float:
        """The distance of all parameters together, relative to the expected distance from the start."""
        moved, should = ({n: values[n] - self.start[n] for n in self.end} for values in (ours, expected))
        return deviation(moved, should)


def check(job: Job, options: SelftestOptions) -> Iterator[Result]:
    if job.world_size == 1:
        yield Result("profiles", "profiles", SKIP, "one rank averages nothing")
        return
    for number, name in enumerate(profile_names()):
        yield _check_profile(job, name, options.steps, seed=number)


def _check_profile(job: Job, name: str, steps: int, seed: int) -> Result:
    began, label = time.perf_counter(), f"profile {name}"
    fitted = fit(load_profile(name), steps)
    level, dtype = fitted.profile.amp_level, fitted.profile.amp_dtype
    precision = None if level == "O0" else Profile(amp_level=level, amp_dtype=dtype)
    if precision is not None and (reason := _unusable(precision)):
        return Result("profiles", label, SKIP, reason)
    try:
        group_size_of(job.cluster, fitted.profile)
    except ProfileError as refusal:
        return Result("profiles", label, SKIP, str(refusal))
    before = dict(os.environ)
    try:
        paddle.seed(seed * 1000 + job.cluster.rank)  # a different start on every rank: rank 0's must be used
        trained = Trained(fitted.network, lambda inner: fleet.distributed_optimizer(inner, fitted.profile), _optimizer)
        run = _train(job, trained, steps, seed)
        difference = _from_simulator(job, fitted, precision, run, steps, seed) if job.cluster.rank == 0 else 0.0
    finally:
        os.environ.clear()
        os.environ.update(before)  # a profile's variables are not the next one's
    outcome = {"end": digest(run.end), "moved": run.moved, "difference": difference}
    everybody = job.all_gather(f"selftest {label}", outcome, timeouts.SELFTEST_SIMULATION_SECONDS)
    return judge(job, label, fitted, steps, everybody, time.perf_counter() - began)


def check_stream(job: Job, options: SelftestOptions, stream: str, folder: Path) -> Iterator[Result]:
    """``collective_stream``: calc is compared with one process, and rank 0 keeps its parameters in ``folder``; the
    others are compared with those."""
    began, label = time.perf_counter(), f"{stream} with {backend_name()}"
    steps, kept = options.steps, folder / "parameters"
    profile = Profile(
        collective_stream=stream,
        nccl_comm_num=1,
        fuse_grad_size_in_MB=1.0,
        last_comm_group_size_MB=0.25,
        divergence_check_steps=0,
        collective_timeout_seconds=timeouts.SELFTEST_TRAINING_SECONDS,
    )
    paddle.seed(job.cluster.rank)  # a different start on every rank, and the same one in the other jobs
    trained = Trained(SEVERAL_BUCKETS, lambda inner: fleet.distributed_optimizer(inner, profile), _optimizer)
    run = _train(job, trained, steps, seed=0)
    outcome = {"end": digest(run.end), "moved": run.moved, "difference": 0.0}
    if job.cluster.rank == 0 and stream == CALC:
        data = batches(steps, SAMPLES_PER_RANK * job.world_size, 0)
        outcome["difference"] = _from_joint_batch(SEVERAL_BUCKETS, run, data)
        write_new(kept, save(run.end))
    elif job.cluster.rank == 0:
        outcome["difference"] = run.difference(run.end, load(read_regular(kept, 2**24)))
    everybody = job.all_gather(f"selftest {label}", outcome, timeouts.SELFTEST_SIMULATION_SECONDS)
    carried_out = job.engine.stream if isinstance(job.engine, StreamEngine) else stream
    bound = 0.0 if stream == OWN and not computes_on_gpu() else tolerance_of(profile, on_gpu=computes_on_gpu())
    yield judge_stream(job, label, stream, carried_out, steps, everybody, bound, time.perf_counter() - began)


def judge_stream(
    job: Job, label: str, stream: str, carried_out: str, steps: int, everybody: Mapping[int, Mapping[str, Any]],
    tolerance: float, seconds: float,
) -> Result:  # fmt: skip
    """``carried_out``: the stream at the end; ``everybody``: as for `judge`, compared with calc, or one process."""
    reference = "one process with the joint batch" if stream == CALC else "calc"
    difference = float(everybody[0]["difference"])
    figures = {"steps": steps, "difference": difference, "tolerance": tolerance, "carried_out": carried_out}
    given_up = "the proof has found results that differ: all ranks went on with calc" if carried_out != stream else ""
    wrong = [words for words in (given_up, why_wrong(job, steps, everybody, reference, tolerance)) if words]
    if wrong:
        return Result("streams", label, FAIL, "; ".join(wrong), seconds, figures)
    near = f"{difference:.1e} from {reference} ({tolerance:.0e} allowed)" if difference else f"the bits of {reference}"
    return Result("streams", label, OK, f"{steps} steps, {near}, replicas bit-equal", seconds, figures)


def fit(profile: Profile, steps: int) -> Fitted:
    """Warm-ups end, and periods occur, within the steps. Variables that only NCCL reads are left to the owner."""
    changed = short_warm_ups(profile)
    changed |= short_periods(profile, max(2, steps // _STEPS_PER_PERIOD))
    environment = {name: value for name, value in profile.environment.items() if not name.startswith("NCCL_")}
    network = BATCH_NORM if profile.sync_batch_norm else SEVERAL_BUCKETS
    several = {knob: _NUMBERS[knob] for knob in open_knobs(profile)}
    settings: dict[str, Any] = {
        **changed,
        **several,
        "environment": environment,
        "collective_timeout_seconds": timeouts.SELFTEST_TRAINING_SECONDS,
    }
    settings["divergence_check_steps"] = 0  # replicas are compared here, and a difference does not end other checks
    return Fitted(profile.with_settings("the selftest", **settings), changed, network)


def _optimizer() -> Any:
    return paddle.optimizer.Momentum(0.01, 0.9)


def _unusable(precision: Profile) -> str:
    try:
        refuse_unusable(precision, on_gpu=computes_on_gpu())
    except ConversionError as error:
        return str(error)
    return ""


def _train(job: Job, trained: Trained, steps: int, seed: int) -> TriedRun:
    random = np.random.default_rng([seed, job.cluster.rank])
    start, seen = trained.state(), {}
    for step, (features, labels) in enumerate(batches(steps, SAMPLES_PER_RANK * job.world_size, seed), 1):
        _stumble(random)
        mine = share(job.cluster.rank)
        trained.step(features[mine], labels[mine])
        if step % _COMPARED_EVERY == 0 or step == steps:
            seen[step] = trained.parameters()
    with paddle.static.scope_guard(trained.scope):
        fleet.synchronize_parameters(trained.main)
    end = trained.parameters()
    return TriedRun(start, seen, end, relative_difference(end, {name: start[name] for name in end}))


def _stumble(random: np.random.Generator) -> None:
    """Delay the others: the host for some milliseconds, the device by products of matrices."""
    time.sleep(random.uniform(0.0, timeouts.SELFTEST_DELAY_SECONDS))
    if computes_on_gpu():
        with dynamic_mode(), paddle.no_grad():
            square = paddle.ones([_KERNEL_SIDE, _KERNEL_SIDE], "float32")
            for _ in range(int(random.integers(0, _MOST_KERNELS))):
                square = paddle.matmul(square, square) / _KERNEL_SIDE


def _from_simulator(job: Job, fitted: Fitted, precision: Profile | None, run: TriedRun, steps: int, seed: int) -> float:
    """The largest distance of this rank's parameters from those of the numpy job, at any time and at the end; NaN if
    one is."""
    data = batches(steps, SAMPLES_PER_RANK * job.world_size, seed)
    if fitted.profile.sync_batch_norm:
        return _from_joint_batch(fitted.network, run, data)
    reference, distances = Reference(fitted.network, _optimizer, run.start, precision), []
    for step, (features, labels) in enumerate(data, 1):
        reference.step(features, labels)
        if step in run.seen:
            distances.append(run.difference(run.seen[step], reference.job.ranks[job.cluster.rank]))
    reference.job.synchronise()
    distances.append(run.difference(run.end, reference.job.ranks[job.cluster.rank]))
    return float(np.max(distances))


def _from_joint_batch(network: TriedNetwork, run: TriedRun, data: list[tuple[Array, Array]]) -> float:
    """Ranks that communicate within their passes are not simulated: one process with the joint batch is equivalent."""
    single, distances = Trained(network, lambda inner: inner, _optimizer), []
    single.start_from(run.start)
    for step, (features, labels) in enumerate(data, 1):
        single.step(features, labels)
        if step in run.seen:
            distances.append(run.difference(run.seen[step], single.parameters()))
    return float(np.max(distances))


def judge(
    job: Job, label: str, fitted: Fitted, steps: int, everybody: Mapping[int, Mapping[str, Any]], seconds: float
) -> Result:
    """``everybody``: by rank, the digest of its final parameters, and on rank 0 the simulator's difference."""
    profile, plan = fitted.profile, fleet.plan()
    tolerance = tolerance_of(profile, on_gpu=computes_on_gpu())
    difference = float(everybody[0]["difference"])
    figures = {
        "steps": steps,
        "difference": difference,
        "tolerance": tolerance,
        "buckets": len(plan.buckets) if plan is not None else 0,
        "changed": dict(fitted.changed),
    }
    wrong = why_wrong(job, steps, everybody, _reference(profile), tolerance)
    if wrong:
        return Result("profiles", label, FAIL, f"{wrong}; do not train on this cluster", seconds, figures)
    return Result("profiles", label, OK, _words(fitted, steps, difference, tolerance), seconds, figures)


def why_wrong(
    job: Job, steps: int, everybody: Mapping[int, Mapping[str, Any]], reference: str, tolerance: float
) -> str:
    """What is wrong with the outcomes of `judge`, or nothing."""
    difference = float(everybody[0]["difference"])
    unequal = [rank for rank, outcome in everybody.items() if outcome["end"] != everybody[0]["end"]]
    if unequal:
        return f"after {steps} steps {job.cluster.describe(unequal[0])} holds other parameters than rank 0"
    if not difference <= tolerance:
        return f"after {steps} steps {difference:.1e} from {reference}, {tolerance:.0e} is allowed"
    return "" if everybody[0]["moved"] > 10 * tolerance else "the parameters have not changed"


def tolerance_of(profile: Profile, *, on_gpu: bool) -> float:
    """GPUs may multiply float32 in TF32, which keeps 10 bits."""
    rounded = profile.compression != "none" or profile.local_sgd_dtype != "float32" or profile.amp_level != "O0"
    return APPROXIMATED if on_gpu or rounded else EXACT


def _reference(profile: Profile) -> str:
    return "one process with the joint batch" if profile.sync_batch_norm else "the simulator"


def _words(fitted: Fitted, steps: int, difference: float, tolerance: float) -> str:
    profile, plan = fitted.profile, fleet.plan()
    words = f"{steps} steps, {difference:.1e} from {_reference(profile)} ({tolerance:.0e} allowed), replicas bit-equal"
    if profile.use_local_sgd:
        words += " after synchronize_parameters"
    if profile.use_hierarchical_allreduce and plan is not None and not plan.group_size:
        words += "; these ranks form no hierarchy, so it ran flat"
    if fitted.changed:
        words += f" ({', '.join(f'{knob} {value}' for knob, value in fitted.changed.items())})"
    return words


SimulatedValues = Mapping[str, Array]


class Gradients(SmallProgram):
    """One program without optimizer and without communication, run for every simulated rank in turn."""

    def __init__(self, network: TriedNetwork, precision: Profile | None = None) -> None:
        self._pairs: list[Any] = []

        def backward(loss: Any, _: Any) -> None:
            if precision is not None:
                lower_precision(loss, precision, on_gpu=computes_on_gpu())
            self._pairs += [pair for pair in paddle.static.append_backward(loss) if pair[1] is not None]

        super().__init__(network, backward)

    def __call__(self, values: SimulatedValues, features: Array, labels: Array) -> Local:
        self.start_from(values)
        loss, *results = self.run(features, labels, *(gradient for _, gradient in self._pairs))
        gradients = {parameter.name: value for (parameter, _), value in zip(self._pairs, results, strict=True)}
        # Values without gradient: running statistics, which the forward pass updates, and frozen values.
        others = {name: value for name, value in self.state().items() if name not in gradients}
        return Local(gradients, float(loss.item()), others)

    def start(self, state: SimulatedValues) -> dict[str, Array]:
        """The part of a real program's state that this one has."""
        return {name: state[name] for name in self.state()}


def numpy_reference(optimizer: Any) -> NumpyOptimizer:
    """The numpy equivalent of this Paddle optimizer."""
    kind = type(optimizer).__name__
    if kind == "Momentum":
        decay = optimizer._default_dict["regularization_coeff"]
        return Momentum(optimizer._momentum, optimizer._use_nesterov, decay)
    if kind in ("Adam", "AdamW"):
        decay = optimizer._weight_decay if kind == "AdamW" else 0.0
        return Adam(optimizer._beta1, optimizer._beta2, optimizer._epsilon, decay)
    assert kind == "SGD", f"no reference for {kind}"
    return Sgd(0.0)


class Reference:
    """The project's simulator with Paddle's gradients: a job parallel to the real one that was converted last, with the
    same data."""

    def __init__(
        self, network: TriedNetwork, make: Callable[[], Any], start: SimulatedValues, precision: Profile | None = None
    ) -> None:
        plan = fleet.plan()
        assert plan is not None
        self.gradients = Gradients(network, precision)
        self.optimizer = make()
        self.job = SimulatedJob(
            plan, fleet.profile(), self.gradients.start(start), lambda: numpy_reference(self.optimizer)
        )

    def step(self, features: Array, labels: Array) -> Step:
        """One step on the joint batch, of which each rank uses its share."""
        self.job.rate = float(self.optimizer.get_lr())
        done = self.job.step(lambda rank, values: self.gradients(values, features[share(rank)], labels[share(rank)]))
        advance_rate(self.optimizer)
        return done
