"""Every command that a page of the documentation prints is run by a test. How to add one: tests/support/pages.py."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from click import Context, Group
from click.testing import CliRunner

from fleet_train.cli import COMMANDS, cli
from tests.support.pages import TABLES, commands_of, hidden_commands, pages, table_of
from tests.support.ports import free_ports
from tests.support.processes import ROOT, clean_environ

# Profile that pages call ./mine.yaml.
MINE = "description: Our five PCs on the office switch.\nextends: multi_node\nfuse_grad_size_in_MB: 4\n"
# Commands that have commands of their own.
GROUPS = {name for name in COMMANDS if isinstance(cli.get_command(Context(cli), name), Group)}
ALL_PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)


@ALL_PAGES
def test_every_command_is_run_by_a_test(page: Path) -> None:
    printed, known = commands_of(page), table_of(page).commands
    table = TABLES.relative_to(ROOT) / f"{page.stem}.yaml"
    unmapped = [command for command in dict.fromkeys(printed) if command not in known]
    assert unmapped == [], (
        f"{page.name} prints these commands, but {table} does not say which test runs them. Put each there: below "
        "`run` if it ends within seconds, below `elsewhere` with the test that runs it (write one), or below "
        "`cannot_run_here` with the reason; tests/support/pages.py explains the table"
    )
    assert [command for command in known if command not in printed] == [], f"{page.name} does not print these any more"
    assert len(known) == len(set(known)), f"{table} lists a command in two sections"
    assert all(table_of(page).cannot_run_here.values()), "a command that cannot run here needs a reason"


@ALL_PAGES
def test_no_command_hides_in_an_unlabelled_block(page: Path) -> None:
    assert hidden_commands(page) == [], f"put these lines of {page.name} into a block that opens with ```bash"


@ALL_PAGES
def test_every_linked_path_exists(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_each_table_belongs_to_a_page() -> None:
    assert {path.stem for path in TABLES.iterdir()} <= {page.stem for page in pages()}


@pytest.mark.parametrize("test", sorted({test for page in pages() for test in table_of(page).elsewhere.values()}))
def test_named_test_exists(test: str) -> None:
    path, name = test.split("::")
    assert name in {
        node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_a_command_that_is_left_to_another_page_is_run_there() -> None:
    run = {command for page in pages() for command in table_of(page).run}
    left = {
        command
        for page in pages()
        for command, test in table_of(page).elsewhere.items()
        if test.endswith("test_docs.py::test_commands_run_as_printed")
    }
    assert left - run == set()


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in pages() if table_of(page).run], ids=lambda page: page.stem)
def test_commands_run_as_printed(page: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes((ROOT / "tools" / "examples" / "train_with_fleet.py").read_bytes())
    (tmp_path / "mine.yaml").write_text(MINE)
    for command, expected in table_of(page).run.items():
        words = shlex.split(command)
        if "launch" in words:  # other tests may use the default port at the same time
            words.insert(words.index("launch") + 1, f"--started_port={free_ports(4)}")
        if words[0] == "python" and words[1].startswith("tools/"):
            words[1] = str(ROOT / words[1])
        done = subprocess.run(
            words, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert expected in done.stdout, command


@ALL_PAGES
def test_commands_that_are_run_elsewhere_have_flags_that_exist(page: Path) -> None:
    table = table_of(page)
    wrong = {command: unknown_flags(command) for command in [*table.elsewhere, *table.cannot_run_here]}
    assert {command: flags for command, flags in wrong.items() if flags} == {}


def unknown_flags(command: str) -> list[str]:
    """The --flags that the help of our program before them does not know. Other programs' flags are not looked at."""
    unknown, help_text = [], None
    words = shlex.split(command)
    for before, word in pairwise(["", *words]):
        if before.startswith("tools/") and before.endswith(".py"):
            help_text = help_of_tool(before, *([] if word.startswith("-") else [word]))
        elif before == "fleet_train" and not word.startswith("-"):
            help_text = CliRunner().invoke(cli, [word, "--help"]).output
        elif before in GROUPS and help_text and not word.startswith("-"):
            help_text = CliRunner().invoke(cli, [before, word, "--help"]).output
        elif word.endswith(".py") or word == "python":
            help_text = None  # a user's script
        if help_text and word.startswith("--") and word != "--":
            flag = word.split("=")[0]
            unknown += [] if re.search(rf"(?<![\w-]){flag}(?![\w-])", help_text) else [flag]
    return unknown


@cache
def help_of_tool(path: str, *subcommand: str) -> str:
    command = [sys.executable, str(ROOT / path), *subcommand, "--help"]
    return subprocess.run(command, env=clean_environ(), capture_output=True, text=True, timeout=180, check=True).stdout


def test_a_flag_that_does_not_exist_is_found() -> None:
    command = "python -m fleet_train launch --nproc_per_node=2 --nods 3 -m fleet_train train --model mlp --epoch 2"
    assert unknown_flags(command) == ["--nods", "--epoch"]
    assert unknown_flags("python -m fleet_train manifest job --nodes 2 --node 3 train.py --epoch 2") == ["--node"]
    assert unknown_flags("python tools/lab.py up --nodes 2 --speed 3") == ["--speed"]
    assert unknown_flags("python tools/demo.py --fast") == ["--fast"]
