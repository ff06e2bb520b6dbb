"""What is found in programs before they run, and that all that is replaced in a user's process is put back."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.incubate.optimizer import LarsMomentumOptimizer
from paddle.nn import functional as F

from fleet_train import compat
from fleet_train.collectives.engine import HostDevice
from fleet_train.convert import process, session
from fleet_train.convert.passes.program import run_if, updates_alone
from fleet_train.convert.planning import parameters_first
from fleet_train.errors import WorkerFailed
from tests.support.processes import ROOT, clean_environ

OPTIMIZERS = {
    **{name: getattr(paddle.optimizer, name) for name in ("SGD", "Momentum", "Adam", "AdamW", "Adagrad", "RMSProp")},
    **{name: getattr(paddle.optimizer, name) for name in ("Adamax", "Adadelta", "Lamb", "NAdam", "RAdam", "Rprop")},
    "ASGD": lambda rate: paddle.optimizer.ASGD(rate, batch_num=2),
    "Lars": lambda rate: LarsMomentumOptimizer(rate, 0.9),
}


@contextlib.contextmanager
def network() -> Iterator[tuple[Any, Any, Any]]:
    """A program, its startup program, and a loss."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        hidden = paddle.nn.BatchNorm1D(4)(paddle.static.data("x", [None, 4], "float32"))
        yield main, startup, paddle.nn.Linear(4, 1)(hidden).mean()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_updates_of_every_optimizer_are_found(make: Callable[[float], Any]) -> None:
    with network() as (main, startup, loss):
        assert updates_alone(main, set()) == ""
        make(0.1).minimize(loss)
    assert updates_alone(main, set()).startswith("test_programs.py, line ")
    assert updates_alone(main, set()).endswith(" (make(0.1).minimize(loss))")
    assert updates_alone(startup, set()) == ""


def test_an_update_inside_a_condition_is_found() -> None:
    with network() as (main, _, loss):
        optimizer = paddle.optimizer.SGD(0.1)
        pairs = optimizer.backward(loss)
        optimizer._create_global_learning_rate()
        run_if(loss > 0, lambda: optimizer.apply_gradients(pairs))
    assert "test_programs.py, line " in updates_alone(main, set())


