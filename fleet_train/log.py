"""The messages of this package: the logger ``fleet_train``, which writes ``fleet_train: MESSAGE`` to stderr.

``logging.getLogger("fleet_train")`` is a user's way to send them elsewhere (its handlers), or to silence them (its
level). A launcher writes them through its terminal, in order with the ranks' output.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Sequence

from fleet_train.errors import printable


class StderrHandler(logging.Handler):
    """Writes to what ``sys.stderr`` is at that time, not at import. A full or closed stderr loses the message."""

    def emit(self, record: logging.LogRecord) -> None:
        self.write(f"fleet_train: {printable(record.getMessage())}")

    def write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


logger = logging.getLogger("fleet_train")
logger.propagate = False  # a root logger that a library configures would repeat each message
if not logger.handlers:
    logger.addHandler(StderrHandler())
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


_logged: set[str] = set()


def log_once(messages: Iterable[str], rank: int) -> None:
    """Log each message on rank 0, the first time that this process has it; the other ranks are silent."""
    for message in messages:
        if rank == 0 and message not in _logged:
            _logged.add(message)
            logger.info("%s", message)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table for terminals: cells of equal number per row, each as wide as the widest of its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
