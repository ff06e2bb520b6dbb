"""The programs whose runs show a knob's effect. Each takes a profile and options, and returns a rank's observations."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import paddle
import yaml
from paddle import nn

from fleet_train import fleet
from fleet_train.cli.profiles import command as profiles_command
from fleet_train.convert.passes import pipeline, precision
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.plan.explain import explain
from fleet_train.profile import Profile
from fleet_train.train import Trainer, TrainerSettings
from tests.parallel.knob_effects_seen import Ran
from tests.parallel.knob_effects_watch import Watch

SHAPES: dict[str, tuple[int, ...]] = {"w0": (64, 32), "w1": (32,), "w2": (16, 16), "w3": (8,)}
LARGE = (512, 256)
FLAGS = ["FLAGS_new_executor_serial_run", "FLAGS_new_executor_sequential_run", "FLAGS_fraction_of_gpu_memory_to_use"]
Feeds = dict[str, np.ndarray[Any, Any]]


class Trained:
    """A program with its optimizer, in a scope of its own; every step's values are kept."""

    def __init__(self, watch: Watch, build: Callable[[], Any], optimizer: Any, profile: Profile) -> None:
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self.ran, self._watch = Ran(fleet.worker_index()), watch
        with paddle.static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            self.loss = build()
            self.optimizer = fleet.distributed_optimizer(optimizer, profile)
            self.optimizer.minimize(self.loss, self.startup)
        self.exe = paddle.static.Executor(fleet.place())
        with paddle.static.scope_guard(self.scope):
            self.exe.run(self.startup)
        self.ran.steps.append(self.values())
        fleet.communication()  # what follows is counted from here
        self.ran.facts |= {
            "operators": operators_of(self.main),
            "explained": explain(fleet.plan()),
            "plan": fleet.plan().to_json(),
            "flags": paddle.get_flags(FLAGS),
        }

    def step(self, feeds: Feeds, fetches: Any = ()) -> list[Any]:
        self._watch.step += 1
        with paddle.static.scope_guard(self.scope):
            fetched = self.exe.run(self.main, feed=feeds, fetch_list=[self.loss, *fetches])
        schedule = self.optimizer._learning_rate
        if isinstance(schedule, paddle.optimizer.lr.LRScheduler):
            schedule.step()
        self.ran.steps.append(self.values())
        return list(fetched)

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: np.array(value) for name, value in self.main.state_dict("all", self.scope).items()}

    def end(self) -> Ran:
        self.ran.events = list(self._watch.events)
        told = fleet.communication()
        self.ran.facts["bytes"] = round(told.bytes_sent * max(told.steps, 1))
        with paddle.static.scope_guard(self.scope):
            fleet.synchronize_parameters(self.main)  # an averaging that is under way ends before the next case
        return self.ran


def operators_of(program: Any) -> list[tuple[str, str]]:
    """Name and dtype of the first result of each operator."""
    operators = [(one.name().removeprefix("pd_op."), one.results()) for one in program.global_block().ops]
    return [(name, _dtype(results[0])) for name, results in operators if results]


def _dtype(value: Any) -> str:
    return str(value.dtype).rsplit(".", 1)[-1].lower() if value.is_dense_tensor_type() else ""


def _sgd() -> Any:
    return paddle.optimizer.SGD(1.0)


def _momentum() -> Any:
    return paddle.optimizer.Momentum(1.0, 0.9)


def _falling() -> Any:
    # To a hundredth after the first averaging: the rule of an adaptive period then asks for ten times as many steps.
    return paddle.optimizer.SGD(paddle.optimizer.lr.PiecewiseDecay([2], [1e-6, 1e-8]))


OPTIMIZERS = {"sgd": _sgd, "momentum": _momentum, "falling": _falling}


def _of_the_rank(_: int, name: str) -> Any:
    """Gradients of 1 on rank 0, 2 on rank 1: 1.5 on average."""
    return np.full(SHAPES[name], 1.0 + fleet.worker_index())


def _of_rank_two(_: int, name: str) -> Any:
    """A diagonal of 3 and 1, the same in each step and on each rank."""
    value = np.zeros(SHAPES[name])
    value.flat[0], value.flat[-1] = 3.0, 1.0
    return value


def _once(step: int, name: str) -> Any:
    """3 and 4 in the first two places of the first step, then nothing."""
    value = np.zeros(SHAPES[name])
    if step == 1:
        value.flat[:2] = 3.0, 4.0
    return value


