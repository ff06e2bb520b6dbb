"""The benchmark's networks in numpy against the same ones in Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from tools.benchmarks import mlp, resnet
from tools.benchmarks.networks import judged, start_weights
from tools.benchmarks.paddle_network import network, start_feed
from tools.benchmarks.task import TASKS, Batches, Task


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    paddle.disable_static()
    yield
    paddle.disable_static()


def logits(task: Task, weights: list[np.ndarray], samples: np.ndarray) -> np.ndarray:
    return mlp.logits(task, weights, samples) if task.network == "mlp" else resnet.logits(weights, samples)


@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_numpy_computes_what_paddle_does_after_a_step_of_training(name: str) -> None:
    task = dataclasses.replace(TASKS[name], seed=3, global_batch_size=4)
    model = network(task)
    samples, labels = Batches(task, 0, 1).at(0)
    optimizer = paddle.optimizer.Momentum(task.learning_rate, task.momentum, parameters=model.parameters())
    paddle.nn.functional.cross_entropy(model(paddle.to_tensor(samples)), paddle.to_tensor(labels)).backward()
    before = [parameter.numpy() for parameter in model.parameters()]
    optimizer.step()
    weights = [parameter.numpy() for parameter in model.parameters()]
    assert all(one.shape == start.shape for one, start in zip(weights, start_weights(task), strict=True))
    assert any(not np.array_equal(one, other) for one, other in zip(before, weights, strict=True))
    model.eval()
    expected = model(paddle.to_tensor(samples)).numpy()
    np.testing.assert_allclose(logits(task, weights, samples), expected, atol=1e-5)


def test_start_weights_reach_paddle_in_their_order() -> None:
    task = dataclasses.replace(TASKS["resnet18"], seed=1)
    for parameter, start in zip(network(task).parameters(), start_weights(task), strict=True):
        np.testing.assert_array_equal(parameter.numpy(), start)


def test_a_fed_startup_program_gives_the_start_weights() -> None:
    task = dataclasses.replace(TASKS["resnet18"], seed=2)
    paddle.enable_static()
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(scope):
        model = network(task)
        feed = start_feed(task, startup)
        assert len(feed) == 62, "running statistics start by themselves"
        paddle.static.Executor().run(startup, feed=feed)
        found = [np.array(scope.find_var(parameter.name).get_tensor()) for parameter in model.parameters()]
    for value, start in zip(found, start_weights(task), strict=True):
        np.testing.assert_array_equal(value, start)


def test_the_test_loss_of_a_network_that_says_nothing_is_that_of_chance() -> None:
    task = Task(hidden_layers=0)
    _, loss = judged(task, [np.zeros((64, 10), np.float32), np.zeros(10, np.float32)])
    assert loss == pytest.approx(np.log(10), rel=1e-5)
