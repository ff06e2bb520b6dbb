"""The launcher's output, written by separate threads, so that a reader that does not read blocks nothing else.

A terminal under Ctrl-S, a pipe whose reader hangs or has closed (``| head``), and a full disk behind ``> file`` must
not delay the detection of a failure or a signal. The job continues, and its exit code is unaffected.

Of rank 0's output, which a `Follower` shows, Paddle's own start-up lines are hidden; the rank's log has them all. They
are known word for word, or by Paddle's source file and level: lines of the script, of this package, of other
libraries, and errors pass. docs/launching.md lists the hidden ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from fleet_train import timeouts
from fleet_train.errors import printable
from fleet_train.files import opened_regular
from fleet_train.log import StderrHandler, logger

_MOST_BYTES = 1 << 20
_PIECE_BYTES = 1 << 12


class Outlet:
    """One stream of this process. Lines that exceed its buffer are dropped; their number is printed later.

    Its thread lives as long as there is something to write. ``stream`` None: there is none (``>&-``).
    """

    def __init__(self, stream: TextIO | None, moved: threading.Condition) -> None:
        self._descriptor = -1 if stream is None else stream.fileno()
        self._moved = moved
        self._waiting: deque[tuple[bytes, Outlet | None, int]] = deque()
        self._waiting_bytes = 0
        self._written_bytes = 0
        self._missing_lines = 0
        self._thread: threading.Thread | None = None
        self._is_stuck = False
        self._given = 0
        self._done = 0

    def write_to(self, stream: TextIO | None) -> None:
        """Write everything there from now on."""
        with self._moved:
            self._descriptor = -1 if stream is None else stream.fileno()

    def has_room(self) -> bool:
        with self._moved:
            return self._waiting_bytes < _MOST_BYTES

    def put(self, text: bytes, after: Outlet | None = None) -> None:
        """Queue it, after everything that ``after`` has been given so far. Never waits."""
        with self._moved:
            if self._waiting_bytes >= _MOST_BYTES:
                self._missing_lines += _lines(text)
            elif text and self._descriptor >= 0:
                self._append(text, after)
                self._start()

    def leave_out(self, lines: int) -> None:
        """Count this many lines as dropped."""
        with self._moved:
            self._missing_lines += lines
            self._start()

    def drain(self) -> bool:
        """Wait until everything is written; False if the reader does not read, or is too slow."""
        deadline = time.monotonic() + timeouts.TERMINAL_SLOW_SECONDS
        with self._moved:
            while self._waiting and time.monotonic() < deadline:
                if not self._goes_on():
                    return False
            return not self._waiting

    def _goes_on(self) -> bool:
        before = self._written_bytes
        return self._moved.wait_for(
            lambda: self._written_bytes > before or not self._waiting, timeouts.TERMINAL_STUCK_SECONDS
        )

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fleet_train output", daemon=True)
            self._thread.start()

    def _append(self, text: bytes, after: Outlet | None = None) -> None:
        self._waiting.append((text, after, after._given if after is not None else 0))
        self._waiting_bytes += len(text)
        self._given += 1

    def _run(self) -> None:
        works = True
        while True:
            with self._moved:
                if not self._waiting and works and self._missing_lines:
                    lines, self._missing_lines = self._missing_lines, 0
                    self._append(b"fleet_train: %d lines could not be shown here in time\n" % lines)
                if not self._waiting:
                    self._thread = None
                    return
                text, after, position = self._waiting[0]
                if after is not None:
                    after._await(position)
            works = self._write(text)
            with self._moved:
                self._missing_lines += 0 if works else _lines(text)
                self._waiting.popleft()
                self._waiting_bytes -= len(text)
                self._done += 1
                self._is_stuck = False
                self._moved.notify_all()

    def _await(self, position: int) -> None:
        """For the other stream's thread: wait until earlier output of this one is written, unless this is stuck."""
        if not self._is_stuck:
            self._is_stuck = not self._moved.wait_for(lambda: self._done >= position, timeouts.TERMINAL_ORDER_SECONDS)

    def _write(self, text: bytes) -> bool:
        """Whether all of it was written; waits as long as it takes."""
        rest = memoryview(text)
        while rest and self._descriptor >= 0:
            try:
                written = os.write(self._descriptor, rest[:_PIECE_BYTES])
            except BlockingIOError:
                select.select([], [self._descriptor], [], 1.0)
            except BrokenPipeError:
                self._descriptor = -1  # "| head" has exited
            except OSError:  # a full disk, a terminal that is gone: the next lines may succeed
                return False
            else:
                rest = rest[written:]
                with self._moved:
                    self._written_bytes += written
                    self._moved.notify_all()
        return True


