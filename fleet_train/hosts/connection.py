"""A connection to one host: OpenSSH, or on this machine a child process, and the agent at its other end."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from fleet_train.cluster.network import is_local, is_loopback, resolve
from fleet_train.errors import ClusterError
from fleet_train.hosts import agent
from fleet_train.hosts.agent import HELLO, SILENCE_SECONDS
from fleet_train.hosts.entries import Host
from fleet_train.launch.processes import dying_with_us

_SSH_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=4",
    "ClearAllForwardings=yes",
    "ForwardX11=no",
    "RemoteCommand=none",
)
_LAST_LINES = 3
_CLOSE_SECONDS = 3.0

Events = queue.SimpleQueue[tuple[int, dict[str, Any] | None]]
"""(host, its message); None: the connection has ended."""


def _ssh(config: Path | None) -> list[str]:
    return ["ssh", "-T", *(["-F", str(config)] if config is not None else [])]


def _remote_command(source: str) -> str:
    """What the other shell runs: this interpreter, which reads the agent's text from its standard input."""
    read = f"import sys; exec(compile(sys.stdin.buffer.read({len(source.encode())}), 'agent', 'exec'))"
    return f"exec {shlex.join([sys.executable, '-u', '-c', read])}"


def agent_command(host: Host, config: Path | None, here: bool, source: str) -> list[str]:
    if here:
        return ["/bin/sh", "-c", _remote_command(source)]
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return [*_ssh(config), *options, "--", host.destination, _remote_command(source)]


def ssh_settings(host: Host, config: Path | None) -> dict[str, str]:
    """What OpenSSH's configuration says of a host, by lower-case names. Raises ClusterError if ssh refuses it."""
    try:
        asked = subprocess.run(
            [*_ssh(config), "-G", "--", host.destination], capture_output=True, text=True, check=False
        )
    except OSError:
        raise ClusterError(
            "--hosts uses OpenSSH, and there is no ssh here: install it (Debian: apt-get install openssh-client)"
        ) from None
    if asked.returncode != 0:
        raise ClusterError(f"ssh refuses the host {host.destination}: {asked.stderr.strip()}")
    return dict(reversed([line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line]))


def is_here(settings: Mapping[str, str], addresses: Iterable[str], user: str) -> bool:
    """Whether a host is this machine and user. At another port, a loopback address may lead to another machine."""
    proxied = any(settings.get(name, "none") != "none" for name in ("proxyjump", "proxycommand"))
    if proxied or settings.get("user", user) != user:
        return False
    try:
        address = resolve(settings["hostname"])
    except ClusterError:  # ssh may know more
        return False
    return is_local(address, addresses) and (not is_loopback(address) or settings.get("port", "22") == "22")


def why_not_connected(code: int, words: str, interpreter: str, typed: str) -> str:
    """Why ssh has ended with this exit code and these last words, and the fix. ``typed``: ssh as a user types it."""
    if code in (126, 127):
        return f"there is no {interpreter}: install the same Python environment at the same path as here"
    if "Host key verification failed" in words:
        return f"its key is not known here, or has changed: connect once with {typed}, and compare the fingerprint"
    if "Permission denied" in words:
        copy = typed.replace("ssh", "ssh-copy-id", 1)
        return f"ssh cannot log in without a password ({words}): {copy}, and ssh-add if your key has a passphrase"
    return f"ssh cannot connect: {words or f'exit code {code}'}; try {typed}"


class Connection:
    """To a host's agent. Its messages, and the end of the connection, become events."""

    def __init__(self, index: int, host: Host, config: Path | None, here: bool, events: Events) -> None:
        self.host, self.here = host, here
        self.is_open = True
        self._index, self._events = index, events
        self._typed = shlex.join([*_ssh(config)[:1], *_ssh(config)[2:], host.destination])
        self._writing = threading.Lock()
        self._last_words: deque[str] = deque(maxlen=_LAST_LINES)
        self.has_greeted = self._is_silent = False
        self._heard_at = time.monotonic()
        source = Path(agent.__file__).read_text()
        self._popen = subprocess.Popen(
            agent_command(host, config, here, source),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it by us only
            preexec_fn=dying_with_us(),
        )
        assert self._popen.stdin is not None
        self._stdin: IO[bytes] = self._popen.stdin
        self._write(source.encode())
        self._words = threading.Thread(target=self._hear_words, args=(self._popen.stderr or (),), daemon=True)
        self._words.start()
        threading.Thread(target=self._hear, args=(self._popen.stdout or (),), daemon=True).start()

    def _hear(self, stream: Iterable[bytes]) -> None:
        for line in stream:
            self._heard_at = time.monotonic()
            message = None
            with contextlib.suppress(ValueError):  # a login shell's own output may come first
                message = json.loads(line)
            if isinstance(message, dict):
                self.has_greeted = self.has_greeted or message.get("hello") == HELLO
                if self.has_greeted:
                    self._events.put((self._index, message))
        self._popen.wait()
        self._words.join(_CLOSE_SECONDS)
        self._events.put((self._index, None))

    def _hear_words(self, stream: Iterable[bytes]) -> None:
        for line in stream:
            if text := line.decode(errors="replace").strip():
                self._last_words.append(text)

    def send(self, **message: Any) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        with self._writing, contextlib.suppress(OSError, ValueError):  # its end is an event of its own
            self._stdin.write(data)
            self._stdin.flush()

    def beat(self) -> None:
        """Say that this end is alive; kill a connection of which nothing is heard."""
        if self.has_greeted:
            self.send()
            self._is_silent = time.monotonic() - self._heard_at > SILENCE_SECONDS
        if self._is_silent:
            self._popen.kill()

    def why_ended(self) -> str:
        """With the fix, where it is known."""
        words, code = " / ".join(self._last_words), self._popen.returncode
        if self._is_silent:
            return f"nothing was heard for {SILENCE_SECONDS:g} s"
        if self.has_greeted:
            return f"the connection has ended{f': {words}' if words else ''}"
        return why_not_connected(code, words, sys.executable, self._typed)

    def close(self) -> None:
        """The agent ends what it runs, and itself."""
        with contextlib.suppress(OSError, ValueError):
            self._stdin.close()

    def end(self, seconds: float) -> None:
        """It has ended afterwards, by itself or killed after so long."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
