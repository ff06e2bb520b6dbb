"""Tests that a page names as its evidence exist."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import ROOT

PAGES = {"docs/faults.md": 9, "CONTRIBUTING.md": 5}
"""The least number of tests that each page names."""
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("page", PAGES)
def test_a_test_that_a_page_names_exists(page: str) -> None:
    named = set(NAMED.findall((ROOT / page).read_text()))
    assert len(named) >= PAGES[page]
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if not (ROOT / path).exists() or f"\ndef {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == [], f"{page} names tests that do not exist: {missing}"


def test_each_row_of_what_gives_the_same_bits_names_a_test() -> None:
    text = (ROOT / "docs/faults.md").read_text().partition("## What gives the same bits")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8
    assert [row for row in rows if not NAMED.search(row) and not row.startswith("| ---")] == []
