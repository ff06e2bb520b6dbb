"""One script: text in, text out, and the remaining marks."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper

from fleet_train.errors import ConversionError, DataError
from fleet_train.files import open_new, write_all
from fleet_train.port.calls import Mark, marks_in
from fleet_train.port.facts import FactFinder, Facts
from fleet_train.port.imports import with_new_imports, with_static_mode
from fleet_train.port.rewriter import Rewriter

_PYTHON_2 = re.compile(r"^\s*(print\s+[\"'\w]|except\s+\w+\s*,\s*\w+\s*:)", re.MULTILINE)


@dataclass(frozen=True)
class Ported:
    """A script before and after. ``marks``: what remains to be done, at lines of ``new``."""

    path: str
    old: bytes
    new: bytes
    marks: tuple[Mark, ...]

    @property
    def changed(self) -> bool:
        return self.old != self.new


def port(content: bytes, path: str) -> Ported:
    """Rewrite a script for Paddle 1.6 to 2.x for Paddle 3 and fleet_train. A second run changes nothing.

    Raises ConversionError, naming file and line, for what is not Python 3.
    """
    try:
        module = cst.parse_module(content)
    except cst.ParserSyntaxError as error:
        raise ConversionError(_unreadable(content, path, error)) from None
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise ConversionError(f"{path}:1: not readable as Python: {error}") from None
    wrapper = MetadataWrapper(module)
    finder = FactFinder()
    wrapper.visit(finder)
    if not finder.facts.uses_paddle:
        return Ported(path, content, content, ())
    rewriter = Rewriter(finder.facts)
    ported = with_new_imports(wrapper.visit(rewriter), rewriter.kept, rewriter.needed)
    if _wants_static_mode(finder.facts, ported.code):
        ported = with_static_mode(ported)
    return Ported(path, content, ported.bytes, tuple(marks_in(path, ported.code)))


def _wants_static_mode(facts: Facts, code: str) -> bool:
    """A script that runs programs, not a module of layers that others import."""
    runs = "Executor(" in code or "default_main_program" in code or "program_guard" in code or "fleet.init" in code
    return facts.is_fluid_script and not (facts.enables_static or facts.is_dynamic) and runs and "paddle." in code


def _unreadable(content: bytes, path: str, error: cst.ParserSyntaxError) -> str:
    text = content.decode(errors="replace")
    message = re.sub(r"^parser error: (error at [\d:]+: )?", "", error.message.splitlines()[0])
    hint = "; it looks like Python 2: run 2to3 on it first" if _PYTHON_2.search(text) else ""
    return f"{path}:{error.raw_line}: not Python 3: {message}{hint}"


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
    Raises DataError for what is not there, and for a folder without scripts.
    """
    found: dict[Path, None] = {}
    skipped: dict[Path, Skipped] = {}
    for path in paths:
        if path.is_dir():
            below, left_out = _below(path)
            if not below:
                words = "".join(f"; skipped {one}" for one in left_out)
                raise DataError(f"{path}: a folder without *.py files; give the folder of your scripts{words}")
            found |= dict.fromkeys(below)
            skipped |= {one.folder: one for one in left_out}
        elif path.is_file():
            found[path] = None
        else:
            raise DataError(f"{path}: no such file or folder")
    return list(found), [
        one for folder, one in skipped.items() if not any(path.is_relative_to(folder) for path in found)
    ]


def _below(folder: Path) -> tuple[list[Path], list[Skipped]]:
    found, skipped = list[Path](), list[Skipped]()
    for name, folders, files in os.walk(folder):
        here = Path(name)
        for one in [one for one in folders if one in _SKIPPED or one.startswith(".")]:
            folders.remove(one)
            scripts = sum(path.is_file() for path in (here / one).rglob("*.py"))
            if scripts:
                skipped.append(Skipped(here / one, scripts, _SKIPPED.get(one, "hidden")))
        found += [
            here / one for one in files if one.endswith(".py") and not one.startswith(".") and (here / one).is_file()
        ]
    return sorted(found), sorted(skipped, key=lambda one: one.folder)


def port_all(paths: Sequence[Path]) -> list[Ported]:
    """Every script ported, in memory. Raises ConversionError for the first one that cannot be parsed."""
    return [port(path.read_bytes(), str(path)) for path in paths]


def difference(ported: Ported) -> str:
    """A unified diff, empty if nothing changes."""
    before, after = (text.decode(errors="replace").splitlines(keepends=True) for text in (ported.old, ported.new))
    name = ported.path.lstrip("/")
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def write(ported: Ported) -> None:
    """Replace the old text by the new one, atomically for concurrent readers."""
    path = Path(ported.path).resolve()
    beside = path.with_name(f".{path.name}.ported")
    with open_new(beside) as file:
        os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        write_all(file, ported.new)
    os.replace(beside, path)
