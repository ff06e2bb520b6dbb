"""The entry points of old and new Fleet scripts on two ranks, against one process with the joint batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.images import infer
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

SCRIPT = ROOT / "tests/parallel/entry_points.py"
SGD = ["plain", "clip", "sum", "sum times ranks", "looking ahead", "by fleet.minimize", "outside"]
BY_ITSELF = "by paddle.Model"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[RanksResult, RanksResult]:
    """(two ranks, one process without a launcher)"""
    folder = tmp_path_factory.mktemp("entry_points")
    return (
        run_ranks(SCRIPT, 2, folder=folder / "two", args=[str(folder)], timeout_seconds=240),
        run_ranks(SCRIPT, 1, nodes=0, folder=folder / "one", args=[str(folder)], timeout_seconds=240),
    )


@pytest.fixture(scope="module")
def two(results: tuple[RanksResult, RanksResult]) -> RanksResult:
    return results[0]


@pytest.fixture(scope="module")
def one(results: tuple[RanksResult, RanksResult]) -> dict[str, Any]:
    return results[1].values[0]


def test_replicas_are_bit_equal_in_every_way_to_start(two: RanksResult) -> None:
    first, second = two.of_all("digests")
    assert first == second
    assert len(first) == 12


def test_wrappers_train_as_the_profile_with_their_knobs(two: RanksResult, one: dict[str, Any]) -> None:
    for values in (two.values[0], one):
        assert values["digests"]["several"] == values["digests"]["several by profile"]
        assert np.abs(values["weights several"] - values["weights adam"]).max() > 1e-4


@pytest.mark.parametrize("name", ["adam", *SGD, BY_ITSELF])
def test_two_ranks_train_as_one_process_with_the_joint_batch(name: str, two: RanksResult, one: dict[str, Any]) -> None:
    expected = one[f"weights {name}"]
    np.testing.assert_allclose(two.values[1][f"weights {name}"], expected, rtol=1e-5, atol=1e-6)


def test_what_is_set_on_the_wrapper_reaches_the_optimizer(two: RanksResult, one: dict[str, Any]) -> None:
    for digests in (two.values[0]["digests"], one["digests"]):
        assert digests["clip set afterwards"] == digests["clip"] != digests["plain"]


def test_a_sum_that_the_script_multiplies_by_the_ranks_itself_is_said_once(
    two: RanksResult, one: dict[str, Any]
) -> None:
    np.testing.assert_array_equal(one["weights sum times ranks"], one["weights sum"])
    np.testing.assert_array_equal(two.values[0]["weights sum times ranks"], two.values[0]["weights sum"])
    for sentence in ("entry_points.py, line", "the constant is taken as the number of shares, 2, that this sum is"):
        assert [sentence in rank.output for rank in two.ranks] == [True, False], sentence
    assert two.ranks[0].output.count("the constant is taken as the number of shares") == 1


def test_paddle_model_saves_what_it_trained_and_each_rank_evaluates_its_share(
    two: RanksResult, one: dict[str, Any]
) -> None:
    for values in (two.values[0], one):
        np.testing.assert_array_equal(values["model_saved"], values["weights by paddle.Model"])
    np.testing.assert_array_equal(*two.of_all("weights by paddle.Model"))
    assert sum(two.of_all("accuracy")) / 2 == pytest.approx(one["accuracy"])


def test_look_ahead_trains_as_paddles_own_and_buckets_do_not_change_it(two: RanksResult, one: dict[str, Any]) -> None:
    expected = one["weights looking ahead by Paddle alone"]
    assert np.abs(expected - one["weights plain"]).max() > 1e-2
    np.testing.assert_array_equal(one["weights looking ahead"], expected)
    np.testing.assert_allclose(two.values[0]["weights looking ahead"], expected, rtol=1e-5, atol=1e-6)
    digests = two.values[0]["digests"]
    assert digests["looking ahead"] == digests["looking ahead in small buckets"]


def test_mapped_settings_are_logged_once_on_rank_0(two: RanksResult) -> None:
    for sentence in (
        "paddle.static.amp.decorate is mapped: read as amp_level: O1 and amp_dtype: bfloat16",
        "GradientMergeOptimizer is mapped: read as accumulate_steps: 2",
        "amp_init is mapped: parameters stay float32, so nothing is cast",
        "fleet._origin_program is fleet.main_program",
        "the strategy of fleet.distributed_optimizer is used, that of fleet.init is not",
    ):
        assert [rank.output.count(sentence) for rank in two.ranks] == [1, 0], sentence


def test_paddle_saves_and_loads_a_converted_program(two: RanksResult, one: dict[str, Any]) -> None:
    assert two.of_all("loaded_equal") == [True, True]
    # The optimizer's state is loaded, too: training goes on as on one card.
    for rank in (0, 1):
        expected = one["weights after load"]
        np.testing.assert_allclose(two.values[rank]["weights after load"], expected, rtol=1e-5, atol=1e-6)
    assert two.of_all("normalized_has_ours") == [False, False]


def test_paddle_saves_what_every_profile_makes(two: RanksResult, one: dict[str, Any]) -> None:
    for told in (*two.of_all("told_when_saving"), one["told_when_saving"]):
        assert set(told.values()) == {""}
    assert two.ranks[0].output.count("fleet_train: Paddle writes this rank's own values of a program, and Local") == 1


def test_what_was_put_inside_a_program_is_not_in_what_paddle_writes_of_it(two: RanksResult) -> None:
    folder = two.folder.parent
    x = np.random.RandomState(0).randn(3, 6).astype("float32")
    for rank in (0, 1):
        written, plain = two.values[rank]["written_norm"], two.values[rank]["plain_norm"]
        assert written.keys() == plain.keys()
        for value_name, value in plain.items():
            np.testing.assert_array_equal(written[value_name], value, err_msg=value_name)
        operators = two.values[rank]["operators_norm"]
        assert not [each for each in operators if "fleet_train" in each or "all_reduce" in each]
    paths = [folder / f"norm, rank0of{ranks}" / "norm_answers" for ranks in (2, 1)]
    answers = [infer(path, x, folder) for path in paths]
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-4, atol=1e-5)


def test_refusals_are_the_same_on_one_process_and_on_two_ranks(two: RanksResult, one: dict[str, Any]) -> None:
    refused = two.values[0]["refused"]
    assert refused == two.values[1]["refused"] == one["refused"]
    assert refused["no startup program"] == (
        "ConversionError: the startup program of minimize initializes no parameter of the loss (such as "
        "'linear_0.b_0'): call minimize inside `with paddle.static.program_guard(main, startup)`, or pass "
        "startup_program=startup"
    )
    assert refused["amp_init"] == ""
    assert "amp_level is O0; set amp_level: O1 or O2" in refused["amp_init without amp"]
    assert "it was returned by distributed_optimizer; wrap an optimizer only once" in refused["wrapped twice"]
    assert "parameter_list= and parameters=, which name one argument" in refused["two names"]


LISTS = {
    "of a copy": "minimize(parameters=...) has 'linear_2.b_0' of another program than the loss's",
    "optimizer of a copy": "parameters= of the optimizer has 'linear_2.b_0', ",
    "untrained of a copy": "minimize(no_grad_set=...) has 'linear_2.b_0' of another program",
    "no such name": "lists 'fc_0.w_0', and the loss's program has no parameter of this name; it has idle, linear_0.b_0",
    "twice": "lists 'idle' twice, and Paddle would update it twice in a step; list it once",
    "optimizer twice": "parameters= of the optimizer lists 'idle' twice",
    "none": "an empty list, with which Paddle trains all parameters; leave it out to have that",
    "not in the loss": "lists 'idle', on which the loss does not depend, so that nothing would be trained",
    "no parameter": "lists a value of pd_op.mean, which are no parameters",
    "fetch of a copy": "fetch_list[0] is a value of pd_op.mean of another program than the one that runs",
}


def test_lists_that_would_train_or_fetch_something_else_are_refused_by_name(two: RanksResult) -> None:
    refused = two.values[0]["refused"]
    for name, words in LISTS.items():
        assert words in refused[name], name
    assert refused["healthy"] == refused["healthy optimizer"] == ""


def test_wrappers_around_ours_are_refused_with_the_right_order(two: RanksResult, one: dict[str, Any]) -> None:
    refused = two.values[0]["wrapping_ours"]
    assert refused == one["wrapping_ours"]
    for name, words in refused.items():
        told = (
            f"ConversionError: {name} was given what fleet.distributed_optimizer returned: give it the optimizer itself"
        )
        assert words.startswith(told)


@pytest.mark.parametrize(("name", "every"), [("each step", 1), ("merged", 2)])
def test_paddles_moving_average_is_the_same_on_two_ranks_as_on_one(
    name: str, every: int, two: RanksResult, one: dict[str, Any]
) -> None:
    trained = one[f"trained {name}"][every - 1 :: every]
    expected = sum(0.1 * 0.9 ** (len(trained) - 1 - step) * value for step, value in enumerate(trained))
    expected /= 1 - 0.9 ** len(trained)
    for values in (two.values[0], two.values[1], one):
        np.testing.assert_allclose(values[f"averaged {name}"], expected, rtol=1e-5, atol=1e-6)
        assert values["restored"]
    assert np.abs(expected - trained[-1]).max() > 1e-3


def test_a_moving_average_of_what_changes_behind_the_update_is_refused(two: RanksResult, one: dict[str, Any]) -> None:
    assert one["not_averaged"] == {"use_local_sgd": "", "sharding": ""}
    for words in two.values[1]["not_averaged"].values():
        assert "weights change behind the update that it follows; call optimizer.around_update(" in words


def test_written_updates_of_two_optimizers_have_their_own_gradients(two: RanksResult) -> None:
    updates = two.values[0]["updates"]
    assert len(updates) == 6
    assert all(parameter == gradient for parameter, gradient in updates)


def test_written_program_is_the_one_of_one_card(one: dict[str, Any]) -> None:
    """Beside what weighs its loss by the number of samples, which is 1 on one card."""
    ours, single, norm, single_norm = one["operators"]
    whole, half = "pd_op.matmul_grad", "pd_op.matmul_with_flatten_grad"  # the parameter's half stays another operator
    for written, original in ((ours, single), (norm, single_norm)):
        assert not any("fleet_train" in name for name in written)
        more = {name: written.count(name) - original.count(name) for name in {*written, *original}}
        assert 0 <= more.pop(half, 0) < original.count(whole)
        assert more.pop(whole) == 0
        assert set(more.values()) <= {0, 1, 2, 3}
    assert "pd_op.adam_" in ours
    assert norm.count("pd_op.batch_norm_") == 1


def test_helpers_of_fleet_say_and_do_what_they_did(two: RanksResult, one: dict[str, Any]) -> None:
    assert two.of_all("roles") == [[True, False, 0, ""]] * 2
    assert two.of_all("same") == [[True, True]] * 2
    assert two.of_all("summed") == [[2, 3]] * 2
    assert two.of_all("mean") == [[1.0, 0.5]] * 2
    assert two.of_all("written") == [[2.0, 1.0]] * 2
    assert two.of_all("gathered") == [[0, 10]] * 2
    assert two.of_all("shard") == [[["a", "b", "c"], ["a"]], [["d", "e"], []]]
    assert two.of_all("endpoints") == [True, True]
    assert two.of_all("origin") == [True, True]
    assert ["printed by the last rank" in rank.output for rank in two.ranks] == [False, True]
    assert one["gathered"] == [0]
    assert two.of_all("groups") == [2, 2], "the strategy of init is the default"
    assert two.of_all("returned") == [True, True]
