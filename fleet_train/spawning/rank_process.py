"""One rank's process in its parent: start, messages, output, stop, exit status."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet_train.cluster.store.reports import FailureReport
from fleet_train.files import open_new, write_all
from fleet_train.spawning.shipping import ParentEnd

_MODULE = "fleet_train.spawning.rank_main"
_PIECE_BYTES = 1 << 16
_TAIL_CHARACTERS = 1 << 16


class RankProcess:
    """A child in a session of its own, so that Ctrl-C reaches only the parent; it dies with the parent."""

    def __init__(self, index: int, environ: Mapping[str, str], greeting: bytes, log: Path | None) -> None:
        self.index = index
        self.result: bytes | None = None
        self.told: dict[str, Any] | None = None
        """Its report about its failure."""
        self.heard_at = 0.0
        """When it reported how its call ended; on the monotonic clock, as are all times here."""
        self.ended_at: float | None = None
        self.asked_to_stop = False
        self.tail = ""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._log = None if log is None else open_new(log)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-u", "-m", _MODULE, str(theirs.fileno()), str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            if self._log is not None:
                self._log.close()
            raise
        finally:
            theirs.close()
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.channel = ParentEnd(ours, greeting)

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

    def read_messages(self) -> bool:
        """Read its messages; False once no more will arrive."""
        goes_on = self.channel.receive_some()
        for header, body in self.channel.messages():
            self.heard_at = time.monotonic()
            if header["kind"] == "result":
                self.result = body
            else:
                self.told = header
        return goes_on

    @property
    def reports(self) -> list[FailureReport]:
        """Its own report about its failure."""
        return [FailureReport.from_json(report) for report in (self.told or {}).get("reports", ())]

    def look(self) -> bool:
        """Whether it has ended. It is not reaped yet: its process id is not reused."""
        if self.ended_at is None:
            try:
                has_ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:  # the parent lets the kernel reap its children (SIGCHLD is ignored)
                has_ended = True
            if has_ended:
                self.ended_at = time.monotonic()
        return self.ended_at is not None

    def signal(self, number: int) -> None:
        """To the rank only."""
        if self.ended_at is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill_all(self) -> None:
        """SIGKILL for the rank and the processes that it started, unless they have left its process group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def collect(self) -> int:
        """Wait for the end, which must be near; returns the exit status, negative for a signal."""
        status = self.process.wait()
        self.ended_at = self.ended_at or time.monotonic()
        return status

    def close(self) -> None:
        self.channel.sock.close()
        self.output.close()
        if self._log is not None:
            self._log.close()
