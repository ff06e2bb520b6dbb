"""Where a rank stands: the stacks of its threads, the script's own lines in them, and what keeps it, in words.

Stacks name files, lines and functions; they hold no values of variables and nothing of the environment.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from fleet_train.errors import FleetTrainError, ScheduleMismatch, printable_line
from fleet_train.files import read_regular

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}|\?\?\?) in (.*)')
_NAME = re.compile(r"# (0x[0-9a-f]+) (.*)")
_PACKAGE = Path(__file__).resolve().parents[2]
_LIBRARY = re.compile(r"^<frozen |^<string>$|/(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/")
# Found by name: the ranks may run another installation than the process that looks.
_is_module = functools.cache(lambda name: (_PACKAGE / name).is_file())
T = TypeVar("T")
_Error = TypeVar("_Error", bound=BaseException)
_readers: dict[type[Any], Any] = {}
_MOST_NUMBER = 1 << 63
_MOST_SOURCE = 80
_MOST_SOURCE_BYTES = 8 << 20
ENDED = "has ended"


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    source: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the frame is of this package, wherever the rank has imported it from."""
        _, found, name = self.file.rpartition(f"/{_PACKAGE.name}/")
        return bool(found) and _is_module(name)

    @property
    def is_users(self) -> bool:
        """Whether the frame is neither Python's, an installed package's, nor ours."""
        return not self.is_ours and not _LIBRARY.search(self.file)

    def __str__(self) -> str:
        source = f" `{self.source}`" if self.source else ""
        return f"{os.path.basename(self.file)}:{self.line}{source}"

    def in_stack(self) -> str:
        """The frame as a line of a stack; the user's are marked."""
        mark, source = ">" if self.is_users else " ", f": {self.source}" if self.source else ""
        return f"    {mark} {self.file}:{self.line} in {self.function}{source}"


@dataclass(frozen=True)
class Thread:
    """A thread and its stack; ``frames``: the innermost one first."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]

    @property
    def is_ours(self) -> bool:
        """Whether it is a thread of this package in which no code of the user runs."""
        return not self.is_main and (self.name.startswith("fleet_train") or any(frame.is_ours for frame in self.frames))

    @property
    def place(self) -> Frame | None:
        """The user's innermost line; where there is none, the innermost line."""
        return next((frame for frame in self.frames if frame.is_users), self.frames[0] if self.frames else None)


@dataclass(frozen=True)
class Stand:
    """What keeps a rank, and where. ``state``: what ``/proc`` says, in words; empty for a process that can answer."""

    rank: int
    pid: int
    step: int
    doing: str
    """What the rank is in, by the events that have not ended, such as ``barrier`` or ``wire bucket 2``."""
    waits: bool
    """Whether the rank only waits for other ranks, or did when it ended, and nothing else keeps it."""
    state: str
    threads: tuple[Thread, ...]
    native: str = ""
    """What py-spy shows, where it is installed."""

    @property
    def place(self) -> Frame | None:
        return next((thread.place for thread in self.threads if thread.is_main), None)

    @property
    def has_ended(self) -> bool:
        return self.state == ENDED

    def sentence(self) -> str:
        """``rank 3 stands in train.py:41 `while not ready:` ``; nothing else if that is not known."""
        where = f"stands in {self.place}" if self.place is not None else ""
        return f"rank {self.rank} {' and '.join(filter(None, (self.state, where))) or 'gives no stack'}"

    def lines(self, whole: bool = False) -> list[str]:
        """The sentence, then the stacks of its threads, the main one first: the user's lines, and the innermost one.
        ``whole``: all lines, of our own threads, too."""
        what = f" (process {self.pid}, step {self.step}{self.doing and f', in {self.doing}'})"
        lines = [self.sentence() + what]
        for thread in sorted(self.threads, key=lambda thread: not thread.is_main):
            if whole or not thread.is_ours:
                lines.append(f"  {'main thread' if thread.is_main else f'thread {thread.name}'}, innermost line first")
                lines += [
                    f.in_stack() for n, f in enumerate(thread.frames) if whole or f.is_users or not (n or f.is_ours)
                ]
        return lines + [f"  {line}" for line in self.native.splitlines()]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Stand:
        """Read a stand that another process has sent. Raises ValueError for anything else."""
        return from_json(cls, harmless(data))


