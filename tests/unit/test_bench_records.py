"""The records of docs/benchmarks are what their raw times give, and are quoted right; two trainings can be compared."""

from __future__ import annotations

import dataclasses
import json
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from fleet_train.cluster.flight import ring
from fleet_train.profile import load_profile, profile_names
from tools.benchmarks import checkouts, costs, labs, quote, recorder, report
from tools.benchmarks.record import FOLDER, Keep, Record, all_records, beside, circumstances, quotable
from tools.benchmarks.report import Window, family_of, predicted, summarise, window_of, wire_ms
from tools.benchmarks.tasks import Batches, Task, judged

AT: dict[str, Any] = {
    "date": "2026-11-23T10:00:00+00:00", "commit": "0123456789abcdef", "uncommitted_changes": False, "command": "x",
    "versions": {"python": "3.11"}, "processor": "a CPU", "processors": 2, "kernel": "6.1",
    "load_average_before": [0.1, 0.1, 0.1],
}  # fmt: skip


def content_of(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def close(value: object) -> object:
    """Equal to what differs by rounding only, at any depth."""
    if isinstance(value, dict):
        return {key: close(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close(each) for each in value]
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


@pytest.mark.parametrize("quoted", quotable(), ids=lambda quoted: quoted.path.stem)
def test_a_quoted_record_is_what_its_raw_times_give(quoted: Record, tmp_path: Path) -> None:
    content, found = quoted.content, {}
    task, lab = content["task"], content["lab"]
    for name in content["summary"]:
        rounds = {each["round"]: each["ranks"] for each in content["rounds"] if each["contestant"] == name}
        found[name] = summarise(rounds, task["warmup_steps"], lab["ranks_per_node"], content["target"])
    for name, row in report.rows_of(found, lab["rate"]).items():
        again = dataclasses.asdict(found[name]) | row
        # Python 3.12 and newer add floats with a compensated sum.
        assert close({key: content["summary"][name][key] for key in again}) == json.loads(json.dumps(again)), name
    again_at = tmp_path / quoted.path.stem
    Keep(again_at)(content, report.page(content, found), report.picture(found), report.PICTURE)
    for ending in (".md", ".svg"):
        assert beside(again_at, ending).read_text() == quoted.path.with_suffix(ending).read_text(), ending


def test_ratios_of_batch_norm_and_errors_of_predictions_are_what_their_rounds_give() -> None:
    record = content_of("2026-11-23-sync-batch-norm")
    for name, figures in record["summary"].items():
        rounds = [each for each in record["rounds"] if each["network"] == name]
        assert costs.ratios_of(rounds, record["asked"]["steps"]) == figures
    record = content_of("2026-11-22-prediction")
    page = labs.prediction_page(record["task"], record["circumstances"], record["networks"])
    assert "\n".join([*page, ""]) == (FOLDER / "2026-11-22-prediction.md").read_text()


def test_what_is_quoted_is_what_the_newest_records_say() -> None:
    differing = [file.name for file, text in quote.wanted(quotable()).items() if file.read_text() != text]
    assert differing == [], "run python tools/bench.py quote"
    measured = [(name, line) for name in profile_names() for line in load_profile(name).measured]
    refuted = tuple(each.source for each in all_records() if each.refutation)
    assert [name for name, line in measured if line.endswith(refuted)] == []
    trials: dict[str, list[float]] = {}
    for made in content_of("2026-11-22-prediction")["networks"]["1gbit"]:
        for each in made["profiles"]:
            if each["measured_ms"] is not None:
                trials.setdefault(each["name"], []).append(each["measured_ms"])
    by_hand = {name: line for name, line in measured if "prediction" in line}
    assert [name for name, line in by_hand.items() if f"; step {median(trials[name]):.1f} ms (" not in line] == []


def record(name: str = "a", **changed: Any) -> Record:
    at = AT | {"date": f"2026-11-2{ord(name) - ord('a')}T15:49:32+00:00"}
    facts = {"profile": changed.pop("profile", {"fetch_frequency": 2, "compression": "bf16"})}
    figures = {
        "step_ms": 40.85, "round_step_ms": {"1": 40.0}, "whole_periods": False, "ratio": None, "twin": None,
        "over_compute": 0.85, "interface_bytes": 65151.6, "accuracies": {"1": 0.9666}, "points_from_synchronous": [],
        "seconds_to_target": {},
    }  # fmt: skip
    content = {
        "circumstances": at, "sittings": [at], "lab": {"nodes": 2, "ranks_per_node": 1, "rate": "1gbit"},
        "task": {"name": "mlp"}, "target": 0.95, "whole_rounds": 2, "start_iteration_of_hooks": 10,
        "summary": {"ours:bf16_compression": figures},
        "rounds": [{"contestant": "ours:bf16_compression", "ranks": [{"facts": facts}]}],
    }  # fmt: skip
    return Record(Path(f"{name}.json"), content | changed)


def test_the_newest_record_of_a_setting_counts_with_the_knobs_of_today_and_tells_what_is_doubtful() -> None:
    def lines(*records: Record) -> list[str]:
        return quote.lines_for(load_profile("bf16_compression"), "bf16_compression", records)

    slow = {"lab": {"nodes": 2, "ranks_per_node": 1, "rate": "100mbit"}}
    found = lines(record("c"), record("b", **slow), record("a"), record("a", **slow))
    assert [line.rpartition("/")[2] for line in found] == ["b.json", "c.json"]
    doubts = "but 0.85 of computing alone, which is unexplained, less than its own start and one period"
    assert f"step 40.9 ms ({doubts}); 0.0652 MB sent per step and node; accuracy 96.66%; 95% not reached" in found[0]
    assert lines(record(profile={"compression": "bf16", "nccl_comm_num": 3})) == []


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
    assert reason in str(record(**changed).why_not_quoted())
    assert [each.path.stem for each in quotable(tmp_path)] == ["good"]


def test_what_no_record_has_a_case_of_is_summarised_by_its_rule() -> None:
    assert window_of({"settles_after": 90, "period_steps": 32}, 8, 100) == Window(8, 100, False)
    assert predicted({"predicted_bytes_per_step": 100.0}, 2) is None, "ranks share the link"
    assert predicted({"predicted_bytes_per_step": 100.0, "predicted_link_bytes_per_step": 50}, 2) == 50.0
    assert [wire_ms(12_500_000, rate) for rate in ("100mbit", "2.5gbit", "none")] == [1000.0, 40.0, None]
    planned = {"gradients": [["w", [4, 4], "float32"]], "period_steps": 8}
    for profile in ({"compression": "dgc"}, {"use_local_sgd": True, "outer_optimizer": "x"}, {"accumulate_steps": 4}):
        assert family_of(planned | {"profile": profile}) is None, profile


def test_a_record_names_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["/x/tools/bench.py", "start", "--before", str(tmp_path), "--record", "a b"])
    assert circumstances()["command"] == f"python tools/bench.py start --before {tmp_path.name} --record 'a b'"


def test_shares_of_a_checkpoint_are_of_the_block_without_one_in_the_same_round() -> None:
    def block(kind: str, seconds: float, processor_seconds: float, stood_ms: float = 0.0) -> dict[str, Any]:
        times = {"seconds": seconds, "processor_seconds": processor_seconds, "stood_ms": stood_ms, "late_ms": 0.0}
        return {"kind": kind} | times

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


def test_what_the_recorder_takes_is_of_the_pair_of_blocks_beside_the_same_load() -> None:
    # The machine is half as fast in every second pair, and once something else happens.
    pairs = [[4.04 * load, 4.0 * load] for load in (1, 2) * 20] + [[9.0, 4.0]]
    found = {"on_off_ms": pairs, "events": 8.0, "event_us": 5.0, "loop_us": 0.6, "helper_percent": 0.02}
    figures = recorder.figures_of(found)
    assert figures["counted_percent"] == pytest.approx(8 * 5e-3 / 4 * 100)
    assert [figures["compared_percent"], *figures["interval_percent"]] == pytest.approx([1.0] * 3)
    for path in FOLDER.glob("*-recorder.json"):
        again = "\n".join([*recorder.page(json.loads(path.read_text())), ""])
        assert again == path.with_suffix(".md").read_text(), path.name


def test_every_call_of_the_recorder_can_be_switched_off_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "time", ring.time)
    each = ring.Recorder()
    monkeypatch.setattr(each, "_map", mmap(-1, ring.RING_BYTES))  # without the thread that `start` begins
    monkeypatch.setattr(recorder, "recorder", each)
    switch = recorder.Switch()
    for kind, events in (("on", 0), ("off", 0), ("timed", 3)):
        switch(kind)
        each.end(each.begin("wire", "bucket 0", 8, "ranks 0-1", enqueued=1.0, began=2.0))
        with each.event("call", "save"):
            pass
        each.add("wait", "bucket 0", 1.0, is_worth_it=True)
        assert switch.events == events
    assert len(switch.seconds) == 5


