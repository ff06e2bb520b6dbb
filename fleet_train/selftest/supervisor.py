"""One rank of a selftest: starts a subject per job, watches it, and meets the supervisors of the other ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_train.cluster.cluster import Cluster
from fleet_train.errors import FleetTrainError
from fleet_train.selftest.child import Child, environ_of, free_port
from fleet_train.selftest.options import Options
from fleet_train.selftest.peers import Peers
from fleet_train.selftest.results import FAIL, Result

_TICK_SECONDS = 0.05
_LOOK_SECONDS = 1.0
TOGETHER_SECONDS = 900.0
"""How long the checks that share a job may take: nothing in them waits for longer than its own timeout."""
_TOGETHER = ("devices", "collectives", "profiles", "overlap")

Say = Callable[[Result], None]


@dataclass(frozen=True)
class End:
    """How one rank's subject has ended. ``exit_code`` is negative for a signal."""

    exit_code: int
    ended_at: float
    """On the clock of all supervisors."""
    was_killed: bool
    """By its supervisor, because it did not end."""
    began: str
    """The check that it was in; empty when it had done all."""
    last_lines: tuple[str, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> End:
        return cls(**data | {"last_lines": tuple(data["last_lines"])})


class Supervisor:
    """Carries out a selftest for one rank. ``say`` is told of every result, on rank 0."""

    def __init__(self, cluster: Cluster, options: Options, folder: Path, say: Say) -> None:
        self.cluster = cluster
        self.options = options
        self.folder = folder
        self.peers = Peers(cluster, options.join_timeout_seconds)
        self.results: list[Result] = []
        self._say = say

    def run(self) -> list[Result]:
        """Every job; all ranks return the same results."""
        if set(self.options.groups) & set(_TOGETHER):
            self._run_together()
        shared = self.peers.gather("results", [result.to_json() for result in self.results])[0]
        self.peers.leave()
        return [Result.from_json(one) for one in shared]

    def found(self, results: Iterable[Result]) -> None:
        """On rank 0: results that are final."""
        for result in results:
            self.results.append(result)
            self._say(result)

    def _run_together(self) -> None:
        ends = self.run_job("together", TOGETHER_SECONDS)
        if self.cluster.rank == 0:
            self.found(judge_ends(self.cluster, ends))

    def run_job(self, job: str, limit_seconds: float) -> dict[int, End]:
        """Start this rank's subject, stay until it has ended; how those of all ranks have ended."""
        subjects = self.peers.subjects(job, free_port(self.cluster.this.host))
        environ = environ_of(subjects, self.options.join_timeout_seconds, os.environ)
        log = self.folder / "log" / f"{job}.{self.cluster.rank}.log"
        child = Child(job, [json.dumps(self.options.to_json())], environ, log)
        try:
            end = self._attend(child, limit_seconds)
        finally:
            child.kill()
        ends = self.peers.gather(f"ends of {job}", asdict(end))
        return {rank: End.from_json(one) for rank, one in ends.items()}

    def _attend(self, child: Child, limit_seconds: float) -> End:
        deadline = time.monotonic() + limit_seconds
        look_at, began, was_killed = 0.0, "start", False
        while True:
            has_ended = child.has_ended()
            for report in child.reports():
                began = report.get("begins", began)
                if "result" in report:
                    self.found([Result.from_json(report["result"])])
            if has_ended:
                return End(child.exit_code, self.peers.clock(), was_killed, began, tuple(child.last_lines()))
            if time.monotonic() > look_at:
                look_at = time.monotonic() + _LOOK_SECONDS
                self.peers.look()
            if time.monotonic() > deadline:
                was_killed = True
                child.kill()
            time.sleep(_TICK_SECONDS)


def judge_ends(cluster: Cluster, ends: dict[int, End]) -> list[Result]:
    """What is wrong with subjects that should have ended with 0: the one that ended first is to blame."""
    wrong = {rank: end for rank, end in ends.items() if end.exit_code != 0}
    if not wrong:
        return []
    rank, end = min(wrong.items(), key=lambda one: one[1].ended_at)
    how = "did not end and was killed" if end.was_killed else f"ended with {describe_code(end.exit_code)}"
    last = end.last_lines[-1] if end.last_lines else "it has printed nothing"
    words = f"{cluster.describe(rank)} {how} during '{end.began}': {last}"
    return [Result(end.began, end.began, FAIL, words)]


def describe_code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def refuse_errors(error: FleetTrainError) -> Result:
    return Result("selftest", "selftest", FAIL, str(error))
