"""Pages and profiles quote the newest record, and none that is refuted."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest

from fleet_train.profile import load_profile, profile_names
from tests.support.processes import ROOT
from tools.bench_strategies import main
from tools.benchmarks.figures import summarise
from tools.benchmarks.quoted import tables_outside_blocks
from tools.benchmarks.records import FOLDER, Record, all_records, in_history, is_marked_page, quotable
from tools.write_measured import PAGES, wanted

RECORDS = all_records()
STRATEGIES = [each for each in RECORDS if each.compares_strategies]
EACH = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.path.stem)


def test_profiles_and_pages_say_what_the_newest_records_say() -> None:
    differing = [file.name for file, text in wanted(quotable()).items() if file.read_text() != text]
    assert differing == [], "run python tools/write_measured.py"


@pytest.mark.parametrize("page", ["README.md", "README_cn.md", *PAGES])
def test_no_table_of_a_page_stands_outside_of_a_block(page: str) -> None:
    assert tables_outside_blocks((ROOT / page).read_text()) == []


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_quotes_no_refuted_record(name: str) -> None:
    refuted = [each.source for each in RECORDS if each.refutation]
    assert [line for line in load_profile(name).measured for source in refuted if source in line] == []


def test_profiles_quote_what_the_trials_of_recommend_took() -> None:
    networks = json.loads((FOLDER / "2026-11-22-prediction.json").read_text())["networks"]
    steps: dict[str, list[float]] = {}
    for profile in (profile for made in networks["1gbit"] for profile in made["profiles"]):
        if profile["measured_ms"] is not None:
            steps.setdefault(profile["name"], []).append(profile["measured_ms"])
    figures = {name: f"{median(steps[name]):.1f} ms" for name in profile_names() if name in steps}
    expected = [
        f"2026-11-22, mlp, 2 nodes x 1 on 1gbit, CPU, 3 rounds of recommend's trials; step {figures[name]} "
        f"(multi_node: {figures['multi_node']}); accuracy not measured; docs/benchmarks/2026-11-22-prediction.json"
        for name in figures
        if not any("-mlp-1gbit" in line for line in load_profile(name).measured)
    ]
    assert len(expected) == 7
    quoted = [line for name in profile_names() for line in load_profile(name).measured if "prediction" in line]
    assert quoted == expected


@EACH
def test_a_mark_is_on_the_page_and_in_the_list(record: Record) -> None:
    page = record.path.with_suffix(".md").read_text()
    section = (FOLDER / "README.md").read_text().partition("\n## Refuted\n")[2]
    assert is_marked_page(page) == bool(record.refutation)
    assert (f"`{record.path.stem}`" in section) == bool(record.refutation)


@EACH
def test_a_record_whose_commit_is_lost_is_marked(record: Record) -> None:
    known = in_history(record.circumstances["commit"])
    if known is None:
        pytest.skip("the history is not here")
    assert known or record.refutation, f"{record.path.name}: {record.circumstances['commit']} is not in the history"


@pytest.mark.parametrize("record", STRATEGIES, ids=lambda record: record.path.stem)
def test_a_record_from_before_the_rules_is_marked(record: Record) -> None:
    assert "sittings" in record.content or record.refutation


def quoted_records() -> list[Record]:
    return quotable() or [pytest.param(None, marks=pytest.mark.skip("no record may be quoted yet"))]  # type: ignore[list-item]


def close(value: object) -> object:
    """Equal to what differs by rounding only, at any depth."""
    if isinstance(value, dict):
        return {key: close(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close(each) for each in value]
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


@pytest.mark.parametrize("record", quoted_records(), ids=lambda record: record.path.stem if record else "none")
def test_a_quoted_record_is_what_its_raw_times_give(record: Record) -> None:
    content = record.content
    for name, figures in content["summary"].items():
        rounds = {each["round"]: each["ranks"] for each in content["rounds"] if each["contestant"] == name}
        task, lab = content["task"], content["lab"]
        again = asdict(summarise(rounds, task["warmup_steps"], lab["ranks_per_node"], content["target"]))
        again = json.loads(json.dumps(again))
        # Python 3.12 and newer add floats with a compensated sum.
        assert {key: close(figures[key]) for key in again} == again, f"{record.path.name}: {name}"


@pytest.mark.parametrize("record", quoted_records(), ids=lambda record: record.path.stem if record else "none")
def test_a_quoted_records_commands_make_it(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(main, "callback", lambda **options: given.append(options))
    for sitting in record.content["sittings"]:
        main(shlex.split(sitting["command"])[2:], standalone_mode=False)
    last = given[-1]
    assert Path(str(last["output"])) == Path("docs/benchmarks") / record.path.stem
    assert last["repeats"] == record.content["repeats"]
    assert last["task_name"] == record.content["task"]["name"]
