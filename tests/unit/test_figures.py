"""Every measured figure of README and docs is what the newest record of its kind says; a page that says otherwise, or
that links to a record without an entry, is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.benchmarks import figures, readings
from tools.benchmarks.figures import FIGURES, PAGE, Figure, Source, newest, pages, problems, words_of, written
from tools.benchmarks.record import ROOT

SOURCES = newest()


def found(page: str, old: str, new: str, sources: dict[str, Source] = SOURCES) -> list[str]:
    texts = pages()
    assert old in texts[page]
    return list(problems(texts | {page: texts[page].replace(old, new)}, sources))


def test_every_figure_is_what_the_newest_record_says_and_every_link_has_an_entry() -> None:
    assert list(problems(pages(), SOURCES)) == [], "change the page, or the list in tools/benchmarks/figures.py"
    assert (ROOT / PAGE).read_text() == written(SOURCES), "run python tools/bench.py figures"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.page}, {figure.kind}")
def test_the_values_of_an_entry_fill_its_gaps(figure: Figure) -> None:
    """A value that no gap takes would be one that nobody compares, but for entries that choose theirs by number."""
    source = SOURCES[figure.kind]
    gaps = [gap.strip("{}").partition(":")[0] for gap in figures._GAP.findall(figure.words)]
    own = [gap for gap in gaps if gap not in ("name", "date")]
    assert figure.values is readings.nothing or own, "has no figure"
    assert all(own) or not any(own), "numbers some gaps only"
    assert source.name in words_of(figure, source) or "{name}" not in figure.words


def test_a_changed_number_in_a_page_is_named_with_what_the_record_says() -> None:
    (line,) = found("docs/memory.md", "took 361 MB instead of 426", "took 261 MB instead of 426")
    assert line.startswith("docs/memory.md: has \"the rank with most keeps 0.251 of a ResNet-18's state")
    said, recorded = line.split("; 2026-11-28-sharding.json gives ")
    assert "took 261 MB" in said
    assert "took 361 MB" in recorded
    (line,) = found("docs/control-plane.md", "| 32 | to the root | 1.3 | 2.7 |", "| 32 | to the root | 1.2 | 2.7 |")
    assert "has '| 32 | to the root | 1.2 |" in line
    (line,) = found("docs/proven.md", "| 60 kills", "| 160 kills")
    assert "160 kills" in line.partition("; ")[0]
    (line,) = found("docs/memory.md", "302 MB instead of 271", "302 MB instead of 271.5")
    assert line.startswith("docs/memory.md: has ")
    (line,) = found("docs/tests.md", "323 noticed", "323 found")
    assert line.startswith("docs/tests.md: does not say it; 2026-11-27-mutants.jsonl gives '470 were tried")


def test_a_changed_or_newer_record_names_the_pages_to_change() -> None:
    old = SOURCES["soak"]
    faults = [*old.content["faults"], old.content["faults"][0]]
    lines = list(problems(pages(), SOURCES | {"soak": replace(old, content=old.content | {"faults": faults})}))
    assert [line.partition(":")[0] for line in lines] == ["docs/faults.md", "docs/proven.md"]
    assert all("61 " in line.partition(" gives ")[2] for line in lines)
    newer = replace(old, path=old.path.with_name("2027-01-01-soak.json"))
    lines = list(problems(pages(), SOURCES | {"soak": newer}))
    outdated = [line for line in lines if line.endswith("; the newest record is 2027-01-01-soak")]
    assert [line.partition(":")[0] for line in outdated] == ["docs/faults.md", "docs/proven.md"]


def test_a_link_to_a_record_needs_an_entry_on_its_page_or_a_block() -> None:
    link = "benchmarks/2026-11-22-codec.md"
    assert found("README.md", "## Where to go next", f"## Where to go next\n[codec](docs/{link})") == [
        "README.md: links to 2026-11-22-codec, and tools/benchmarks/figures.py has no entry for codec on this page"
    ]
    block = f"<!-- figures: task=none network=1gbit -->\n[x]({link})\n<!-- end of figures -->"
    assert found("README.md", "## Where to go next", f"## Where to go next\n{block}") == []


def test_a_sentence_about_all_of_a_record_needs_an_entry_that_computes_it() -> None:
    link = "[kills](benchmarks/2026-11-29-kills.md)"
    text = pages()["docs/faults.md"]
    lines = list(
        problems(pages() | {"docs/faults.md": f"{text}\nOf {link}, all were survived. All is said.\n"}, SOURCES)
    )
    assert lines == [
        "docs/faults.md: says 'all' of a record in words that no entry computes: "
        "'Of [kills](benchmarks/2026-11-29-kills.md), all were survived.'"
    ]


def test_the_newest_record_that_is_not_refuted_counts(tmp_path: Path) -> None:
    for day, content in (("01", {"a": 1}), ("02", {"a": 2}), ("03", {"refuted": {"by": "x", "because": "y"}})):
        (tmp_path / f"2026-11-{day}-codec.json").write_text(json.dumps(content))
        (tmp_path / f"2026-11-{day}-codec.md").touch()
    (tmp_path / "2026-11-09-doctor-codec.json").write_text("{}")
    assert [(each.name, each.content) for each in newest(tmp_path).values()] == [("2026-11-02-codec", {"a": 2})]
    lines = list(problems({}, {}))
    assert len(lines) == len(FIGURES)
    assert lines[0].startswith("docs/checkpoints.md: no record of checkpoint")


def test_the_command_reports_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / PAGE).write_text("old\n")
    (tmp_path / "docs" / "benchmarks").symlink_to(ROOT / "docs" / "benchmarks")
    texts = pages()
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "pages", lambda: texts)
    run = CliRunner().invoke
    result = run(figures.main, ["--check"])
    assert (result.exit_code, result.output) == (1, f"{PAGE}: not what the records say\n")
    assert run(figures.main, []).output == f"{PAGE}: written\n"
    assert run(figures.main, ["--check"]).exit_code == 0
    assert (tmp_path / PAGE).read_text() == written(SOURCES)
    texts["docs/tests.md"] = ""
    result = run(figures.main, ["--check"])
    assert result.exit_code == 1
    assert result.output.startswith("docs/tests.md: does not say it")
