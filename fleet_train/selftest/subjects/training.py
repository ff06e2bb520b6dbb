"""A network trained through the facade, or on one process, in separate programs and scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet
from fleet_train.selftest.subjects.networks import FEATURES, Array, Network


def computes_on_gpu() -> bool:
    """Whether this rank computes on one."""
    return not isinstance(fleet.place(), paddle.CPUPlace)


class Trained:
    """``wrap`` is applied to the optimizer: ``fleet.distributed_optimizer``, or the identity."""

    def __init__(self, network: Network, wrap: Callable[[Any], Any], make_optimizer: Callable[[], Any]) -> None:
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self.exe = paddle.static.Executor(fleet.place())
        self.optimizer = wrap(make_optimizer())
        with paddle.static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            features = paddle.static.data("features", [None, FEATURES], "float32")
            labels = paddle.static.data("labels", [None, 1], "int64")
            self.loss = nn.functional.cross_entropy(network.build(features), labels)
            self.optimizer.minimize(self.loss, self.startup)
        with paddle.static.scope_guard(self.scope):
            self.exe.run(self.startup)

    def step(self, features: Array, labels: Array) -> float:
        with paddle.static.scope_guard(self.scope):
            (loss,) = self.exe.run(self.main, feed={"features": features, "labels": labels}, fetch_list=[self.loss])
        rate = self.optimizer._learning_rate
        if isinstance(rate, paddle.optimizer.lr.LRScheduler):
            rate.step()
        return float(loss.item())

    def state(self) -> dict[str, Array]:
        return {name: np.array(value) for name, value in self.main.state_dict("all", self.scope).items()}

    def start_from(self, state: Mapping[str, Array]) -> None:
        for name, value in self.main.state_dict("all", self.scope).items():
            value.set(state[name], fleet.place())

    def parameters(self) -> dict[str, Array]:
        names = [parameter.name for parameter in self.main.global_block().all_parameters()]
        return {name: value for name, value in self.state().items() if name in names}
