"""CONTRIBUTING.md: each recipe is carried out on a copy of the checkout, with and without each of its files."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import shell_commands
from tests.support.processes import ROOT, clean_environ
from tests.support.recipe_examples import COMPRESSION, EXAMPLES, Example
from tools.mutate import COPIED

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
MOST_LINES = 205
_PATH = re.compile(r"`([\w.-]*/[\w./-]*|[\w-]+\.(?:md|py|toml|yaml))`")
_ENDED_WITH_FAILURES = (1, 2)  # pytest's codes: tests failed, or a module could not be imported


@dataclass(frozen=True)
class Row:
    """``paths``: one of them, or something below one, is written. ``noticed_by``: the test that fails without it."""

    paths: tuple[str, ...]
    noticed_by: str

    def has(self, path: str) -> bool:
        return any(path == one or (one.endswith("/") and path.startswith(one)) for one in self.paths)


@dataclass(frozen=True)
class Recipe:
    """``elsewhere``: what only some additions need."""

    rows: tuple[Row, ...]
    elsewhere: Row
    commands: tuple[str, ...]

    def of(self, example: Example) -> Recipe:
        """With the example's name for NAME."""
        named = lambda text: text.replace("NAME", example.name)  # noqa: E731
        rows = tuple(Row(tuple(map(named, row.paths)), row.noticed_by) for row in self.rows)
        return Recipe(rows, Row(tuple(map(named, self.elsewhere.paths)), ""), tuple(map(named, self.commands)))


def recipes(text: str) -> dict[str, Recipe]:
    """By heading."""
    return {
        heading: _recipe(part)
        for heading, _, part in (
            part.partition("\n") for part in text.partition("\n## Recipes\n")[2].split("\n### ")[1:]
        )
    }


def _recipe(part: str) -> Recipe:
    rows = []
    for line in part.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows.append(Row(tuple(_PATH.findall(cells[0])), cells[2].strip("`")))
    bullets = re.findall(r"^- (.*?):\s", part, re.MULTILINE)
    elsewhere = tuple(path for bullet in bullets for path in _PATH.findall(bullet))
    return Recipe(tuple(rows), Row(elsewhere, ""), tuple(shell_commands(part)))


RECIPES = recipes(TEXT)
NAMED = {heading: RECIPES[heading].of(example) for heading, example in EXAMPLES.items() if heading in RECIPES}


def faults(heading: str, recipe: Recipe, example: Example) -> Iterator[str]:
    """What a recipe says otherwise than its example does."""
    written = [*example.files, *example.written]
    for row in recipe.rows:
        if not any(row.has(path) for path in written):
            yield f"{heading}: the example writes nothing for {row.paths}"
        if not is_a_test(row.noticed_by):
            yield f"{heading}: there is no {row.noticed_by}"
        elif not any(is_run_by(command, row.noticed_by) for command in recipe.commands):
            yield f"{heading}: no command of it runs {row.noticed_by}"
    for path in written:
        if not any(row.has(path) for row in (*recipe.rows, recipe.elsewhere)):
            yield f"{heading}: the example needs {path}, which the recipe does not name"
    yield from (f"{heading}: does not say to run {one}" for one in set(example.written.values()) - set(recipe.commands))


def is_a_test(name: str) -> bool:
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    return function in {
        one.name for one in ast.parse((ROOT / path).read_text()).body if isinstance(one, ast.FunctionDef)
    }


def is_run_by(command: str, test: str) -> bool:
    words = shlex.split(command)
    paths = [word for word in words[3:] if "/" in word] if words[:3] == ["python", "-m", "pytest"] else []
    return any(Path(test.partition("::")[0]).is_relative_to(path) for path in paths)


def apply(example: Example, folder: Path, left_out: Row | None = None) -> None:
    """Write the example's files, but those of a row; what a command writes is for the command."""
    for path, insertions in example.files.items():
        if left_out is None or not left_out.has(path):
            for insertion in insertions:
                insertion.into(folder / path)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of a recipe in the copy, with this process's share of ports."""
    ports = {name: value for name, value in os.environ.items() if name.startswith("PYTEST_XDIST_WORKER")}
    environ = clean_environ({"PYTHONPATH": str(folder), **ports})
    return subprocess.run(
        shlex.split(command), cwd=folder, env=environ, capture_output=True, text=True, timeout=850, check=False
    )


def write_what_commands_write(example: Example, folder: Path, left_out: Row | None = None) -> None:
    before = {path: (folder / path).read_text() for path in example.written if left_out and left_out.has(path)}
    for command in dict.fromkeys(example.written.values()):
        run(command, folder)
    for path, text in before.items():
        (folder / path).write_text(text)


def copy_of_the_checkout(where: Path) -> Path:
    folder = where / "checkout"
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_of_the_checkout(tmp_path)


