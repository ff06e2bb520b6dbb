"""A program in which every profile has something to communicate, and its traces on all ranks of a cluster.

Negative controls: engines without one of their rules, which the model must find faulty, so that finding none means
something."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import paddle
from paddle import nn

from fleet_train.cluster import Cluster
from fleet_train.collectives import own_streams
from fleet_train.collectives.engine import CallContext, Collective, Stages
from fleet_train.collectives.engines import OWN, EngineResult, Enqueued, InFlight, ThreadEngine
from fleet_train.collectives.job import Job
from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.profile import Profile, load_profile
from fleet_train.profile.knobs import AUTO
from tests.streams.record import MakeEngine, PlayedJob, PlayedStreams, Recorder, play_rank
from tests.streams.replay import Found, replay, schedule_of
from tests.streams.trace import Op, Trace, from_first_step, mismatches

T = TypeVar("T")

FEATURES, WIDTH, CLASSES = 16, 130, 5
BATCH = 4

# Several small buckets, and warm-ups that end: what a profile is about must happen in a few steps.
_GRADIENTS_PER_BUCKET = 3
_SHORT: dict[str, Any] = {
    "local_sgd_is_warm_steps": 2,
    "local_sgd_steps": 2,
    "local_sgd_max_steps": 3,
    "local_sgd_fragments": 2,
    "local_sgd_overlap_steps": 1,
    "powersgd_start_step": 2,
    "accumulate_steps": 2,
}


def shortened(profile: Profile, stream: str = OWN) -> Profile:
    """The profile with small buckets and short warm-ups where it has any, on this ``collective_stream``. Raises
    ProfileError where the profile does not go with it."""
    wanted = {knob: value for knob, value in _SHORT.items() if knob in profile.explicit}
    wanted["collective_stream"] = stream
    if profile.use_hierarchical_allreduce:
        wanted["force_hierarchical_allreduce"] = True
    if "local_sgd_fragments" in wanted:
        wanted |= {"local_sgd_steps": 4}  # two steps for each fragment's averaging
    wanted["divergence_check_steps"] = 3
    if profile.nccl_comm_num == AUTO:
        wanted["nccl_comm_num"] = 2  # one would be chosen for so few bytes
    if profile.fuse_all_reduce_ops:
        wanted["fuse_parameter_groups_size"] = _GRADIENTS_PER_BUCKET
    return profile.with_settings("the model of streams", **wanted)


def network(features: Any) -> Any:
    """Batch norm, matrices for PowerSGD, small tensors: about 20,000 elements."""
    hidden = nn.Linear(FEATURES, WIDTH, bias_attr=False)(features)
    hidden = paddle.tanh(nn.BatchNorm1D(WIDTH)(hidden))
    hidden = paddle.tanh(nn.Linear(WIDTH, WIDTH)(hidden))
    hidden = paddle.tanh(nn.BatchNorm1D(12)(nn.Linear(WIDTH, 12)(hidden)))
    hidden = paddle.tanh(nn.Linear(12, 12)(hidden))
    return nn.Linear(12, CLASSES)(hidden)


class SmallTraining:
    """The converted program of one rank, and steps of it."""

    def __init__(self, job: PlayedJob, recorder: Recorder, profile: Profile) -> None:
        self._recorder = recorder
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self._exe = paddle.static.Executor(job.place)
        paddle.seed(7)
        inner = paddle.optimizer.Momentum(0.05, 0.9)
        self.optimizer = DistributedOptimizer(inner, profile, job, lambda *_: None)
        with paddle.static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            features = paddle.static.data("features", [None, FEATURES], "float32")
            labels = paddle.static.data("labels", [None, 1], "int64")
            self.loss = nn.functional.cross_entropy(network(features), labels)
            self.optimizer.minimize(self.loss, self.startup)
        with paddle.static.scope_guard(self.scope), recorder.inside("startup"):
            self._exe.run(self.startup)

    def step(self, number: int) -> None:
        """Every second step fetches the loss, which the host waits for."""
        random = np.random.default_rng(number)
        feed = {
            "features": random.standard_normal((BATCH, FEATURES)).astype("float32"),
            "labels": random.integers(0, CLASSES, (BATCH, 1)).astype("int64"),
        }
        fetched = [self.loss] if number % 2 else []
        self._recorder.begin_run(self.main)
        with paddle.static.scope_guard(self.scope):
            self._exe.run(self.main, feed=feed, fetch_list=fetched)
        self._recorder.end_run()
        if fetched:
            self._recorder.add(Op.SYNC, what="fetch")


def record(
    profile: Profile,
    cluster: Cluster,
    steps: int,
    make_engine: MakeEngine = PlayedStreams,
    ranks: Sequence[int] | None = None,
    proves: bool = True,
) -> list[Trace]:
    """The traces of a training under ``profile`` on all ranks, or those: conversion, start values, ``steps`` steps.
    ``proves``: whether own streams are compared with the calculation stream in the first three."""

    def train(job: PlayedJob, recorder: Recorder) -> None:
        training = SmallTraining(job, recorder, profile)
        for number in range(steps):
            training.step(number)

    proof_steps = own_streams.PROOF_STEPS if proves else 0
    with mock.patch.object(own_streams, "PROOF_STEPS", proof_steps):
        return [play_rank(cluster, rank, make_engine, train) for rank in ranks or range(cluster.world_size)]


class OldEngine(ThreadEngine):
    """Threads that call with ``sync_op=True`` and read values, on NCCL too: what they expose is what streams save."""

    def __init__(self, recorder: Recorder, job: Job) -> None:
        super().__init__(job.place, job.attribute_failure)
        self._recorder = recorder

    def start(
        self, stages: Stages[T], context: CallContext, communicator: int = 0, barrier: Future[Any] | None = None
    ) -> EngineResult[T]:
        with self._recorder.inside(context.what):
            return super().start(stages, context, communicator, barrier)

    def run_here(self, stages: Stages[T], context: CallContext) -> T:
        with self._recorder.inside(context.what):
            return super().run_here(stages, context)


class EndsWhenComplete(PlayedStreams):
    """Ends stages when their collectives happen to be complete, which differs between ranks."""

    def __init__(self, recorder: Recorder, job: Job) -> None:
        super().__init__(recorder, job)
        self._random = random.Random(recorder.trace.rank)

    def step_on(self) -> None:
        for running in list(self._in_flight):
            if running.has_more and self._random.random() < 0.5:
                self._end_stage(running)


class WithoutGroupRule(PlayedStreams):
    """Has groups that share two ranks in flight at a time."""

    def _begin_one(self, running: InFlight[Any], collective: Collective) -> None:
        task = self._begin(collective, self.stream, running)
        if task is not None:
            running.tasks.append(Enqueued(collective, task))


class SideBySide(WithoutGroupRule):
    """And keeps the several communicators that a profile asks for; statistics have a group of their own."""

    side_by_side = True


DEADLOCK, MISMATCH, NOTHING = "deadlock", "order mismatch", "nothing"


@dataclass(frozen=True)
class Control:
    """An engine under a profile of the catalogue (with ``settings``), and what must be found."""

    name: str
    engine: MakeEngine
    profile: str
    nodes: int = 2
    ranks_per_node: int = 1
    one_resident: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    expected: str = DEADLOCK

    def traces(self, steps: int) -> list[Trace]:
        profile = load_profile(self.profile).with_settings("a control", **self.settings)
        return record(
            shortened(profile), Cluster.imagined(self.nodes, self.ranks_per_node), steps, self.engine, proves=False
        )


_ALONE, _HIERARCHY = {"nccl_comm_num": 1}, {"use_hierarchical_allreduce": True}  # which `shortened` then forces
CONTROLS = (
    Control("two communicators in flight", SideBySide, "multi_node", one_resident=True),
    Control("the same, kernels always side by side", SideBySide, "multi_node", expected=NOTHING),
    Control("statistics on a group of their own", SideBySide, "sync_batch_norm", one_resident=True, settings=_ALONE),
    Control("PowerSGD's stages end when complete", EndsWhenComplete, "powersgd", 3, expected=MISMATCH),
    Control("hierarchical stages end when complete", EndsWhenComplete, "hierarchical", 2, 2, True, expected=MISMATCH),
    Control(
        "hierarchy with statistics, no rule for groups", WithoutGroupRule, "sync_batch_norm", 2, 2, True, _HIERARCHY
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Of one control."""

    mismatches: list[str]
    found: Found
    ranks: int

    @property
    def what(self) -> str:
        if self.mismatches:
            return MISMATCH
        return DEADLOCK if self.found.deadlocks else NOTHING


def outcome(control: Control, interleavings: int, seed: int, steps: int = 4) -> Outcome:
    """Record the control's traces, and replay them unless their orders differ already."""
    traces = control.traces(steps)
    if found := mismatches(traces):
        return Outcome(found, Found(), len(traces))
    schedule = schedule_of([from_first_step(trace) for trace in traces])
    found_in = replay(schedule, interleavings, np.random.default_rng(seed), control.one_resident)
    return Outcome([], found_in, len(traces))
