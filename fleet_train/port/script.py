"""One script: text in, text out, and the remaining marks; its imports; scripts on disk."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper

from fleet_train.errors import ConversionError, DataError
from fleet_train.files import open_new, write_all
from fleet_train.port import calls, published
from fleet_train.port.calls import Mark, marks_in, source
from fleet_train.port.facts import FactFinder, Facts
from fleet_train.port.index import is_old
from fleet_train.port.rewriter import Rewriter

_PYTHON_2 = re.compile(r"^\s*(print\s+[\"'\u2018-\u201f\w]|except\s+\w+\s*,\s*\w+\s*:)", re.MULTILINE)


@dataclass(frozen=True)
class Ported:
    """A script before and after. ``marks``: what remains to be done, at lines of ``new``. ``replaced``: characters of
    web pages. ``framework``: ``Paddle``, another one if it does not use Paddle, or nothing known."""

    path: str
    old: bytes
    new: bytes
    marks: tuple[Mark, ...]
    replaced: str
    framework: str

    @property
    def changed(self) -> bool:
        return self.old != self.new


def port(content: bytes, path: str) -> Ported:
    """Rewrite a script for Paddle 1.6 to 2.x for Paddle 3 and fleet_train. A second run changes nothing.

    Characters of web pages in its code become Python's own. Raises ConversionError, naming file and line, for what is
    not Python 3 then.
    """
    readable, replaced, problem = published.read(content)
    try:
        module = cst.parse_module(readable)
    except cst.ParserSyntaxError as error:
        raise ConversionError(_unreadable(content, path, error, problem)) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConversionError(
            f"{path}:{line}: not readable as Python: {error}; save it as UTF-8, or begin it with # -*- coding: gbk -*-"
        ) from None
    except (SyntaxError, LookupError) as error:
        raise ConversionError(f"{path}:1: not readable as Python: {error}") from None
    wrapper = MetadataWrapper(module)
    finder = FactFinder()
    wrapper.visit(finder)
    framework = published.framework_of(finder.facts.imported)
    if framework != published.PADDLE and calls.PREFIX.encode() not in content:
        return Ported(path, content, content if framework else readable, (), "" if framework else replaced, framework)
    rewriter = Rewriter(finder.facts)
    ported = with_new_imports(wrapper.visit(rewriter), rewriter.kept, rewriter.needed)
    if _wants_static_mode(finder.facts, ported.code):
        ported = with_static_mode(ported)
    return Ported(path, content, ported.bytes, tuple(marks_in(path, ported.code)), replaced, published.PADDLE)


def _wants_static_mode(facts: Facts, code: str) -> bool:
    """Whether a script of 1.x runs programs: it is no module of layers that others import."""
    runs = "Executor(" in code or "default_main_program" in code or "program_guard" in code or "fleet.init" in code
    return facts.is_fluid_script and not (facts.enables_static or facts.is_dynamic) and runs and "paddle." in code


def _unreadable(content: bytes, path: str, error: cst.ParserSyntaxError, problem: SyntaxError | None) -> str:
    text = content.decode(errors="replace")
    message = re.sub(r"^parser error: (error at [\d:]+: )?", "", error.message.splitlines()[0])
    line, message = (error.raw_line, message) if problem is None else (problem.lineno or 1, problem.msg)
    hint = "; it looks like Python 2: run 2to3 on it first" if _PYTHON_2.search(text) else ""
    return f"{path}:{line}: not Python 3: {message}{hint}"


# Import statements: old ones go unless a marked use needs them, new ones come in their place.

Statement = TypeVar("Statement", cst.Import, cst.ImportFrom)
Kept = Collection[tuple[cst.CSTNode, str]]
_KEPT = calls.comment("an import of old Paddle", "remove it with the last marked line below that needs it")


def with_new_imports(module: cst.Module, kept: Kept, needed: Collection[str]) -> cst.Module:
    """``module`` without old imports, but with ``needed`` (first parts of the new names) where the old ones were."""
    cleaner = _Cleaner(module, kept)
    cleaned = module.visit(cleaner)
    wanted = set(needed) | ({"paddle"} if cleaner.bound_paddle else set())
    lines = _statements(wanted - _bound(cleaned.body))
    body, comments = list[cst.BaseStatement | cst.SimpleStatementLine](), list[cst.EmptyLine]()
    for statement in cleaned.body:
        if id(statement) in cleaner.places:
            leading = [*comments, *_leading(statement)]
            body += _with_leading(lines, leading)
            comments = [] if lines else [line for line in leading if line.comment]
            lines = []
        else:
            body.append(_with_leading([statement], [*comments, *_leading(statement)])[0] if comments else statement)
            comments = []
    at = 0 if not lines else _behind_paddle(body)
    return cleaned.with_changes(body=[*body[:at], *lines, *body[at:]])


def with_static_mode(module: cst.Module) -> cst.Module:
    """``module`` with ``paddle.enable_static()`` behind its first imports: programs of 1.x were static by default."""
    at = _behind_imports(module.body)
    line = cst.parse_statement("\npaddle.enable_static()\n")
    return module.with_changes(body=[*module.body[:at], line, *module.body[at:]])


class _Cleaner(cst.CSTTransformer):
    """Takes old names out; a statement of the module that loses all of its names becomes a place for new ones."""

    def __init__(self, module: cst.Module, kept: Kept) -> None:
        super().__init__()
        self._top, self._kept = {id(statement) for statement in module.body}, kept
        self._first, self._header = module.body[0] if module.body else None, module.header
        self.bound_paddle = False
        self._places: list[cst.SimpleStatementLine] = []

    @property
    def places(self) -> set[int]:
        """Identities of the statements that stand where all names went."""
        return {id(place) for place in self._places}

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        left = []
        for alias in original_node.names:
            bound = alias.evaluated_alias or alias.evaluated_name.split(".")[0]
            if not is_old(alias.evaluated_name) or (original_node, bound) in self._kept:
                left.append(alias)
            else:
                self.bound_paddle |= bound == "paddle"
        return _with_names(updated_node, left)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        if isinstance(original_node.names, cst.ImportStar) or original_node.relative or original_node.module is None:
            return updated_node
        module = source(original_node.module)
        left = [
            alias
            for alias in original_node.names
            if not is_old(f"{module}.{alias.evaluated_name}")
            or (original_node, alias.evaluated_alias or alias.evaluated_name) in self._kept
        ]
        return _with_names(updated_node, left)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if not updated_node.body:
            if id(original_node) not in self._top:
                return cst.RemoveFromParent()
            place = updated_node.with_changes(body=[cst.Pass()])
            self._places.append(place)
            return place
        if any(node is part for node, _ in self._kept for part in original_node.body):
            new = calls.not_in(self._header, [_KEPT]) if original_node is self._first else [_KEPT]
            return updated_node.with_changes(leading_lines=calls.with_marks(updated_node.leading_lines, new))
        return updated_node


def _with_names(statement: Statement, left: Sequence[cst.ImportAlias]) -> Statement | cst.RemovalSentinel:
    assert not isinstance(statement.names, cst.ImportStar)
    if not left:
        return cst.RemoveFromParent()
    if len(left) == len(statement.names):
        return statement
    last = left[-1].with_changes(comma=statement.names[-1].comma)
    return statement.with_changes(names=[*left[:-1], last])


def _leading(statement: cst.BaseStatement | cst.SimpleStatementLine) -> list[cst.EmptyLine]:
    return list(getattr(statement, "leading_lines", ()))


def _with_leading(statements: Sequence[cst.BaseStatement], leading: Sequence[cst.EmptyLine]) -> list[cst.BaseStatement]:
    """The statements, ``leading`` in front of the first."""
    if not statements:
        return []
    first = statements[0].with_changes(leading_lines=list(leading))
    return [first, *statements[1:]]


def _statements(names: Collection[str]) -> list[cst.BaseStatement]:
    ours = sorted(set(names) - {"paddle"})
    texts = ["import paddle\n"] if "paddle" in names else []
    texts += [f"from fleet_train import {', '.join(ours)}\n"] if ours else []
    return [cst.parse_statement(text) for text in texts]


def _bound(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> set[str]:
    """Names that ``import x`` and ``from fleet_train import x`` bind at the top of the module."""
    bound = set[str]()
    for statement in body:
        for part in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(part, cst.Import):
                bound |= {alias.evaluated_name.split(".")[0] for alias in part.names if not alias.asname}
            elif isinstance(part, cst.ImportFrom) and part.module is not None and source(part.module) == "fleet_train":
                names = () if isinstance(part.names, cst.ImportStar) else part.names
                bound |= {alias.evaluated_name for alias in names if not alias.asname}
    return bound


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(part, (cst.Import, cst.ImportFrom)) for part in statement.body
    )


def _is_docstring(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    return isinstance(statement.body[0].value, (cst.SimpleString, cst.ConcatenatedString))


def _behind_future(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> int:
    at = 1 if body and _is_docstring(body[0]) else 0
    while at < len(body) and _is_import(body[at]) and "__future__" in source(body[at]):
        at += 1
    return at


def _behind_paddle(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> int:
    """The place behind the first import of Paddle: what a script sets for it in front has to stay there."""
    for at, statement in enumerate(body):
        if _is_import(statement) and re.search(r"\b(import|from) paddle\b", source(statement)):
            return at + 1
    return _behind_future(body)


def _behind_imports(body: Sequence[cst.BaseStatement | cst.SimpleStatementLine]) -> int:
    """The place behind the last import before another statement; behind `import paddle` at least."""
    at = last = 1 if body and _is_docstring(body[0]) else 0
    while at < len(body) and (_is_import(body[at]) or isinstance(body[at], (cst.Try, cst.If))):
        if _is_import(body[at]):
            last = at + 1
        at += 1
    paddle = [i for i, statement in enumerate(body) if _is_import(statement) and "paddle" in _bound([statement])]
    return max([last, *(i + 1 for i in paddle[:1])])


# Scripts on disk: found, ported together, shown as a diff, written atomically.


_SKIPPED = {
    "__pycache__": "made by Python",
    "node_modules": "installed packages",
    "build": "a name of build output",
    "dist": "a name of build output",
}


@dataclass(frozen=True)
class Skipped:
    """A folder that was not looked at because of its name."""

    folder: Path
    scripts: int
    reason: str

    def __str__(self) -> str:
        return f"{self.folder} ({self.scripts} script(s)): {self.reason}; name the folder itself to port it"


def scripts_in(paths: Iterable[Path]) -> tuple[list[Path], list[Skipped]]:
    """The given files, and the ``*.py`` below folders, each once; and the folders below them that were skipped.

    Hidden folders, and those with a name of what is made or installed, are skipped unless they are given themselves.
    Raises DataError for what is not there, for a folder without scripts, and for a notebook.
    """
    scripts: dict[Path, None] = {}
    skipped: dict[Path, Skipped] = {}
    for path in paths:
        if path.is_dir():
            below, left_out = _below(path)
            if not below:
                words = "".join(f"; skipped {entry}" for entry in left_out)
                raise DataError(f"{path}: a folder without *.py files; give the folder of your scripts{words}")
            scripts |= dict.fromkeys(below)
            skipped |= {entry.folder: entry for entry in left_out}
        elif path.suffix == ".ipynb":
            raise DataError(f"{path}: a notebook is no script; save its cells with jupyter nbconvert --to script first")
        elif path.is_file():
            scripts[path] = None
        else:
            raise DataError(f"{path}: no such file or folder")
    return list(scripts), [
        entry for folder, entry in skipped.items() if not any(path.is_relative_to(folder) for path in scripts)
    ]


def _below(folder: Path) -> tuple[list[Path], list[Skipped]]:
    scripts, skipped = list[Path](), list[Skipped]()
    for name, folders, files in os.walk(folder):
        here = Path(name)
        for left_out in [child for child in folders if child in _SKIPPED or child.startswith(".")]:
            folders.remove(left_out)
            number = sum(path.is_file() for path in (here / left_out).rglob("*.py"))
            if number:
                skipped.append(Skipped(here / left_out, number, _SKIPPED.get(left_out, "hidden")))
        scripts += [
            here / file
            for file in files
            if file.endswith(".py") and not file.startswith(".") and (here / file).is_file()
        ]
    return sorted(scripts), sorted(skipped, key=lambda entry: entry.folder)


def difference(ported: Ported) -> str:
    """A unified diff, empty if nothing changes."""
    before, after = (text.decode(errors="replace").splitlines(keepends=True) for text in (ported.old, ported.new))
    name = ported.path.lstrip("/")
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def write(ported: Ported) -> None:
    """Replace the old text by the new one, atomically for concurrent readers."""
    path = Path(ported.path).resolve()
    draft = path.with_name(f".{path.name}.ported")
    with open_new(draft) as file:
        os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        write_all(file, ported.new)
    os.replace(draft, path)
