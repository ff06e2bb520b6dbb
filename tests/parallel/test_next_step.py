"""Updates a step later (``overlap_next_step``): whatever scripts do between steps, they see the same bits.

The trainings, and what the scripts do, are in ``next_steps.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fleet_train.errors import ConversionError
from tests.parallel.next_steps import PREVENTED, SCRIPTS
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

SCRIPT = ROOT / "tests/parallel/next_steps.py"
SMALL = {"fuse_grad_size_in_MB": 0.001}
Case = tuple[str, str, dict[str, Any]]

BETWEEN: list[Case] = [(script, "norms", SMALL) for script in SCRIPTS]
SETTINGS: list[Case] = [
    ("plain", network, {"fuse_grad_size_in_MB": 0.001, **settings})
    for network, settings in (
        ("norms", {"optimizer": "adamw", "nccl_comm_num": 3}),
        ("norms", {"optimizer": "clipped"}),
        ("norms", {"accumulate_steps": 2}),
        ("norms", {"sync_batch_norm": True, "num_threads": 4}),
        ("norms", {"amp_level": "O1", "amp_dtype": "bfloat16"}),
        ("norms", {"compression": "int8"}),
        ("norms", {"compression": "bf16", "divergence_check_steps": 3}),
        ("norms", {"compression": "powersgd", "powersgd_start_step": 2, "powersgd_min_compression": 0}),
        ("norms", {"replay_check_steps": 3}),
        ("norms", {"nonfinite": "skip", "broken": [2, 5]}),
        ("norms", {"nonfinite": "skip", "broken": [2, 5], "compression": "int8"}),
        ("norms", {"sharding": True, "optimizer": "adamw"}),
        ("norms", {"sharding": True, "num_threads": 4, "accumulate_steps": 2, "nccl_comm_num": 2}),
        ("table", {"sparse_embeddings": True, "optimizer": "sgd"}),
        ("table", {"sparse_embeddings": True, "accumulate_steps": 3}),
        ("tied", {"recompute_segments": 2}),
    )
]
SEVERAL: list[Case] = [
    ("plain", "norms", SMALL | {"nccl_comm_num": 2}),
    ("plain", "tied", SMALL | {"optimizer": "adamw", "compression": "int4"}),
    ("reads", "norms", SMALL | {"sharding": True}),
    ("saves", "norms", SMALL | {"compression": "int8"}),
    ("saves", "table", SMALL | {"sharding": True, "optimizer": "adamw"}),
]


def compared(cases: list[Case], folder: Path, world_size: int = 2, **options: Any) -> list[dict[str, Any]]:
    result = run_ranks(
        SCRIPT, world_size, folder=folder, nodes=2, args=[json.dumps(cases)], timeout_seconds=600, **options
    )
    return list(result.of_all("cases"))


def expect_the_same_bits(found: list[dict[str, Any]]) -> None:
    wrong = {name: case for rank in found for name, case in rank.items() if case.get("different") != []}
    assert not wrong
    for rank in found:
        for name, case in rank.items():
            alone, overlapped = case["early"]
            assert alone == 0, name
            assert overlapped > 0, f"{name}: no run waited for the averages of the run before"


def test_scripts_see_the_same_bits_whatever_they_do_between_steps(tmp_path: Path) -> None:
    expect_the_same_bits(compared(BETWEEN, tmp_path))


def test_strategies_train_the_same_bits(tmp_path: Path) -> None:
    expect_the_same_bits(compared(SETTINGS, tmp_path))


def test_each_bucket_is_waited_for_right_before_its_first_use(tmp_path: Path) -> None:
    whole, first, steady, flush = run_ranks(SCRIPT, 2, folder=tmp_path, nodes=2, args=["[]"]).of_all("cases")[0][
        "order"
    ]
    forward, updates = ["layer"] * 3 + ["loss"], {f"wait {index}": ["update"] * 2 for index in range(4)}

    def waited(*indices: int) -> list[str]:
        return [each for index in indices for each in (f"wait {index}", *updates[f"wait {index}"])]

    launches = [f"launch {index}" for index in (0, 2, 3, 1)]  # bucket 1 is postponed
    assert whole == [*forward, *(f"launch {index}" for index in range(4)), *waited(0, 1, 2, 3)]
    assert first == [*forward, *launches]
    # Bucket 0 is needed by the last layer; it has arrived before the one that is postponed, which the second needs.
    assert steady == [*waited(3), "layer", *waited(2, 0, 1), "layer", "layer", "loss", *launches]
    assert flush == waited(0, 1, 2, 3)


def test_where_nothing_is_sent_later_the_reason_is_said_once(tmp_path: Path) -> None:
    checked = SMALL | {"divergence_check_steps": 1}
    merged = SMALL | {"accumulate_steps": 4}  # the first four runs are of the first step, which is compared
    cases: list[Case] = [(script, "tied", SMALL) for script in PREVENTED]
    cases += [("plain", "tied", checked), ("plain", "norms", SMALL), ("plain", "norms", merged)]
    result = run_ranks(SCRIPT, 2, folder=tmp_path, nodes=2, args=[json.dumps(cases)])
    for rank in result.of_all("cases"):
        assert [case["different"] for case in rank.values()] == [[]] * 6
        # The run of the other program begins with the waits, too.
        assert [case["early"][1] > 0 for case in rank.values()] == [False, False, True, False, True, True]
    told = re.findall(r"overlap_next_step: nothing is sent .* because in \w+\.py, line \d+ (.*)", result.report())
    assert told == [
        "a run fetches what is known after its own update",
        "find_var reads what it changes",
        "another program or scope comes next",
        "every step is compared (divergence_check_steps, replay_check_steps)",
    ]
    assert result.report().count("call fleet.flush()") == 1


def test_after_a_run_that_failed_within_an_update_the_next_one_is_refused(tmp_path: Path) -> None:
    cases = json.dumps([("fails_inside", "norms", SMALL)])
    result = run_ranks(SCRIPT, 2, folder=tmp_path, nodes=2, args=[cases], check=False)
    for rank in result.of_all("cases"):
        (case,) = rank.values()
        assert "a run has failed after it had begun the update of the run before" in case["refused"]
    # The script has caught that and gone on, and there is still no step to end with.
    assert 0 not in result.exit_codes
    assert ConversionError.exit_code in result.exit_codes


def test_a_strict_job_updates_in_each_step(tmp_path: Path) -> None:
    result = run_ranks(
        SCRIPT,
        2,
        folder=tmp_path,
        nodes=2,
        args=[json.dumps([("plain", "norms", SMALL)])],
        env={"FLEET_TRAIN_STRICT": "1"},
    )
    for rank in result.of_all("cases"):
        (case,) = rank.values()
        assert case["different"] == []
        assert case["early"] == [0, 0]
    assert result.report().count("every update is made in its own step, because the job is strict") == 1


@pytest.mark.long
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_train_the_same_bits(world_size: int, tmp_path: Path) -> None:
    hierarchical = ("plain", "norms", SMALL | {"use_hierarchical_allreduce": True})
    nodes = {"nodes": 2} if world_size == 4 else {}
    found = compared([*SEVERAL, *([hierarchical] if nodes else [])], tmp_path, world_size)
    expect_the_same_bits(found)


@pytest.mark.long
def test_on_streams_the_ranks_train_the_same_bits(tmp_path: Path) -> None:
    settings = [case for case in SETTINGS if "num_threads" not in case[2]]
    # A device would have to be read to put back what was left out of the gradient.
    settings = [case for case in settings if not {"nonfinite", "compression"} <= case[2].keys()]
    expect_the_same_bits(compared([*BETWEEN, *settings], tmp_path, late_streams=True))
