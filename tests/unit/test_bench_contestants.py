"""The benchmark's contestants, and the batches and weights that they all share."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tools.benchmarks.contestants import Contestant, beside_before, is_tuned, parse, with_baselines
from tools.benchmarks.hooks import Hook
from tools.benchmarks.link import CollectiveSpec, limiter_bytes
from tools.benchmarks.mlp import start_weights
from tools.benchmarks.networks import judged, parameters
from tools.benchmarks.task import TASKS, Batches, Task


def test_names_become_contestants() -> None:
    assert parse("ours:multi_node") == Contestant("ours", "multi_node")
    assert parse("ours:profiles/mine.yaml") == Contestant("ours", "profiles/mine.yaml")
    assert parse("torch:powersgd_4").baseline == "alone:torch"
    assert parse("alone:paddle").framework == "paddle"
    assert parse("torch:post_local_sgd_4_from_100").name == "torch:post_local_sgd_4_from_100"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("multi_node", "is not kind:variant"),
        ("horovod:x", "unknown kind 'horovod'"),
        ("torch:powersgd", "PyTorch takes part as"),
        ("paddle:fleet", "stock Paddle takes part as data_parallel"),
        ("alone:jax", "alone takes ours, torch or paddle"),
    ],
)
def test_unknown_names_are_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(word)


def test_compute_only_runs_come_first_and_once() -> None:
    chosen = [parse(word) for word in ("ours:a", "torch:ddp", "ours:b", "ours:a")]
    names = [each.name for each in with_baselines(chosen)]
    assert names == ["alone:ours", "alone:torch", "ours:a", "torch:ddp", "ours:b"]


def test_each_of_ours_runs_beside_the_other_checkouts() -> None:
    assert beside_before(["ours:a", "torch:ddp"]) == ["ours:a", "before:a", "torch:ddp"]
    assert (parse("before:a").framework, parse("before:a").baseline) == ("ours", "alone:ours")


def test_a_hook_is_read_from_its_name() -> None:
    assert Hook.of("ddp", 10) == Hook("ddp")
    assert Hook.of("bf16_4mb", 10) == Hook("bf16", bucket_mb=4)
    assert Hook.of("powersgd_2", 10) == Hook("powersgd", number=2, start=10)
    assert Hook.of("post_local_sgd_8_from_0", 10) == Hook("post_local_sgd", number=8, start=0)
    assert Hook.of("post_local_sgd_8", 10).rhythm() == {"settles_after": 10, "period_steps": 8}
    assert Hook.of("powersgd_2", 10).rhythm() == {"settles_after": 10, "period_steps": 1}


def test_a_profile_of_a_file_is_tuned() -> None:
    assert [is_tuned(parse(word)) for word in ("ours:a", "ours:b/a.yaml", "torch:ddp_4mb")] == [False, True, False]


@pytest.mark.parametrize(
    ("name", "values", "tensors"),
    [("mlp", 2_919_690, 18), ("resnet18", 11_172_810, 62), ("small_tensors", 84_778, 160)],
)
def test_networks_have_the_sizes_that_the_pages_say(name: str, values: int, tensors: int) -> None:
    assert parameters(TASKS[name]) == (values, tensors)


def test_ranks_share_a_global_batch_without_overlap() -> None:
    task = Task(global_batch_size=8)
    whole, labels = Batches(task, 0, 1).at(5)
    halves = [Batches(task, rank, 2).at(5) for rank in (0, 1)]
    assert whole.shape == (8, 64)
    np.testing.assert_array_equal(np.concatenate([features for features, _ in halves]), whole)
    np.testing.assert_array_equal(np.concatenate([part for _, part in halves]), labels)


def test_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch_size=128 is not a multiple of 3 ranks"):
        Batches(Task(), 0, 3)


def test_start_weights_are_the_same_for_a_seed() -> None:
    one, two, other = (start_weights(Task(width=8, seed=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one[2], two[2])
    assert not np.array_equal(one[2], other[2])


def test_accuracy_of_a_network_that_always_says_zero() -> None:
    task = Task(hidden_layers=0)
    weights = [np.zeros((64, 10), np.float32), np.eye(10, dtype=np.float32)[0]]
    assert judged(task, weights)[0] == pytest.approx(36 / 359)


def test_images_are_the_features_with_every_pixel_repeated() -> None:
    features, labels = Batches(TASKS["mlp"], 0, 1).at(0)
    images, same = Batches(dataclasses.replace(TASKS["resnet18"], global_batch_size=128), 0, 1).at(0)
    assert images.shape == (128, 1, 32, 32)
    np.testing.assert_array_equal(images[:, 0, ::4, ::4].reshape(128, 64), features)
    np.testing.assert_array_equal(images[:, 0, 3::4, 3::4].reshape(128, 64), features)
    np.testing.assert_array_equal(labels, same)


def test_limiter_counts_are_read_from_tc() -> None:
    shown = "qdisc tbf 8001: root refcnt 2 rate 1Gbit burst 131050b lat 50ms\n Sent 1234567 bytes 890 pkt (dropped 0)\n"
    assert limiter_bytes(shown) == 1234567
    assert limiter_bytes("qdisc noqueue 0: root refcnt 2\n Sent 0 bytes 0 pkt (dropped 0)\n") == 0
    assert CollectiveSpec(5, 7) - CollectiveSpec(2, 3) + CollectiveSpec(1, 1) == CollectiveSpec(4, 5)
