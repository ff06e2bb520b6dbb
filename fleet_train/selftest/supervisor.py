"""One rank of a selftest: starts a subject per job, monitors it, and synchronizes with the other supervisors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet_train.cluster.cluster import Cluster
from fleet_train.errors import WorkerFailed
from fleet_train.selftest import faults, record
from fleet_train.selftest.child import Child, environ_of, free_port
from fleet_train.selftest.faults import describe_code, last_words
from fleet_train.selftest.options import TOGETHER, TOGETHER_GROUPS, Options
from fleet_train.selftest.peers import Peers
from fleet_train.selftest.results import FAIL, SKIP, Result

_TICK_SECONDS = 0.05
_LOOK_SECONDS = 0.5
TOGETHER_SECONDS, TOGETHER_SECONDS_PER_RANK = 900.0, 10.0
"""How long the checks that share a job may take. Nothing in them waits for longer than its own timeout; the simulation
takes longer with more ranks."""
FAULT_COMES_WITHIN_SECONDS = 180.0
"""For the start of a job that fails on purpose: importing Paddle, joining, a few steps."""
_KILLED_LATER_SECONDS = 5.0
"""Subjects that have not ended this long after the bound will not."""

Say = Callable[[Result], None]


@dataclass(frozen=True)
class End:
    """How one rank's subject ended. ``exit_code`` is negative for a signal."""

    exit_code: int
    ended_at: float
    """On the clock of all supervisors."""
    was_killed: bool
    """By its supervisor, because it did not end."""
    began: str
    """The check that it was in; empty if it had done all."""
    last_lines: tuple[str, ...]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> End:
        return cls(**data | {"last_lines": tuple(data["last_lines"])})


