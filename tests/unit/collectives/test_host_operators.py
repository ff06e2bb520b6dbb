"""Host operators in a running program: what each calls with what, in which mode, and what it returns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F
from paddle.static import python_op

from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.engine import StageProgress
from fleet_train.collectives.host_ops import (
    broadcast,
    emit_arrive,
    emit_barrier,
    emit_begin,
    emit_finish,
    emit_hold,
    emit_launch,
    emit_wait,
    is_barrier,
    is_link,
    onednn_flags,
    passes_a_token,
    token,
)
from fleet_train.collectives.paddle_compat import dynamic_mode, ensured_dynamic_mode, operators_in_dynamic_mode
from fleet_train.collectives.sync_batch_norm import combined, packed
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket, TensorSpec
from tests.unit.collectives.played import PaperRank

BUCKET = Bucket(2, (TensorSpec("w", (2, 3), "float32"), TensorSpec("b", (3,), "float32")), 0)


class Exchange:
    """What operators ask of one, written down; averages are twice what was launched."""

    number = 7

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.launched: list[Any] = []

    def arrive(self) -> None:
        self.did.append("arrive")

    def begin(self, parameters: Any) -> None:
        self.did.append(("begin", [one.tolist() for one in parameters]))

    def launch(self, index: int, gradients: Any, boundary: Any) -> None:
        self.launched = [2 * one for one in gradients]
        self.did.append(("launch", index, None if boundary is None else boundary.tolist()))

    def wait(self, index: int) -> list[Any]:
        self.did.append(("wait", index))
        return self.launched

    def finish(self, held: Any, names: Any, loss: Any) -> None:
        groups = [[one.tolist() for one in group] for group in (held.parameters, held.statistics, held.accumulators)]
        self.did.append(("finish", groups, list(names), None if loss is None else loss.tolist()))
        for parameter in held.parameters:
            parameter.zero_()


def run(main: Any, fetched: list[Any], **feed: Any) -> list[np.ndarray]:
    executor = paddle.static.Executor(paddle.CPUPlace())
    return list(executor.run(main, feed=feed, fetch_list=fetched))


def data(name: str, *shape: int, dtype: str = "float32") -> Any:
    return paddle.static.data(name, list(shape), dtype)


@pytest.mark.parametrize("merged", [True, False])
def test_a_steps_operators_call_the_exchange_in_the_order_of_their_chain(main: Any, merged: bool) -> None:
    exchange: Any = Exchange()
    w, b, ends, loss = data("w", 2, 3), data("b", 3), data("ends", 1, dtype="bool"), data("loss", 1)
    chain = emit_arrive(exchange, token())
    chain = emit_begin(exchange, [b], chain)
    chain = emit_launch(exchange, BUCKET, [w, b], chain, ends if merged else None)
    chain, averages = emit_wait(exchange, BUCKET, [(w.shape, w.dtype), (b.shape, b.dtype)], chain)
    chain = emit_finish(exchange, HeldValues([averages[1]], [b, w], [loss]), ["b"], loss if merged else None, chain)
    operators = [one for one in main.global_block().ops if "fleet_train_" in one.name()]
    assert [is_link(one) for one in operators] == [passes_a_token(one) for one in operators] == [True] * 5
    assert not any(map(is_barrier, operators))
    others = [one for one in main.global_block().ops if "fleet_train_" not in one.name()]
    assert others
    assert not any(is_link(one) or passes_a_token(one) for one in others)
    ones = np.ones([2, 3], "float32")
    feed = {"w": ones, "b": 3 * ones[0], "ends": np.array([True]), "loss": np.array([0.5], "float32")}
    found = run(main, [chain, averages[0]], **feed)
    np.testing.assert_array_equal(found[1], 2 * ones)
    threes = [3.0] * 3
    assert exchange.did == [
        "arrive",
        ("begin", [threes]),
        ("launch", 2, [True] if merged else None),
        ("wait", 2),
        ("finish", [[[6.0] * 3], [threes, ones.tolist()], [[0.5]]], ["b"], [0.5] if merged else None),
    ]


class Job(PaperRank):
    """What operators ask of one: rank 0 has the bytes of this rank the other way round."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.engine = SimpleNamespace(start=self._start, run_in_background=self._in_background)
        self.did: list[Any] = []

    def step_barrier(self, name: str, timeout_seconds: float) -> None:
        self.did.append((name, timeout_seconds))

    def _in_background(self, task: Any) -> str:
        self.did.append("behind what is under way")
        task()
        return "passed"

    def _start(self, stages: Any, place: Any, barrier: str = "") -> Any:
        progress = StageProgress[Any](stages, place)
        assert progress.stage is not None
        if barrier:
            self.did.append(barrier)
            return SimpleNamespace(result=lambda: None)
        (one,) = progress.stage.collectives
        assert (one.kind, one.root, one.tensor.dtype, one.group.id) == ("broadcast", 0, paddle.uint8, 0)
        self.did.append((place.what, place.timeout_seconds, one.tensor.size))
        paddle.assign(paddle.to_tensor(one.tensor.numpy()[::-1].copy()), output=one.tensor)
        progress.go_on()
        return SimpleNamespace(result=lambda: progress.value)


