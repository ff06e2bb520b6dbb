"""Change one place of the code at a time, and list the changes that no test notices.

    .venv/bin/python tools/mutate.py --most 150 --seed 1 fleet_train/cluster/network.py
    .venv/bin/python tools/mutate.py --tests "tests/unit/plan tests/unit/test_plan.py" fleet_train/plan
    .venv/bin/python tools/mutate.py --most 600 --record before.jsonl fleet_train
    .venv/bin/python tools/mutate.py --again before.jsonl --record after.jsonl fleet_train

Without --tests, a change is tried with the unit tests that are not long and name its module, and those that stand in
the folder of the same name; if there are none, with all that name its package. --record appends a line per change to a
file, and leaves out what is in it already: a run that was ended goes on. --again takes the changes of such a file,
tries each with the test that had noticed it first, and exits with 1 if one that was noticed is not noticed any more.

A change is one of: another comparison, another arithmetic or boolean operator, a number one larger, the other truth
value, a `not` left out, `None` returned, min for max, a condition that never holds, a statement left out. The tests run
in a copy of the checkout; the checkout itself is not touched. Each change is put back before the next.

It prints a line for each change that survived, FILE:LINE and what was changed, then the count of each result. Examine
each survivor: is it equivalent (a faster path, the words of a message), or is a test missing? The exit code is 2 if the
tests of --tests fail before anything is changed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_FOLDERS = ("fleet_train", "tests", "tools", "strategies", "docs")
COPIED = (*_FOLDERS, "pyproject.toml", "README.md", "README_cn.md", "CONTRIBUTING.md", "Makefile")
_OPPOSITES = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.BitAnd, ast.BitOr), (ast.LShift, ast.RShift), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or),
)  # fmt: skip
_INSTEAD: dict[type[ast.AST], type[ast.AST]] = {
    **{one: other for pair in _OPPOSITES for one, other in (pair, pair[::-1])},
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
_COUNTERPARTS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NOTICED, _SURVIVED, _ENDLESS = "noticed", "survived", "noticed by its endlessness"


@dataclass(frozen=True)
class Mutant:
    """One change: ``lines`` [first, last) of the file become ``text``."""

    path: Path
    line: int
    what: str
    lines: tuple[int, int]
    text: str

    @property
    def key(self) -> str:
        """What identifies the change in records."""
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Result:
    """What came of a change: one of noticed, survived, noticed by its endlessness; ``by``: the test that failed."""

    change: str
    end: str
    by: str = ""

    @property
    def is_noticed(self) -> bool:
        return self.end != _SURVIVED


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change of one file, in the order of its lines."""
    source = path.read_text()
    tree = ast.parse(source)
    for statement in _statements(tree):
        # What stands in a statement's blocks are statements of their own.
        inner = {id(node) for block in ("body", "orelse") for one in _block(statement, block) for node in ast.walk(one)}
        for position, node in enumerate(ast.walk(statement)):
            for number in range(0 if id(node) in inner else len(_changes(node))):
                changed = copy.deepcopy(statement)
                what = _change(next(itertools.islice(ast.walk(changed), position, None)), number)
                yield _mutant(path, statement, changed, getattr(node, "lineno", statement.lineno), what)
        if _is_droppable(statement):
            nothing = ast.Pass(lineno=statement.lineno, col_offset=statement.col_offset)
            yield _mutant(path, statement, nothing, statement.lineno, f"left out: {ast.unparse(statement)[:80]}")


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements of functions and modules except definitions, docstrings and imports; of blocks, head and body."""
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            found = getattr(node, block, None)
            for statement in found if isinstance(found, list) else []:
                if not _is_fixed(statement):
                    yield statement


def _is_fixed(statement: ast.AST) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    fixed = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assert, ast.Raise)
    return is_text or isinstance(statement, (*fixed, ast.Pass, ast.With, ast.AsyncWith, ast.Try, ast.For, ast.AsyncFor))


def _is_droppable(statement: ast.stmt) -> bool:
    is_call = isinstance(statement, ast.Expr) and not isinstance(statement.value, (ast.Yield, ast.YieldFrom))
    return is_call or isinstance(statement, (ast.AugAssign, ast.Break, ast.Continue))


def _block(statement: ast.stmt, name: str) -> list[ast.stmt]:
    found = getattr(statement, name, [])
    return found if isinstance(found, list) else []


def _change(node: ast.AST, number: int) -> str:
    """Make the change with that index in place; returns its description."""
    before = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else ""
    field, value = _changes(node)[number]
    setattr(node, field, value)
    if isinstance(node, (ast.If, ast.While)):
        return f"{before.splitlines()[0]}  ->  {ast.unparse(node).splitlines()[0]}"
    return f"{before[:90]}  ->  {ast.unparse(node)[:90]}"


def _changes(node: ast.AST) -> list[tuple[str, object]]:
    """(field of the node, its other value) of each change of this node."""
    found: list[tuple[str, object]] = []
    if isinstance(node, ast.Compare):
        found.append(("ops", [_INSTEAD[type(node.ops[0])](), *node.ops[1:]]))
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _INSTEAD and not _is_text(node):
        found.append(("op", _INSTEAD[type(node.op)]()))
    elif isinstance(node, ast.BoolOp):
        found.append(("op", _INSTEAD[type(node.op)]()))
        found += [("values", node.values[:index] + node.values[index + 1 :]) for index in (0, 1)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        found.append(("value", not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        found.append(("value", node.value + 1))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        found.append(("operand", ast.UnaryOp(ast.Not(), node.operand)))
    elif isinstance(node, ast.Name) and node.id in _COUNTERPARTS:
        found.append(("id", _COUNTERPARTS[node.id]))
    elif isinstance(node, ast.Return) and getattr(node.value, "value", node.value) is not None:
        found.append(("value", ast.Constant(None)))
    elif isinstance(node, (ast.If, ast.IfExp)):
        found.append(("test", ast.Constant(False)))
        found.append(("test", ast.Constant(True)))
    return found


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Also lists and tuples, which know no other operator."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    of_texts = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(isinstance(each, of_texts) or isinstance(getattr(each, "value", None), str) for each in sides)


def _mutant(path: Path, statement: ast.stmt, changed: ast.stmt, line: int, what: str) -> Mutant:
    text = ast.unparse(ast.fix_missing_locations(changed))
    indent = " " * statement.col_offset
    end = statement.end_lineno or statement.lineno
    return Mutant(
        path, line, what, (statement.lineno - 1, end), "".join(f"{indent}{one}\n" for one in text.splitlines())
    )


class Copy:
    """A copy of the checkout in which the tests run."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._failed = folder / "failed_test"
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, folder / name)

    def try_out(self, mutant: Mutant, tests: list[str]) -> Result:
        """The result of the tests with a change."""
        path = self.folder / mutant.path.relative_to(ROOT)
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        first, last = mutant.lines
        # Assumes that no line has two statements (`a; b`): the code has none.
        path.write_text("".join([*lines[:first], mutant.text, *lines[last:]]))
        try:
            end = self.run(tests)
            return Result(mutant.key, end, self._failed.read_text() if self._failed.exists() else "")
        finally:
            path.write_text(source)

    def run(self, tests: list[str]) -> str:
        """Run the tests in a fork of this process, which has imported the slow modules."""
        self._failed.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._run_tests(tests)
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                _end_group(child)
                return _NOTICED if status else _SURVIVED
            time.sleep(0.02)
        _end_group(child)
        os.waitpid(child, 0)
        return _ENDLESS

    def _run_tests(self, tests: list[str]) -> None:
        """Does not return. The tests' own processes stay in its group and are killed with it."""
        os.setsid()
        os.chdir(self.folder)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.environ |= {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.folder), *(one for one in sys.path if one not in ("", str(ROOT), str(ROOT / "tools")))]
        code = 1
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[_Ending(self._failed)]))
        finally:
            os._exit(code)


