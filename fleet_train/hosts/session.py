"""Connections to all hosts at once: they are looked at, asked for their addresses, and run a command each."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from fleet_train.cluster.installed import one_line
from fleet_train.cluster.network import local_addresses
from fleet_train.cluster.store.access import SECRET, SECRET_FILE, job_secret
from fleet_train.errors import ClusterError, WorkerFailed
from fleet_train.hosts import checks
from fleet_train.hosts.agent import BEAT_SECONDS, HELLO, digest_of
from fleet_train.hosts.connection import CONNECT_SECONDS, Connection, Events, is_here, own_user, ssh_settings
from fleet_train.hosts.entries import Host
from fleet_train.launch.node import appended
from fleet_train.launch.prepare import import_path_for_ranks
from fleet_train.log import logger

_LOOK_SECONDS = 60.0
_TICK_SECONDS = 0.2
_LATER_SECONDS = 60.0
"""How long launchers that have met have to end by themselves: they find out together what has failed."""
_MARGIN_SECONDS = 20.0
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
    """As a context manager, nothing that it has started runs afterwards, here or there."""

    def __init__(
        self, hosts: Sequence[Host], config: Path | None, stop_seconds: float = 0.0, *, here_first: bool = False
    ) -> None:
        self.hosts = tuple(hosts)
        self._here_first = here_first
        self._stop_seconds = stop_seconds + _MARGIN_SECONDS
        self._events: Events = queue.SimpleQueue()
        self._connections: list[Connection] = []
        self._config = config
        self._beaten_at = 0.0

    def __enter__(self) -> Session:
        own, user = local_addresses(), own_user()
        here = {host: is_here(ssh_settings(host, self._config), own, user) for host in self.hosts}
        if self._here_first:
            self.hosts = tuple(sorted(self.hosts, key=lambda host: not here[host]))
        self._connections = [
            Connection(index, host, self._config, here[host], self._events) for index, host in enumerate(self.hosts)
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each in self._connections:
            each.close()
        deadline = time.monotonic() + self._stop_seconds
        for each in self._connections:
            if not each.wait(max(0.0, deadline - time.monotonic())):
                each.kill()

    @property
    def is_here(self) -> list[bool]:
        return [each.here for each in self._connections]

    @property
    def open(self) -> set[int]:
        """The hosts whose connection is open."""
        return {index for index, each in enumerate(self._connections) if each.is_open}

    # questions

    def look(
        self, files: Sequence[str], environ: Mapping[str, str], all_needed: bool = True
    ) -> dict[int, dict[str, Any]]:
        """What the hosts have. Raises ClusterError that names every host that cannot take part, and why; unless some
        can and not all are needed."""
        mine = {
            "folder": os.getcwd(),
            "interpreter": sys.executable,
            "python": platform.python_version(),
            "version": one_line(),
            "files": {name: digest_of(name) for name in files},
        }
        question = {"folder": mine["folder"], "files": list(files), "environ": dict(environ)}
        found, problems = self._ask("hello", "found", question, "look")
        for index, answer in found.items():
            if differences := checks.problems_of(answer, mine, self.hosts[index].destination):
                problems[index] = differences
        if all_needed or len(problems) == len(self.hosts):
            self._refuse(problems)
        for index, why in problems.items():
            logger.warning(f"{self.hosts[index].name} is left out: {why[0]}")
            self._connections[index].close()
            self._connections[index].is_open = False
        return found

    def addresses(self, found: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """Each host's own address on the route to the others. Raises ClusterError."""
        reached = [
            "" if each.here else checks.reachable(found[index]["address"])
            for index, each in enumerate(self._connections)
        ]
        addresses = reached
        if len(self.hosts) > 1:
            # Twice: a host that ssh has not reached by a usable address learns its own from its route to the others.
            for _ in range(2 if "" in reached else 1):
                routes, problems = self._ask("", "towards", addresses, "towards")
                self._refuse(problems)
                addresses = [
                    checks.own_address(
                        reached[index],
                        [route for other, route in enumerate(routes[index]["towards"]) if other != index],
                    )
                    for index in range(len(self.hosts))
                ]
            names = [host.name for host in self.hosts]
            wrong = checks.problems_of_addresses(names, addresses)
            self._refuse({index: [wrong[name]] for index, name in enumerate(names) if name in wrong})
        return addresses

    def _ask(self, before: str, awaited: str, question: Any, kind: str) -> tuple[dict[int, Any], dict[int, list[str]]]:
        """Ask all, those that are not greeted yet once they are; (answers, problems) by host."""
        answers: dict[int, Any] = {}
        problems: dict[int, list[str]] = {}
        if not before:
            for each in self._connections:
                each.send(**{kind: question})
        deadline = time.monotonic() + CONNECT_SECONDS + _LOOK_SECONDS
        while len(answers) + len(problems) < len(self.hosts) and time.monotonic() < deadline:
            index, message = self._next()
            if message is None and index not in problems:
                problems[index] = [self._connections[index].why_ended()]
            elif message is not None and before and message.get(before) == HELLO:
                self._connections[index].send(**{kind: question})
            elif message is not None and awaited in message:
                answers[index] = message[awaited] if awaited == "found" else message
        for index in range(len(self.hosts)):
            if index not in answers and index not in problems:
                problems[index] = [f"has not answered within {CONNECT_SECONDS + _LOOK_SECONDS:g} s"]
        return answers, problems

    def _refuse(self, problems: Mapping[int, Sequence[str]]) -> None:
        if not problems:
            return
        lines = [f"  {self.hosts[index].name}: {problem}" for index in sorted(problems) for problem in problems[index]]
        many = f"{len(problems)} of {len(self.hosts)} hosts cannot take part, and nothing was started:"
        raise ClusterError("\n".join([many, *lines]))

    def _next(self) -> tuple[int, dict[str, Any] | None]:
        """The next event, or an empty one after a moment. Keeps the connections alive, and ends those that are not."""
        now = time.monotonic()
        if now - self._beaten_at > BEAT_SECONDS:
            self._beaten_at = now
            for each in self._connections:
                each.beat()
        for each in self._connections:
            if each.is_silent:
                each.kill()
        try:
            index, message = self._events.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            return _HERE, {}
        if message is None:
            self._connections[index].is_open = False
        return index, message

    # commands

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
        """A command on each host, to the end of all; returns the job's exit code. Signals go to all of them.

        ``needed``: on so many hosts the commands must go on, or all have to end after ``patience_seconds``. ``marker``:
        hosts that do not see this file send what appears in their log folder.
        """
        run = _Run(self, sink, needed, patience_seconds)
        with self._signals_as_events() if forwards_signals else contextlib.nullcontext():
            for each, command in zip(self._connections, commands, strict=True):
                each.send(
                    run={
                        "command": list(command),
                        "stop_seconds": self._stop_seconds,
                        "marker": str(marker) if marker is not None else "",
                    }
                )
            for index in set(range(len(self.hosts))) - self.open:
                run.on(index, None)
            while not run.is_over:
                index, message = self._next()
                run.on(index, message)
        return run.exit_code

    def signal_all(self, number: int) -> None:
        for each in self._connections:
            each.send(signal=int(number))

    def lose(self, index: int) -> str:
        return self._connections[index].why_ended()

    def close_all(self) -> None:
        for each in self._connections:
            each.close()

    @property
    def stop_seconds(self) -> float:
        return self._stop_seconds

    @contextlib.contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        on_signal: Callable[..., None] = lambda number, _: self._events.put((_HERE, {"signal": number}))  # noqa: E731
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
        self._running = set(range(len(session.hosts))) if needed else session.open
        self._done = 0
        self._begun = False
        self._codes: list[int] = []
        self._stop_at: float | None = None
        self._give_up_at: float | None = None

    @property
    def is_over(self) -> bool:
        return not self._running

    @property
    def exit_code(self) -> int:
        return checks.exit_code(self._codes, self._needed)

    def on(self, index: int, message: Mapping[str, Any] | None) -> None:
        if message is None:
            self._lost(index)
        elif "exit" in message:
            self._ended(index, message["exit"])
        elif "signal" in message and index == _HERE:
            self._session.signal_all(message["signal"])
        elif index != _HERE:
            self._begun = self._begun or "logs" in message
            self._sink.take(index, message)
        self._look_at_time()

    def _ended(self, index: int, code: int) -> None:
        self._running.discard(index)
        self._codes.append(code)
        self._done += code == 0
        self._decide(_LATER_SECONDS if self._begun else self._patience_seconds)

    def _lost(self, index: int) -> None:
        if index not in self._running:
            return
        self._running.discard(index)
        self._codes.append(WorkerFailed.exit_code)
        ends = self._running and len(self._running) + self._done < self._needed
        then = "; the job ends on the other hosts" if ends else ""
        logger.info(f"{self._session.hosts[index].name} is lost: {self._session.lose(index)}{then}")
        self._decide(self._patience_seconds)

    def _decide(self, seconds: float) -> None:
        if len(self._running) + self._done < self._needed:
            at = time.monotonic() + seconds
            self._stop_at = at if self._stop_at is None else min(at, self._stop_at)

    def _look_at_time(self) -> None:
        now = time.monotonic()
        if self._give_up_at is not None and now > self._give_up_at:
            self._session.close_all()
        elif self._stop_at is not None and now > self._stop_at and self._give_up_at is None:
            self._give_up_at = now + self._session.stop_seconds
            self._session.signal_all(signal.SIGTERM)
