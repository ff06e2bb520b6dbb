"""Connections to all hosts at once: they are looked at, asked for their addresses, and run a command each."""

from __future__ import annotations

import contextlib
import getpass
import math
import os
import platform
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from fleet_train.cluster.installed import one_line
from fleet_train.cluster.network import local_addresses
from fleet_train.cluster.store.access import SECRET, SECRET_FILE, job_secret
from fleet_train.errors import ClusterError, WorkerFailed
from fleet_train.hosts import checks
from fleet_train.hosts.agent import BEAT_SECONDS, digest_of
from fleet_train.hosts.connection import Connection, Events, is_here, ssh_settings
from fleet_train.hosts.entries import Host
from fleet_train.launch.node import appended
from fleet_train.launch.prepare import import_path_for_ranks
from fleet_train.log import logger

_ANSWER_SECONDS = 60.0
"""How long a host may take to be reached and to answer: Python starts twice there."""
_TICK_SECONDS = 0.2
_TOGETHER_SECONDS = 60.0
_MARGIN_SECONDS = 20.0
"""How much longer than its ranks' grace a launcher may take to end."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_HERE = -1
"""The index of this process in events: a signal has arrived."""


class Sink(Protocol):
    """Takes what comes from the hosts while their commands run."""

    def take(self, index: int, message: Mapping[str, Any]) -> None: ...


def environment_for(hosts: Sequence[Host], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that every host gets, with the job's secret: the user's, or a new one."""
    passed = checks.passed_on(environ)
    secret = job_secret(passed)
    passed.pop(SECRET_FILE, None)
    if len(hosts) > 1:
        passed[SECRET] = secret.decode(errors="surrogateescape") if secret else secrets.token_hex(32)
    if (home := import_path_for_ranks()) is not None:
        passed["PYTHONPATH"] = appended(passed.get("PYTHONPATH", ""), str(home))
    passed["FLEET_TRAIN_ENGINE"] = "none"  # the hosts are given: nothing else says who takes part
    return passed


