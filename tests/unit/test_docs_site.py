"""The parts of the documentation site that no build shows: links, lists, and what its pages of folders miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tools.docs_site import layout
from tools.docs_site.links import Page, Rewriter, separated_lists

DEEP, FIRST = Page("docs/benchmarks/a.md", "benchmarks/a.md"), Page("README.md", "index.md")


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        (DEEP, "[x](../../README.md#two)", "[x](../index.md#two)"),
        (FIRST, "[x](docs/proven.md) [y](README_cn.md)", "[x](proven.md) [y](index_cn.md)"),
        (FIRST, "[x](docs/benchmarks)", "[x](benchmarks/README.md)"),
        (FIRST, "[x](strategies/slowmo.yaml)", "[x](reference/catalogue.md#slowmo)"),
        (
            FIRST,
            "[x](tools/train.py) [y](tests/streams/)",
            "[x](source/tools/train.py.md) [y](source/tests/streams.md)",
        ),
        (DEEP, "[x](https://a.org/b.md) [y](#z) [z](no.md)", "[x](https://a.org/b.md) [y](#z) [z](no.md)"),
        (FIRST, "```text\n[x](docs/proven.md)\n```", "```text\n[x](docs/proven.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: Page, text: str, expected: str) -> None:
    assert Rewriter(ROOT).rewritten(page, text) == expected + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two things:\n- one\n  - inner\n- two", "Two things:\n\n- one\n    - inner\n- two"),
        ("words\n| a | b |\n| --- | --- |", "words\n\n| a | b |\n| --- | --- |"),
        ("in the year\n2019. So", "in the year\n2019. So"),
        ("````\n```\nlist:\n- one\n````", "````\n```\nlist:\n- one\n````"),
    ],
)
def test_lists_and_tables_are_separated_as_python_markdown_wants_them(text: str, expected: str) -> None:
    assert separated_lists(text) == expected + "\n"


def test_a_silent_folder_and_files_beyond_what_is_allowed_are_found(tmp_path: Path) -> None:
    (tmp_path / "fleet_train" / "mute").mkdir(parents=True)
    (tmp_path / "fleet_train" / "__init__.py").write_text('"""Says something."""\n')
    (tmp_path / "fleet_train" / "mute" / "__init__.py").touch()
    (tmp_path / "fleet_train" / "mute" / "long.py").write_text("x = 1\n" * 501)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "design.md").write_text(
        "## Mass\n| `fleet_train/` | 1 | 1 |\n| `fleet_train/mute/` | 1 | 5 |\n- `fleet_train`: the root\n"
        "- `fleet_train/mute`: silent\n## Next\n"
    )
    read = ", ".join(["`mute/long.py`"] * 11)
    (tmp_path / "docs" / "how-it-works.md").write_text(f"## One evening\n- {read}\n\n## Next\n")
    assert [problem.split(";")[0] for problem in layout.problems(tmp_path)] == [
        "fleet_train/mute/__init__.py: needs a docstring that says what the folder contains",
        "fleet_train/mute/: 2 files with 501 lines",
        "fleet_train/mute/long.py: 501 lines",
        "docs/how-it-works.md: one evening reads 11 files with 5,511 lines",
        "docs/layout.md is out of date",
    ]