VALUES = np.array([1.0, 2.0, np.nan], np.float32)
OTHER_VALUES = (VALUES.view(np.uint32) ^ np.array([0, 1, 0], np.uint32)).view(np.float32)


def save(folder: Path, values: Any, parts: tuple[str, ...] = ("trained", "saved", "resumed")) -> None:
    folder.mkdir(exist_ok=True)
    for case, part, rank in ((case, part, rank) for case in (0, 1) for part in parts for rank in (0, 1)):
        np.savez(folder / f"dgc-{case}-{part}-{rank}.npz", weight=values)


def test_one_bit_between_two_checkouts_is_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        save(folder, VALUES)
    assert list(checkouts.differences(one, other, "dgc", 2)) == []
    save(other, OTHER_VALUES, ("resumed",))
    first, *more = checkouts.differences(one, other, "dgc", 2)
    assert first.startswith("weight (Momentum, resumed, rank 0): differs by up to 2.38e-07")
    assert len(more) == 3
    save(other, VALUES)
    # What was taken over is compared with what the first checkout resumed.
    save(other, OTHER_VALUES, ("taken_over",))
    assert next(checkouts.differences(one, other, "dgc", 2)).startswith("weight (Momentum, taken_over, rank 0)")


def test_ranks_share_a_global_batch_without_overlap_and_the_loss_is_that_of_what_is_said() -> None:
    task = Task(global_batch_size=8, hidden_layers=0)
    whole, labels = Batches(task, 0, 1).at(5)
    halves = [Batches(task, rank, 2).at(5) for rank in (0, 1)]
    np.testing.assert_array_equal(np.concatenate([features for features, _ in halves]), whole)
    np.testing.assert_array_equal(np.concatenate([part for _, part in halves]), labels)
    with pytest.raises(ValueError, match="global_batch_size=8 is not a multiple of 3 ranks"):
        Batches(task, 0, 3)
    nothing = np.zeros((64, 10), np.float32)
    assert judged(task, [nothing, np.zeros(10, np.float32)])[1] == pytest.approx(np.log(10), rel=1e-5)
    assert judged(task, [nothing, np.eye(10, dtype=np.float32)[0]])[0] == pytest.approx(36 / 359)
