"""Every `--help` is fast: since a machine may be busy, the test checks what is imported instead of the time."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet_train.cli import COMMANDS
from tests.support.processes import ROOT, clean_environ, python

# Each takes a tenth of a second or more to import, or pulls in one that does.
HEAVY = {
    "asyncio",
    "flask",
    "google",
    "libcst",
    "llvmlite",
    "matplotlib",
    "numba",
    "paddle",
    "pandas",
    "psutil",
    "pydantic",
    "safetensors",
    "scipy",
    "sklearn",
    "visualdl",
}
CLI = ROOT / "fleet_train" / "cli"


def modules_loaded_by_help(*command: str) -> set[str]:
    code = (
        "import json, sys\nfrom fleet_train.cli import cli\n"
        f"try:\n    cli([*{command!r}, '--help'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "json.dump(sorted(sys.modules), sys.stderr)"
    )
    done = subprocess.run(
        python("-c", code), env=clean_environ(), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
    return {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_imports_nothing_heavy(command: str) -> None:
    assert modules_loaded_by_help(command) & HEAVY == set()


def test_help_of_all_commands_together_imports_no_command() -> None:
    assert modules_loaded_by_help() & (HEAVY | {"numpy"}) == set()


def test_every_command_has_a_module_and_every_line_of_the_list_a_command() -> None:
    modules = [path for path in CLI.glob("*.py") if path.stem != "__init__"]
    named = {path.stem for path in modules if re.search(r"@click\.(command|group)\b", path.read_text())}
    assert named == set(COMMANDS)


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.stem)
def test_no_module_of_a_command_imports_heavy_things_at_its_top(path: Path) -> None:
    at_top = {name.partition(".")[0] for name in imported_at_top(ast.parse(path.read_text()))}
    assert at_top & HEAVY == set()


def imported_at_top(module: ast.Module) -> Iterator[str]:
    """What is imported when the module is: not within functions, not below TYPE_CHECKING."""
    for node in module.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_reader_of_imports_sees_the_top_alone() -> None:
    code = "import paddle.static\nfrom psutil import Process\ndef f():\n    import numba\n"
    assert set(imported_at_top(ast.parse(code))) == {"paddle.static", "psutil"}