def _lines(text: bytes) -> int:
    return max(1, text.count(b"\n"))


_moved = threading.Condition()
out = Outlet(sys.__stdout__, _moved)
_err = Outlet(sys.__stderr__, _moved)


class _Messages(StderrHandler):
    """The package's messages, on this terminal."""

    def write(self, line: str) -> None:
        _err.put(f"{line}\n".encode(errors="replace"), after=out)


@contextlib.contextmanager
def messages_in_order() -> Iterator[None]:
    """The package's messages appear in order with the ranks' output; everything is written at the block's end."""
    before = logger.handlers
    logger.handlers = [_Messages() if isinstance(handler, StderrHandler) else handler for handler in before]
    try:
        yield
    finally:
        logger.handlers = before
        for outlet in (out, _err):
            outlet.drain()


@contextlib.contextmanager
def beside_stdout() -> Iterator[None]:
    """Ranks' output goes to stderr meanwhile: stdout is for the caller's output."""
    out.write_to(sys.__stderr__)
    try:
        yield
    finally:
        out.drain()
        out.write_to(sys.__stdout__)


def show(text: bytes) -> None:
    """Rank 0's output, byte for byte."""
    out.put(text, after=_err)


def show_lines(text: str) -> None:
    """The lines of a report. Names and lines of logs come from other machines: they cannot control this terminal."""
    _err.put(f"{printable(text)}\n".encode(errors="replace"), after=out)


REPORT_TO = "FLEET_TRAIN_REPORT_TO"
"""Names the descriptor to which `told` writes."""


def told(**message: str) -> bool:
    """Tell it to the command that has started launchers on several hosts (``--hosts``), if one has: what all launchers
    would print is shown there once."""
    descriptor = os.environ.get(REPORT_TO, "")
    if not descriptor.isdigit():
        return False
    with contextlib.suppress(OSError):
        os.write(int(descriptor), json.dumps(message).encode() + b"\n")
        return True
    return False


class Follower:
    """Shows a growing file on the terminal, byte for byte, so that progress bars work; except what ``passing`` holds
    back (None: nothing).

    The file is the buffer for a slow reader: what does not fit now is read later.
    """

    def __init__(
        self,
        path: Path,
        outlet: Outlet = out,
        write: Callable[[bytes], None] = show,
        passing: StartupLines | None = None,
    ) -> None:
        self._path = path
        self._outlet = outlet
        self._write = write
        self._passing = passing
        self._file: BinaryIO | None = None
        self._last = b"\n"

    def pump(self) -> None:
        if self._file is None:
            try:
                self._file = opened_regular(self._path)
            except OSError:
                return
        came = False
        while self._outlet.has_room() and (chunk := self._file.read(1 << 16)):
            self._show(chunk if self._passing is None else self._passing.feed(chunk))
            came = True
        if not came and self._outlet.has_room():
            self._show_rest()

    def _show_rest(self) -> None:
        if self._passing is not None:
            self._show(self._passing.rest())

    def _show(self, text: bytes) -> None:
        if text:
            self._write(text)
            self._last = text

    def close(self) -> None:
        """Show the rest and end the line, so that later output does not continue a progress bar.

        Bounded: output that is not read within seconds is counted and dropped.
        """
        self.pump()
        while not self._outlet.has_room() and self._outlet.drain():
            self.pump()
        self._show_rest()
        self._show(b"" if self._last.endswith(b"\n") else b"\n")
        if self._file is not None:
            self._outlet.leave_out(sum(chunk.count(b"\n") for chunk in iter(partial(self._file.read, 1 << 20), b"")))
            self._file.close()