def _of_ones(_: int, name: str) -> Any:
    del name
    return np.ones(LARGE)


GRADIENTS = {"of the rank": _of_the_rank, "of rank two": _of_rank_two, "once": _once, "of ones": _of_ones}


def linear(
    watch: Watch,
    profile: Profile,
    steps: int = 2,
    optimizer: str = "sgd",
    gradients: str = "of the rank",
    shapes: dict[str, tuple[int, ...]] = SHAPES,
) -> Ran:
    """The sum of parameters times feeds: what is fed is the gradient, so that every number is known beforehand."""

    def build() -> Any:
        terms = []
        for name, shape in shapes.items():
            start = nn.initializer.Constant(1.0)
            parameter = paddle.static.create_parameter(shape, "float32", name=name, default_initializer=start)
            terms.append(paddle.sum(parameter * paddle.static.data(f"x_{name}", shape, "float32")))
        return paddle.add_n(terms)

    trained = Trained(watch, build, OPTIMIZERS[optimizer](), profile)
    for step in range(1, steps + 1):
        trained.step({f"x_{name}": GRADIENTS[gradients](step, name).astype("float32") for name in shapes})
    return trained.end()


def large(watch: Watch, profile: Profile) -> Ran:
    """Four parameters of 512 KiB: enough to cut into buckets in more than one way."""
    return linear(watch, profile, gradients="of ones", shapes={f"v{number}": LARGE for number in range(4)})


def layers(watch: Watch, profile: Profile) -> Ran:
    """Four layers, tanh behind each; what the first product and what follows it are fetched as."""
    seen: list[Any] = []

    def build() -> Any:
        hidden = paddle.static.data("x", [None, 8], "float32")
        for number in range(4):
            start = nn.initializer.Constant(0.125)
            weight = paddle.static.create_parameter(
                [8, 8], "float32", name=f"layer_{number}", default_initializer=start
            )
            product = paddle.matmul(hidden, weight)
            hidden = paddle.tanh(product)
            seen.extend([product, hidden] if number == 0 else [])
        return paddle.mean(hidden)

    trained = Trained(watch, build, _sgd(), profile)
    fetched = trained.step({"x": np.full((2, 8), 1.0 + 2.0**-8, "float32")}, seen)
    # Emulated on processors without bfloat16: a value is float32 and has the bits of bfloat16 once it is read.
    read_as = (
        fetched[1],
        fetched[0],
    )  # the product of rounded numbers; the mean of what the activation behind it gives
    trained.ran.facts["fetched"] = [
        "uint16" if is_rounded(read) else str(value.dtype) for value, read in zip(fetched[1:], read_as, strict=True)
    ]
    trained.ran.facts["product"] = float(fetched[1].flat[0]) if fetched[1].dtype == np.float32 else None
    return trained.end()


def is_rounded(values: Any) -> bool:
    """Whether float32 values are ones of bfloat16."""
    return values.dtype == np.float32 and not np.any(np.ascontiguousarray(values).view(np.uint32) & 0xFFFF)


def batch_norm(watch: Watch, profile: Profile) -> Ran:
    """Batch norm of zeros on rank 0 and of twos on rank 1."""

    def build() -> Any:
        hidden = nn.BatchNorm1D(4)(paddle.static.data("x", [None, 4], "float32"))
        return paddle.mean(nn.Linear(4, 1)(hidden))

    trained = Trained(watch, build, _sgd(), profile)
    trained.step({"x": np.full((3, 4), 2.0 * fleet.worker_index(), "float32")})
    return trained.end()


