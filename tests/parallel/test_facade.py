"""The facade's promises, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.inference import infer
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, late_streams: bool) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("facade")
    result = run_ranks(
        ROOT / "tests/parallel/facade.py",
        2,
        folder=folder,
        nodes=2,
        args=[str(folder / "saved")],
        timeout_seconds=150,
        late_streams=late_streams,
    )
    return [result.values[0], result.values[1]]


def test_every_rank_knows_its_place(ranks: list[dict[str, Any]]) -> None:
    assert [rank["who"] for rank in ranks] == [[0, 2, 2, 0], [1, 2, 2, 0]]


def test_calls_before_init_say_so(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["early"].startswith("ConversionError: fleet.init(role) has not been called yet")


def test_second_init_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["twice"].startswith("ConversionError: fleet.init was called twice")


def test_init_after_shutdown_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["after"].startswith("ConversionError: this process has left its job")


def test_shutdown_puts_back_everything_that_was_replaced(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["replaced_in_job"] == ["exit", "run", "serialize_pir_program", "excepthook", "FLAGS_use_mkldnn"]
        assert rank["replaced_after"] == []


def test_all_reduce_keeps_shape_and_dtype(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        np.testing.assert_array_equal(rank["sums"], np.array([[3.0, 1.0]], "float32"), strict=True)
        np.testing.assert_array_equal(rank["largest"], np.array([7], "int64"), strict=True)
        np.testing.assert_array_equal(rank["smallest"], np.array(-3.0), strict=True)


def test_all_reduce_of_different_arrays_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "the ranks passed different arrays" in rank["unequal"]


def test_all_reduce_names_what_it_takes(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["bad_op"] == "ConversionError: all_reduce: op='product' is unknown; it takes sum, max, min, mean"
    assert ranks[0]["bad_dtype"].startswith("ConversionError: all_reduce: dtype float16 cannot be reduced")


def test_gather_gives_all_values_by_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["gathered"] == [{"rank": 0}, {"rank": 1}]


def test_stock_strategy_is_taken_field_by_field(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["stock"] == 8.0


def test_ranks_may_name_different_folders_and_rank_0_writes_its_own(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["folders"] == ["rank0"]


def test_loaded_state_is_the_saved_one_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["perturbed"] != ranks[1]["perturbed"]
    for rank in ranks:
        assert rank["loaded"] == rank["saved"] == ranks[0]["saved"]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("altered", "persistables.safetensors: tensor 'fleet_train/step' was altered"),
        ("missing", "nowhere holds no saved state: complete.json is missing"),
        ("unwritable", "save to /proc/nowhere"),
        ("other", "'fc_0.b_0' is [8] float32, this program needs [9] float32"),
    ],
)
def test_every_rank_gets_the_error_if_a_file_cannot_be_saved_or_loaded(
    ranks: list[dict[str, Any]], case: str, told: str
) -> None:
    for rank in ranks:
        assert rank[case].startswith("CheckpointError: ")
        assert told in rank[case]


def test_exported_program_gives_the_same_without_fleet_train(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    for program in ("", "trained"):
        outputs = infer(Path(ranks[0]["exported_to"]) / program, np.ones((3, 4), "float32"), tmp_path)
        np.testing.assert_allclose(outputs, ranks[0]["evaluated"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ranks[0]["evaluated"], ranks[1]["evaluated"])


def test_an_unknown_input_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["unknown_input"].endswith("the program has no input 'x'; it has features")


def test_backward_and_apply_gradients_apart_communicate_too(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["apart"] == ranks[1]["apart"]
    assert ranks[0]["main_is_last"]