# INFO of Paddle's C++ code about its executor, its stores and its devices, and the two warnings that every run has.
_INFO = (
    "allocator_facade|comm_context_manager|gloo_context|gpu_resources|interpretercore|nccl_comm_context|"
    "pir_interpreter|process_group_gloo|process_group_nccl|program_interpreter|standalone_executor|tcp_store|tcp_utils"
)
_WARNING = (
    r"eager_utils\.cc:\d+\] Paddle static graph\(PIR\) not support input out|gpu_resources\.cc:\d+\] Please NOTE: "
)
_WHEN = r"\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ "
_LINES = re.compile(
    "|".join(
        (
            rf"I{_WHEN}(?:{_INFO})\.cc:\d+\] ",
            rf"W{_WHEN}(?:{_WARNING})",
            r"WARNING: Logging before InitGoogleLogging\(\) is written to STDERR\s*$",
            r"FLAGS\(name='FLAGS_\w+', current_value=.*, default_value=.*\)\s*$",
        )
    ).encode()
)
# Python shows a warning in two lines: where and what, and the line of source that gave it.
WARNINGS = {
    "No ccache found": "paddle.utils.cpp_extension.extension_utils",
    "Tensor do not have 'place' interface": "paddle.pir.math_op_patch",
}
"""Beginning of a message -> the module that gives it."""
_WARNED = re.compile(
    "|".join(
        rf"\S.*{module.replace('.', '/')}\.py:\d+: UserWarning: {re.escape(message)}"
        for message, module in WARNINGS.items()
    ).encode()
)
_SOURCE = b"  warnings.warn("
_TABLE = re.compile(rb"=+ Modified FLAGS detected =+\s*$")
_TABLE_END = re.compile(rb"=+\s*$")
# Beginnings of lines to hide: an incomplete one waits for its end, or for a pause in the output.
_BEGINNINGS = (b"I", b"W", b"F", b"/", b"=", b" ")
_LONGEST_LINE = 4096


class StartupLines:
    """Takes a rank's output in pieces and returns the part to show, unchanged and in order."""

    def __init__(self) -> None:
        self._held = b""
        self._is_within = False
        """The beginning of the current line has been shown."""
        self._after_warning = False
        self._in_table = False

    def feed(self, data: bytes) -> bytes:
        lines = (self._held + data).split(b"\n")
        self._held = b""
        shown = [self._whole(line + b"\n") for line in lines[:-1]]
        return b"".join([*shown, self._begun(lines[-1])])

    def rest(self) -> bytes:
        """The incomplete line: after a pause in the output it is a prompt or a progress bar."""
        held, self._held = self._held, b""
        self._is_within = self._is_within or bool(held)
        return held

    def _whole(self, line: bytes) -> bytes:
        if self._is_within:
            self._is_within = False
            return line
        after_warning, self._after_warning = self._after_warning, False
        if after_warning and line.startswith(_SOURCE):
            return b""
        if self._in_table and _TABLE_END.match(line):
            self._in_table = False
            return b""
        self._after_warning = _WARNED.match(line) is not None
        self._in_table = self._in_table or _TABLE.match(line) is not None
        return b"" if self._after_warning or _TABLE.match(line) or _LINES.match(line) else line

    def _begun(self, piece: bytes) -> bytes:
        if not piece or self._is_within:
            return piece
        if piece.startswith(_BEGINNINGS) and b"\r" not in piece and len(piece) < _LONGEST_LINE:
            self._held = piece
            return b""
        self._is_within = True
        return piece


def without_startup_lines(text: str) -> str:
    """A whole text."""
    startup_lines = StartupLines()
    return (startup_lines.feed(text.encode(errors="surrogateescape")) + startup_lines.rest()).decode(
        errors="surrogateescape"
    )
