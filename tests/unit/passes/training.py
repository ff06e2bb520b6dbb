"""A network with its optimizer in its own programs and scope, for comparing ways of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleet_train.profile import Profile
from fleet_train.selftest.training import CLASSES, FEATURES
from fleet_train.selftest.training import batches as batches

State = dict[str, np.ndarray]


def loss_scaling(**settings: Any) -> Profile:
    """Float16 with these settings of its loss scale (knobs without ``amp_``)."""
    return Profile(amp_level="O1", amp_dtype="float16", **{f"amp_{name}": value for name, value in settings.items()})


def mlp(features: Any) -> Any:
    hidden = paddle.tanh(nn.Linear(FEATURES, 24)(features))
    return nn.Linear(24, CLASSES)(hidden)


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


class Trained:
    """``minimize(optimizer, loss)`` is what is tested; it runs with the programs as the current ones."""

    def __init__(
        self,
        make_optimizer: Callable[[], Any],
        minimize: Callable[[Any, Any], Any] = lambda optimizer, loss: optimizer.minimize(loss),
        network: Callable[[Any], Any] = mlp,
    ) -> None:
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self.exe = paddle.static.Executor(paddle.CPUPlace())
        self.optimizer = make_optimizer()
        with paddle.static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            features = paddle.static.data("features", [None, FEATURES], "float32")
            labels = paddle.static.data("labels", [None, 1], "int64")
            self.loss = nn.functional.cross_entropy(network(features), labels)
            self.result = minimize(self.optimizer, self.loss)
        with paddle.static.scope_guard(self.scope):
            self.exe.run(self.startup)

    def step(self, batch: tuple[np.ndarray, np.ndarray], fetch: Any = None) -> Any:
        """Run one step; returns the loss, or the values of ``fetch``."""
        feed = {"features": batch[0], "labels": batch[1]}
        with paddle.static.scope_guard(self.scope):
            fetched = self.exe.run(self.main, feed=feed, fetch_list=[self.loss] if fetch is None else fetch)
        return fetched[0].item() if fetch is None else fetched

    def schedule(self) -> None:
        """One step of the learning rate's schedule, if there is one."""
        if isinstance(self.optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
            self.optimizer._learning_rate.step()

    def state(self) -> State:
        return {name: np.array(value) for name, value in self.main.state_dict("all", self.scope).items()}

    def start_from(self, state: State) -> None:
        """Take over every value that both have."""
        for name, value in self.main.state_dict("all", self.scope).items():
            if name in state:
                value.set(state[name], paddle.CPUPlace())

    def parameters(self) -> State:
        names = [parameter.name for parameter in self.main.global_block().all_parameters()]
        return {name: value for name, value in self.state().items() if name in names}

    def operators(self) -> list[str]:
        return [operator.name() for operator in self.main.global_block().ops]


def relative_difference(ours: State, expected: State, floor: float = 1e-6) -> float:
    """The largest difference of a value, relative to the largest of its tensor, or to ``floor`` if that is more.

    A bias in front of a batch norm has no gradient but rounding noise: its size says nothing.
    """
    assert ours.keys() == expected.keys()
    return max(float(np.abs(ours[n] - expected[n]).max() / max(np.abs(expected[n]).max(), floor)) for n in ours)


def how_far_moved(end: State, start: State) -> float:
    """The largest change of a value, relative to the largest of its tensor at the start: of a tensor that starts at 0,
    as biases do, any change is large, and says nothing."""
    begun = {name: value for name, value in start.items() if name in end and np.any(value)}
    return max((float(np.abs(end[n] - begun[n]).max() / np.abs(begun[n]).max()) for n in begun), default=0.0)
