"""From benchmark records to the profiles and pages that quote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet_train.profile import load_profile
from tools.benchmarks.quoted import tables_outside_blocks, with_blocks
from tools.benchmarks.records import Record, is_marked_page, mark, quotable, read
from tools.write_measured import NOT_YET, lines_for, section_of

FIGURES: dict[str, Any] = {
    "step_ms": 40.85,
    "round_step_ms": {"1": 40.0, "2": 41.7},
    "whole_periods": True,
    "ratio": 0.344,
    "twin": "torch:bf16",
    "over_twin": 0.95,
    "tuned": False,
    "interface_bytes": 65151.6,
    "times_fewer_bytes": 179.7,
    "accuracies": {"1": 0.9666, "2": 0.9686},
    "points_from_synchronous": [0.1, -0.3, 0.5],
    "seconds_to_target": {"1": 5.6, "2": 5.2},
    "target_ratio": 1.4,
}
BF16 = {"fetch_frequency": 2, "compression": "bf16"}


def record(name: str = "a", profile: dict[str, Any] = BF16, **changed: Any) -> Record:
    at = {"date": f"2026-11-2{ord(name) - ord('a')}T15:49:32+00:00", "commit": "0123456789abcdef", "processor": "a CPU"}
    content = {
        "circumstances": at,
        "sittings": [at | {"uncommitted_changes": False}],
        "lab": {"nodes": 2, "ranks_per_node": 1, "rate": "1gbit"},
        "task": {"name": "mlp"},
        "target": 0.95,
        "repeats": 5,
        "whole_rounds": 2,
        "start_iteration_of_hooks": 10,
        "summary": {"ours:bf16_compression": FIGURES, "torch:ddp": FIGURES | {"ratio": 1.0}},
        "rounds": [
            {"contestant": "ours:bf16_compression", "round": 1, "seed": 0, "ranks": [{"facts": {"profile": profile}}]}
        ],
    }
    return Record(Path(f"{name}.json"), content | changed)


def lines(*records: Record) -> list[str]:
    return lines_for(load_profile("bf16_compression"), "bf16_compression", records)


def test_a_line_has_circumstances_figures_and_source() -> None:
    assert lines(record()) == [
        "2026-11-20, mlp, 2 nodes x 1 on 1gbit, CPU, 2 rounds; step 40.9 ms (0.34 of PyTorch DDP's best, 0.95 of "
        "torch:bf16's); 0.0652 MB sent per step and node; accuracy 96.76% (+0.10 points); 95% after 5.4 s (DDP needs "
        "1.40 times that); docs/benchmarks/a.json"
    ]


def test_a_step_shorter_than_computing_alone_is_not_quoted_as_a_gain() -> None:
    (line,) = lines(record(summary={"ours:bf16_compression": FIGURES | {"over_compute": 0.85}}))
    assert "but 0.85 of computing alone, which is unexplained)" in line
    (line,) = lines(record(summary={"ours:bf16_compression": FIGURES | {"over_compute": 1.2}}))
    assert "computing alone" not in line


def test_a_target_that_was_missed_and_no_rival() -> None:
    figures = FIGURES | {"ratio": None, "twin": None, "seconds_to_target": {}, "whole_periods": False}
    (line,) = lines(record(summary={"ours:bf16_compression": figures}))
    assert "step 40.9 ms (less than its own start and one period); " in line
    assert "95% not reached" in line


def test_the_newest_record_of_a_setting_counts() -> None:
    slow = {"lab": {"nodes": 2, "ranks_per_node": 1, "rate": "100mbit"}}
    found = lines(record("c"), record("b", **slow), record("a"), record("a", **slow))
    assert [line.rpartition("/")[2] for line in found] == ["b.json", "c.json"]


def test_other_knob_values_and_other_contestants_give_no_line() -> None:
    assert lines(record(profile=BF16 | {"nccl_comm_num": 3})) == []
    tuned = {"ours:tools/benchmarks/profiles/bf16_small_buckets.yaml": FIGURES}
    assert lines(record(summary=tuned)) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"refuted": {"by": "issue 10", "because": "x"}}, "refuted by issue 10"),
        ({"sittings": [{"uncommitted_changes": True}]}, "uncommitted"),
        ({"whole_rounds": 0}, "no whole round"),
    ],
)
def test_records_that_may_not_be_quoted(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(record().content))
    (tmp_path / "bad.json").write_text(json.dumps(record("c", **changed).content))
    (tmp_path / "soak.json").write_text(json.dumps({"circumstances": {}}))
    assert reason in str(read(tmp_path / "bad.json").why_not_quoted())
    assert [each.path.stem for each in quotable(tmp_path)] == ["good"]


def test_a_mark_stands_at_the_top_of_both_files_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n "circumstances": {"date": "x"}\n}\n')
    (tmp_path / "a.md").write_text("# Title\n\n- Network: y\n")
    assert not is_marked_page((tmp_path / "a.md").read_text())
    mark(tmp_path / "a", "issue 10", "it is wrong")
    assert read(tmp_path / "a.json").content == {
        "refuted": {"by": "issue 10", "because": "it is wrong"},
        "circumstances": {"date": "x"},
    }
    text = (tmp_path / "a.md").read_text()
    assert text == "# Title\n\n> **Refuted** by issue 10, because it is wrong.\n\n- Network: y\n"
    assert is_marked_page(text)
    with pytest.raises(ValueError, match="is marked already"):
        mark(tmp_path / "a", "me", "twice")


def test_a_profile_without_lines_says_why() -> None:
    assert section_of(load_profile("infiniband"), []) == list(load_profile("infiniband").measured)
    old = load_profile("multi_node").model_copy(update={"measured": ["2026-11-20, from a record that is refuted now"]})
    assert section_of(old, []) == [NOT_YET]
    assert section_of(old, ["new"]) == ["new"]


def test_a_line_from_a_record_of_another_kind_stays() -> None:
    lines = [
        "2026-11-20, 1.2 of the step; docs/benchmarks/a.json",
        "2026-11-20, 1.3 of the step; docs/benchmarks/b.json",
    ]
    profile = load_profile("multi_node").model_copy(update={"measured": lines})
    assert section_of(profile, ["new"], ["docs/benchmarks/b.json"]) == ["new", lines[1]]


PAGE = "before\n<!-- figures: task=mlp network=1gbit -->\nold\n<!-- end of figures -->\nafter\n"


def test_a_block_has_the_newest_figures_and_their_source() -> None:
    text = with_blocks(PAGE, [record("c"), record("a")])
    assert text.startswith("before\n<!-- figures: task=mlp network=1gbit -->\n\n| strategy |")
    assert "| `bf16_compression` | 0.34 | 0.95 | 179.7 | +0.10 (-0.30 … +0.50) | 1.40 |\n" in text
    assert "[c](benchmarks/c.md): 2 of 5 rounds, 1 seeds, target 95%, commit 0123456789" in text
    assert text.endswith("<!-- end of figures -->\nafter\n")
    assert with_blocks(text, [record("c"), record("a")]) == text


def test_a_block_names_tuned_files_and_missed_targets() -> None:
    missed = FIGURES | {"tuned": True, "seconds_to_target": {}, "target_ratio": None}
    summary = {"ours:tools/benchmarks/profiles/x.yaml": missed, "torch:ddp": FIGURES}
    text = with_blocks(PAGE, [record(summary=summary)])
    assert "| `x.yaml` (tuned file) | 0.34 | 0.95 | 179.7 | +0.10 (-0.30 … +0.50) | not reached |" in text


@pytest.mark.parametrize("other", [{"task": {"name": "resnet18"}}, {"summary": {"ours:bf16_compression": FIGURES}}])
def test_a_block_without_a_record_says_so(other: dict[str, Any]) -> None:
    assert "\n\nNo record has these figures" in with_blocks(PAGE, [record(**other)])


def test_a_table_without_a_block_is_found() -> None:
    table = "| strategy | step / DDP | more |\n| --- | --- | --- |\n| a | 0.5 | 1 |\n"
    assert tables_outside_blocks(table) == ["| strategy | step / DDP"]
    assert tables_outside_blocks(with_blocks(PAGE, [record()])) == []
