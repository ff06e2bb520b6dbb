"""Feeds that the prefetch thread copied to the device: the executor accepts them, and they equal the arrays."""

from __future__ import annotations

import numpy as np
import paddle

from fleet_train.data import BatchLoader, ShardedBatchSampler, device_copy, synthetic
from fleet_train.data.loader import tensor_copy


def test_nothing_is_copied_for_a_cpu() -> None:
    assert device_copy(paddle.CPUPlace()) is None


def test_copied_batches_run_like_arrays() -> None:
    data, sampler = synthetic(20).train, ShardedBatchSampler(20, 8)
    loader = BatchLoader(data, sampler, finish=tensor_copy(paddle.CPUPlace()))
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            features = paddle.static.data("features", [None, 1, 8, 8], "float32")
            labels = paddle.static.data("labels", [None], "int64")
            fetches = [paddle.sum(features, axis=[1, 2, 3]), labels + 1]
        executor = paddle.static.Executor(paddle.CPUPlace())
        with loader.epoch(0) as feeds:
            results = [(len(feed["labels"]), executor.run(program, feed=feed, fetch_list=fetches)) for feed in feeds]
    finally:
        paddle.disable_static()
    assert [size for size, _ in results] == [8, 8, 4]
    for step, (_, (sums, shifted)) in enumerate(results):
        arrays = data.arrays(loader.indices(step))
        np.testing.assert_allclose(sums, arrays["features"].sum(axis=(1, 2, 3)), rtol=1e-4, atol=1e-4)
        assert (shifted == arrays["labels"] + 1).all()
