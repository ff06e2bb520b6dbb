"""TODO lines: code that cannot be rewritten automatically stays, with a line above it that says what to use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

PREFIX = "# TODO(fleet_train): "
_LINE = re.compile(r"^\s*" + re.escape(PREFIX) + r"(?P<what>.*?) -> (?P<do>.*)$")


@dataclass(frozen=True)
class Mark:
    """One thing to do by hand, at a line of the ported script."""

    path: str
    line: int
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what} -> {self.do}"


def comment(what: str, do: str) -> str:
    """The text of a TODO line; always one line."""
    return PREFIX + " ".join(f"{what} -> {do}".split())


def not_in(lines: Sequence[cst.EmptyLine], comments: Sequence[str]) -> list[str]:
    """The comments that none of these lines is: what is above a module's first statement is the module's header."""
    there = {line.comment.value for line in lines if line.comment}
    return [text for text in dict.fromkeys(comments) if text not in there]


def with_marks(leading: Sequence[cst.EmptyLine], comments: Sequence[str]) -> list[cst.EmptyLine]:
    """Lines before a statement with the missing TODO lines added."""
    new = not_in(leading, comments)
    return [*leading, *(cst.EmptyLine(comment=cst.Comment(text)) for text in new)]


def marks_in(path: str, text: str) -> list[Mark]:
    """All TODO lines of a script, by line. The line is that of what the comment is about."""
    lines, found = text.splitlines(), list[Mark]()
    for number, line in enumerate(lines, start=1):
        if match := _LINE.match(line):
            below = number
            while below < len(lines) and lines[below].lstrip().startswith("#"):
                below += 1
            found.append(Mark(path, below + 1, match["what"], match["do"]))
    return found
