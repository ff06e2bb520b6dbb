"""One script: text in, text out, and the remaining marks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper

from fleet_train.errors import ConversionError
from fleet_train.port.rewriting.facts import FactFinder, Facts
from fleet_train.port.rewriting.imports import with_new_imports, with_static_mode
from fleet_train.port.rewriting.marks import Mark, marks_in
from fleet_train.port.rewriting.rewriter import Rewriter

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
