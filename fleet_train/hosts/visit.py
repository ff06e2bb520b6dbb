"""The ranks of all hosts, for whoever looks at them from outside: each host is asked for its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fleet_train.cluster.flight.rows import Row, marked
from fleet_train.cluster.flight.stands import Stand
from fleet_train.errors import FleetTrainError
from fleet_train.hosts.job import Where
from fleet_train.hosts.session import Session, environment_for

_PATIENCE_SECONDS = 20.0


class VisitedHosts:
    """A host that cannot be reached is left out; `Session.look` has said so."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def stands(self, *, native: bool) -> list[list[Stand]]:
        """Where the ranks of this user stand; a list for each job."""
        looks = self._ask("stacks", *["--native"] * native)
        return jobs_of([[[Stand.from_json(stand) for stand in job] for job in look[-1]] for look in looks])

    def rows(self) -> list[Row]:
        rows = (Row.from_json(row) for host in self._ask("top") for row in host)
        return marked({(row.job, row.rank, row.pid): row for row in rows}.values())

    def nobody(self) -> FleetTrainError:
        names = ", ".join(host.name for host in self._session.hosts)
        return FleetTrainError(
            f"no rank of this user runs on {names}: ranks appear once their script has imported fleet_train"
        )

    def _ask(self, name: str, *flags: str) -> list[Any]:
        """What the command of this name answers on each host that has ranks."""
        command = [sys.executable, "-m", "fleet_train", name, "--json", *flags]
        answers = _Answers(len(self._session.hosts))
        self._session.run([command] * len(answers.texts), answers, 0, _PATIENCE_SECONDS, forwards_signals=False)
        found = []
        for text in answers.texts:
            try:
                found.append(json.loads(text))
            except ValueError:  # no rank runs there
                continue
        return found


class _Answers:
    """Keeps what the hosts write to stdout."""

    def __init__(self, number: int) -> None:
        self.texts = [b""] * number

    def take(self, index: int, message: Mapping[str, Any]) -> None:
        self.texts[index] += message.get("out", "").encode("latin-1")


def jobs_of(hosts: Sequence[Sequence[Sequence[Stand]]]) -> list[list[Stand]]:
    """The jobs of all hosts. They are one where no host has several; others cannot be told apart."""
    if any(len(jobs) > 1 for jobs in hosts):
        return [list(job) for jobs in hosts for job in jobs]
    found = {(stand.rank, stand.pid): stand for jobs in hosts for job in jobs for stand in job}
    return [[found[key] for key in sorted(found)]] if found else []


@contextmanager
def visit_hosts(where: Where, environ: Mapping[str, str]) -> Iterator[VisitedHosts]:
    """Raises ClusterError if no host can be reached."""
    with Session(where.hosts, where.config) as session:
        session.look((), environment_for(where.hosts, environ), all_needed=False)
        yield VisitedHosts(session)
