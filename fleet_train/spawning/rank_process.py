"""One rank's process in its parent: start, output, answer, end."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet_train.cluster.store.reports import FailureReport
from fleet_train.files import open_new, write_all
from fleet_train.launch.processes import Process
from fleet_train.spawning import shipping

_MODULE = "fleet_train.spawning.rank_main"
_PIECE_BYTES = 1 << 16
_TAIL_CHARACTERS = 1 << 16


class RankProcess(Process):
    """It reads ``greeting``, a file of `channel`, and writes its answer (result or failure) into another one."""

    def __init__(self, index: int, environ: Mapping[str, str], greeting: int, log: Path | None) -> None:
        self.index = index
        self.result: bytes | None = None
        self.told: dict[str, Any] | None = None
        """Its report about its failure."""
        self.heard_at = 0.0
        """When it reported how its call ended; on the monotonic clock, as are all times here."""
        self.is_over = False
        """Its end was noticed, and its answer was read."""
        self.was_done = False
        """Its call had returned when it was stopped: how its process ended does not count."""
        self.tail = ""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        with contextlib.ExitStack() as kept:
            self._log = None if log is None else kept.enter_context(open_new(log))
            self._answer = shipping.create()
            kept.callback(os.close, self._answer)
            descriptors = (greeting, self._answer)
            command = [sys.executable, "-u", "-m", _MODULE, *map(str, descriptors), str(os.getpid())]
            super().__init__(command, environ, subprocess.PIPE, pass_fds=descriptors, ties_itself=True)
            assert self.stdout is not None
            self.output = kept.enter_context(self.stdout)
            self._open = kept.pop_all()
        os.set_blocking(self.output.fileno(), False)

    def read_output(self) -> tuple[str, bool]:
        """(its output since the last call, whether there may be more)."""
        try:
            piece = os.read(self.output.fileno(), _PIECE_BYTES)
        except BlockingIOError:
            return "", True
        except OSError:
            piece = b""
        if piece and self._log is not None:
            with contextlib.suppress(OSError):  # a full disk is no reason to end the job
                write_all(self._log, piece)
        text = self._text.decode(piece, final=not piece)
        self.tail = (self.tail + text)[-_TAIL_CHARACTERS:]
        return text, bool(piece)

    def read_answer(self) -> None:
        """Its result or its failure, once it has told it."""
        if not self.heard_at and (answer := shipping.read(self._answer)) is not None:
            self.heard_at = time.monotonic()
            header, body = answer
            if header["kind"] == "result":
                self.result = body
            else:
                self.told = header

    @property
    def reports(self) -> list[FailureReport]:
        """Its own report about its failure."""
        return [FailureReport.from_json(report) for report in (self.told or {}).get("reports", ())]

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        super().ask_to_stop(number)
        if self.result is not None:
            self.asked_to_stop, self.was_done = 0, True

    def close(self) -> None:
        self._open.close()
