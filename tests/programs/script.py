"""A program's argument: everything in it that differs between one process and several ranks, and the feeds.

Imports no fleet_train: one process is plain Paddle.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from tests.programs.catalogue import BATCH, STEPS, Input, Program

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]
_SEED = 0


def batch_of(inputs: Mapping[str, Input], samples: int, *key: int | str) -> Batch:
    """``samples`` of each input, decided by ``key`` and the input's name."""
    return {
        name: one.draw(_generator(*key, name), (samples, *one.shape)).astype(one.dtype) for name, one in inputs.items()
    }


def _generator(*key: int | str) -> np.random.Generator:
    return np.random.default_rng([part if isinstance(part, int) else zlib.crc32(part.encode()) for part in key])


def share_of(batch: Batch, part: int, parts: int) -> Batch:
    """One of ``parts`` equal parts of a joint batch."""
    size, rest = divmod(len(next(iter(batch.values()))), parts)
    assert rest == 0, f"a batch has no {parts} equal parts"
    return {name: values[part * size : (part + 1) * size] for name, values in batch.items()}


class Script:
    """One process with the joint batch. Programs, scope and unique names are those that the caller has made current."""

    rank = 0
    ranks = 1
    micro_batches = 1

    def __init__(self, program: Program) -> None:
        self.name, self.random, self._sums = program.name, program.random, program.sums
        self.place: Any = paddle.CPUPlace()
        self.exe = paddle.static.Executor(self.place)
        self.optimizers: list[Any] = []
        """As the program made them."""
        self.start_state: dict[str, Array] = {}
        self.end_state: dict[str, Array] = {}
        self.end_parameters: dict[str, Array] = {}
        self.fetched: list[float] = []
        """The first value that each run fetched."""
        self.runs = 0
        self._kept: dict[str, Any] = {}
        self._inputs: list[tuple[Any, dict[str, Input]]] = []

    def wrap(self, optimizer: Any) -> Any:
        """The changed line of a script: here the optimizer as it is."""
        self.optimizers.append(optimizer)
        return _Summing(optimizer) if self._sums else optimizer

    def inputs(self, **inputs: Input) -> list[Any]:
        """Inputs of the current program, their first dimension unknown."""
        self._inputs.append((paddle.static.default_main_program(), inputs))
        return [paddle.static.data(name, [None, *one.shape], one.dtype) for name, one in inputs.items()]

    def start(self, startup: Any = None) -> None:
        """Run a startup program."""
        self.exe.run(startup or paddle.static.default_startup_program())

    def batches(self, steps: int = STEPS, program: Any = None, samples: int = BATCH) -> Iterator[Batch]:
        """The joint batches of a program."""
        for step in range(steps):
            yield self.batch(step, program, samples)

    def batch(self, step: int, program: Any = None, samples: int = BATCH) -> Batch:
        wanted = program or paddle.static.default_main_program()
        inputs = {name: one for main, found in self._inputs if main is wanted for name, one in found.items()}
        return batch_of(inputs, samples, self.name, _SEED, step)

    def run(self, batch: Batch, fetch: Sequence[Any] = (), program: Any = None) -> list[Array]:
        """Train on a joint batch; returns what was fetched, the mean over this rank's micro-batches."""
        self._begin()
        results = []
        for micro in range(self.micro_batches):
            own = share_of(batch, self.rank * self.micro_batches + micro, self.ranks * self.micro_batches)
            if self.random:
                paddle.seed(self._random_seed(self.rank))
            results.append(self.exe.run(program, feed=own, fetch_list=list(fetch)))
            self.runs += 1
        means = [np.mean(values, axis=0) for values in zip(*results, strict=True)]
        self._note(means)
        return means

    def _begin(self) -> None:
        if self.runs == 0:
            self.start_state = self.state()

    def _note(self, found: Sequence[Array]) -> None:
        if found and found[0].size == 1:
            self.fetched.append(float(found[0].item()))

    def _random_seed(self, rank: int) -> int:
        return 1000 * self.runs + rank

    def evaluate(self, batch: Batch, fetch: Sequence[Any], program: Any) -> list[Array]:
        """Run a program that trains nothing, on the joint batch."""
        found: list[Array] = self.exe.run(program, feed=batch, fetch_list=list(fetch))
        self.fetched.append(float(np.mean(found[0])))
        return found

    def mean_over_ranks(self, value: float) -> float:
        """The mean of a number that each rank has."""
        return value

    def minimize(self, optimizer: Any, loss: Any, **settings: Any) -> None:
        self.wrap(optimizer).minimize(loss, **settings)

    def train(self, loss: Any, steps: int = STEPS, scheduler: Any = None, samples: int = BATCH) -> None:
        """Start, and train the current program."""
        self.start()
        for batch in self.batches(steps, samples=samples):
            self.run(batch, [loss])
            if scheduler is not None:
                scheduler.step()

    def save(self, schedule: Any = None) -> None:
        """Save the state of the current program."""
        paddle.static.save(paddle.static.default_main_program(), f"{self.name}/state")
        self._kept = {} if schedule is None else dict(schedule.state_dict())

    def load(self, schedule: Any = None) -> None:
        """Take back what ``save`` has saved."""
        paddle.static.load(paddle.static.default_main_program(), f"{self.name}/state", self.exe)
        if schedule is not None:
            schedule.set_state_dict(self._kept)

    def finish(self) -> None:
        """Keep what the training came to."""
        self.end_state, self.end_parameters = self.state(), self.state("param")

    @property
    def programs(self) -> list[Any]:
        """The programs with inputs: those that train or evaluate."""
        found: list[Any] = []
        for main, _ in self._inputs:
            if not any(main is other for other in found):
                found.append(main)
        return found

    def state(self, mode: str = "all") -> dict[str, Array]:
        """Copies of what the programs hold: ``all``, or ``param``, without the optimizer's state."""
        scope = paddle.static.global_scope()
        return {name: np.array(value) for one in self.programs for name, value in one.state_dict(mode, scope).items()}


class _Summing:
    """An optimizer that updates a parameter once, by the sum of the gradients of its uses."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def minimize(self, loss: Any) -> None:
        parameters: dict[str, Any] = {}
        gradients: dict[str, list[Any]] = {}
        for parameter, gradient in self._inner.backward(loss):
            parameters[parameter.name] = parameter
            gradients.setdefault(parameter.name, []).append(gradient)
        self._inner.apply_gradients([(parameters[name], paddle.add_n(found)) for name, found in gradients.items()])


def is_linear(optimizer: Any) -> bool:
    """Whether the mean of updates is the update of the mean gradient."""
    return type(optimizer).__name__ in ("SGD", "Momentum") and optimizer._grad_clip is None
