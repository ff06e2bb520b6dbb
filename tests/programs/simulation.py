"""A program with the simulator in place of ranks: gradients are Paddle's, everything else is numpy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.plan import CommPlan
from fleet_train.plan.simulate import Adam, Local, Momentum, NumpyOptimizer, Sgd, SimulatedJob
from fleet_train.profile import Profile
from tests.programs.catalogue.entry import Program
from tests.programs.feeds import Array, Batch, share_of
from tests.programs.script import Script


class Simulation(Script):
    """All ranks of the plan in this process, for programs of one optimizer and one training program."""

    def __init__(self, program: Program, profile: Profile, plan: CommPlan, real: Script) -> None:
        super().__init__(program, real.seed)
        self.real_rank, self.ranks = real.rank, plan.world_size
        self._plan, self._profile, self._real_start = plan, profile, real.start_state
        self._pairs: list[tuple[str, Any]] = []
        self._job: SimulatedJob | None = None

    def wrap(self, optimizer: Any) -> Any:
        self.optimizers.append(optimizer)
        return _Recorder(optimizer, self._pairs)

    def start(self, startup: Any = None) -> None:
        super().start(startup)
        held = paddle.static.default_main_program().state_dict("all", paddle.static.global_scope())
        start = {name: self._real_start[name] for name in held}
        (optimizer,) = self.optimizers
        self._job = SimulatedJob(self._plan, self._profile, start, lambda: numpy_reference(optimizer))

    def run(self, batch: Batch, fetch: Sequence[Any] = (), program: Any = None) -> list[Array]:
        assert self._job is not None
        assert program is None
        found: list[Array] = []
        for micro in range(self._profile.accumulate_steps):
            parts = [
                share_of(
                    batch, rank * self._profile.accumulate_steps + micro, self.ranks * self._profile.accumulate_steps
                )
                for rank in range(self.ranks)
            ]

            def backward(rank: int, values: Mapping[str, Array], parts: list[Batch] = parts) -> Local:
                local, found[:] = self._backward(rank, values, parts[rank], fetch)
                return local

            self._job.rate = float(self.optimizers[0].get_lr())
            self._job.step(backward)
            self.runs += 1
        return found

    def _backward(
        self, rank: int, values: Mapping[str, Array], part: Batch, fetch: Sequence[Any]
    ) -> tuple[Local, list[Array]]:
        main, scope = paddle.static.default_main_program(), paddle.static.global_scope()
        for name, held in main.state_dict("all", scope).items():
            held.set(values[name].astype(self._real_start[name].dtype), self.place)
        if self.random:
            paddle.seed(self._random_seed(rank))
        wanted = [*fetch, *(value for _, value in self._pairs)]
        results = self.exe.run(main, feed=part, fetch_list=wanted)
        gradients: dict[str, Array] = {}
        for (name, _), value in zip(self._pairs, results[len(fetch) :], strict=True):
            gradients[name] = gradients[name] + value if name in gradients else value
        others = {n: np.array(v) for n, v in main.state_dict("all", scope).items() if n not in gradients}
        return Local(gradients, statistics=others), results[: len(fetch)]

    def finish(self) -> None:
        assert self._job is not None
        names = paddle.static.default_main_program().state_dict("param", paddle.static.global_scope())
        self.values = {name: self._job.ranks[self.real_rank][name] for name in names}


class _Recorder:
    """Stands for the wrapped optimizer: makes the backward pass and no update."""

    def __init__(self, inner: Any, pairs: list[tuple[str, Any]]) -> None:
        self._inner, self._pairs = inner, pairs

    def minimize(self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None) -> None:
        found = self._inner.backward(loss, startup_program, parameters, no_grad_set)
        self._pairs += [(parameter.name, value) for parameter, value in found if value is not None]


def numpy_reference(optimizer: Any) -> NumpyOptimizer:
    """The numpy optimizer that computes what this one of Paddle's does."""
    kind = type(optimizer).__name__
    if kind == "Momentum":
        decay = optimizer._default_dict["regularization_coeff"]
        return Momentum(optimizer._momentum, optimizer._use_nesterov, decay)
    if kind == "Adam":
        return Adam(optimizer._beta1, optimizer._beta2, optimizer._epsilon)
    assert kind == "SGD", f"no reference for {kind}"
    return Sgd()