def lowered(watch: Watch, profile: Profile) -> Ran:
    """The forward program that a GPU would get. A CPU has no kernels for it, so that its operators are only read."""
    del watch
    ran, main = Ran(fleet.worker_index()), paddle.static.Program()
    inner = _sgd()
    inner.backward = lambda *_: []
    with (
        mock.patch.object(precision, "refuse_unusable"),
        mock.patch.object(precision, "has_kernels", return_value=True),
        mock.patch.object(precision, "is_emulated", return_value=False),
        paddle.static.program_guard(main, paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        weight = paddle.static.create_parameter([4, 4], "float32")
        hidden = paddle.matmul(paddle.static.data("x", [4, 4], "float32"), weight)
        fleet.distributed_optimizer(inner, profile).backward(paddle.mean(nn.BatchNorm1D(4)(hidden)))
    ran.facts["operators"] = operators_of(main)
    return ran


def scaled(watch: Watch, profile: Profile, overflows: tuple[int, ...] = (), steps: int = 6) -> Ran:
    """float16's loss scale over a program that stays in float32, as CPUs have no product in float16.

    In the steps of ``overflows`` the gradients of rank 1 are infinite.
    """

    def build() -> Any:
        parameter = paddle.static.create_parameter(
            [4], "float32", name="w", default_initializer=nn.initializer.Constant(1.0)
        )
        return paddle.sum(parameter * paddle.static.data("x", [4], "float32"))

    with mock.patch.object(pipeline, "lower_precision"):
        trained = Trained(watch, build, _sgd(), profile)
    scales = []
    for step in range(1, steps + 1):
        is_infinite = step in overflows and fleet.worker_index() == 1
        trained.step({"x": np.full([4], np.inf if is_infinite else 1.0, "float32")})
        with paddle.static.scope_guard(trained.scope):
            scales.append(round(fleet.loss_scale() or 0.0, 3))
    trained.ran.facts["scales"] = scales
    return trained.end()


def trainer(watch: Watch, profile: Profile) -> Ran:
    """The reference trainer over two epochs of five steps, and what `fleet.should_fetch` tells other loops."""

    def build() -> Any:
        features = paddle.static.data("features", [-1, 6], "float32")
        labels = paddle.static.data("labels", [-1], "int64")
        return nn.functional.cross_entropy(nn.Linear(6, 3)(features), labels)

    trained = Trained(watch, build, _sgd(), profile)
    samples, size = 40, 4
    sampler = ShardedBatchSampler(samples, size, fleet.worker_index(), fleet.worker_num(), seed=1)
    loader = BatchLoader(synthetic(samples, (6,), 3).train, sampler, prefetch_depth=1)
    fetched, real = [], trained.exe.run

    def run(*args: Any, **options: Any) -> Any:
        fetched.append(len(options["fetch_list"]))
        return real(*args, **options)

    with paddle.static.scope_guard(trained.scope), mock.patch.object(trained.exe, "run", run):
        Trainer(trained.exe, trained.loss, loader, TrainerSettings(epochs=2, seed=1, log_every=1)).fit()
    trained.ran.facts |= {"fetched": fetched, "asked": [fleet.should_fetch(step) for step in range(6)]}
    return trained.end()


def memory(watch: Watch, profile: Profile, elements: int = 1 << 20) -> Ran:
    """A program with an intermediate value of 4 MB: is any of it there between two steps?"""

    def build() -> Any:
        parameter = paddle.static.create_parameter([1], "float32", name="w")
        large = paddle.full([elements], 1.0, "float32") * parameter
        return paddle.mean(paddle.tanh(large))

    trained = Trained(watch, build, _sgd(), profile)
    start, peak = _allocated("current"), 0
    for _ in range(4):
        trained.step({})
        peak = max(peak, _allocated("peak") - start)
    trained.ran.facts |= {"held": not _falls_below(start + elements), "needed": peak >= 4 * elements}
    return trained.end()


def _falls_below(held: int, patience_seconds: float = 5.0) -> bool:
    """A thread of Paddle's executor frees memory, some time after the step has returned."""
    deadline = time.monotonic() + patience_seconds
    while _allocated("current") >= held and time.monotonic() < deadline:
        time.sleep(0.01)
    return _allocated("current") < held


def _allocated(kind: str) -> int:
    return int(getattr(paddle.base.core, f"host_memory_stat_{kind}_value")("Allocated", 0))


def catalogue(watch: Watch, profile: Profile) -> Ran:
    """What `fleet_train profiles FILE` prints of the profile."""
    del watch
    ran = Ran(fleet.worker_index())
    with tempfile.TemporaryDirectory() as folder, _captured() as text:
        path = Path(folder) / "shown.yaml"
        path.write_text(yaml.safe_dump(profile.settings()))
        profiles_command.main([str(path)], standalone_mode=False)
    ran.facts["printed"] = click.unstyle(text.getvalue())
    return ran


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield text


RUNS: dict[str, Callable[..., Ran]] = {
    run.__name__: run for run in (linear, large, layers, batch_norm, lowered, scaled, trainer, memory, catalogue)
}
