"""The wall clock can be set, by hand and by NTP: nothing is measured, bounded or ordered by it.

What people read may show it; whoever needs it for that is listed here. Runs of different days are ordered by it, where
no run that is known says otherwise.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.processes import ROOT

_USES = {
    "doctor/measure_apart.py": {"st_mtime", "time.time"},  # what a killed doctor left, by an hour and more
    "doctor/responder.py": {"time.time"},  # the clocks of two machines are what is compared
    "selftest/record.py": {"datetime.now"},  # the date of a record
    "train/metrics.py": {"time.time"},  # of each record; records are ordered by their steps
    "train/prometheus_sink.py": {"time.time"},  # of the newest record, for people's eyes
    "train/checkpoint/storage.py": {"time.time"},  # a run's begin, made later than that of every run that is seen then
}
_OF_THE_WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "ctime", "getmtime", "create_time"}
_OF_FILES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "st_atime"}


def asked(path: Path) -> set[str]:
    """Each use of a wall clock, or of the times of files, in a module: ``time.time``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found |= {f"{node.module}.{name.name}" for name in node.names if name.name in _OF_THE_WALL}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_clock = node.attr in _OF_THE_WALL and node.value.id in ("time", "datetime", "date", "os", "path")
            if is_clock or node.attr in _OF_FILES:
                found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr in _OF_FILES | {"getmtime", "create_time"}:
            found.add(node.attr)
    return found


def test_the_wall_clock_is_shown_to_people_and_orders_runs_and_nothing_else() -> None:
    package = ROOT / "fleet_train"
    found = {str(path.relative_to(package)): asked(path) for path in sorted(package.rglob("*.py"))}
    assert {name: uses for name, uses in found.items() if uses} == _USES


def test_uses_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import time\nfrom time import time as now\nfrom datetime import datetime\n"
        "time.time()\ndatetime.now()\npath.stat().st_mtime\nprocess().create_time()\ntime.monotonic()\n"
    )
    assert asked(module) == {"time.time", "datetime.now", "st_mtime", "create_time"}
