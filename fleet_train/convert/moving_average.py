"""``ExponentialMovingAverage`` of Paddle 1.x and 2.x, whose own operators PIR programs cannot have.

``fleet.init`` puts it in the place of ``paddle.static.ExponentialMovingAverage``; ported scripts call it by
`fleet_train.compat`. `fleet_train.train.WeightAverage` is the average of our own trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from fleet_train.convert import process, session
from fleet_train.convert.passes.program import persistable, run_if
from fleet_train.errors import ConversionError

Array = NDArray[Any]


class ExponentialMovingAverage:
    """average = decay * average + (1 - decay) * weights in each step with an update, of all parameters that the default
    main program has now.

    It starts at zero and is applied divided by 1 - decay**steps. ``thres_steps`` is a number of steps in the program,
    with which the decay is at most (1 + thres_steps) / (10 + thres_steps).
    """

    def __init__(self, decay: float = 0.999, thres_steps: Any = None, name: str | None = None) -> None:
        self._decay, self._thres_steps = decay, thres_steps
        self._prefix = paddle.utils.unique_name.generate(name or "ema")
        self._program = paddle.static.default_main_program()
        self._parameters = {value.name: value for value in self._program.global_block().all_parameters()}
        self._averages: dict[str, str] = {}
        self._trained: dict[str, Array] = {}

    def update(self) -> None:
        """Append the average to the program, behind ``minimize``. Raises ConversionError where a rank's weights are not
        those of the job in each step."""
        boundary = self._boundary()
        with paddle.static.program_guard(self._program, paddle.static.default_startup_program()):
            if boundary is None:
                self._follow()
            else:
                run_if(boundary, self._follow)

    def _boundary(self) -> Any:
        """Bool [1]: whether a run of a converted program ends with an update; None where each does."""
        optimizers = session.current().optimizers if session.is_open() else []
        updates = [each for each in optimizers if each.updates(self._program)]
        for optimizer in updates:
            if optimizer.changes_weights_at_the_end:
                raise ConversionError(
                    "ExponentialMovingAverage.update: with use_local_sgd and sharding, weights change behind the "
                    "update that it follows; call optimizer.around_update(WeightAverage(decay).follow) before minimize "
                    "(fleet_train.train.WeightAverage, docs/training.md), or choose another profile"
                )
        return next((boundary for each in updates if (boundary := each.boundary) is not None), None)

    def _follow(self) -> None:
        decay, steps = self._decay_now(), self._state("steps", [1], "int64")
        for name, parameter in self._parameters.items():
            average = self._state(name, parameter.shape, parameter.dtype)
            own = decay.cast(parameter.dtype)
            paddle.assign(average * own + parameter * (1.0 - own), average)
            self._averages[name] = average.name
        paddle.assign(steps + 1, steps)

    def _decay_now(self) -> Any:
        fixed = paddle.full([1], self._decay, "float32")
        if self._thres_steps is None:
            return fixed
        steps = self._thres_steps.cast("float32").reshape([1])
        kept = self._state("decay", [1], "float32")
        decay = paddle.minimum(fixed, (steps + 1.0) / (steps + 10.0))
        paddle.assign(decay, kept)
        return decay

    def _state(self, name: str, shape: Any, dtype: Any) -> Any:
        kind = getattr(paddle, dtype) if isinstance(dtype, str) else dtype
        return persistable(f"{name}.{self._prefix}", kind, shape)

    @contextmanager
    def apply(self, executor: Any, need_restore: bool = True) -> Iterator[None]:
        """Within the block the parameters are the averages; afterwards what they were, or so until ``restore``."""
        self._trained = {name: _read(name) for name in self._parameters}
        _write(self._weights(), executor.place)
        try:
            yield
        finally:
            if need_restore:
                self.restore(executor)

    def restore(self, executor: Any) -> None:
        """Put the parameters back that ``apply`` has replaced."""
        _write(self._trained, executor.place)
        self._trained = {}

    def _weights(self) -> Mapping[str, Array]:
        if not self._averages:
            raise ConversionError("ExponentialMovingAverage.apply: call update() before, behind minimize")
        steps = int(_read(f"steps.{self._prefix}").item())
        if steps == 0:
            return self._trained
        decay = self._decay if self._thres_steps is None else float(_read(f"decay.{self._prefix}").item())
        averages = {name: _read(average) for name, average in self._averages.items()}
        return {name: (each / (1.0 - decay**steps)).astype(each.dtype) for name, each in averages.items()}


def replace_paddles() -> None:
    """Let ``paddle.static.ExponentialMovingAverage`` do what ours does from now on, wherever a script imports it."""

    def initialize(self: Any, *args: Any, **named: Any) -> None:
        self.ours = ExponentialMovingAverage(*args, **named)

    paddles = paddle.static.ExponentialMovingAverage
    process.replace(paddles, "__init__", initialize)
    for name in ("update", "apply", "restore"):
        process.replace(paddles, name, _of_ours(name))


def _of_ours(name: str) -> Any:
    return lambda self, *args, **named: getattr(self.ours, name)(*args, **named)


def autoincreased_step_counter(counter_name: str | None = None, begin: int = 1, step: int = 1) -> Any:
    """``fluid.layers.autoincreased_step_counter``: int64 [1], ``begin`` in the first run, and ``step`` more in each."""
    name, program = counter_name or "@STEP_COUNTER@", paddle.static.default_main_program()
    counters: dict[str, Any] = vars(program).setdefault(_COUNTERS, {})
    if name not in counters:
        counter = persistable(name, paddle.int64, value=begin - step)
        counters[name] = counter + step
        counters[name].stop_gradient = True
        paddle.assign(counters[name], counter)
    return counters[name]


_COUNTERS = "_fleet_train_counters"
"""The attribute of a program that has its counters by name, each of which counts once."""


def _read(name: str) -> Array:
    return np.array(paddle.static.global_scope().find_var(name).get_tensor())


def _write(arrays: Mapping[str, Array], place: Any) -> None:
    for name, array in arrays.items():
        paddle.static.global_scope().find_var(name).get_tensor().set(array, place)
