"""Paddle's own start-up lines in a rank's output, which the terminal does not show; the rank's log has them all.

Lines are hidden if they are known word for word, or by Paddle's source file and level: lines of the script, of this
package, of other libraries, and errors pass. docs/launching.md lists the hidden ones.
"""

from __future__ import annotations

import re

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


class Everything:
    """For ``--verbose``."""

    def feed(self, data: bytes) -> bytes:
        return data

    def rest(self) -> bytes:
        return b""


def without_startup_lines(text: str) -> str:
    """A whole text."""
    startup_lines = StartupLines()
    return (startup_lines.feed(text.encode(errors="surrogateescape")) + startup_lines.rest()).decode(
        errors="surrogateescape"
    )
