"""Where the documentation site is built."""

from __future__ import annotations

from tests.support.processes import ROOT

PYTHON = ROOT / ".venv-docs" / "bin" / "python"


def why_no_site() -> str | None:
    return None if PYTHON.is_file() else "there is no .venv-docs, in which the site is built: make docs"
