"""The watchdog relies on this: while Paddle's executor runs a program, Python's other threads run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import paddle
import pytest


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


def test_other_threads_run_while_the_executor_does() -> None:
    ticks = 0
    is_over = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_over.wait(0.001):
            ticks += 1

    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        values = paddle.static.data("x", [1500, 1500], "float32")
        result = values
        for _ in range(8):
            result = paddle.matmul(result, values) * 1e-3
        total = result.sum()
    exe = paddle.static.Executor(paddle.CPUPlace())
    feed = {"x": np.ones((1500, 1500), np.float32)}
    exe.run(main, feed=feed, fetch_list=[total])  # compiled
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks
        exe.run(main, feed=feed, fetch_list=[total])
        during = ticks - before
    finally:
        is_over.set()
        thread.join()
    # A thread that held the lock for as long as the program runs would leave one tick at most.
    assert during > 10
