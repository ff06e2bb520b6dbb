"""The records of docs/benchmarks are what their raw times give, and are quoted right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import paddle
import pytest

from fleet_train.profile import load_profile, profile_names
from tools.benchmarks import labs, pictures, quote, report, step, strategies
from tools.benchmarks.contestants import chosen_contestants, family_of
from tools.benchmarks.networks import PaddleKit, build
from tools.benchmarks.ranks import Window, window_of
from tools.benchmarks.record import FOLDER, Keep, Record, all_records, circumstances, quotable, told_network
from tools.benchmarks.tasks import TASKS, Batches, Judge, auc, bits_per_byte, sources

TASK = dataclasses.replace(TASKS["bytes"], steps=10, targets=(3.6, 3.45, 3.35))
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
def test_a_quoted_record_is_what_its_raw_figures_give(quoted: Record) -> None:
    content = quoted.content
    again = json.loads(json.dumps(report.summarised(content)))
    # Python 3.12 and newer add floats with a compensated sum.
    assert close(content["summary"]) == again
    assert "\n".join(report.page(content)) in quoted.path.with_suffix(".md").read_text()
    drawn = quoted.path.with_suffix(".svg").read_text()
    assert [name for name in content["summary"] if name.startswith("ours:") and name not in drawn] == []


@pytest.mark.parametrize("quoted", quotable(), ids=lambda quoted: quoted.path.stem)
def test_a_task_shows_that_ranks_learn_from_each_other(quoted: Record) -> None:
    """What ranks that send nothing reach as well is no task to compare strategies on."""
    content = quoted.content
    if (score := report.score_of(content)) is None:
        return
    synchronous = content["summary"]["ours:multi_node"]
    for name in ("alone:ours", "average once"):
        worse, errors = report.distance(content["summary"][name], synchronous, score)
        assert worse > 0, name
        assert errors > 3, name
        assert content["summary"][name]["targets"][-1]["reached"] == 0, name


def test_errors_of_predictions_are_what_their_rounds_give() -> None:
    (path,) = FOLDER.glob("*-prediction.json")
    record = content_of(path.stem)
    page = labs.prediction_page(record["task"], record["circumstances"], record["networks"])
    assert "\n".join([*page, ""]) == path.with_suffix(".md").read_text()


def test_what_is_quoted_is_what_the_newest_records_say() -> None:
    differing = [file.name for file, text in quote.wanted(quotable()).items() if file.read_text() != text]
    assert differing == [], "run python tools/bench.py quote"
    measured = [(name, line) for name in profile_names() for line in load_profile(name).measured]
    refuted = tuple(each.source for each in all_records() if each.refutation)
    assert [name for name, line in measured if line.endswith(refuted)] == []


def turn(
    name: str, number: int = 1, step_ms: float = 40.85, scores: Sequence[float] = (), **more: Any
) -> dict[str, Any]:
    """A turn as a record has it: an evaluation after every 5 steps, of 1 s each."""
    evaluations = [[5 * place, 5.0 * place, score] for place, score in enumerate(scores, 1)]
    return {
        "contestant": name, "round": number, "seed": number, "seconds": 30.0, "step_ms": step_ms, "paused_share": 0.01,
        "sent_bytes": 65151.6, "wire_bytes": 70000.0, "timed_steps": 10, "whole_periods": False, "facts": {},
        "evaluations": evaluations,
    } | more  # fmt: skip


def record(name: str = "a", **changed: Any) -> Record:
    at = AT | {"date": f"2026-11-2{ord(name) - ord('a')}T15:49:32+00:00", "rounds": [1], "load_average_after": [0.1]}
    facts = {"profile": changed.pop("profile", {"fetch_frequency": 2, "compression": "bf16"})}
    rounds = changed.pop("rounds", [turn("ours:bf16_compression", scores=(3.9, 3.6), facts=facts)])
    content = {
        "circumstances": at, "sittings": [at], "lab": {"nodes": 2, "ranks_per_node": 1, "rate": "1gbit"},
        "task": dataclasses.asdict(TASK) | {"network": "x", "data": "y"},
        "contestants": list(dict.fromkeys(each["contestant"] for each in rounds)), "frozen": "0123456789abcdef",
        "whole_rounds": 2, "repeats": 2, "failures": [], "rounds": rounds,
    }  # fmt: skip
    content |= changed
    return Record(Path(f"{name}.json"), content | {"summary": report.summarised(content)})


def test_a_profile_without_a_record_has_what_the_trials_of_recommend_took() -> None:
    rounds = [
        {"profiles": [{"name": "multi_node", "predicted_ms": 40.0, "measured_ms": base},
                      {"name": "int4", "predicted_ms": 40.0, "measured_ms": took}]}
        for base, took in ((40.0, 61.0), (44.0, 60.0), (42.0, None))
    ]  # fmt: skip
    tried = Record(Path("x-prediction.json"), {"circumstances": AT, "task": "bytes", "networks": {"1gbit": rounds}})
    (line,) = quote.trials_for("int4", tried)
    assert "2 rounds of recommend's trials; step 60.5 ms (multi_node: 42.0 ms); accuracy not measured" in line
    assert quote.trials_for("slowmo", tried) == quote.trials_for("int4", None) == []


def test_the_newest_record_of_a_setting_counts_with_the_knobs_of_today() -> None:
    def lines(*records: Record) -> list[str]:
        return quote.lines_for(load_profile("bf16_compression"), "bf16_compression", records)

    slow = {"lab": {"nodes": 2, "ranks_per_node": 1, "rate": "100mbit"}}
    found = lines(record("c"), record("b", **slow), record("a"), record("a", **slow))
    assert [line.rpartition("/")[2] for line in found] == ["b.json", "c.json"]
    told = "step 40.9 ms (less than its own start and one period); 0.0652 MB sent per step and node; "
    assert f"{told}bits per byte 3.600 ± 0.000 after 10 steps; 3.45 never;" in found[0]
    assert lines(record(profile={"compression": "bf16", "nccl_comm_num": 3})) == []


def test_figures_of_training_are_means_of_seeds_with_their_error_and_ranks_that_send_nothing_are_there_twice() -> None:
    nothing = turn("alone:ours", step_ms=10.0, scores=(4.0, 3.9, 3.8, 3.9), wire_bytes=0.0)
    rounds = [
        nothing | {"each": [[5, 5.0, 4.2], [10, 10.0, 4.1], [15, 15.0, 4.05], [20, 20.0, 4.3]]},
        *(turn("ours:multi_node", number, 30.0, (3.6, 3.3 + 0.1 * number), facts={"profile": {}}) for number in (1, 2)),
        *(turn("torch:ddp", number, 20.0 * number, (3.5, 3.4)) for number in (1, 2)),
    ]
    found = record(rounds=rounds).content["summary"]
    assert list(found) == ["alone:ours", "average once", "ours:multi_node", "torch:ddp"]
    assert found["alone:ours"]["at_equal_steps"]["value"] == 4.1
    assert found["alone:ours"]["best"]["value"] == 4.05
    assert found["average once"]["at_equal_steps"]["value"] == 3.9
    assert [each["reached"] for each in found["average once"]["targets"]] == [0, 0, 0]
    synchronous = found["ours:multi_node"]
    assert synchronous["at_equal_steps"] == {"value": pytest.approx(3.45), "error": pytest.approx(0.05), "seeds": 2}
    # 3.45 lies between the two evaluations of the first seed; the second seed does not reach it.
    assert [each["reached"] for each in synchronous["targets"]] == [2, 1, 0]
    assert synchronous["targets"][1] == {"target": 3.45, "seconds": None, "time_over": None, "reached": 1}
    assert found["torch:ddp"]["targets"][1]["seconds"]["value"] == pytest.approx(7.5)
    assert found["torch:ddp"]["targets"][1]["time_over"]["value"] == 1
    # Of 30 / 20 and 30 / 40: the geometric mean, and an interval by Student's t of one degree of freedom.
    ratio = synchronous["ratio"]
    assert (ratio["value"], ratio["least"], ratio["most"]) == pytest.approx(((30 / 20 * 30 / 40) ** 0.5, 0.75, 1.5))
    far = 12.7062 * np.std(np.log([1.5, 0.75]), ddof=1) / 2**0.5
    assert (ratio["low"], ratio["high"]) == pytest.approx(
        (ratio["value"] / np.exp(far), ratio["value"] * np.exp(far)), rel=1e-4
    )
    assert synchronous["twin"] == "torch:ddp"
    assert synchronous["score_over"]["value"] == pytest.approx(0.05)
    # Half of the 10 s that DDP trains: its first evaluation.
    assert synchronous["at_equal_time"]["value"] == pytest.approx(3.6)
    assert (synchronous["compute_ms"], synchronous["exposed_ms"]["value"]) == (10.0, 20.0)
    assert (synchronous["wire_ms"], synchronous["hidden_ms"]) == (pytest.approx(0.56), 0.0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"refuted": {"by": "another", "because": "x"}}, "refuted by another"),
        ({"sittings": [{"uncommitted_changes": True}]}, "uncommitted"),
        ({"whole_rounds": 0}, "no whole round"),
        ({"contestants": ["ours:mine/samples.yaml"]}, "not in the catalogue"),
    ],
)
def test_records_that_may_not_be_quoted(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(record().content))
    (tmp_path / "bad.json").write_text(json.dumps(record("c", **changed).content))
    assert reason in str(record(**changed).why_not_quoted())
    assert [each.path.stem for each in quotable(tmp_path)] == ["good"]


def test_what_no_record_has_a_case_of_is_summarised_by_its_rule() -> None:
    assert window_of({"settles_after": 90, "period_steps": 32}, 8, 100) == Window(8, 100, False)
    assert window_of({"settles_after": 10, "period_steps": 32}, 8, 100) == Window(36, 100, True)
    assert [report.wire_ms(12_500_000, rate) for rate in ("100mbit", "2.5gbit", "none")] == [1000.0, 40.0, None]
    for profile in ({"compression": "int4"}, {"use_local_sgd": True, "outer_optimizer": "x"}, {"accumulate_steps": 4}):
        assert family_of(profile) is None, profile
    assert report.score_at([(1, 2.0, 5.0), (2, 4.0, 7.0)], 3.0) == 6.0
    assert [report.score_at([(1, 2.0, 5.0), (2, 4.0, 7.0)], seconds) for seconds in (1.0, 9.0)] == [5.0, 7.0]


def test_seeds_follow_from_the_commit_that_froze_the_knobs_and_only_missing_turns_are_taken() -> None:
    assert len({strategies.seed_of("abc", number) for number in range(1, 6)}) == 5
    assert strategies.seed_of("abc", 1) != strategies.seed_of("abd", 1)
    assert strategies.seed_of("abc", 1) == 2866785017
    chosen = chosen_contestants(["multi_node", "local_sgd"], "default", "256kb")
    names = [each.name for each in chosen]
    assert names[:3] == ["alone:ours", "alone:paddle", "alone:torch"]
    assert names[5:] == [
        "paddle:data_parallel", "paddle:fleet", "torch:ddp", "torch:ddp_256kb", "torch:bf16", "torch:bf16_256kb",
        "torch:post_local_sgd_4_from_100", "horovod:ddp",
    ]  # fmt: skip
    far = [each.name for each in chosen_contestants(["streaming_diloco"], "default", "256kb", has_tables=True)]
    assert far[-4:] == ["torch:sparse", "torchft:diloco_30_3_5_0.7_0.5", "torchft:diloco_30_3_5_0.7_0.9", "horovod:ddp"]
    begun = strategies.Benchmark(TASKS["clicks"], chosen, 2, 1, "1gbit", 0.0, 5, 60.0, frozen="abc")
    begun.sittings = [AT | {"rounds": [1], "load_average_after": [0.1]}]
    begun.rounds = [turn("alone:ours", scores=(0.6,), each=[[600, 5.0, 0.6]])]
    begun.rounds[0]["evaluations"] = [[600, 5.0, 0.6]]
    written = json.loads(json.dumps(begun.record()))
    again = strategies.Benchmark(TASKS["clicks"], chosen, 2, 1, "1gbit", 0.0, 5, 60.0, frozen="abc")
    again.go_on_from(written)
    assert (1, chosen[0]) not in again.turns()
    assert len(again.turns()) == 5 * len(chosen) - 1


def test_a_record_goes_on_with_the_same_settings_processor_and_code_only(tmp_path: Path) -> None:
    keep = Keep(tmp_path / "x")
    fresh = {"circumstances": AT, "task": "bytes", "rounds": []}
    assert keep.begun(fresh) == fresh
    keep(fresh | {"rounds": [1, 2]}, [])
    assert keep.begun(fresh)["rounds"] == [1, 2]
    other = {"circumstances": AT | {"processor": "another", "commit": "fedcba"}, "task": "clicks", "rounds": []}
    words = "task: bytes there, clicks now; processor: a CPU there, another now; commit: 0123456789 there, fedcba now"
    with pytest.raises(click.UsageError, match=words):
        keep.begun(other)


@pytest.mark.parametrize(
    ("ours", "rivals", "words"),
    [
        (["nothing"], "none", "nothing"),
        (["multi_node"], "torch:ddp_4", r"PyTorch takes part as ddp, ddp_4mb"),
        (["multi_node"], "mpi:ddp", "'mpi:ddp' is not one of ours, paddle, torch, torchft, horovod, alone"),
        (["multi_node"], "paddle:static", "paddle takes data_parallel or fleet"),
        (["multi_node"], "torchft:diloco_30", "torchft takes part as diloco_STEPS_FRAGMENTS_DELAY_LR_MOMENTUM"),
    ],
)
def test_an_unknown_contestant_is_refused_with_what_is_accepted(ours: list[str], rivals: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen_contestants(ours, rivals, "4mb")


def test_the_link_is_busy_where_it_carries_more_than_a_third_of_its_rate() -> None:
    # Of the second half, until the last byte was sent: a step of 4 readings, of which one carries nothing.
    sent = [0, 0, 0, 0, 500_000, 900_000, 1_300_000, 1_300_000, 1_800_000]
    readings = [(0.004 * place, each) for place, each in enumerate([*sent, 1_800_000, 1_800_000])]
    assert step.busy_share(readings, 125e6) == pytest.approx(3 / 4)
    assert step.busy_share([(0.0, 70), (0.004, 70), (0.008, 70)], 125e6) == 0


def test_a_record_names_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["/x/tools/bench.py", "step", "--before", str(tmp_path), "--record", "a b"])
    assert circumstances()["command"] == f"python tools/bench.py step --before {tmp_path.name} --record 'a b'"


def test_ranks_share_a_global_batch_without_overlap() -> None:
    task = dataclasses.replace(TASKS["resnet18"], global_batch_size=8)
    whole, labels = Batches(task, 0, 1).at(5)
    halves = [Batches(task, rank, 2).at(5) for rank in (0, 1)]
    np.testing.assert_array_equal(np.concatenate([images for images, _ in halves]), whole)
    np.testing.assert_array_equal(np.concatenate([part for _, part in halves]), labels)
    with pytest.raises(ValueError, match="global_batch_size=8 is not a multiple of 3 ranks"):
        Batches(task, 0, 3)


@pytest.mark.parametrize("name", ["bytes", "clicks"])
def test_ranks_have_parts_of_their_own_of_little_data(name: str) -> None:
    task = TASKS[name]
    parts = [Batches(task, rank, 2) for rank in (0, 1)]
    for part in parts:
        for values, (shape, dtype) in zip(part.at(0), task.specs, strict=True):
            assert (values.shape[1:], str(values.dtype)) == (tuple(shape[1:]), dtype)
    assert not np.array_equal(parts[0].at(0)[0], parts[1].at(0)[0])
    if name == "clicks":
        np.testing.assert_array_equal(parts[0].at(3)[0], parts[0].at(303)[0])
        return
    training, validation = sources()
    assert len(training) == 98304
    inputs, labels = parts[1].at(7)
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
    second = training[len(training) // 2 :].tobytes()
    assert all(window.astype(np.uint8).tobytes() in second for window in inputs)
    # Two files may begin with the same licence.
    elsewhere = [window.astype(np.uint8).tobytes() in validation.tobytes() for window in inputs]
    assert sum(elsewhere) < len(elsewhere) / 4


def test_scores_are_what_they_are_called() -> None:
    random = np.random.default_rng(3)
    scores, clicks = random.random(300), random.random(300) < 0.3
    pairs = scores[clicks][:, None] > scores[~clicks]
    assert auc(scores, clicks.astype(np.float32)) == pytest.approx(pairs.mean())
    labels = random.integers(0, 256, (4, 8))
    assert bits_per_byte(np.zeros((32, 256), np.float32), labels) == pytest.approx(8.0)
    certain = 100 * np.eye(256, dtype=np.float32)[labels.reshape(-1)]
    assert bits_per_byte(certain, labels) == pytest.approx(0.0, abs=1e-6)
    # A network of start weights knows little of Python, one of zeros nothing.
    task = TASKS["bytes"]
    judge = Judge(task)
    start = PaddleKit(task.seed)
    build(task, start)
    assert 7.5 < judge(start.start) < 8.5
    assert judge([np.zeros_like(value) for value in start.start]) == pytest.approx(8.0)


def test_the_network_of_clicks_is_deepfm_and_that_of_bytes_looks_at_nothing_ahead() -> None:
    kit = PaddleKit(5)
    network = build(TASKS["clicks"], kit)
    ids = Batches(TASKS["clicks"], 0, 2).at(0)[0][:6]
    linear, table, *deep = kit.start
    factors = table[ids]
    hidden = factors.reshape(6, -1)
    for matrix, bias in zip(deep[0:4:2], deep[1:4:2], strict=True):
        hidden = np.maximum(hidden @ matrix + bias, 0)
    pairs = sum((factors[:, i] * factors[:, j]).sum(axis=1) for i in range(12) for j in range(i))
    expected = linear[ids].sum(axis=1)[:, 0] + pairs + (hidden @ deep[4] + deep[5])[:, 0]
    np.testing.assert_allclose(network(paddle.to_tensor(ids)).numpy()[:, 0], expected, rtol=1e-4, atol=1e-6)

    reader = build(TASKS["bytes"], PaddleKit(5))
    text = Batches(TASKS["bytes"], 0, 2).at(0)[0][:1]
    other = text.copy()
    other[0, 40:] = 32
    one, two = (reader(paddle.to_tensor(each)).numpy() for each in (text, other))
    np.testing.assert_allclose(one[:, :40], two[:, :40], atol=1e-6)
    assert np.abs(one[:, 40:] - two[:, 40:]).max() > 1e-4


def test_a_network_is_told_as_people_say_it() -> None:
    told = {"100mbit": "at 100 Mb/s", "2.5gbit": "at 2.5 Gb/s", "none": "without a limit"}
    told |= {"100mbit-20ms": "at 100 Mb/s with a ping of 20 ms"}
    assert {name: told_network(name) for name in told} == told


def test_scores_at_equal_steps_are_the_mean_over_the_last_period() -> None:
    task = dataclasses.replace(TASKS["bytes"], steps=120)
    assert task.evaluated_at() == [25, 50, 75, 100, 120]
    assert task.evaluated_at(30) == [25, 50, 75, 93, 97, 100, 101, 105, 108, 112, 116, 120]
    # Ranks that send nothing go on, and are compared where the others end.
    twice = dataclasses.replace(task, steps=240, compared_at=120)
    assert 120 in twice.evaluated_at()
    assert twice.evaluated_at()[-1] == 240
    curve = [[90, 1.0, 9.0], [93, 1.1, 4.0], [105, 1.2, 3.0], [120, 1.3, 2.0], [240, 2.0, 1.0]]
    assert report.score_at_steps({"facts": {"period_steps": 30}, "evaluations": curve}, 120) == 3.0
    assert report.score_at_steps({"facts": {}, "evaluations": curve}, 120) == 2.0


def test_a_table_and_a_picture_have_the_best_rival_of_each_kind_beside_ours() -> None:
    slow, fast = (3.9, 3.44), (3.5, 3.4)
    rounds = [
        turn(name, number, step_ms, scores, facts={"profile": {}})
        for number in (1, 2)
        for name, step_ms, scores in (
            ("torch:ddp", 40.0, fast), ("torch:ddp_256kb", 30.0, fast), ("ours:multi_node", 35.0, fast),
            ("torch:bf16", 20.0, slow), ("torch:powersgd_2_from_100", 25.0, fast),
            ("torch:post_local_sgd_4_from_100", 22.0, slow), ("torchft:diloco_30_3_5_0.7_0.5", 24.0, (3.9, 3.8)),
        )
    ]  # fmt: skip
    content = record(rounds=rounds).content
    table = "\n".join(quote.figures_of(content, is_short=True))
    for name in ("torch:ddp_256kb", "multi_node", "torch:powersgd_2_from_100", "torch:post_local_sgd_4_from_100"):
        assert f"| `{name}` |" in table
    for name in ("`torch:ddp`", "torch:bf16", "torchft"):
        assert name not in table
    assert "bits per byte 3.45 takes 1.00 [1.00, 1.00] of the time" in pictures.title(content)
    assert all(name in pictures.picture(content) for name in ("torch:powersgd_2_from_100", "ours:multi_node"))