def test_ranks_pass_a_named_barrier_within_the_jobs_timeout(main: Any) -> None:
    job: Any = Job()
    chain = emit_barrier(job, "before the epoch", emit_barrier(job, "before the epoch", token()))
    operators = [one for one in main.global_block().ops if passes_a_token(one)]
    assert [(is_barrier(operator), is_link(operator)) for operator in operators] == [(True, False)] * 2
    assert len({operator.name() for operator in operators}) == 2
    run(main, [chain])
    behind = "behind what is under way"
    job.did, did = [], job.did
    with paddle.static.program_guard(paddle.static.Program()):
        chain = emit_barrier(job, "statistics", token(), in_steps=True)
        job.step_timeout_seconds = 4.0  # known when the program runs
        run(paddle.static.default_main_program(), [chain])
    assert job.did == [behind, ("statistics 0", 4.0), "passed"]
    assert did == [behind, ("before the epoch 0", 9.0), "passed", behind, ("before the epoch 1", 9.0), "passed"]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("bool", [True, False, False, True, True]), ("uint8", [1, 2, 3, 250]), ("int8", [1, -2, 3, -4])],
)
def test_rank_0s_values_replace_this_ranks_as_bytes(dtype: str, values: list[Any]) -> None:
    job: Any = Job()
    tensor = paddle.to_tensor(values, dtype=dtype).reshape([1, -1])
    found = broadcast(job, tensor, "start value of 'w'")
    assert (found.tolist(), found.dtype) == ([values[::-1]], tensor.dtype)
    assert tensor.tolist() == [values]
    broadcast(job, paddle.ones([3, 2], "float64"), "w")
    nothing = paddle.empty([0, 4])
    assert broadcast(job, nothing, "n") is nothing
    assert job.did == [("start value of 'w'", 9.0, len(values)), ("w", 9.0, 48)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors inside of operators."""
    errors: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: errors.append(error))
    return errors


def test_error_of_an_operator_is_marked_as_one_of_ours(main: Any, told: list[BaseException]) -> None:
    exchange: Any = Exchange()

    def fail() -> None:
        raise ValueError("no barrier")

    exchange.arrive = fail
    chain = emit_arrive(exchange, token())
    with pytest.raises((SystemError, ValueError)):
        run(main, [chain])
    assert all(error.inside_host_operator for error in told)  # type: ignore[attr-defined]


@pytest.fixture
def onednn() -> Iterator[None]:
    """Convolutions are computed by oneDNN, in its own memory layout, as a CPU with AVX-512 always does in bfloat16."""
    before = paddle.get_flags("FLAGS_use_onednn")
    paddle.set_flags({"FLAGS_use_onednn": True})
    yield
    paddle.set_flags(before)


def convolved() -> tuple[Any, dict[str, np.ndarray]]:
    """A value in blocks of 8 channels where oneDNN computes it, and a feed."""
    values = np.random.default_rng(3)
    feed = {name: values.normal(size=[2, 16, 5, 5]).astype("float32") for name in ("image", "filter")}
    return F.conv2d(data("image", 2, 16, 5, 5), data("filter", 2, 16, 5, 5)[:, :, :2, :2]), feed


def emit_launched(exchange: Any, values: list[Any]) -> Any:
    bucket = Bucket(0, tuple(TensorSpec("w", tuple(one.shape), "float32") for one in values), 0)
    chain = emit_launch(exchange, bucket, values, token())
    return emit_wait(exchange, bucket, [(one.shape, one.dtype) for one in values], chain)[1]


@pytest.mark.usefixtures("onednn")
def test_what_onednn_computed_is_read_in_paddles_layout(main: Any) -> None:
    value, feed = convolved()
    exchange: Any = Exchange()
    averages = emit_launched(exchange, [value])
    held = emit_hold([value], data("trigger", 1))
    expected, average, kept = run(main, [value, *averages, *held], **feed, trigger=np.zeros(1, "float32"))
    np.testing.assert_array_equal(average, 2 * expected)
    np.testing.assert_array_equal(kept, expected)
    emit_finish(exchange, HeldValues([value], [], []), ["w"], value.mean(), token())
    (finish,) = [one for one in main.global_block().ops if "fleet_train_finish" in one.name()]
    assert [one.get_defining_op().name() for one in finish.operands_source()][1:] == ["pd_op.conv2d", "pd_op.assign"]
    assert onednn_flags() == ["FLAGS_use_onednn"]
    paddle.set_flags(dict.fromkeys(onednn_flags(), False))
    assert onednn_flags() == []


def test_flag_that_comes_after_the_conversion_is_refused(
    main: Any, request: pytest.FixtureRequest, told: list[BaseException]
) -> None:
    value, feed = convolved()
    averages = emit_launched(Exchange(), [value])
    assert not [one for one in main.global_block().ops if one.name() == "pd_op.assign"], "nothing has to be copied"
    request.getfixturevalue("onednn")
    with pytest.raises((SystemError, ConversionError)):
        run(main, averages, **feed)
    assert "FLAGS_use_onednn" in str(told[0])


CHANNELS = (3, 5)


def values_of(rank: int, samples: int, dtype: str, mean: float) -> list[np.ndarray]:
    """Of a layer with images and one with vectors; the ranks differ in mean and spread."""
    random = np.random.default_rng(rank)
    shapes = ((samples, CHANNELS[0], 2, 3), (samples, CHANNELS[1]))
    return [((1 + rank) * random.standard_normal(shape) + mean + rank).astype(dtype) for shape in shapes]


def row_of(layers: list[np.ndarray]) -> paddle.Tensor:
    means = [paddle.to_tensor(each.mean(axes_of(each), dtype="float64").astype(each.dtype)) for each in layers]
    variances = [paddle.to_tensor(each.var(axes_of(each), dtype="float64").astype(each.dtype)) for each in layers]
    return packed([paddle.to_tensor(each) for each in layers], means, variances)


def axes_of(values: np.ndarray) -> tuple[int, ...]:
    return tuple(axis for axis in range(values.ndim) if axis != 1)


@pytest.mark.parametrize("samples", [(4, 4), (1, 7), (2, 5, 11)])
@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"), [("float32", 0, 1e-6), ("float64", 0, 1e-13), ("float32", 1e4, 1e-3)]
)
def test_batches_of_different_size_combine_to_the_joint_batch(
    samples: tuple[int, ...], dtype: str, mean: float, tolerance: float
) -> None:
    """With a mean of 1e4, mean(x * x) - mean * mean would be off by more than the variance in float32."""
    ranks = [values_of(rank, count, dtype, mean) for rank, count in enumerate(samples)]
    found = combined(paddle.stack([row_of(layers) for layers in ranks]), CHANNELS)
    assert [each.shape for each in found] == [[1], [3], [3], [1], [5], [5]]
    for layer in range(2):
        joint = np.concatenate([each[layer] for each in ranks]).astype("float64")
        count, average, variance = (each.numpy() for each in found[3 * layer : 3 * layer + 3])
        assert count == joint.size / CHANNELS[layer]
        np.testing.assert_allclose(average, joint.mean(axes_of(joint)), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(variance, joint.var(axes_of(joint)), rtol=tolerance)


def as_operator(function: Any) -> Any:
    """``function`` as Paddle's executor calls a host operator that was emitted in our mode."""
    with operators_in_dynamic_mode():
        return python_op.run_in_dynamic_mode(function)


def tracer() -> Any:
    return paddle.base.framework.global_var._dygraph_tracer_


@pytest.mark.usefixtures("main")
def test_the_thread_is_as_before_when_an_operator_or_its_dynamic_mode_ends_or_raises() -> None:
    def fail() -> None:
        assert paddle.in_dynamic_mode()
        raise ValueError("in the operator")

    def fail_in_dynamic_mode() -> None:
        with dynamic_mode():
            fail()

    for failing in (as_operator(fail), fail_in_dynamic_mode):
        with pytest.raises(ValueError, match="in the operator"):
            failing()
        assert (tracer(), paddle.in_dynamic_mode()) == (None, False)
    with dynamic_mode():
        before = tracer()
        as_operator(lambda: None)()
        assert tracer() is before
        with dynamic_mode():
            assert tracer() is not before
        assert tracer() is before
        with ensured_dynamic_mode():
            assert tracer() is before
    with ensured_dynamic_mode():
        assert tracer() is not None
    assert tracer() is None
