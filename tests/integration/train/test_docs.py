"""docs/training.md keeps its word beyond its commands, which tests/integration/test_docs.py runs."""

from __future__ import annotations

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "training.md"


def test_example_is_true() -> None:
    (example,) = fenced_blocks(PAGE.read_text(), "python")
    exec(compile(example, str(PAGE), "exec"), {})
