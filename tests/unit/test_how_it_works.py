"""docs/how-it-works.md names functions and files that exist where the page says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PACKAGE = ROOT / "fleet_train"
PAGE = ROOT / "docs" / "how-it-works.md"
# What users, Paddle and this page call by their own names.
FOREIGN = {"fleet_train/", "fleet.distributed_optimizer", "minimize", "paddle.static.register_op"}


def sections(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """(files, other names) in backticks, of each section."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        cited = re.findall(r"`([^`]+)`", section)
        files = [word for word in cited if word.endswith(".py")]
        yield files, [word for word in cited if not word.endswith(".py") and word not in FOREIGN]


def names_in(path: Path) -> set[str]:
    """Functions, classes, constants and methods (``Class.method``) that a module defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def wrong(text: str) -> list[str]:
    """One line for each file that is not there, and for each name that no file of its section defines."""
    found = []
    for files, names in sections(text):
        for file in files:
            if not (PACKAGE / file).is_file():
                now = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob(Path(file).name))
                found.append(f"`{file}` is not in fleet_train/; of that name there is {now or 'nothing'}")
        defined = set().union(*(names_in(PACKAGE / file) for file in files if (PACKAGE / file).is_file()))
        for name in names:
            if name not in defined:
                found.append(f"`{name}` is in none of {sorted(set(files))}, but in {homes().get(name, 'no module')}")
    return found


@cache
def homes() -> dict[str, list[str]]:
    """Which modules define each name."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in names_in(path):
            found.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    return found


def test_every_name_is_where_the_page_says() -> None:
    assert wrong(PAGE.read_text()) == []


def test_page_goes_from_backward_to_finish() -> None:
    cited = [name for _, names in sections(PAGE.read_text()) for name in names]
    way = ["DistributedOptimizer.backward", "agreed_plan", "insert_launches", "GradientExchange.launch", "flatten"]
    way += ["FlatAllreduce.sum", "ThreadEngine.start", "GradientExchange.wait", "ProgramPasses.update"]
    way += ["GradientExchange.finish"]
    assert [name for name in cited if name in way] == way


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "`collectives/exchanges.py`",
            "`collectives/exchanges.py` is not in fleet_train/; of that name there is nothing",
        ),
        ("`Job.lunch` (`errors.py`)", "`Job.lunch` is in none of ['errors.py'], but in no module"),
        ("`FleetTrainError`", "`FleetTrainError` is in none of [], but in ['errors.py']"),
    ],
)
def test_a_name_that_is_not_there_is_found(text: str, complaint: str) -> None:
    assert wrong(text) == [complaint]


def test_a_moved_file_is_reported_with_its_new_place() -> None:
    (line,) = wrong("`mistakes/errors.py`")
    assert line == "`mistakes/errors.py` is not in fleet_train/; of that name there is ['errors.py']"
