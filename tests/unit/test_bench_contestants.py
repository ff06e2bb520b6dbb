"""Who takes part in the benchmark, and which batches and weights everybody gets."""

from __future__ import annotations

import numpy as np
import pytest

from tools.benchmarks.contestants import DEFAULT, Contestant, beside_before, number_in, parse, with_baselines
from tools.benchmarks.link import Sent, limiter_bytes
from tools.benchmarks.task import TASKS, Batches, Task, start_weights
from tools.benchmarks.task import test_accuracy as accuracy_on_test_images


def test_words_become_contestants() -> None:
    assert parse("ours:multi_node") == Contestant("ours", "multi_node")
    assert parse("ours:profiles/mine.yaml") == Contestant("ours", "profiles/mine.yaml")
    assert parse("torch:powersgd_4").baseline == "alone:torch"
    assert parse("alone:paddle").framework == "paddle"
    assert [parse(word).name for word in DEFAULT] == DEFAULT


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("multi_node", "is not kind:variant"),
        ("horovod:x", "unknown kind 'horovod'"),
        ("torch:powersgd", "PyTorch takes part as"),
        ("paddle:fleet", "stock Paddle takes part as data_parallel"),
        ("alone:jax", "what runs alone is"),
    ],
)
def test_unknown_words_are_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(word)


def test_compute_only_runs_come_first_and_once() -> None:
    chosen = [parse(word) for word in ("ours:a", "torch:ddp", "ours:b", "ours:a")]
    names = [each.name for each in with_baselines(chosen)]
    assert names == ["alone:ours", "alone:torch", "ours:a", "torch:ddp", "ours:b"]


def test_each_of_ours_runs_beside_the_other_checkouts() -> None:
    assert beside_before(["ours:a", "torch:ddp"]) == ["ours:a", "before:a", "torch:ddp"]
    assert (parse("before:a").framework, parse("before:a").baseline) == ("ours", "alone:ours")


def test_number_of_a_variant_is_its_last() -> None:
    assert [number_in(word) for word in ("post_local_sgd_8", "ddp_4mb", "powersgd_1")] == [8, 4, 1]


def test_network_has_about_three_million_parameters() -> None:
    assert TASKS["digits_3m"].parameters == 2_919_690
    assert TASKS["digits_3m"].tensors == 18


def test_small_tensors_has_160() -> None:
    assert TASKS["small_tensors"].tensors == 160
    assert len(start_weights(TASKS["small_tensors"])) == 160


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
    assert accuracy_on_test_images(task, weights) == pytest.approx(36 / 359)


def test_limiter_counts_are_read_from_tc() -> None:
    shown = "qdisc tbf 8001: root refcnt 2 rate 1Gbit burst 131050b lat 50ms\n Sent 1234567 bytes 890 pkt (dropped 0)\n"
    assert limiter_bytes(shown) == 1234567
    assert limiter_bytes("qdisc noqueue 0: root refcnt 2\n Sent 0 bytes 0 pkt (dropped 0)\n") == 0
    assert Sent(5, 7) - Sent(2, 3) + Sent(1, 1) == Sent(4, 5)
