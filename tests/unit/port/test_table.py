"""Every row of the table: the new form of an old line (golden.yaml), whose names exist today."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_train.port import port
from fleet_train.port.calls import PREFIX
from fleet_train.port.index import rows
from fleet_train.port.rules import To, Todo
from tests.support.processes import ROOT, clean_environ, python
from tests.unit.port import golden

GOLDEN: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "golden.yaml").read_text())
ROWS = rows()
# What the old lines of Fleet itself and those of fleet scripts need around them.
OF_FLEET = {
    name for name in GOLDEN if name.startswith("paddle.distributed.fleet") or name.endswith("(in fleet scripts)")
}


@pytest.fixture(scope="module")
def ported() -> dict[str, str]:
    """Each row's old line, ported: two scripts, with Fleet and without."""
    found = {}
    for names, fleet in ((sorted(GOLDEN.keys() - OF_FLEET), False), (sorted(OF_FLEET), True)):
        new = port(golden.script([GOLDEN[name]["old"] for name in names], fleet).encode(), "golden.py").new.decode()
        found |= dict(zip(names, golden.split(new), strict=True))
    return found


def test_every_row_has_a_golden_line() -> None:
    assert GOLDEN.keys() == ROWS.keys()


@pytest.mark.parametrize("row", sorted(GOLDEN))
def test_old_line_becomes_the_golden_one(row: str, ported: dict[str, str]) -> None:
    assert ported[row] == GOLDEN[row]["new"]


@pytest.mark.parametrize("row", sorted(name for name, rule in ROWS.items() if isinstance(rule, Todo)))
def test_what_a_machine_cannot_decide_stays_below_a_todo_line(row: str, ported: dict[str, str]) -> None:
    if row.endswith("CompiledProgram"):
        return  # is always taken away; the row speaks where it cannot be
    todo, line = ported[row].split("\n")
    assert todo.startswith(PREFIX)
    assert line == GOLDEN[row]["old"]


_LOOK = """
import inspect, json, sys
import paddle
from fleet_train import DistributedStrategy, compat, fleet, role_maker
from fleet_train.port.table_programs import BUILD_FIELDS
wrong = []
for name, keywords in json.load(open(sys.argv[1])):
    owner, _, last = name.rpartition(".")
    if owner == "fleet":
        there = last in fleet.__all__
    else:
        there = True
    try:
        thing = None if name in ("fleet.main_program", "fleet.startup_program") else eval(name)
    except AttributeError as error:
        there = False
    if not there:
        wrong.append(f"{name} does not exist")
    elif keywords:
        known = inspect.signature(thing).parameters
        wrong += [f"{name} has no parameter {word}" for word in keywords if word not in known]
fields = {name for name in dir(paddle.static.BuildStrategy()) if name[0] != "_"} - {"ReduceStrategy"}
wrong += [f"BuildStrategy has a field {name}" for name in fields ^ BUILD_FIELDS]
print(json.dumps(wrong))
"""


def test_every_target_exists_today_with_the_arguments_that_are_written(tmp_path: Path) -> None:
    asked: list[Any] = []
    for rule in ROWS.values():
        if isinstance(rule, To):
            words = [one.new for one in rule.parameters if one.dropped is None and one.old != rule.act]
            words += [keyword for keyword, _ in rule.added]
            direct = set(rule.targets) - {rule.otherwise}
            asked += [(name, words) for name in sorted(direct)] + ([(rule.otherwise, [])] if rule.otherwise else [])
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "look.py").write_text(_LOOK)
    done = subprocess.run(
        python(str(tmp_path / "look.py"), str(tmp_path / "asked.json")),
        env=clean_environ({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_compat_takes_the_arguments_of_1_8_in_their_order() -> None:
    old = json.loads((Path(__file__).parent / "signatures_1_8.json").read_text())
    code = (
        "import inspect, json\nfrom fleet_train import compat\n"
        "show = lambda f: [[p.name, None if p.default is p.empty else repr(p.default)] for p in "
        "inspect.signature(f).parameters.values()]\n"
        "print(json.dumps({name: show(getattr(compat, name)) for name in compat.__all__}))"
    )
    done = subprocess.run(
        python("-c", code),
        env=clean_environ({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    now = json.loads(done.stdout.splitlines()[-1])
    assert now.keys() == old.keys() | {"clone_for_test"}  # a method in 1.8
    for name, parameters in old.items():
        assert [one[0] for one in now[name]][: len(parameters)] == [one[0] for one in parameters], name
        assert [one[1] for one in now[name][: len(parameters)] if one[0] not in ("type", "place")] == [
            one[1] for one in parameters if one[0] not in ("type", "place")
        ], name
