"""Which test runs each command that a page of the documentation prints.

A page with commands (docs/NAME.md, README.md, CONTRIBUTING.md) has a table tests/integration/docs/NAME.yaml:

    run:              # run as printed, in this order, in one folder; value: what the output must contain
      python -m fleet_train profiles multi_node: nccl_comm_num
    elsewhere:        # run by another test, word for word but for addresses, ports and folders; value: that test
      make demo: tests/integration/train/test_demo.py::test_demo_learns_the_digits_and_says_where_everything_is
      python train.py: tests/integration/test_docs.py::test_commands_run_as_printed  # another page has it under `run`
    cannot_run_here:  # value: the reason
      pip install -r requirements-gpu.txt: needs a GPU

The folder has a train.py (tools/examples/train_with_fleet.py) and a mine.yaml. Only what ends within seconds, and needs
neither root nor the internet, belongs under `run`. Sections may be left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.support.commands import shell_commands
from tests.support.processes import ROOT

TABLES = ROOT / "tests" / "integration" / "docs"
SECTIONS = ("run", "elsewhere", "cannot_run_here")
_COMMAND_LINE = re.compile(r"^ *(\$ |sudo |python |make |pip |fleet_train |bash |apt-get )")


@dataclass(frozen=True)
class Table:
    """Each section: command -> what its comment above says."""

    run: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    cannot_run_here: dict[str, str] = field(default_factory=dict)

    @property
    def commands(self) -> list[str]:
        return [*self.run, *self.elsewhere, *self.cannot_run_here]


def pages() -> list[Path]:
    """The README, CONTRIBUTING.md and every page of docs/. README_cn.md has the README's commands: test_readme.py."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def table_of(page: Path) -> Table:
    """Raises ValueError for what is no such table."""
    path = TABLES / f"{page.stem}.yaml"
    content = yaml.safe_load(path.read_text()) if path.exists() else {}
    if not isinstance(content, dict) or not all(isinstance(rows, dict) for rows in content.values()):
        raise ValueError(f"{path}: not sections of `command: value` lines")
    if unknown := content.keys() - set(SECTIONS):
        raise ValueError(f"{path}: unknown section {sorted(unknown)}; the sections are {', '.join(SECTIONS)}")
    return Table(**content)


def commands_of(page: Path) -> list[str]:
    """What a reader would type: every command of every block that is labelled as shell."""
    return shell_commands(page.read_text())


def hidden_commands(page: Path) -> list[str]:
    """Lines that look like commands in blocks without a shell's label, where `commands_of` does not see them."""
    text = re.sub(r"^```\w+\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) + re.findall(
        r"^ {4}.*$", text, re.MULTILINE
    )
    return [line.strip() for block in blocks for line in block.splitlines() if _COMMAND_LINE.match(line)]
