"""What runs on each host: its text comes over ssh and needs nothing there but Python's standard library.

One JSON object per line in both directions. It answers questions about its machine, runs a command and sends what that
writes. When the connection ends, or is silent for too long, the command ends: first SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

HELLO = "fleet_train agent"
REPORT_TO = "FLEET_TRAIN_REPORT_TO"
"""Names a descriptor: a launcher writes there where its logs are, and its report of a failure."""
BEAT_SECONDS, SILENCE_SECONDS = 4.0, 20.0
"""How often each side of a connection writes; after how much silence the other one counts as lost."""
_TAIL_SECONDS, _LOOK_SECONDS, _KILL_SECONDS = 0.5, 30.0, 3.0
_PIECE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class Agent:
    """One connection. Only the first thread reads, and it never writes: a link that is cut blocks writers for long."""

    def __init__(self) -> None:
        self._writing = threading.Lock()
        self._environ = dict(os.environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_seconds = 0.0

    def serve(self) -> None:
        """Until the connection ends; nothing that it has started runs then."""
        self._in_thread(self._beat)
        for message in messages_from(0):
            if "look" in message:
                self._in_thread(self._look, **message["look"])
            elif "towards" in message:
                self._in_thread(self._say, found=[address_towards(each) for each in message["towards"]])
            elif "run" in message:
                self._run(**message["run"])
            elif "signal" in message:
                self._signal(message["signal"])
        self._end()

    def _in_thread(self, do: Any, *arguments: Any, **named: Any) -> threading.Thread:
        thread = threading.Thread(target=do, args=arguments, kwargs=named, daemon=True)
        thread.start()
        return thread

    def _say(self, **message: Any) -> None:
        rest = json.dumps(message).encode() + b"\n"
        with self._writing, contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(1, rest) :]

    def _beat(self) -> None:
        self._say(hello=HELLO)
        while True:
            time.sleep(BEAT_SECONDS)
            self._say()

    # questions

    def _look(self, folder: str, files: list[str], environ: dict[str, str]) -> None:
        """What a command would find here in this folder with these variables, which it gets."""
        self._environ.update(environ)
        found: dict[str, Any] = {"python": platform.python_version(), "folder": "", "files": {}}
        found["address"] = (os.environ.get("SSH_CONNECTION", "").split() or ["", "", ""])[2]
        try:
            os.chdir(folder)
        except OSError as error:
            return self._say(found={**found, "folder": error.strerror})
        found["files"] = {name: digest_of(name) for name in files}
        command = [sys.executable, "-m", "fleet_train", "--version"]
        try:
            asked = subprocess.run(
                command, env=self._environ, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LOOK_SECONDS,
                check=False,
            )  # fmt: skip
            lines = (asked.stderr if asked.returncode else asked.stdout).decode(errors="replace").strip().splitlines()
            version = lines[-1] if lines else f"exit code {asked.returncode}"
            found.update(works=asked.returncode == 0, version=version)
        except subprocess.TimeoutExpired:
            found.update(works=False, version=f"no answer within {_LOOK_SECONDS:g} s")
        return self._say(found=found)

    # the command

    def _run(self, command: list[str], stop_seconds: float, marker: str) -> None:
        self._stop_seconds = stop_seconds
        reports, write_end = os.pipe()
        self._child = child = subprocess.Popen(
            command,
            env={**self._environ, REPORT_TO: str(write_end)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=[write_end],
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
        os.close(write_end)
        assert child.stdout is not None
        assert child.stderr is not None
        logs = Logs(self._say) if marker and not os.path.exists(marker) else None
        readers = [
            self._in_thread(self._pass_on, child.stdout.fileno(), "out"),
            self._in_thread(self._pass_on, child.stderr.fileno(), "err"),
            self._in_thread(self._pass_reports, reports, logs),
        ]
        self._in_thread(self._await_end, child, readers, logs)

    def _pass_on(self, stream: int, kind: str) -> None:
        while piece := os.read(stream, _PIECE_BYTES):
            self._say(**{kind: piece.decode("latin-1")})

    def _pass_reports(self, stream: int, logs: Logs | None) -> None:
        with os.fdopen(stream) as lines:
            for line in lines:
                message = json.loads(line)
                if logs is not None and "logs" in message:
                    logs.folder = message["logs"]
                self._say(**message)

    def _await_end(self, child: subprocess.Popen[bytes], readers: list[threading.Thread], logs: Logs | None) -> None:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_TAIL_SECONDS)
                break
            if logs is not None:
                logs.send()
        for reader in readers:
            reader.join(_KILL_SECONDS)
        if logs is not None:
            logs.send()
        self._say(exit=child.returncode)

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def _end(self) -> None:
        if self._child is None or self._child.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        for seconds in (self._stop_seconds, _KILL_SECONDS):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)


class Logs:
    """The files of a log folder: what is new in them is sent."""

    def __init__(self, say: Any) -> None:
        self.folder = ""
        self._say = say
        self._sent: dict[str, tuple[int, int, int]] = {}
        """(inode, bytes, time of the last change) of each file."""

    def send(self) -> None:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder) if self.folder else ():
                if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                    self._send(entry.name)

    def _send(self, name: str) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self.folder, name), "rb") as file:
            about = os.fstat(file.fileno())
            inode, size, changed = self._sent.get(name, (0, 0, -1))
            if (inode, size, changed) == (about.st_ino, about.st_size, about.st_mtime_ns):
                return
            at = size if inode == about.st_ino and size < about.st_size else 0
            file.seek(at)
            while (piece := file.read(_PIECE_BYTES)) or changed == -1:
                self._say(log=name, at=at, data=base64.b64encode(piece).decode())
                at, changed = at + len(piece), 0
            self._sent[name] = (about.st_ino, at, about.st_mtime_ns)


def messages_from(descriptor: int) -> Iterator[dict[str, Any]]:
    """What arrives, until the connection ends or is silent."""
    rest = b""
    while select.select([descriptor], [], [], SILENCE_SECONDS)[0]:
        try:
            piece = os.read(descriptor, _PIECE_BYTES)
        except OSError:
            return
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)


def digest_of(name: str) -> str:
    """Of a file's contents; empty if it cannot be read."""
    try:
        with open(name, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def address_towards(address: str) -> str:
    """This machine's address on the route to another one; empty without a route. Nothing is sent."""
    if not address:
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what ends with it is told by the connection
    try:
        Agent().serve()
    except Exception:
        traceback.print_exc()
    os._exit(0)  # whatever its threads wait for