def merged(stands: Iterable[Stand]) -> str:
    """``rank 3 stands in train.py:41 `while not ready:`; ranks 0-2, 4-7 wait for it in step 112, wire bucket 4``."""
    every = [stand for stand in stands if stand.waits or not stand.has_ended]
    standing = [stand.sentence() for stand in every if not stand.waits]
    waiting: dict[str, list[int]] = {}
    for stand in every:
        if stand.waits:
            at = "" if standing or stand.place is None else f", at {stand.place}"
            waiting.setdefault(f"step {stand.step}, {stand.doing}{at}", []).append(stand.rank)
    for_it = " for it" if len(standing) == 1 else ""
    return "; ".join([*standing, *(f"{_who(sorted(ranks))}{for_it} in {what}" for what, ranks in waiting.items())])


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {spans(ranks)} wait"


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, span)) for span in runs)


def parse(text: str, main_ident: int) -> tuple[Thread, ...]:
    """The threads in what ``faulthandler`` has written, each with its first stack there; lines of source are read from
    the disk."""
    source = functools.cache(_source)
    names: dict[int, str] = {}
    stacks: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _NAME.match(line):
            names[int(match[1], 16)] = match[2]
        elif match := _THREAD.match(line):
            frames = []
            stacks.setdefault(int(match[1], 16), frames)
        elif match := _FRAME.match(line):
            number = int(match[2]) if match[2].isdecimal() else 0
            lines = source(match[1])
            shown = lines[number - 1].strip()[:_MOST_SOURCE] if 0 < number <= len(lines) else ""
            frames.append(Frame(match[1], number, match[3], shown))
    return tuple(
        Thread(names.get(ident, f"{ident:#x}"), ident == main_ident, tuple(frames)) for ident, frames in stacks.items()
    )


def _source(name: str) -> list[str]:
    """The lines of a file of Python, which a relative name is below this folder or in the search path; none for any
    other: a rank's script may be a pipe, or have no end."""
    for folder in ("", *(() if os.path.isabs(name) else sys.path)):
        with suppress(OSError, ValueError):
            return read_regular(Path(folder, name), _MOST_SOURCE_BYTES).decode(errors="replace").splitlines()
    return []


def with_stands(error: _Error, stands: Sequence[Stand]) -> _Error:
    """An error with where ranks stand. Ranks that did not arrive because they wait themselves are not the cause, if
    another one does not."""
    if stands:
        error.args = (f"{error}; {merged(stands)}",)
        causes = {stand.rank for stand in stands if not stand.waits}
        if isinstance(error, FleetTrainError) and causes and not isinstance(error, ScheduleMismatch):
            error.absent = tuple(absence for absence in error.absent if absence.member in causes)
    return error


# What another process has sent as JSON: read as a dataclass, and made harmless to show.


def from_json(kind: type[T], data: Any) -> T:
    """A dataclass from the JSON of another process. Raises ValueError for anything else."""
    value: T = _reader(kind).validate_python(data)
    return value


def harmless(data: Any) -> Any:
    """The JSON of another process with control characters and line ends as escapes, for a table or a line. Raises
    ValueError for NaN, infinite and huge numbers.
    """
    if isinstance(data, str):
        return printable_line(data)
    if isinstance(data, dict):
        return {name: harmless(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [harmless(value) for value in data]
    if isinstance(data, (int, float)) and not abs(data) < _MOST_NUMBER:
        raise ValueError("a number is too large, or is none")
    return data


def _reader(kind: type[Any]) -> Any:
    """The reader of a kind of dataclass, created once: that takes longer than parsing."""
    from pydantic import TypeAdapter  # heavy: not for --help

    if kind not in _readers:
        _readers[kind] = TypeAdapter(kind)
    return _readers[kind]