def test_each_recipe_has_an_example_and_is_what_the_example_does() -> None:
    assert list(RECIPES) == list(EXAMPLES)
    assert [fault for heading, recipe in NAMED.items() for fault in faults(heading, recipe, EXAMPLES[heading])] == []


def test_a_compression_is_one_file_and_its_place_in_one_list() -> None:
    """What else is written are its case in a test, and what commands write."""
    files = [path for path in COMPRESSION.files if path.startswith("fleet_train/")]
    assert files == ["fleet_train/profile/methods/bf16_gather.py", "fleet_train/profile/methods/__init__.py"]


def is_written(path: str, example: Example) -> bool:
    """Whether this one of a row's choices is the example's."""
    row = Row((path.replace("NAME", example.name),), "")
    return any(row.has(one) for one in (*example.files, *example.written))


FIRST_COLUMN = [
    (heading, path)
    for heading, example in EXAMPLES.items()
    for row in (RECIPES[heading].rows if heading in RECIPES else ())
    for path in row.paths
    if is_written(path, example)
]


@pytest.mark.parametrize(("heading", "path"), FIRST_COLUMN)
def test_a_file_that_is_missing_or_renamed_in_a_recipe_is_noticed(heading: str, path: str) -> None:
    start = TEXT.index(f"### {heading}\n")
    head, part = TEXT[:start], TEXT[start:]
    [row] = [row for row in RECIPES[heading].rows if path in row.paths]
    example = EXAMPLES[heading]
    renamed = recipes(head + part.replace(f"`{path}`", f"`other/{path}`", 1))[heading].of(example)
    assert list(faults(heading, renamed, example))
    line = re.search(rf"^\| .*`{re.escape(row.paths[0])}`.*\n", part, re.MULTILINE)
    assert line is not None
    without = recipes(head + part.replace(line[0], "", 1))[heading].of(example)
    assert list(faults(heading, without, example))


def test_every_path_exists() -> None:
    paths = {path.replace("NAME.", "").rstrip("/") for path in _PATH.findall(TEXT) if "NAME" not in path}
    paths |= {path.partition("NAME")[0] for path in _PATH.findall(TEXT) if "NAME" in path}
    given_by_sentence = {
        ".venv",
        "htmlcov/index.html",
    }
    assert len(paths) > 40
    assert [path for path in sorted(paths - given_by_sentence) if not (ROOT / path).exists()] == []


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(re.findall(r"`[^`\n]+`|^make .*$", TEXT, re.MULTILINE))))
    assert named - targets == set()
    assert named >= {"check", "test", "test-long", "docs", "wheel", "coverage", "format"}
    assert re.findall(r"\bmake ([a-z-]+)", (ROOT / ".ci" / "run").read_text())


def test_the_bars_of_ci_are_those_that_the_page_names() -> None:
    run_there = set(re.findall(r"^(?:run \S+ )?(make [a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    assert run_there | {"make test"} == {"make check", "make docs", "make test-long", "make test"}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_still_finds_its_places(heading: str, tmp_path: Path) -> None:
    for path in EXAMPLES[heading].files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_file():
            shutil.copy(ROOT / path, tmp_path / path)
    apply(EXAMPLES[heading], tmp_path)
    assert all((tmp_path / path).read_text() for path in EXAMPLES[heading].files)


def test_the_page_is_short_and_linked() -> None:
    assert len(TEXT.splitlines()) < MOST_LINES
    for page in ("README.md", "README_cn.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        assert "CONTRIBUTING.md" in (ROOT / page).read_text(), page


COMMANDS = tuple(dict.fromkeys(command for recipe in NAMED.values() for command in recipe.commands))


@pytest.fixture(scope="module")
def with_all_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which every recipe has been carried out: their commands are the same ones in part."""
    folder = copy_of_the_checkout(tmp_path_factory.mktemp("contributing"))
    for example in EXAMPLES.values():
        apply(example, folder)
    for command in dict.fromkeys(command for example in EXAMPLES.values() for command in example.written.values()):
        run(command, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_recipe_passes(command: str, with_all_examples: Path) -> None:
    done = run(command, with_all_examples)
    assert done.returncode == 0, done.stdout + done.stderr


ROWS = [
    pytest.param(heading, row, id=f"{EXAMPLES[heading].name}-{row.paths[0]}")
    for heading, recipe in NAMED.items()
    for row in recipe.rows
]


@pytest.mark.long
@pytest.mark.parametrize(("heading", "row"), ROWS)
def test_a_file_that_is_left_out_fails_the_named_test(heading: str, row: Row, checkout: Path) -> None:
    apply(EXAMPLES[heading], checkout, left_out=row)
    write_what_commands_write(EXAMPLES[heading], checkout, left_out=row)
    path, _, name = row.noticed_by.partition("::")  # a module that cannot be imported ends pytest with 4 for path::name
    done = run(f"python -m pytest -q -x -p no:cacheprovider {path} -k {name}", checkout)
    assert done.returncode in _ENDED_WITH_FAILURES, done.stdout + done.stderr
