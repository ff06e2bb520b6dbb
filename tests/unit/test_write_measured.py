"""From a benchmark's record to the profiles that it has figures for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fleet_train.profile import load_profile
from tools.write_measured import lines_of, with_section

FIGURES: dict[str, Any] = {
    "step_ms": 40.85,
    "ratio": 0.344,
    "interface_bytes": 65151.6,
    "accuracy": 0.96657,
    "seconds_to_target": [5.6, 5.3],
}


def record(**summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "circumstances": {"date": "2026-11-20T15:49:32+00:00"},
        "lab": {"nodes": 2, "ranks_per_node": 1, "rate": "1gbit"},
        "target": 0.95,
        "summary": {name.replace("__", ":"): figures for name, figures in summary.items()},
    }


def test_a_line_has_circumstances_figures_and_source() -> None:
    assert lines_of(record(ours__bf16_compression=FIGURES), "docs/benchmarks/a.json") == {
        "bf16_compression": [
            "2026-11-20, 2 nodes x 1 on 1gbit, CPU; step 40.9 ms (0.34 of PyTorch DDP's); 0.0652 MB sent per step and "
            "node; accuracy 96.66%, 95% after 5.4 s; docs/benchmarks/a.json"
        ]
    }


def test_a_target_that_was_missed_once_and_no_reference() -> None:
    figures = FIGURES | {"ratio": None, "seconds_to_target": [5.6, None]}
    (line,) = lines_of(record(ours__dgc=figures), "a.json")["dgc"]
    assert "step 40.9 ms; " in line
    assert "95% not reached in every round" in line


def test_rivals_and_computing_alone_are_no_profiles() -> None:
    assert lines_of(record(torch__ddp=FIGURES, alone__ours=FIGURES), "a.json") == {}


@pytest.mark.parametrize(
    ("file", "profile", "numbers"),
    [
        ("local_sgd_8", "local_sgd", "local_sgd_is_warm_steps 10, local_sgd_steps 8"),
        ("powersgd_1", "ethernet_1g", "powersgd_start_step 10"),
    ],
)
def test_a_file_made_for_the_benchmark_counts_where_only_numbers_differ(file: str, profile: str, numbers: str) -> None:
    found = lines_of(record(**{f"ours__tools/benchmarks/profiles/{file}.yaml": FIGURES}), "a.json")
    assert "multi_node" not in found
    assert f"(with {numbers})" in found[profile][0]


def test_a_section_is_replaced_and_the_rest_stays() -> None:
    text = "# Why: x\n\ndescription: A.\nmeasured:\n  - old\n  - older\nnccl_comm_num: 2\n"
    changed = with_section(text, ['new: "1"', "two"])
    assert yaml.safe_load(changed) == {"description": "A.", "nccl_comm_num": 2, "measured": ['new: "1"', "two"]}
    assert changed.startswith("# Why: x\n\ndescription: A.\n")
    assert with_section(changed, ["three"]).count("measured") == 1


def test_a_profile_shows_what_was_measured_and_does_not_hand_it_on() -> None:
    assert load_profile("ethernet_1g").measured
    assert load_profile("ethernet_1g").measured != load_profile("multi_node").measured
