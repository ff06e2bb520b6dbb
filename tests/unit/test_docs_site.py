"""The parts of the documentation site that need no build: links, lists, generated pages, the navigation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fleet_train.cli import COMMANDS
from fleet_train.profile import profile_names
from tests.support.processes import ROOT
from tools.docs_site import layout
from tools.docs_site.links import Page, Rewriter, separated_lists, source_page
from tools.docs_site.pages import allowed, api_pages, catalogue_page, command_line_page, keys_page


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        (Page("docs/a.md", "a.md"), "[x](../README.md)", "[x](index.md)"),
        (Page("docs/benchmarks/a.md", "benchmarks/a.md"), "[x](../../README.md#two)", "[x](../index.md#two)"),
        (Page("README.md", "index.md"), "[x](docs/proven.md) [y](README_cn.md)", "[x](proven.md) [y](index_cn.md)"),
        (Page("README.md", "index.md"), "[x](docs/benchmarks)", "[x](benchmarks/README.md)"),
        (Page("docs/a.md", "a.md"), "[x](../strategies/dgc.yaml)", "[x](reference/catalogue.md#dgc)"),
        (Page("README.md", "index.md"), "[x](tools/train.py)", "[x](source/tools/train.py.md)"),
        (Page("docs/a.md", "a.md"), "[x](../tests/streams/)", "[x](source/tests/streams.md)"),
        (Page("docs/a.md", "a.md"), "[x](https://a.org/b.md) [y](#z)", "[x](https://a.org/b.md) [y](#z)"),
        # What does not exist stays, for strict mode to name.
        (Page("docs/a.md", "a.md"), "[x](nothing.md) [y](../nothing.py)", "[x](nothing.md) [y](../nothing.py)"),
        (Page("docs/a.md", "a.md"), "```text\n[x](../README.md)\n```", "```text\n[x](../README.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: Page, text: str, expected: str) -> None:
    assert Rewriter(ROOT).rewritten(page, text) == expected + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two things:\n- one\n- two", "Two things:\n\n- one\n- two"),
        ("- one\n  goes on\n- two", "- one\n  goes on\n- two"),
        ("- one\n  - inner", "- one\n    - inner"),
        ("words\n| a | b |\n| --- | --- |", "words\n\n| a | b |\n| --- | --- |"),
        ("in the year\n2019. So", "in the year\n2019. So"),
        ("```yaml\nlist:\n- one\n  - two\n```", "```yaml\nlist:\n- one\n  - two\n```"),
        ("````\n```\nlist:\n- one\n````", "````\n```\nlist:\n- one\n````"),
    ],
)
def test_lists_and_tables_are_separated_as_python_markdown_wants_them(text: str, expected: str) -> None:
    assert separated_lists(text) == expected + "\n"


def test_shown_file_is_whole_whatever_fences_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a\n````\nb\n")
    assert source_page(tmp_path, "notes.txt").endswith("# `notes.txt`\n\n`````text\na\n````\nb\n`````\n")
    (tmp_path / "inner").mkdir()
    assert source_page(tmp_path, "").endswith("\n\n- `inner/`\n- `notes.txt`\n")


def test_command_line_page_has_every_command_with_its_flags() -> None:
    page = command_line_page()
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert [name for name in headings if " " not in name] == ["fleet_train", *COMMANDS]
    assert "manifest slurm" in headings
    launch = page.split("## launch\n")[1].split("\n## ")[0]
    assert "Usage: python -m fleet_train launch [OPTIONS]" in launch
    assert "--cluster_node_ips" in launch


def test_keys_catalogue_and_api_are_whole() -> None:
    page, schema = keys_page(ROOT), json.loads((ROOT / "strategies" / "schema.json").read_text())
    assert re.findall(r"^## `(\w+)`", page, re.MULTILINE) == list(schema["properties"])
    assert "- Allowed: a number, more than 0, up to 4096 or `auto`" in page
    assert "- Needs: `fuse_all_reduce_ops`" in page
    assert re.findall(r"^## (\w+) \{", catalogue_page(ROOT), re.MULTILINE) == sorted(profile_names())
    pages = api_pages(ROOT)
    assert len(pages) == 1 + len(layout.folders(ROOT))
    assert "\n::: fleet_train.errors\n" in pages["reference/api/fleet_train.md"]
    assert "::: fleet_train.__main__" not in pages["reference/api/fleet_train.md"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"enum": ["O0", "O1"], "type": "string"}, "one of `O0`, `O1`"),
        ({"type": "integer", "minimum": 1, "maximum": 16}, "a whole number, from 1, up to 16"),
        ({"type": "integer", "maximum": 1000000000}, "a whole number, up to 1000000000"),
    ],
)
def test_the_values_of_a_key_are_described(row: dict[str, Any], words: str) -> None:
    assert allowed(row) == words


def test_generated_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert layout.main(["--check"]) == 0, capsys.readouterr().err


def test_silent_folder_and_missing_page_are_found(tmp_path: Path) -> None:
    (tmp_path / "fleet_train" / "mute").mkdir(parents=True)
    (tmp_path / "fleet_train" / "__init__.py").write_text('"""Says something."""\n')
    (tmp_path / "fleet_train" / "mute" / "__init__.py").touch()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "design.md").write_text(
        "## Mass\n| `fleet_train/` | 1 | 1 |\n| `fleet_train/mute/` | 1 | 5 |\n- `fleet_train`: the root\n"
        "- `fleet_train/mute`: silent\n## Next\n"
    )
    assert "| `fleet_train/mute/` |  |\n" in layout.page(tmp_path)
    missing = [
        "fleet_train/mute/__init__.py: needs a docstring that says what the folder contains",
        "docs/layout.md is out of date; run: python -m tools.docs_site.layout",
    ]
    assert list(layout.problems(tmp_path)) == missing
    (tmp_path / "fleet_train" / "mute" / "long.py").write_text("x = 1\n" * 501)
    (tmp_path / "fleet_train" / "short.py").write_text("x = 1\n")
    assert [line for line in layout.problems(tmp_path) if line not in missing] == [
        "fleet_train/: 2 files with 2 lines; docs/design.md allows 1 with 1: make it smaller, or raise the number in a "
        "commit that says why",
        "fleet_train/short.py: 1 lines; a file has 60 to 500",
        "fleet_train/mute/: 2 files with 501 lines; docs/design.md allows 1 with 5: make it smaller, or raise the "
        "number in a commit that says why",
        "fleet_train/mute/long.py: 501 lines; a file has 60 to 500",
    ]


TABLE = {
    "errors": frozenset[str](),
    "plan": frozenset({"errors"}),
    "train": frozenset({"plan", "errors"}),
    "cli": frozenset({"train", "errors"}),
}


def test_picture_draws_what_does_not_follow_and_each_box_above_what_it_imports() -> None:
    assert layout.ordered(TABLE) == ["cli", "train", "plan", "errors"]
    assert layout.drawn_imports(TABLE) == [("cli", "train"), ("plan", "errors"), ("train", "plan")]
    assert layout.picture(TABLE, frozenset({"train"})).count(layout.WITH_PADDLE) == 2, "its box, and what that means"
    source = (
        "MAY_IMPORT: X = {'errors': set(), 'plan': {'errors'}, '__main__': {'plan'}}\nLAYERS_WITH_PADDLE = {'plan'}"
    )
    assert layout.tables(source) == ({"errors": frozenset(), "plan": frozenset({"errors"})}, {"plan"})
