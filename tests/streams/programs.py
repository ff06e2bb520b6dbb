"""Programs in which every profile has something to communicate, and their traces on all ranks of a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train.cluster import Cluster
from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.profile import Profile
from fleet_train.profile.knobs import AUTO
from tests.streams.played import MakeEngine, PlayedJob, play_rank, stream_engine
from tests.streams.recorder import Recorder
from tests.streams.trace import Op, Trace

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
    "dgc_rampup_begin_step": 2,
    "dgc_rampup_steps": 2,
    "dgc_sparsity": 0.99,
    "powersgd_start_step": 2,
    "accumulate_steps": 2,
}


def shortened(profile: Profile) -> Profile:
    """The profile with small buckets and short warm-ups where it has any."""
    wanted = {knob: value for knob, value in _SHORT.items() if knob in profile.explicit}
    if "local_sgd_fragments" in wanted:
        wanted |= {"local_sgd_steps": 4}  # two steps for each fragment's averaging
    wanted["divergence_check_steps"] = 3
    if profile.nccl_comm_num == AUTO:
        wanted["nccl_comm_num"] = 2  # one would be chosen for so few bytes
    if profile.fuse_all_reduce_ops:
        wanted["fuse_parameter_groups_size"] = _GRADIENTS_PER_BUCKET
    return profile.with_settings("the model of streams", **wanted)


def network(features: Any) -> Any:
    """Batch norm, a weight past DGC's bound, matrices for PowerSGD, small tensors: about 20,000 elements."""
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


def record(profile: Profile, cluster: Cluster, steps: int, make_engine: MakeEngine = stream_engine) -> list[Trace]:
    """The traces of all ranks of a training under ``profile``: conversion, start values, ``steps`` steps."""

    def train(job: PlayedJob, recorder: Recorder) -> None:
        training = SmallTraining(job, recorder, profile)
        for number in range(steps):
            training.step(number)

    return [play_rank(cluster, rank, make_engine, train) for rank in range(cluster.world_size)]