class Session:
    """As a context manager, nothing that it has started runs afterwards, here or there. ``stop_seconds``: how long a
    command may take to end. ``here_first``: this machine becomes the first host, if it is one."""

    def __init__(self, hosts: Sequence[Host], config: Path | None, stop_seconds: float = 0.0, here_first: bool = False):
        self.hosts, self._here_first = tuple(hosts), here_first
        self.stop_seconds = stop_seconds + _MARGIN_SECONDS
        self.connections: list[Connection] = []
        self._config = config
        self._events: Events = queue.SimpleQueue()
        self._leaving = threading.Event()

    def __enter__(self) -> Session:
        own, user = local_addresses(), getpass.getuser()
        here = {host: is_here(ssh_settings(host, self._config), own, user) for host in self.hosts}
        if self._here_first:
            self.hosts = tuple(sorted(self.hosts, key=lambda host: not here[host]))
        try:
            for index, host in enumerate(self.hosts):
                self.connections.append(Connection(index, host, self._config, here[host], self._events))
        except BaseException:
            self.__exit__()
            raise
        threading.Thread(target=self._beat, name="fleet_train keeps connections", daemon=True).start()
        return self

    def _beat(self) -> None:
        """Of a thread of its own: a disk that hangs here ends no job."""
        while not self._leaving.wait(BEAT_SECONDS):
            for each in self.connections:
                each.beat()

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for each in self.connections:
            each.close()
        deadline = time.monotonic() + self.stop_seconds
        for each in self.connections:
            each.end(max(0.0, deadline - time.monotonic()))

    def look(self, files: Sequence[str], environ: Mapping[str, str], all_needed: bool = True) -> dict[int, Any]:
        """What the hosts have. Raises ClusterError that names every host that cannot take part, and why; unless some
        can and not all are needed: then the others are left out."""
        mine = {
            "folder": os.getcwd(),
            "interpreter": sys.executable,
            "python": platform.python_version(),
            "version": one_line(),
            "files": {name: digest_of(name) for name in files},
        }
        found, problems = self._ask(look={"folder": mine["folder"], "files": list(files), "environ": dict(environ)})
        for index, answer in found.items():
            if differences := checks.problems_of(answer, mine, self.hosts[index].destination):
                problems[index] = differences
        if all_needed or len(problems) == len(self.hosts):
            self._refuse(problems)
        for index, why in problems.items():
            logger.warning(f"{self.hosts[index].name} is left out: {why[0]}")
            self.connections[index].close()
            self.connections[index].is_open = False
        return found

    def addresses(self, found: Mapping[int, Any]) -> list[str]:
        """Each host's own address on the route to the others. Raises ClusterError."""
        # Who types over ssh has a connection of his own here: it says nothing.
        reached = [
            "" if each.here else checks.reachable(found[index]["address"])
            for index, each in enumerate(self.connections)
        ]
        if len(self.hosts) == 1:
            return reached
        addresses = reached
        # Twice: a host that ssh has not reached by a usable address learns its own from its route to the others.
        for _ in range(1 + ("" in reached)):
            routes, problems = self._ask(towards=addresses)
            self._refuse(problems)
            others = [routes[index][:index] + routes[index][index + 1 :] for index in range(len(self.hosts))]
            addresses = [checks.own_address(*each) for each in zip(reached, others, strict=True)]
        self._refuse(checks.problems_of_addresses([host.name for host in self.hosts], addresses))
        return addresses

    def _ask(self, **question: Any) -> tuple[dict[int, Any], dict[int, list[str]]]:
        """Ask all, each once it has greeted; (answers, problems) by host."""
        answers: dict[int, Any] = {}
        problems: dict[int, list[str]] = {}
        for each in self.connections:
            if each.has_greeted:
                each.send(**question)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while len(answers.keys() | problems) < len(self.hosts) and time.monotonic() < deadline:
            index, message = self._next()
            if message is None:
                problems[index] = [self.connections[index].why_ended()]
            elif "hello" in message:
                self.connections[index].send(**question)
            elif "found" in message:
                answers[index] = message["found"]
        for index in set(range(len(self.hosts))) - answers.keys() - problems.keys():
            problems[index] = [f"has not answered within {_ANSWER_SECONDS:g} s"]
        return answers, problems

    def _refuse(self, problems: Mapping[int, Sequence[str]]) -> None:
        if not problems:
            return
        lines = [f"  {self.hosts[index].name}: {problem}" for index in sorted(problems) for problem in problems[index]]
        many = f"{len(problems)} of {len(self.hosts)} hosts cannot take part, and nothing was started:"
        raise ClusterError("\n".join([many, *lines]))

    def _next(self) -> tuple[int, dict[str, Any] | None]:
        """The next event, or an empty one after a moment."""
        try:
            index, message = self._events.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            return _HERE, {}
        if message is None:
            self.connections[index].is_open = False
        return index, message

    def run(
        self,
        commands: Sequence[Sequence[str]],
        sink: Sink,
        needed: int,
        patience_seconds: float,
        *,
        marker: Path | None = None,
        forwards_signals: bool = True,
    ) -> int:
        """A command on each host, to the end of all; returns the job's exit code.

        ``needed``: on so many hosts the commands must go on, or all have to end after ``patience_seconds``. ``marker``:
        hosts that do not see this file send what appears in their log folder. Signals go to all commands.
        """
        run = _Run(self, sink, needed, patience_seconds)
        with self._signals_as_events() if forwards_signals else contextlib.nullcontext():
            how = {"stop_seconds": self.stop_seconds, "marker": str(marker or "")}
            for index, each in enumerate(self.connections):
                each.send(run={"command": list(commands[index]), **how})
                if not each.is_open:
                    run.on(index, None)
            while run.running:
                run.on(*self._next())
        return checks.exit_code(run.codes, needed)

    @contextlib.contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        def on_signal(number: int, _: FrameType | None) -> None:
            self._events.put((_HERE, {"signal": number}))

        before = {number: signal.getsignal(number) for number in _FORWARDED}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Run:
    """Commands that run on all hosts: how each has ended, and whether the others have to end."""

    def __init__(self, session: Session, sink: Sink, needed: int, patience_seconds: float) -> None:
        self._session, self._sink, self._needed = session, sink, needed
        self._patience_seconds = patience_seconds
        self.running = {index for index, each in enumerate(session.connections) if needed or each.is_open}
        self.codes: list[int] = []
        """In the order of the ends."""
        self._begun = False
        self._stop_at = self._give_up_at = math.inf

    def on(self, index: int, message: Mapping[str, Any] | None) -> None:
        if index == _HERE and message:
            self._signal_all(message["signal"])
        elif message is None and index in self.running:
            self._ended(index, WorkerFailed.exit_code, self._patience_seconds)
            why = self._session.connections[index].why_ended()
            then = "; the job ends on the other hosts" if self._has_to_end else ""
            logger.info(f"{self._session.hosts[index].name} is lost: {why}{then}")
        elif message and "exit" in message:
            # Launchers that have met find out together what has failed, and let ranks save.
            met = _TOGETHER_SECONDS + self._session.stop_seconds
            self._ended(index, message["exit"], met if self._begun else self._patience_seconds)
        elif message:
            self._begun = self._begun or "logs" in message
            self._sink.take(index, message)
        if time.monotonic() > self._give_up_at:
            for each in self._session.connections:
                each.close()
        elif time.monotonic() > self._stop_at and self._give_up_at == math.inf:
            self._give_up_at = time.monotonic() + self._session.stop_seconds
            self._signal_all(signal.SIGTERM)

    @property
    def _has_to_end(self) -> bool:
        return bool(self.running) and len(self.running) + self.codes.count(0) < self._needed

    def _ended(self, index: int, code: int, seconds: float) -> None:
        self.running.discard(index)
        self.codes.append(code)
        if self._has_to_end:
            self._stop_at = min(self._stop_at, time.monotonic() + seconds)

    def _signal_all(self, number: int) -> None:
        for each in self._session.connections:
            each.send(signal=int(number))
