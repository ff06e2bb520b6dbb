"""The other benchmarks' arithmetic and pages, the records of docs/benchmarks, and what is quoted from them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fleet_train.profile import load_profile, profile_names
from tools.bench import MODULES, main
from tools.benchmarks import checkouts, costs, labs, quote, report
from tools.benchmarks.bits_rank import SHORTENED
from tools.benchmarks.record import FOLDER, Keep, Record, all_records, beside, circumstances, quotable
from tools.benchmarks.report import summarise
from tools.benchmarks.start_rank import now, processes_above

AT: dict[str, Any] = {
    "date": "2026-11-23T10:00:00+00:00", "commit": "0123456789abcdef", "uncommitted_changes": False, "command": "x",
    "versions": {"python": "3.11"}, "processor": "a CPU", "processors": 2, "kernel": "6.1",
    "load_average_before": [0.1, 0.1, 0.1],
}  # fmt: skip
RECORDS = all_records()


@pytest.mark.parametrize("name", MODULES)
def test_help_of_every_benchmark_teaches(name: str) -> None:
    text = CliRunner().invoke(main, [name, "--help"]).output
    assert f"python tools/bench.py {name}" in text
    assert "--record" in text or name == "quote"


def test_a_record_names_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["/x/tools/bench.py", "start", "--before", str(tmp_path), "--record", "a b"])
    assert circumstances()["command"] == f"python tools/bench.py start --before {tmp_path.name} --record 'a b'"
    Keep(tmp_path / "new" / "x.1gbit")({"a": 1, "rounds": [{"b": 2}, {"b": 3}]}, ["# Title", "text"])
    text = (tmp_path / "new" / "x.1gbit.json").read_text()
    assert json.loads(text) == {"a": 1, "rounds": [{"b": 2}, {"b": 3}]}
    assert '{"b": 2},\n{"b": 3}\n' in text
    assert (tmp_path / "new" / "x.1gbit.md").read_text() == "# Title\ntext\n"


def block(kind: str, seconds: float, processor_seconds: float, stood_ms: float = 0.0) -> dict[str, Any]:
    times = {"seconds": seconds, "processor_seconds": processor_seconds, "stood_ms": stood_ms, "late_ms": 0.0}
    return {"kind": kind} | times


def test_shares_of_a_checkpoint_are_of_the_block_without_one_in_the_same_round() -> None:
    # The machine is half as fast in the second round: only blocks of one round are compared.
    rounds = [
        [block("none", 1.0, 1.0), block("background", 1.01, 1.03, 5.0), block("waiting", 1.1, 1.04, 90.0)],
        [block("waiting", 2.4, 2.1, 110.0), block("none", 2.0, 2.0), block("background", 2.06, 2.02, 9.0)],
    ]
    found = costs.shares_of(rounds, steps=50)
    assert found["step_ms"] == 30.0
    assert (found["background"]["share_percent"], found["waiting"]["share_percent"]) == (2.0, 15.0)
    assert found["background"]["processor_share_percent"] == 2.0
    assert (found["background"]["stood_ms"], found["waiting"]["stood_ms"]) == (7.0, 100.0)
    job = {"ranks": 2, "rounds": rounds, "checkpoint_bytes": 23_400_000, "summary": found}
    page = costs.checkpoint_page({"circumstances": AT, "task": "a network", "steps": 50, "jobs": [job]})
    assert page[-2].startswith("| 2 | 30.0 ms | in the background | +2.00 % (")
    assert page[-1].endswith("| +4.50 % | 100.0 ms |")


def test_ratios_of_synchronised_batch_norm_are_of_medians_in_the_same_round() -> None:
    def round_of(plain: list[float], synchronised: list[float]) -> dict[str, Any]:
        blocks = [block("plain", each, each / 2) for each in plain]
        blocks += [block("synchronised", each, each / 2) for each in synchronised]
        return {"network": "convnet", "load_average": 1.5, "exchanges": 6, "ranks": [blocks]}

    # The machine is half as fast in the second round, and one block was held up.
    rounds = [round_of([1.0, 1.0, 9.0], [1.2, 1.2, 1.2]), round_of([2.0, 2.0, 2.0], [2.8, 2.8, 30.0])]
    found = costs.ratios_of(rounds, steps=10)
    assert found["step_ms"] == {"plain": 150.0, "synchronised": 200.0, "ratio": 1.3, "ratios": [1.2, 1.4]}
    assert found["processor_ms"]["plain"] == 75.0
    asked = {"ranks": 1, "blocks": 3, "steps": 10, "rounds": 2}
    record = {"circumstances": AT, "rounds": rounds, "summary": {"convnet": found}, "asked": asked}
    assert (
        "| convnet | 32 | 6 | 150 ms | 200 ms | 213.3 -> 160.0 | 1.30 (1.20 to 1.40) | 75 ms | 100 ms |"
        in (costs.batch_norm_page(record)[-1])
    )


def test_phases_of_a_start_follow_one_another_and_a_launcher_counts_once() -> None:
    rank = {
        "processes": [[14, 101.5, 2.0], [11, 100.0, 1.0], [1, 3.0, 50.0]],
        "ends": {"interpreter": 101.75, "import of the framework": 103.0, "first step": 104.0},
    }
    assert checkouts.phases(checkouts.CHAIN, 100.0, rank) == {
        "launcher, until it starts the rank": 1.5,
        "interpreter": 0.25,
        "import of the framework": 1.25,
        "first step": 1.0,
        "total": 4.0,
    }
    other = {"processes": [[15, 101.5, 3.0], [11, 100.0, 1.25], [1, 3.0, 50.0]]}
    assert checkouts.processor_seconds(checkouts.CHAIN, [rank, other]) == 2.0 + 3.0 + 1.25


def test_ratios_of_starts_are_taken_within_a_round_and_then_the_median() -> None:
    def turn(ours: float, torch: float) -> dict[str, dict[str, float]]:
        return {
            checkouts.OURS: {"interpreter": 0.25, "total": ours, "end": ours + 1, "processor": 2 * ours},
            checkouts.TORCH: {"total": torch, "end": torch + 1, "processor": torch},
        }

    # The machine is half as fast in round 2: a ratio of medians would compare different rounds.
    rounds = [turn(2.0, 4.0), turn(6.0, 8.0), turn(3.0, 4.0)]
    found = checkouts.summary(rounds)
    assert found["ratios"] == {
        checkouts.OURS: {"total": [0.5, 0.75, 0.75], "end": [0.6, 0.778, 0.8], "processor": [1.0, 1.5, 1.5]}
    }
    loads = {"loads": [0.5, 1.0, 2.0], "before": None}
    lines = checkouts.start_page({"circumstances": AT, "rounds": rounds, **loads, **found})
    assert "| fleet_train | 3.00 | 0.75 | 0.50 to 0.75 | 6.00 | 1.50 | 4.00 |" in lines
    assert "| torchrun + DDP | 4.00 | 1 | - | 4.00 | 1 | 5.00 |" in lines
    assert "| interpreter | 0.25 |" in lines


def test_a_process_knows_when_it_and_those_above_it_were_made_and_what_they_used() -> None:
    found = processes_above(os.getpid())
    # In a container the parent may be process 1, which is left out.
    assert [pid for pid, _, _ in found[:2]] == [pid for pid in (os.getpid(), os.getppid()) if pid > 1]
    times = [at for _, at, _ in found]
    assert times == sorted(times, reverse=True)
    assert 0 < times[0] <= now()
    before = time.process_time()
    while time.process_time() < before + 0.1:
        pass
    assert found[0][2] + 0.08 <= processes_above(os.getpid())[0][2] <= found[0][2] + 5


def test_errors_of_predictions_are_of_medians_over_the_rounds() -> None:
    def made(*steps: tuple[str, float, float | None]) -> dict[str, Any]:
        return {"profiles": [dict(zip(("name", "predicted_ms", "measured_ms"), each, strict=True)) for each in steps]}

    rounds = [made(("a", 9.0, 10.0), ("b", 8.0, 20.0), ("c", 1.0, None)), made(("a", 11.0, 10.0), ("b", 8.0, 20.0))]
    lines = labs.figures({"1gbit": [*rounds, made(("a", 9.0, 12.0))]})
    assert "| 1gbit | a | 9.0 (9.0 to 11.0) | 10.0 (10.0 to 12.0) | 10% | 3 |" in lines
    assert "| 1gbit | b | 8.0 (8.0 to 8.0) | 20.0 (20.0 to 20.0) | 60% | 2 |" in lines
    assert "2 steps: median error 35%, worst 60%" in lines
    assert "- 1gbit: with the default of 4 trials it picks a, 1.00 of the best measured (a)" in lines


def save(folder: Path, values: Any, parts: tuple[str, ...] = ("trained", "saved", "resumed")) -> None:
    folder.mkdir(exist_ok=True)
    for case, part, rank in ((case, part, rank) for case in (0, 1) for part in parts for rank in (0, 1)):
        np.savez(folder / f"dgc-{case}-{part}-{rank}.npz", weight=values)


def one_bit_off(values: Any) -> Any:
    changed = values.copy()
    changed.view(np.uint32)[1] ^= 1
    return changed


def test_one_bit_between_two_checkouts_is_named(tmp_path: Path) -> None:
    values = np.array([1.0, 2.0, np.nan], np.float32)
    one, other = tmp_path / "one", tmp_path / "other"
    save(one, values)
    save(other, values)
    assert list(checkouts.differences(one, other, "dgc", 2)) == []
    save(other, one_bit_off(values), ("resumed",))
    first, *more = checkouts.differences(one, other, "dgc", 2)
    assert first.startswith("weight (Momentum, resumed, rank 0): differs by up to 2.38e-07")
    assert len(more) == 3
    save(other, values)
    # What was taken over is compared with what the first checkout resumed.
    save(other, one_bit_off(values), ("taken_over",))
    assert next(checkouts.differences(one, other, "dgc", 2)).startswith("weight (Momentum, taken_over, rank 0)")


@pytest.mark.parametrize(
    ("runs", "result"), [("aaa", "equal"), ("aab", "different"), ("aba", "not repeatable"), ("a-a", "failed")]
)
def test_a_row_tells_a_difference_from_noise_and_from_a_failure(
    runs: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.array([1.0, 2.0], np.float32)

    def run_all(*given: Any) -> dict[str, str]:
        folder, other = given[3:]
        assert (other is None) == (folder.name != "after")
        kind = runs[["before", "again", "after"].index(folder.name)]
        if kind != "-":
            save(folder, values if kind == "a" else one_bit_off(values))
        return {} if kind != "-" else {"dgc": "exit code 1: rank 1 said why"}

    monkeypatch.setattr(checkouts, "run_all", run_all)
    (row,) = checkouts.compare({"before": Path(), "after": Path()}, [2], ["dgc"])
    assert (row["result"], bool(row["first"])) == (result, result != "equal")
    assert set(SHORTENED) <= set(profile_names())


FIGURES: dict[str, Any] = {
    "step_ms": 40.85, "round_step_ms": {"1": 40.0, "2": 41.7}, "whole_periods": True, "ratio": 0.344,
    "twin": "torch:bf16", "over_twin": 0.95, "tuned": False, "interface_bytes": 65151.6, "times_fewer_bytes": 179.7,
    "accuracies": {"1": 0.9666, "2": 0.9686}, "points_from_synchronous": [0.1, -0.3, 0.5],
    "seconds_to_target": {"1": 5.6, "2": 5.2}, "target_ratio": 1.4,
}  # fmt: skip
BF16 = {"fetch_frequency": 2, "compression": "bf16"}


def record(name: str = "a", profile: dict[str, Any] = BF16, **changed: Any) -> Record:
    at = AT | {"date": f"2026-11-2{ord(name) - ord('a')}T15:49:32+00:00"}
    turn = {"contestant": "ours:bf16_compression", "seed": 0, "ranks": [{"facts": {"profile": profile}}]}
    content = {
        "circumstances": at, "sittings": [at], "lab": {"nodes": 2, "ranks_per_node": 1, "rate": "1gbit"},
        "task": {"name": "mlp"}, "target": 0.95, "repeats": 5, "whole_rounds": 2, "start_iteration_of_hooks": 10,
        "summary": {"ours:bf16_compression": FIGURES, "torch:ddp": FIGURES | {"ratio": 1.0}}, "rounds": [turn],
    }  # fmt: skip
    return Record(Path(f"{name}.json"), content | changed)


def lines(*records: Record) -> list[str]:
    return quote.lines_for(load_profile("bf16_compression"), "bf16_compression", records)


def test_a_line_has_circumstances_figures_and_source() -> None:
    assert lines(record()) == [
        "2026-11-20, mlp, 2 nodes x 1 on 1gbit, CPU, 2 rounds; step 40.9 ms (0.34 of PyTorch DDP's best, 0.95 of "
        "torch:bf16's); 0.0652 MB sent per step and node; accuracy 96.76% (+0.10 points); 95% after 5.4 s (DDP needs "
        "1.40 times that); docs/benchmarks/a.json"
    ]
    missed = {"ratio": None, "twin": None, "seconds_to_target": {}, "whole_periods": False}
    (line,) = lines(record(summary={"ours:bf16_compression": FIGURES | missed}))
    assert "step 40.9 ms (less than its own start and one period); " in line
    assert "95% not reached" in line
    # A step shorter than computing alone is not quoted as a gain.
    (line,) = lines(record(summary={"ours:bf16_compression": FIGURES | {"over_compute": 0.85}}))
    assert "but 0.85 of computing alone, which is unexplained)" in line


def test_the_newest_record_of_a_setting_counts_with_the_knobs_of_today() -> None:
    slow = {"lab": {"nodes": 2, "ranks_per_node": 1, "rate": "100mbit"}}
    found = lines(record("c"), record("b", **slow), record("a"), record("a", **slow))
    assert [line.rpartition("/")[2] for line in found] == ["b.json", "c.json"]
    assert lines(record(profile=BF16 | {"nccl_comm_num": 3})) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"refuted": {"by": "another", "because": "x"}}, "refuted by another"),
        ({"sittings": [{"uncommitted_changes": True}]}, "uncommitted"),
        ({"whole_rounds": 0}, "no whole round"),
    ],
)
def test_records_that_may_not_be_quoted(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(record().content))
    (tmp_path / "bad.json").write_text(json.dumps(record("c", **changed).content))
    (tmp_path / "soak.json").write_text(json.dumps({"circumstances": {}}))
    assert reason in str(record(**changed).why_not_quoted())
    assert [each.path.stem for each in quotable(tmp_path)] == ["good"]


def test_a_profile_without_lines_says_why_and_keeps_lines_of_other_records() -> None:
    old = ["2026-11-20, 1.2 of the step; docs/benchmarks/a.json", "2026-11-20, 1.3; docs/benchmarks/b.json"]
    profile = load_profile("multi_node").model_copy(update={"measured": old})
    assert quote.section_of(profile, []) == [quote.NOT_YET]
    assert quote.section_of(profile, ["new"], ["docs/benchmarks/b.json"]) == ["new", old[1]]
    assert quote.section_of(load_profile("infiniband"), []) == list(load_profile("infiniband").measured)


def test_a_block_has_the_newest_figures_and_their_source() -> None:
    page = "before\n<!-- figures: task=mlp network=1gbit -->\nold\n<!-- end of figures -->\nafter\n"
    text = quote.with_blocks(page, [record("c"), record("a")])
    assert "| `bf16_compression` | 0.34 | 0.95 | 179.7 | +0.10 (-0.30 … +0.50) | 1.40 |\n" in text
    assert "[c](benchmarks/c.md): 2 of 5 rounds, 1 seeds, target 95%, commit 0123456789" in text
    assert quote.with_blocks(text, [record("c"), record("a")]) == text
    missed = FIGURES | {"tuned": True, "seconds_to_target": {}, "target_ratio": None}
    text = quote.with_blocks(page, [record(summary={"ours:tools/x.yaml": missed, "torch:ddp": FIGURES})])
    assert "| `x.yaml` (tuned file) | 0.34 | 0.95 | 179.7 | +0.10 (-0.30 … +0.50) | not reached |" in text
    assert "\n\nNo record has these figures" in quote.with_blocks(page, [record(summary={})])


def test_what_is_quoted_is_what_the_newest_records_say() -> None:
    differing = [file.name for file, text in quote.wanted(quotable()).items() if file.read_text() != text]
    assert differing == [], "run python tools/bench.py quote"
    refuted = [each.source for each in RECORDS if each.refutation]
    assert [
        name for name in profile_names() for line in load_profile(name).measured if line.endswith(tuple(refuted))
    ] == []
    trials: dict[str, list[float]] = {}
    for made in json.loads((FOLDER / "2026-11-22-prediction.json").read_text())["networks"]["1gbit"]:
        for each in made["profiles"]:
            if each["measured_ms"] is not None:
                trials.setdefault(each["name"], []).append(each["measured_ms"])
    by_hand = {name: line for name in profile_names() for line in load_profile(name).measured if "prediction" in line}
    assert [name for name, line in by_hand.items() if f"; step {median(trials[name]):.1f} ms (" not in line] == []


@pytest.mark.parametrize("quoted", quotable(), ids=lambda quoted: quoted.path.stem)
def test_a_quoted_record_is_what_its_raw_times_give(quoted: Record, tmp_path: Path) -> None:
    content, found = quoted.content, {}
    task, lab = content["task"], content["lab"]
    for name, figures in content["summary"].items():
        rounds = {each["round"]: each["ranks"] for each in content["rounds"] if each["contestant"] == name}
        found[name] = summarise(rounds, task["warmup_steps"], lab["ranks_per_node"], content["target"])
        again = asdict(found[name])
        # Python 3.12 and newer add floats with a compensated sum.
        assert close({key: figures[key] for key in again}) == json.loads(json.dumps(again)), name
    again_at = tmp_path / quoted.path.stem
    Keep(again_at)(content, report.page(content, found), report.picture(found), report.PICTURE)
    for ending in (".md", ".svg"):
        assert beside(again_at, ending).read_text() == quoted.path.with_suffix(ending).read_text(), ending


def close(value: object) -> object:
    """Equal to what differs by rounding only, at any depth."""
    if isinstance(value, dict):
        return {key: close(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close(each) for each in value]
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
