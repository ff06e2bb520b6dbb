"""Every knob's effect in a run of real ranks: the harness. The cases, and what each must show, are in its test.

Run as ranks with the cases as JSON. Each case is a program (``RUNS``) that every rank trains. `Watch` notes what the
rank sends, launches and waits for meanwhile; the functions in ``LOOKS`` extract plain values from what one rank has
seen (`Ran`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.cluster import StoreClient
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.convert import optimizer as convert_optimizer
from fleet_train.convert.passes import pipeline, precision
from fleet_train.convert.session import current
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.profile import Profile
from fleet_train.train import Trainer, TrainerSettings
from tests.support.late import ending_late
from tests.support.worker import report

Array = np.ndarray[Any, Any]
Shapes = Mapping[str, Sequence[int]]
# In the order in which their gradients become ready; 8192, 128, 1024 and 32 bytes.
SHAPES: Shapes = {"w0": (64, 32), "w1": (32,), "w2": (16, 16), "w3": (8,)}
BYTES = (8192, 128, 1024, 32)
AVERAGING = ("warm_steps", "period", "schedule", "overlap_steps", "wire_dtype", "outer_optimizer")
KINDS = ("all_reduce", "all_gather", "reduce", "broadcast")
FLAGS = ["FLAGS_new_executor_serial_run", "FLAGS_new_executor_sequential_run", "FLAGS_fraction_of_gpu_memory_to_use"]


class Watch:
    """Stands before Paddle's collectives, the exchange and the store from its making on.

    Notes collectives, ``sent`` (one has ended), ``launch`` and ``launched`` (a bucket's launch operator begins, ends),
    ``ran`` (a run of the program has ended), and ``meet`` (in the job's store). ``holds``: for how many seconds at most
    a collective waits until no launch operator is under way; with ``holds_runs`` until the run has ended.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.step, self.holds, self.holds_runs = 0, 0.0, False
        self._idle = threading.Event()
        self._idle.set()
        stream = paddle.distributed.stream
        for kind in KINDS:
            setattr(stream, kind, partial(self._collective, kind, getattr(stream, kind)))
        self._launch, self._meet = GradientExchange.launch, StoreClient._meet
        GradientExchange.launch = lambda *args: self._launches(*args)  # type: ignore[method-assign]
        StoreClient._meet = lambda *args: self._meets(*args)  # type: ignore[method-assign]

    def _note(self, what: str, name: str = "", **details: Any) -> None:
        thread = threading.get_ident()
        self.events.append(SimpleNamespace(what=what, step=self.step, thread=thread, name=name, **details))

    def _collective(self, kind: str, real: Callable[..., Any], *args: Any, group: Any, **options: Any) -> Any:
        tensor = args[1] if kind == "all_gather" else args[0]
        dtype = str(tensor.dtype).removeprefix("paddle.")
        nbytes = int(tensor.size) * tensor.element_size()
        self._note(kind, nbytes=nbytes, dtype=dtype, group=group.id, ranks=tuple(group.ranks))
        self._idle.wait(self.holds)
        if dtype == "float16":  # whose sums are infinite in Gloo: taken in float32 here
            wide = tensor.cast("float32")
            result = real(wide, group=group, **options)
            paddle.assign(wide.cast("float16"), output=tensor)
        else:
            result = real(*args, group=group, **options)
        self._note("sent")
        return result

    def _launches(self, *args: Any) -> Any:
        self._note("launch")
        self._idle.clear()
        try:
            return self._launch(*args)
        finally:
            if not self.holds_runs:
                self._idle.set()
            self._note("launched")

    def ran(self) -> None:
        self._note("ran")
        self._idle.set()

    def _meets(self, client: Any, kind: str, name: str, header: Any, body: bytes, count: int, *rest: Any) -> Any:
        self._note("meet", name=name, seconds=rest[0])
        return self._meet(client, kind, name, header, body, count, *rest)


@dataclass
class Ran:
    """What one rank saw of one program. ``steps[s]``: all values of the program behind step s; 0 is the start."""

    events: list[Any] = field(default_factory=list)
    steps: list[dict[str, Array]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def collectives(self, step: int | None = None) -> list[Any]:
        return [e for e in self.events if e.what in KINDS and e.step > 0 and step in (None, e.step)]

    def values(self, name: str, place: int = 0) -> list[float]:
        return [round(float(values[name].flat[place]), 4) for values in self.steps]

    def moved(self, name: str, place: int = 0) -> list[float]:
        """By how much an element of a parameter fell in each step."""
        exact = [float(values[name].flat[place]) for values in self.steps]
        return [round(before - after, 4) for before, after in pairwise(exact)]


def sent(ran: Ran) -> list[list[str]]:
    """Step by step: kind, bytes and dtype of each collective, float32 left out; in the order of a communicator."""
    return [
        [f"{e.what} {e.nbytes} {e.dtype}".removesuffix(" float32") for e in ran.collectives(step)]
        for step in range(1, len(ran.steps))
    ]


def _by_bucket(ran: Ran, what: str) -> str:
    """Threads or groups of the first step, when each parameter has a bucket: a is the first one's."""
    by_size = {event.nbytes: getattr(event, what) for event in ran.collectives(1)}
    order = list(dict.fromkeys(by_size[nbytes] for nbytes in BYTES))
    return "".join("abcdefgh"[order.index(by_size[nbytes])] for nbytes in BYTES)


def _threads(ran: Ran, what: str) -> set[int]:
    return {event.thread for event in ran.events if event.what == what}


def launches_wait(ran: Ran) -> list[bool]:
    """Of each bucket: whether its collective had ended when its launch operator did."""
    ends = [index for index, event in enumerate(ran.events) if event.what == "sent" and event.step > 0]
    launched = [index for index, event in enumerate(ran.events) if event.what == "launched"]
    return [end < launch for end, launch in zip(ends, launched, strict=True)]


def runs_end_first(ran: Ran) -> bool:
    """Whether the program's last run has ended before what it sent has arrived."""
    last = {event.what: place for place, event in enumerate(ran.events)}
    return last["ran"] < last["sent"]


def _steps(ran: Ran) -> list[Any]:
    """The barriers at the beginning of steps; averagings left out."""
    return [event for event in ran.events if event.name.startswith("step ")]


# Behind these, every fact of a run is a look of its name.
LOOKS: dict[str, Callable[[Ran], Any]] = {
    **{look.__name__: look for look in (sent, launches_wait, runs_end_first)},
    # Where two groups talk at a time, on two threads.
    "sorted_sent": lambda ran: [sorted(step) for step in sent(ran)],
    "sending_steps": lambda ran: sorted({event.step for event in ran.collectives()}),
    "threads": lambda ran: _by_bucket(ran, "thread"),
    "groups": lambda ran: _by_bucket(ran, "group"),
    "beside_computing": lambda ran: not _threads(ran, "launch") & {e.thread for e in ran.collectives()},
    "members": lambda ran: [f"{e.what} {','.join(map(str, e.ranks))}" for e in ran.collectives(1)],
    "on_the_scripts_thread": lambda ran: _threads(ran, "launch") == {threading.get_ident()},
    "moved": lambda ran: ran.moved("w0"),
    "stays_finite": lambda ran: [bool(np.isfinite(values["w0"]).all()) for values in ran.steps[1:]],
    "first_values": lambda ran: ran.values("w0")[1:],
    "velocities": lambda ran: ran.values("w0_velocity_0")[1:],
    "running_mean": lambda ran: [ran.values(name)[-1] for name in ran.steps[-1] if "w_1" in name],
    # Of a constant gradient of w2 with singular values 3 and 1: whether the last step is 3 in the place of the first;
    # whether half of the second has arrived; by how much the second moves, each size once (it is 1 in every step).
    "finds_the_largest": lambda ran: abs(ran.moved("w2")[-1] - 3.0) < 1e-3,
    "sends_both": lambda ran: sum(ran.moved("w2", -1)) > (len(ran.steps) - 1) / 2,
    "small_steps": lambda ran: sorted({round(moved, 3) for moved in ran.moved("w2", -1)}),
    # When the ranks compare digests of their parameters.
    "compared_at": lambda ran: re.findall("digest at ([a-z]+ [a-z0-9]+)", "\n".join(e.name for e in ran.events)),
    "replayed_at": lambda ran: re.findall("passes of (step [0-9]+)", "\n".join(e.name for e in ran.events)),
    "ends_with_an_operator": lambda ran: "fleet_train_finish" in str(ran.facts["operators"]),
    "bounds": lambda ran: sorted({event.seconds for event in _steps(ran)}),
    "barriers": lambda ran: [event.step for event in _steps(ran)],
    "planned": lambda ran: [ran.facts["plan"][name] for name in ("accumulate_steps", "waits_for_each")],
    "averaging": lambda ran: [ran.facts["plan"]["averaging"][name] for name in AVERAGING],
    "tanhs": lambda ran: ran.facts["operators"].count("tanh"),
    "product_dtype": lambda ran: ran.facts["dtypes"]["matmul"],
    "batch_norm_dtype": lambda ran: ran.facts["dtypes"]["batch_norm_"],
    "serial_flags": lambda ran: [ran.facts["flags"][name] for name in FLAGS[:2]],
    "memory_fraction_flag": lambda ran: round(float(ran.facts["flags"][FLAGS[2]]), 4),
    "variables": lambda ran: [ran.facts["environ"].get(name) for name in ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME")],
}


class Trained:
    """A program with its optimizer, in a scope of its own; every step's values are kept."""

    watch: Watch

    def __init__(self, profile: Profile, build: Callable[[], Any], optimizer: Any = None) -> None:
        self.main, self.startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self.ran = Ran()
        with paddle.static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            self.loss = build()
            self.optimizer = fleet.distributed_optimizer(optimizer or paddle.optimizer.SGD(1.0), profile)
            self.optimizer.minimize(self.loss, self.startup)
        self.exe = paddle.static.Executor(fleet.place())
        with paddle.static.scope_guard(self.scope):
            self.exe.run(self.startup)
        self.ran.steps.append(self.values())
        fleet.communication()  # what follows is counted from here
        plan: Any = fleet.plan()
        self.ran.facts = {"plan": plan.to_json(), "flags": paddle.get_flags(FLAGS)}
        self.ran.facts |= operators_of(self.main)

    def step(self, feeds: dict[str, Array], fetches: Any = ()) -> list[Any]:
        self.watch.step += 1
        with paddle.static.scope_guard(self.scope):
            fetched = self.exe.run(self.main, feed=feeds, fetch_list=[self.loss, *fetches])
        self.watch.ran()
        if isinstance(schedule := self.optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
            schedule.step()
        self.ran.steps.append(self.values())
        return list(fetched)

    def values(self) -> dict[str, Array]:
        return {name: np.array(value) for name, value in self.main.state_dict("all", self.scope).items()}

    def end(self, **facts: Any) -> Ran:
        self.ran.events = list(self.watch.events)
        told = fleet.communication()
        self.ran.facts |= {"counted": round(told.bytes_sent * max(told.steps, 1)), **facts}
        with paddle.static.scope_guard(self.scope):
            fleet.synchronize_parameters(self.main)  # an averaging that is under way ends before the next case
        return self.ran


def operators_of(program: Any) -> dict[str, Any]:
    """Names, and the dtype of the last first result by name."""
    operators = [(one.name().removeprefix("pd_op."), one.results()) for one in program.global_block().ops]
    dense = [(name, results[0]) for name, results in operators if results and results[0].is_dense_tensor_type()]
    dtypes = {name: str(value.dtype).rpartition(".")[2].lower() for name, value in dense}
    return {"operators": [name for name, _ in operators], "dtypes": dtypes}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: paddle.optimizer.SGD(1.0),
    "momentum": lambda: paddle.optimizer.Momentum(1.0, 0.9),
    # To a hundredth after the first averaging: the rule of an adaptive period then asks for ten times as many steps.
    "falling": lambda: paddle.optimizer.SGD(paddle.optimizer.lr.PiecewiseDecay([2], [1e-6, 1e-8])),
}


def gradient(kind: str, step: int, shape: Sequence[int]) -> Array:
    """``of the rank``: 1 on rank 0, 2 on rank 1: 1.5 on average. ``of rank two``: a diagonal of 3 and 1, alike in each
    step and on each rank. ``broken``: as the first, with NaN on rank 1 in step 2. ``once``: 3 and 4 in the first two
    places of the first step, then nothing.
    """
    if kind in ("of the rank", "broken"):
        spoilt = kind == "broken" and step == 2 and fleet.worker_index() == 1
        return np.full(shape, np.nan if spoilt else 1.0 + fleet.worker_index(), "float32")
    value = np.zeros(shape, "float32")
    if kind == "of rank two":
        value.flat[0], value.flat[-1] = 3.0, 1.0
    elif step == 1:
        value.flat[:2] = 3.0, 4.0
    return value


def parameter(name: str, shape: Any, start: float = 1.0) -> Any:
    return paddle.static.create_parameter(shape, "float32", name, default_initializer=nn.initializer.Constant(start))


def linear(
    profile: Profile, steps: int = 2, optimizer: str = "sgd", gradients: str = "of the rank", shapes: Shapes = SHAPES
) -> Ran:
    """The sum of parameters times feeds: what is fed is the gradient, so that every number is known beforehand."""

    def build() -> Any:
        feeds = {name: paddle.static.data(f"x_{name}", shape) for name, shape in shapes.items()}
        return paddle.add_n([paddle.sum(parameter(name, shapes[name]) * fed) for name, fed in feeds.items()])

    trained = Trained(profile, build, OPTIMIZERS[optimizer]())
    for step in range(1, steps + 1):
        trained.step({f"x_{name}": gradient(gradients, step, shape) for name, shape in shapes.items()})
    return trained.end()


def on_streams(profile: Profile, steps: int = 2) -> Ran:
    """As ``linear`` on the engine of NCCL, whose collectives are Gloo's, late."""
    with ending_late(current().job):
        return linear(profile, steps)


def layers(profile: Profile) -> Ran:
    """Four layers, tanh behind each; as what the first product and the tanh behind it are fetched."""
    seen: list[Any] = []

    def build() -> Any:
        hidden = paddle.static.data("x", [None, 8])
        for number in range(4):
            product = paddle.matmul(hidden, parameter(f"layer_{number}", [8, 8], 0.125))
            hidden = paddle.tanh(product)
            seen.extend([product, hidden] if number == 0 else [])
        return paddle.mean(hidden)

    trained = Trained(profile, build)
    loss, *fetched = trained.step({"x": np.full((2, 8), 1.0 + 2.0**-8, "float32")}, seen)
    # Emulated on processors without bfloat16: a value is float32 and has the bits of bfloat16 once it is read: the
    # product of rounded numbers, and the mean of what the activation behind it gives.
    dtypes = [
        "uint16" if read.dtype == np.float32 and not np.any(read.view(np.uint32) & 0xFFFF) else str(value.dtype)
        for value, read in zip(fetched, map(np.ascontiguousarray, (fetched[0], loss)), strict=True)
    ]
    return trained.end(fetched_dtypes=dtypes)


def batch_norm(profile: Profile) -> Ran:
    """Batch norm of zeros on rank 0 and of twos on rank 1."""

    def build() -> Any:
        hidden = nn.BatchNorm1D(4)(paddle.static.data("x", [None, 4]))
        return paddle.mean(nn.Linear(4, 1)(hidden))

    trained = Trained(profile, build)
    trained.step({"x": np.full((3, 4), 2.0 * fleet.worker_index(), "float32")})
    return trained.end()


def unequal(profile: Profile, taken: str = "mean") -> Ran:
    """The mean, or the sum, of a parameter times samples: three ones on rank 0, one five on rank 1."""

    def build() -> Any:
        return getattr(paddle, taken)(parameter("w0", [1]) * paddle.static.data("x", [None, 1]))

    trained = Trained(profile, build)
    trained.step({"x": [np.ones((3, 1), "float32"), np.full((1, 1), 5.0, "float32")][fleet.worker_index()]})
    return trained.end()


def shares(profile: Profile, steps: int = 1) -> Ran:
    """A rank's part of 8 samples in each step, where rank 1 sleeps for each of its own."""
    trained, sizes = (
        Trained(profile, lambda: paddle.mean(parameter("w0", [1]) * paddle.static.data("x", [None, 1]))),
        [],
    )
    for _ in range(steps):
        sizes.append(fleet.batch_size(8))
        time.sleep(0.004 * sizes[-1] * fleet.worker_index())
        trained.step({"x": np.ones((sizes[-1], 1), "float32")})
    ran = trained.end()
    ran.facts |= {
        "size": sizes[-1],
        "first change": next((i for i, size in enumerate(sizes) if size != sizes[0]), None),
    }
    return ran


def lowered(profile: Profile) -> Ran:
    """The forward program that a GPU would get. A CPU has no kernels for it, so that its operators are only read."""
    main, inner = paddle.static.Program(), paddle.optimizer.SGD(1.0)
    inner.backward = lambda *_: []
    with (
        mock.patch.object(precision, "refuse_unusable"),
        mock.patch.object(precision, "has_kernels", return_value=True),
        mock.patch.object(precision, "is_emulated", return_value=False),
        paddle.static.program_guard(main, paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        hidden = paddle.matmul(paddle.static.data("x", [4, 4]), parameter("w", [4, 4]))
        fleet.distributed_optimizer(inner, profile).backward(paddle.mean(nn.BatchNorm1D(4)(hidden)))
    return Ran(facts=operators_of(main))


def scaled(profile: Profile, overflows: tuple[int, ...] = (), steps: int = 6) -> Ran:
    """float16's loss scale over a program that stays in float32, as CPUs have no product in float16.

    In the steps of ``overflows`` a gradient of rank 1 is infinite in its last element.
    """
    with mock.patch.object(pipeline, "lower_precision"):
        trained = Trained(profile, lambda: paddle.sum(parameter("w0", [4]) * paddle.static.data("x", [4])))
    scales = []
    for step in range(1, steps + 1):
        is_infinite = step in overflows and fleet.worker_index() == 1
        trained.step({"x": np.array([1.0, 1.0, 1.0, np.inf if is_infinite else 1.0], "float32")})
        with paddle.static.scope_guard(trained.scope):
            scales.append(round(fleet.loss_scale() or 0.0, 3))
    return trained.end(scales=scales)


def trainer(profile: Profile) -> Ran:
    """The reference trainer over two epochs of five steps, and what `fleet.should_fetch` tells other loops."""

    def build() -> Any:
        scores = nn.Linear(6, 3)(paddle.static.data("features", [-1, 6]))
        return nn.functional.cross_entropy(scores, paddle.static.data("labels", [-1], "int64"))

    trained = Trained(profile, build)
    sampler = ShardedBatchSampler(40, 4, fleet.worker_index(), fleet.worker_num(), seed=1)
    loader = BatchLoader(synthetic(40, (6,), 3).train, sampler, prefetch_depth=1)
    fetched, real = [], trained.exe.run

    def run(*args: Any, **options: Any) -> Any:
        fetched.append(".x"[bool(options["fetch_list"])])
        return real(*args, **options)

    with paddle.static.scope_guard(trained.scope), mock.patch.object(trained.exe, "run", run):
        Trainer(trained.exe, trained.loss, loader, TrainerSettings(epochs=2, seed=1, log_every=1)).fit()
    return trained.end(fetches="".join(fetched), asked="".join(".x"[fleet.should_fetch(step)] for step in range(6)))


def memory(profile: Profile, elements: int = 1 << 20) -> Ran:
    """Is a value of 4 MB there during a step, and between two?"""
    trained = Trained(profile, lambda: paddle.mean(paddle.tanh(paddle.full([elements], 1.0) * parameter("w", [1]))))
    start, peak = _allocated("current"), 0
    for _ in range(4):
        trained.step({})
        peak = max(peak, _allocated("peak") - start)
    deadline = time.monotonic() + 5.0  # a thread of Paddle's executor frees memory some time after the step
    while (held := _allocated("current") >= start + elements) and time.monotonic() < deadline:
        time.sleep(0.01)
    return trained.end(large_value=["needed"] * (peak >= 4 * elements) + ["held"] * held)


def _allocated(kind: str) -> int:
    return int(getattr(paddle.base.core, f"host_memory_stat_{kind}_value")("Allocated", 0))


def embedding(profile: Profile) -> Ran:
    """A table of 600 x 4, of which rank 0 looks up rows 0 and 1, and rank 1 rows 1, 2 and 5."""

    def build() -> Any:
        found = nn.functional.embedding(paddle.static.data("ids", [None], "int64"), parameter("w0", [600, 4]))
        return paddle.sum(found)

    trained = Trained(profile, build)
    for _ in range(2):
        trained.step({"ids": np.array([[0, 1], [1, 2, 5]][fleet.worker_index()], "int64")})
    return trained.end()


RUNS: dict[str, Callable[..., Ran]] = {
    run.__name__: run
    for run in (linear, on_streams, layers, batch_norm, unequal, shares, lowered, scaled, trainer, memory, embedding)
}


def run(case: dict[str, Any], watch: Watch) -> dict[str, Any]:
    """What is seen."""
    watch.events, watch.holds, before = [], case["holds"], dict(os.environ)
    watch.holds_runs = case["holds_runs"]
    os.environ.update(case["variables"])
    with contextlib.redirect_stderr(io.StringIO()) as text:
        for _ in range(1 + ("said" in case["sees"])):  # a sentence is due once, however often the optimizer is wrapped
            watch.step = 0
            ran = RUNS[case["run"]](Profile(**{"average_over": "ranks", **case["with"]}), **case["options"])
            watch.events = []
    told = re.findall("^fleet_train: (.*)$", text.getvalue(), re.MULTILINE)
    # Those of the case's knob, up to the reason of a mapping.
    said = [re.sub(" is mapped.*", " is mapped", line) for line in told if case["knob"] in line]
    ran.facts |= {"said": said, "environ": dict(os.environ)}
    os.environ.clear()
    os.environ.update(before)
    return {name: _seen(name, ran) for name in case["sees"]}


def _seen(name: str, ran: Ran) -> Any:
    try:
        return LOOKS[name](ran) if name in LOOKS else ran.facts[name]
    except Exception as error:  # the test shows it beside what should have been seen
        return f"{type(error).__name__}: {error}"


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    Trained.watch = Watch()
    # What this backend refuses is tried all the same: float16 is summed in float32 by the watch.
    with mock.patch.object(convert_optimizer, "refuse_on_this_device"):
        seen = {case["name"]: run(case, Trained.watch) for case in json.loads(sys.argv[1])}
    report(fleet.worker_index(), seen=seen)


if __name__ == "__main__":
    main()