class _Ending:
    """Writes down which test fails, and skips pytest's clean-up after the last test, in which a fork may crash."""

    def __init__(self, failed: Path) -> None:
        self._failed = failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed.exists():
            self._failed.write_text(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        os._exit(int(exitstatus))


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def files_in(paths: list[Path]) -> list[Path]:
    """The Python files named, and those below the folders named."""
    return [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def tests_of(path: Path) -> list[str]:
    """Pytest's arguments for the unit tests of a module: those that name it, then those of its folder; without any, all
    that name its package."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package = ".".join(module.split(".")[:2])
    parent, _, name = module.rpartition(".")
    texts = {file: file.read_text() for file in sorted((ROOT / "tests/unit").rglob("test_*.py"))}
    names_it = [f for f, text in texts.items() if module in text or f"from {parent} import {name}" in text]
    beside = [file for file in texts if file.parent.name == package.split(".")[1]]
    others = [file for file, text in texts.items() if package in text]
    ordered = dict.fromkeys([*names_it, *beside] or others)
    return ["-m", "not long", *(str(file.relative_to(ROOT)) for file in ordered)]


def read_results(path: Path | None) -> dict[str, Result]:
    """By change; of a file that --record has written."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {result.change: result for result in results}


def read_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders to change")
    parser.add_argument("--tests", default="", help="arguments for pytest, separated by spaces")
    parser.add_argument(
        "--preload",
        default="numpy pydantic",
        help="modules imported once, before the forks; add paddle if the tests need it",
    )
    parser.add_argument("--most", type=int, default=0, help="size of a random sample of the changes; 0 = all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which the tests count as hanging")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="start no further change after so long; 0 = no limit"
    )
    parser.add_argument("--record", type=Path, help="file that gets a line of JSON per change; goes on where it ends")
    parser.add_argument("--again", type=Path, help="file of such lines, whose changes are tried instead of a sample")
    parser.add_argument("--list", action="store_true", help="print the changes without running tests")
    return parser.parse_args(arguments)


def chosen(flags: argparse.Namespace, before: dict[str, Result]) -> list[Mutant]:
    """The changes that are asked for."""
    files = [path.resolve() for path in files_in(flags.paths)]
    if flags.again:
        named = {key.partition(":")[0] for key in before}
        files = [file for file in files if str(file.relative_to(ROOT)) in named]
    # Two equal changes of one line count as one.
    found = list({mutant.key: mutant for file in files for mutant in mutants_of(file)}.values())
    if flags.again:
        return [mutant for mutant in found if mutant.key in before]
    return random.Random(flags.seed).sample(found, flags.most) if 0 < flags.most < len(found) else found


def try_all(flags: argparse.Namespace, mutants: list[Mutant], before: dict[str, Result], folder: Path) -> list[Result]:
    """Try the changes, one after the other; prints those that survive."""
    began, results = time.monotonic(), []
    checkout = Copy(folder, flags.timeout)
    if flags.tests and checkout.run(flags.tests.split()) != _SURVIVED:
        print("the tests fail, or time out, before anything is changed", file=sys.stderr)
        sys.exit(2)
    for mutant in mutants:
        if flags.minutes and time.monotonic() - began > 60 * flags.minutes:
            break
        tests = flags.tests.split() or tests_of(mutant.path)
        known = before[mutant.key].by if mutant.key in before else ""
        result = Result(mutant.key, _SURVIVED)
        if known and (ROOT / known.partition("::")[0]).exists():
            result = checkout.try_out(mutant, [known])
        if not result.by:
            result = checkout.try_out(mutant, tests)
        results.append(result)
        if not result.is_noticed:
            print(result.change, flush=True)
        if flags.record:
            with flags.record.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    return results


def main() -> int:
    flags = read_flags()
    before, done = read_results(flags.again), read_results(flags.record)
    found = chosen(flags, before)
    if flags.list:
        print(*(mutant.key for mutant in found), sep="\n")
        return 0
    for name in flags.preload.split():
        importlib.import_module(name)
    assert "fleet_train" not in sys.modules
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutate_") as folder:
        results = try_all(flags, [one for one in found if one.key not in done], before, Path(folder))
    ends = Counter(result.end for result in results)
    print(f"{len(results)} of {len(found)} changes tried in {time.monotonic() - began:.0f} s:", dict(ends))
    results += done.values()
    lost = [
        one.change for one in results if not one.is_noticed and one.change in before and before[one.change].is_noticed
    ]
    for change in lost:
        print(f"noticed before, not now: {change}", file=sys.stderr)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
