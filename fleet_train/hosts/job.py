"""A command on all hosts, as it is typed once: a job, an examination, or a look at running ranks."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_train.hosts import checks
from fleet_train.hosts.entries import Host, node_flags
from fleet_train.hosts.output import Screen
from fleet_train.hosts.session import Session, environment_for
from fleet_train.launch.logs import take_log_dir
from fleet_train.launch.terminal import messages_in_order, show_lines
from fleet_train.log import logger

_LAUNCH_PATIENCE_SECONDS, _EXAMINE_PATIENCE_SECONDS = 2.0, 60.0
"""How long the other hosts have to end by themselves when one is lost, or has ended before the job began."""


@dataclass(frozen=True)
class Command:
    """``python -m fleet_train NAME WORDS``, on every host."""

    name: str
    words: tuple[str, ...]
    """Its flags and arguments, without those that say where it runs."""
    files: tuple[str, ...] = ()
    """Files that must be the same everywhere."""

    def on(self, *flags: str) -> list[str]:
        return [sys.executable, "-m", "fleet_train", self.name, *flags, *self.words]


@dataclass(frozen=True)
class Where:
    hosts: tuple[Host, ...]
    config: Path | None = None


def launch(command: Command, where: Where, log_dir: Path, stop_seconds: float, needed: int, dry_run: bool) -> int:
    """A job whose nodes are the hosts; returns its exit code. Raises FleetTrainError if it cannot start."""
    with messages_in_order(), _met(command, where, stop_seconds=stop_seconds) as (session, addresses):
        log_dir = log_dir.absolute() if dry_run else take_log_dir(log_dir.absolute())
        commands = [
            command.on(*node_flags(where.hosts, addresses, index), f"--log_dir={log_dir / host.name}")
            for index, host in enumerate(where.hosts)
        ]
        with contextlib.closing(Screen(where.hosts, None if dry_run else log_dir)) as show_to:
            if dry_run:
                for each, words in zip(session.connections, commands, strict=True):
                    how = "this machine" if each.here else "over ssh"
                    show_lines(f"{each.host.name}, {how}: {shlex.join(words)}")
                names = sorted(checks.passed_on(os.environ))
                show_lines(f"variables that every host gets from here: {', '.join(names)}; and a secret of the job")
                return session.run(commands, show_to, 0, _LAUNCH_PATIENCE_SECONDS)
            logger.info(f"{len(where.hosts)} hosts; their logs come to {log_dir}/HOST")
            with tempfile.NamedTemporaryFile(dir=log_dir, prefix=".hosts-") as marker:
                return session.run(commands, show_to, needed, _LAUNCH_PATIENCE_SECONDS, marker=Path(marker.name))


def examine(command: Command, where: Where, leaves: str) -> int:
    """A command whose first rank reports, and ``leaves`` files there: this machine is the first if it is listed. The
    first one's standard output is shown as it is, and no other one's."""
    with messages_in_order(), _met(command, where, here_first=True) as (session, addresses):
        hosts = session.hosts
        if leaves and not session.connections[0].here:
            logger.info(f"this machine is not among the hosts: {leaves} will be on {hosts[0].name}")
        commands = [command.on(*node_flags(hosts, addresses, index)) for index in range(len(hosts))]
        with contextlib.closing(Screen(hosts, plain=0)) as show_to:
            return session.run(commands, show_to, len(hosts), _EXAMINE_PATIENCE_SECONDS)


@contextlib.contextmanager
def _met(command: Command, where: Where, **how: Any) -> Iterator[tuple[Session, list[str]]]:
    """All hosts can take part; with the address of each."""
    with Session(where.hosts, where.config, **how) as session:
        found = session.look(command.files, environment_for(where.hosts, os.environ))
        yield session, session.addresses(found)
