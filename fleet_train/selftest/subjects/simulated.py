"""The project's simulator with Paddle's gradients: the reference for real ranks, in each rank's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.convert.passes.precision_rules import MixedPrecision
from fleet_train.plan.simulate import Adam, Local, Momentum, NumpyOptimizer, Sgd, SimulatedJob, Step
from fleet_train.selftest.subjects.networks import FEATURES, Array, Network, share
from fleet_train.selftest.subjects.training import computes_on_gpu

Values = Mapping[str, Array]


class Gradients:
    """One program without optimizer and without communication, run for every simulated rank in turn."""

    def __init__(self, network: Network, precision: MixedPrecision | None = None) -> None:
        self.main, self.scope = paddle.static.Program(), paddle.static.Scope()
        self._exe, startup = paddle.static.Executor(fleet.place()), paddle.static.Program()
        with paddle.static.program_guard(self.main, startup), paddle.utils.unique_name.guard():
            features = paddle.static.data("features", [None, FEATURES], "float32")
            labels = paddle.static.data("labels", [None, 1], "int64")
            self._loss = nn.functional.cross_entropy(network.build(features), labels)
            if precision is not None:
                lower_precision(self._loss, precision, on_gpu=computes_on_gpu())
            self._pairs = [pair for pair in paddle.static.append_backward(self._loss) if pair[1] is not None]
        with paddle.static.scope_guard(self.scope):
            self._exe.run(startup)
        self._held = self.main.state_dict("all", self.scope)

    def __call__(self, values: Values, features: Array, labels: Array) -> Local:
        for name, held in self._state().items():
            held.set(values[name], fleet.place())
        with paddle.static.scope_guard(self.scope):
            feed = {"features": features, "labels": labels}
            loss, *found = self._exe.run(
                self.main, feed=feed, fetch_list=[self._loss, *(gradient for _, gradient in self._pairs)]
            )
        gradients = {parameter.name: value for (parameter, _), value in zip(self._pairs, found, strict=True)}
        # Values without gradient: running statistics, which the forward pass updates, and frozen values.
        others = {name: np.array(value) for name, value in self._state().items() if name not in gradients}
        return Local(gradients, float(loss.item()), others)

    def start(self, state: Values) -> dict[str, Array]:
        """The part of a real program's state that this one has."""
        return {name: state[name] for name in self._state()}

    def _state(self) -> dict[str, Any]:
        held: dict[str, Any] = self.main.state_dict("all", self.scope)
        return held


def numpy_reference(optimizer: Any) -> NumpyOptimizer:
    """The numpy equivalent of this Paddle optimizer."""
    kind, decay = type(optimizer).__name__, 0.0
    if kind == "Momentum":
        decay = optimizer._default_dict["regularization_coeff"]
    if kind == "Momentum":
        return Momentum(optimizer._momentum, optimizer._use_nesterov, decay)
    if kind in ("Adam", "AdamW"):
        decay = optimizer._weight_decay if kind == "AdamW" else 0.0
        return Adam(optimizer._beta1, optimizer._beta2, optimizer._epsilon, decay)
    assert kind == "SGD", f"no reference for {kind}"
    return Sgd(decay)


class Reference:
    """A simulated job parallel to the real one that was converted last, with the same data."""

    def __init__(
        self, network: Network, make: Callable[[], Any], start: Values, precision: MixedPrecision | None = None
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
        if isinstance(self.optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
            self.optimizer._learning_rate.step()
        return done