class Supervisor:
    """Runs a selftest for one rank. ``say`` is called with every result, on rank 0."""

    def __init__(self, peers: Peers, options: Options, folder: Path, say: Say) -> None:
        self.cluster = peers.cluster
        self.options = options
        self.folder = folder
        self.peers = peers
        self.results: list[Result] = []
        self._say = say
        self._shared = 0

    def run(self) -> tuple[list[Result], list[dict[str, Any]]]:
        """Runs every job. Returns the results, and the facts of each node; the same on all ranks."""
        facts = self.peers.gather("facts", record.facts())
        if set(self.options.groups) & set(TOGETHER_GROUPS):
            limit = TOGETHER_SECONDS + TOGETHER_SECONDS_PER_RANK * self.cluster.world_size
            ends, subjects = self.run_job(TOGETHER, limit)
            for result in judge_ends(subjects, ends):
                self.found([result, *not_done(self.options.groups, result.group)])
        if "faults" in self.options.groups:
            self._run_faults()
        shared = self.shared([result.to_json() for result in self.results])
        firsts = [self.cluster.ranks_on_node(node)[0] for node in range(self.cluster.node_num)]
        return [Result.from_json(one) for one in shared], [facts[rank] for rank in firsts]

    def shared(self, value: Any) -> Any:
        """Rank 0's value, on all ranks, after a barrier."""
        self._shared += 1
        return self.peers.gather(f"shared {self._shared}", value)[0]

    def found(self, results: Iterable[Result]) -> None:
        """Final results; rank 0's count."""
        for result in results:
            self.results.append(result)
            if self.cluster.rank == 0:
                self._say(result)

    def _run_faults(self) -> None:
        if self.cluster.world_size == 1:
            self.found([Result("faults", "faults", SKIP, "one rank has no peer that could fail")])
            return
        for kind in faults.KINDS:
            began = time.monotonic()
            ends, subjects = self.run_job(kind, FAULT_COMES_WITHIN_SECONDS)
            fault_at = self.peers.noted(f"fault of {kind}")
            others = {rank: end for rank, end in ends.items() if rank != self._at_fault}
            if fault_at is None:
                self.found([_no_fault(subjects, kind, others)])
                continue
            ended = {
                rank: faults.Ended(end.ended_at - fault_at, end.exit_code, end.was_killed, end.last_lines)
                for rank, end in others.items()
            }
            self.found([faults.judge(subjects, kind, self.options, ended, time.monotonic() - began)])

    @property
    def _at_fault(self) -> int:
        return self.cluster.world_size - 1

    def run_job(self, job: str, limit_seconds: float) -> tuple[dict[int, End], Cluster]:
        """Start this rank's subject and wait for its end; returns how all ranks' subjects ended, and their cluster.

        ``limit_seconds``: when it is killed, unless a fault has been recorded: then soon after the bound for that.
        """
        subjects = self.peers.subjects(job, free_port(self.cluster.this.host))
        environ = environ_of(subjects, self.options.join_timeout_seconds, os.environ)
        log = self.folder / "log" / f"{job.replace(' ', '_')}.{self.cluster.rank}.log"
        child = Child(job, [json.dumps(self.options.to_json())], environ, log)
        try:
            end = self._attend(job, child, limit_seconds)
            self.peers.note(f"end of {job} {self.cluster.rank}")
        finally:
            child.kill()
        ends = self.peers.gather(f"ends of {job}", asdict(end), limit_seconds)
        return {rank: End.from_json(one) for rank, one in ends.items()}, subjects

    def _attend(self, job: str, child: Child, limit_seconds: float) -> End:
        deadline, look_at = time.monotonic() + limit_seconds, 0.0
        began, was_killed = "start", False
        while True:
            has_ended = child.has_ended()
            for report in child.reports():
                began = report.get("begins", began)
                if "result" in report:
                    self.found([Result.from_json(report["result"])])
                if "fault" in report:
                    self.peers.note(f"fault of {job}")
            if has_ended:
                return End(child.exit_code, self.peers.clock(), was_killed, began, child.last_lines())
            if time.monotonic() > look_at:
                look_at = time.monotonic() + _LOOK_SECONDS
                self.peers.look()
                if time.monotonic() > deadline or self._is_over(job):
                    was_killed = True
                    child.kill()
            time.sleep(_TICK_SECONDS)

    def _is_over(self, job: str) -> bool:
        """Whether this rank's subject can be stopped: all others have ended, or its time after a fault is over."""
        fault_at = self.peers.noted(f"fault of {job}")
        if fault_at is None:
            return False
        bound = self.options.fault_timeout_seconds + faults.GRACE_SECONDS + _KILLED_LATER_SECONDS
        if self.peers.clock() > fault_at + bound:
            return True
        others = (rank for rank in range(self.cluster.world_size) if rank != self._at_fault)
        return self.cluster.rank == self._at_fault and all(
            self.peers.noted(f"end of {job} {rank}") is not None for rank in others
        )


def judge_ends(cluster: Cluster, ends: Mapping[int, End]) -> list[Result]:
    """The failures of subjects that should have ended with 0: names the first one that ended without having lost

    another. The failed group is ``began`` of its end.
    """
    wrong = {rank: end for rank, end in ends.items() if end.exit_code != 0}
    if not wrong:
        return []
    rank, end = min(wrong.items(), key=lambda one: (one[1].exit_code == WorkerFailed.exit_code, one[1].ended_at))
    how = "did not end and was killed" if end.was_killed else f"ended with {describe_code(end.exit_code)}"
    return [Result(end.began, end.began, FAIL, f"{cluster.describe(rank)} {how}: {last_words(end.last_lines)}")]


def not_done(groups: Sequence[str], failed: str) -> list[Result]:
    """The checks of the same job after the one in which it ended; ``start`` comes before all."""
    behind = TOGETHER_GROUPS[TOGETHER_GROUPS.index(failed) + 1 :] if failed in TOGETHER_GROUPS else TOGETHER_GROUPS
    return [Result(one, one, SKIP, f"not run: the ranks ended in '{failed}'") for one in behind if one in groups]


def _no_fault(cluster: Cluster, kind: str, others: dict[int, End]) -> Result:
    """The ranks did not reach the fault."""
    found = judge_ends(cluster, others)
    why = found[0].words if found else "no rank reported why"
    return Result("faults", f"a rank {kind}", FAIL, f"the ranks did not reach the fault: {why}")