def test_each_program_is_looked_at_once_and_paddles_method_comes_back() -> None:
    before, seen = paddle.static.Executor.run, []
    try:
        session.before_first_runs(seen.append)
        exe = paddle.static.Executor()
        with network() as (main, startup, loss), paddle.static.scope_guard(paddle.static.Scope()):
            exe.run(startup)
            for _ in range(3):
                exe.run(feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
                exe.run(main, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
        with pytest.raises(AttributeError, match="'list' object"):  # as Paddle has it
            exe.run([])
        assert seen == [startup, main]
    finally:
        process.put_back()
    assert paddle.static.Executor.run is before


JOB = """
import sys
from fleet_train import fleet
from fleet_train.errors import DataError

for number in range(2):
    fleet.init()
    assert sys.excepthook is not sys.__excepthook__
    fleet.shutdown()
    assert sys.excepthook is sys.__excepthook__
fleet.init()
try:
    raise DataError("bad row")
finally:
    fleet.shutdown()
"""


def test_a_job_of_one_process_can_begin_again_and_an_error_of_ours_keeps_its_exit_code_though_it_ended() -> None:
    command = [sys.executable, "-c", JOB]
    ended = subprocess.run(command, env=clean_environ(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 10, ended.stderr
    assert ended.stderr.splitlines()[-1] == "fleet_train.errors.DataError: bad row"


def test_what_was_replaced_twice_comes_back_in_the_opposite_order() -> None:
    owner = SimpleNamespace(first="a", second="b")
    assert process.replace(owner, "first", "c") == "a"
    assert process.replace(owner, "first", "d") == "c"
    assert process.replace(owner, "first", "d") == "c"  # not again
    process.replace(owner, "second", "e")
    owner.second = "somebody else's"
    process.put_back()
    assert vars(owner) == {"first": "a", "second": "somebody else's"}


def test_hooks_see_a_run_and_what_the_one_before_has_fed() -> None:
    seen: list[object] = []
    before = paddle.static.Executor.run

    def note(_: object, feed: dict[str, object], fetch_list: object) -> tuple[object, object]:
        seen.append(sorted(feed))
        return feed, fetch_list

    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        total = paddle.static.data("x", [1], "float32") + paddle.static.data("y", [1], "float32")
    try:
        process.before_each_run(lambda _, feed, fetched: ({**feed, "y": np.zeros(1, "float32")}, fetched))
        process.before_each_run(note)
        process.before_each_run(note)
        feed = {"x": np.ones(1, "float32")}
        (value,) = paddle.static.Executor().run(main, feed=feed, fetch_list=[total])
    finally:
        process.put_back()
    assert (value.item(), seen) == (1.0, [["x", "y"]])
    assert paddle.static.Executor.run is before


def test_what_acts_on_each_run_gets_the_program_and_the_scope_in_which_it_runs() -> None:
    seen: list[tuple[object, object]] = []
    main, scope, exe = paddle.static.Program(), paddle.static.Scope(), paddle.static.Executor()
    with paddle.static.program_guard(main, paddle.static.Program()):
        one = paddle.full([1], 1.0)
    try:
        process.on_each_run(lambda *given: seen.append(given))
        process.before_each_run(lambda _, feed, __: (feed, [one]))
        by_name = exe.run(main, fetch_list=[], scope=scope)
        by_place = exe.run(main, {}, [], "feed", "fetch", scope)
        with paddle.static.program_guard(main), paddle.static.scope_guard(scope):
            by_default = exe.run()
    finally:
        process.put_back()
    assert [value.item() for values in (by_name, by_place, by_default) for value in values] == [1.0] * 3
    assert [(program is main, where is scope) for program, where in seen] == [(True, True)] * 3


@pytest.mark.parametrize("cause", [WorkerFailed("step 4: rank 1 was lost"), None])
def test_the_explanation_of_a_failed_run_is_raised_with_its_cause(
    cause: WorkerFailed | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("std::exception")

    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(paddle.static.Executor, "run", run)
    try:
        process.before_each_run(lambda _, feed, fetched: (feed, fetched))
        process.explain_failed_runs(lambda given: cause if given is error else None)
        with pytest.raises(type(cause or error)) as raised:
            paddle.static.Executor().run(paddle.static.Program())
    finally:
        process.put_back()
    assert raised.value.__cause__ is (None if cause is None else error)


def test_what_a_device_is_fed_keeps_its_values() -> None:
    """Paddle's ``get_tensor`` is a reference: the memory of an eager tensor that has gone would be given away."""
    job: Any = SimpleNamespace(engine=SimpleNamespace(device=HostDevice()), cluster=SimpleNamespace(rank=0))
    fed_by_hand = object()
    arrays = {f"x{number}": np.full([500, 3], number, "float32") for number in range(8)}
    given = {**arrays, "none": np.zeros([0, 3], "int64"), "one": np.array(7.0)}
    feed, fetched = session.Session(job).feed_through_pinned_memory(None, {**given, "else": fed_by_hand}, ["loss"])
    others = [paddle.full([500, 3], -1.0) for _ in range(16)]
    assert feed.pop("else") is fed_by_hand
    assert {name: np.array(value).tolist() for name, value in feed.items()} == {n: v.tolist() for n, v in given.items()}
    assert [np.array(value).dtype for value in feed.values()] == [value.dtype for value in given.values()]
    assert (len(others), fetched) == (16, ["loss"])


def test_a_loader_that_is_made_after_a_shutdown_feeds_its_program_too() -> None:
    for _ in range(2):
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            x = paddle.static.data("x", [2], "float32")
            loader = compat.from_generator([x], 2, iterable=False)
            both = x + x
        loader.set_batch_generator(lambda: iter([np.ones(2, "float32")]))
        loader.start()
        try:
            assert paddle.static.Executor().run(main, fetch_list=[both])[0].tolist() == [2.0, 2.0]
        finally:
            loader.reset()
            process.put_back()


def layers_of_each_kind(image: Any) -> Any:
    """Of image [batch, 4, 8, 8]. The first makes the gradient of its parameter alone."""
    hidden = F.tanh(nn.Conv2D(4, 8, 3, bias_attr=False)(image))
    hidden = F.tanh(nn.Conv2D(8, 8, 3, groups=8)(hidden))
    hidden = F.tanh(nn.Conv2D(8, 6, 3, stride=2, padding=1, groups=2)(hidden))
    hidden = F.tanh(nn.Conv3D(6, 4, 1)(hidden.unsqueeze(2))).flatten(1)
    left = paddle.static.create_parameter([3, 16], "float32", name="left.w_0")
    return paddle.matmul(left, F.tanh(nn.Linear(16, 16)(hidden)), transpose_y=True)


def gradients_of_each_kind(
    change: Callable[[Any], Any], samples: int = 5, is_known: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Operators that make gradients, in their order, and the gradients by parameter, of fixed values. ``is_known``:
    the program has the number of samples."""
    main, startup, random = paddle.static.Program(), paddle.static.Program(), np.random.default_rng(3)
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        image = paddle.static.data("image", [samples if is_known else None, 4, 8, 8], "float32")
        pairs = change(paddle.optimizer.SGD(0.1).backward(layers_of_each_kind(image).square().mean()))
    names = [f"{parameter.name} {number}" for number, (parameter, _) in enumerate(pairs)]
    makers = {value.get_defining_op().id(): name for name, (_, value) in zip(names, pairs, strict=True)}
    order = [makers.get(operator.id(), operator.name()) for operator in main.global_block().ops]
    with paddle.static.scope_guard(paddle.static.Scope()):
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        for each in main.global_block().all_parameters():
            tensor = paddle.static.global_scope().find_var(each.name).get_tensor()
            tensor.set(random.standard_normal(each.shape).astype(np.float32) / 4, paddle.CPUPlace())
        feed = {"image": random.standard_normal((samples, 4, 8, 8)).astype(np.float32)}
        found = executor.run(main, feed=feed, fetch_list=[value for _, value in pairs])
    return order, dict(zip(names, found, strict=True))


@pytest.mark.parametrize(("is_known", "products"), [(False, 1), (True, 2)])
def test_the_gradient_of_a_parameter_comes_before_that_of_the_activation_with_the_same_bits(
    is_known: bool, products: int
) -> None:
    _, whole = gradients_of_each_kind(list, is_known=is_known)
    order, halves = gradients_of_each_kind(parameters_first, is_known=is_known)
    assert whole.keys() == halves.keys()
    assert all(np.array_equal(whole[name], halves[name]) and np.any(whole[name]) for name in whole)
    for kind, number in (("depthwise_conv2d", 1), ("conv2d", 1), ("conv3d", 1), ("matmul", products)):
        activations = [place for place, name in enumerate(order) if name == f"pd_op.{kind}_grad"]
        assert len(activations) == number, kind
        assert all("w_0" in order[place - 1] for place in activations), (kind, order)


def test_the_gradients_of_no_samples_are_0_as_on_one_card() -> None:
    _, whole = gradients_of_each_kind(list, samples=0)
    _, halves = gradients_of_each_kind(parameters_first, samples=0)
    assert whole.keys() == halves.keys()
    assert all(np.array_equal(whole[name], halves[name]) and not np.any(whole[name]) for name in whole)


@pytest.mark.parametrize("watched", [False, True])
def test_a_product_that_is_only_watched_does_not_lend_its_attributes_to_a_gradient(watched: bool) -> None:
    """The same two values are multiplied twice, the second time transposed; only the first is in the loss."""
    found = []
    for change in (list, parameters_first):
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            hidden = paddle.tanh(nn.Linear(6, 6)(paddle.static.data("image", [4, 6], "float32")))
            square = paddle.static.create_parameter([6, 6], "float32", name="square.w_0")
            one, other = (paddle.matmul(hidden, square, transpose_y=each) for each in (watched, not watched))
            pairs = change(paddle.optimizer.SGD(0.1).backward((one**3).sum()))
        with paddle.static.scope_guard(paddle.static.Scope()):
            executor, random = paddle.static.Executor(paddle.CPUPlace()), np.random.default_rng(3)
            executor.run(startup)
            for each in main.global_block().all_parameters():
                tensor = paddle.static.global_scope().find_var(each.name).get_tensor()
                tensor.set(random.standard_normal(each.shape).astype(np.float32), paddle.CPUPlace())
            feed = {"image": random.standard_normal((4, 6)).astype(np.float32)}
            found.append(executor.run(main, feed=feed, fetch_list=[other, *(value for _, value in pairs)]))
    for whole, half in zip(*found, strict=True):
        np.testing.assert_array_equal(whole, half)


def test_gradients_in_bfloat16_stay_in_one_operator_that_can_be_run() -> None:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        hidden = paddle.tanh(nn.Linear(6, 6)(paddle.static.data("image", [4, 6], "float32"))).cast("bfloat16")
        half = nn.initializer.Constant(0.5)
        low = paddle.static.create_parameter([6, 6], "bfloat16", name="low.w_0", default_initializer=half)
        pairs = paddle.optimizer.SGD(0.1).backward(paddle.matmul(hidden, low).cast("float32").square().sum())
        before = [operator.name() for operator in main.global_block().ops]
        gradients = [value.cast("float32") for _, value in parameters_first(pairs)]
    assert [operator.name() for operator in main.global_block().ops][: len(before)] == before
    with paddle.static.scope_guard(paddle.static.Scope()):
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        found = executor.run(main, feed={"image": np.ones((4, 6), "float32")}, fetch_list=gradients)
    assert len(found) == 3
    assert all(np.isfinite(value).all() and value.any() for value in found)
