"""One rank of a selftest: starts a subject per job, monitors it, and synchronizes with the other supervisors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.cluster import Cluster
from fleet_train.errors import WorkerFailed
from fleet_train.launch.on_ranks import Peers, RankCommand, SubjectEnd, Where, first_to_fail, start_on_ranks
from fleet_train.selftest import record
from fleet_train.selftest.options import (
    FAIL,
    GROUPS,
    OK,
    SKIP,
    TOGETHER,
    TOGETHER_GROUPS,
    Result,
    SelftestOptions,
    verdict,
)

FAULT_KINDS = ("skips a collective", "is stopped", "is killed")


def start(
    options: SelftestOptions,
    where: Where,
    folder: Path,
    as_json: bool,
    outcome: Path | None,
    make: type[SelftestSupervisor],
) -> int:
    """Run the selftest; returns the exit code. ``outcome``: given to ranks that were started from here; ``make``: of a
    rank's supervisor."""
    began = time.monotonic()

    def supervise(peers: Peers) -> dict[str, Any]:
        results, machines = make(peers, options).run()
        seconds = time.monotonic() - began
        content: dict[str, Any] = peers.gather(
            "record",
            record.make(peers.cluster, options, machines, results, seconds) if not peers.cluster.rank else None,
        )[0]
        if peers.cluster.rank == 0:
            path = record.write(folder, content)
            peers.show(verdict(results, seconds))
            peers.show(f"record: {path} (and .md); logs: {folder / 'log'}")
            if options.ladder:
                peers.show(record.how_to_send(path, content["exit_code"]))
        return content

    return start_on_ranks(command_of(options, folder, as_json, outcome), where, supervise)


def command_of(
    options: SelftestOptions, folder: Path, as_json: bool = False, outcome: Path | None = None
) -> RankCommand:
    arguments = ["--record", str(folder.absolute())]
    arguments += [word for group in GROUPS if group not in options.groups for word in ("--skip", group)]
    arguments += ["--ladder"] if options.ladder else []
    arguments += ["--quick"] if options.is_quick else []
    return RankCommand("selftest", arguments, folder, options.join_timeout_seconds, as_json, outcome)


class SelftestSupervisor:
    """Runs a selftest for one rank; rank 0 shows every result."""

    def __init__(self, peers: Peers, options: SelftestOptions) -> None:
        self.cluster = peers.cluster
        self.options = options
        self.peers = peers
        self.results: list[Result] = []

    def run(self) -> tuple[list[Result], list[dict[str, Any]]]:
        """Runs every job. Returns the results, and the facts of each node; the same on all ranks."""
        facts = self.peers.gather("facts", record.facts())
        self.run_jobs()
        shared = self.peers.gather("results", [result.to_json() for result in self.results])[0]  # rank 0's count
        firsts = [self.cluster.ranks_on_node(node)[0] for node in range(self.cluster.node_num)]
        return [Result.from_json(content) for content in shared], [facts[rank] for rank in firsts]

    def run_jobs(self) -> None:
        if set(self.options.groups) & set(TOGETHER_GROUPS):
            limit = timeouts.SELFTEST_SECONDS + timeouts.SELFTEST_SECONDS_PER_RANK * self.cluster.world_size
            ends, subjects = self.run_job(TOGETHER, limit)
            for result in judge_ends(subjects, ends):
                self.add([result, *not_done(self.options.groups, result.group)])
        if "faults" not in self.options.groups:
            return
        if self.cluster.world_size == 1:
            self.add([Result("faults", "faults", SKIP, "one rank has no peer that could fail")])
            return
        for kind in FAULT_KINDS:
            self.run_fault(kind)

    def add(self, results: Iterable[Result]) -> None:
        """Final results."""
        for result in results:
            self.results.append(result)
            self.peers.show(result.line)

    def run_fault(self, kind: str) -> dict[int, SubjectEnd]:
        """A job in which the last rank fails in this way; returns how the others ended."""
        began = time.monotonic()
        ends, subjects = self.run_job(kind, timeouts.SELFTEST_FAULT_COMES_SECONDS)
        fault_at = self.peers.noted(f"fault of {kind}")
        others = {rank: end for rank, end in ends.items() if rank != self._at_fault}
        if fault_at is None:
            self.add([_no_fault(subjects, kind, others)])
        else:
            self.add([judge_faults(subjects, kind, self.options, others, fault_at, time.monotonic() - began)])
        return others

    @property
    def _at_fault(self) -> int:
        return self.cluster.world_size - 1

    def run_job(self, job: str, limit_seconds: float) -> tuple[dict[int, SubjectEnd], Cluster]:
        """Start this rank's subject and wait for its end; returns how all ranks' subjects ended, and their cluster.

        ``limit_seconds``: when it is killed, unless a fault has been recorded: then soon after the bound for that.
        """

        def on_report(report: dict[str, Any]) -> None:
            if "result" in report:
                self.add([Result.from_json(report["result"])])
            if "fault" in report:
                self.peers.note(f"fault of {job}")

        def why_over() -> str:
            return "its time after a fault is over" if self._is_over(job) else ""

        return self.peers.run(job, self.options.to_json(), limit_seconds, on_report, why_over)

    def _is_over(self, job: str) -> bool:
        """Whether this rank's subject can be stopped: all others have ended, or its time after a fault is over."""
        fault_at = self.peers.noted(f"fault of {job}")
        if fault_at is None:
            return False
        bound = (
            self.options.fault_timeout_seconds
            + timeouts.SELFTEST_FAULT_GRACE_SECONDS
            + timeouts.SELFTEST_KILLED_LATER_SECONDS
        )
        if self.peers.clock() > fault_at + bound:
            return True
        others = (rank for rank in range(self.cluster.world_size) if rank != self._at_fault)
        return self.cluster.rank == self._at_fault and all(
            self.peers.noted(f"end of {job} {rank}") is not None for rank in others
        )


def judge_ends(cluster: Cluster, ends: Mapping[int, SubjectEnd]) -> list[Result]:
    """The failures of subjects that should have ended with 0: names the first one that ended without having lost
    another. The failed group is ``began`` of its end."""
    rank = first_to_fail(ends)
    if rank is None:
        return []
    end = ends[rank]
    return [Result(end.began, end.began, FAIL, f"{cluster.describe(rank)} {end.failure}")]


def not_done(groups: Sequence[str], failed: str) -> list[Result]:
    """The checks of the same job after the one in which it ended; ``start`` comes before all."""
    behind = TOGETHER_GROUPS[TOGETHER_GROUPS.index(failed) + 1 :] if failed in TOGETHER_GROUPS else TOGETHER_GROUPS
    return [
        Result(group, group, SKIP, f"not run: the ranks ended in '{failed}'") for group in behind if group in groups
    ]


def _no_fault(cluster: Cluster, kind: str, others: dict[int, SubjectEnd]) -> Result:
    """The ranks did not reach the fault."""
    failures = judge_ends(cluster, others)
    why = failures[0].words if failures else "no rank reported why"
    return Result("faults", f"a rank {kind}", FAIL, f"the ranks did not reach the fault: {why}")


def judge_faults(
    cluster: Cluster,
    kind: str,
    options: SelftestOptions,
    ends: Mapping[int, SubjectEnd],
    fault_at: float,
    seconds: float,
) -> Result:
    """How soon the others ended when one rank failed, and whether they name it.

    ``cluster``: the subjects', whose last rank failed at ``fault_at``; ``ends``: those of all others.
    """
    bound = options.fault_timeout_seconds + timeouts.SELFTEST_FAULT_GRACE_SECONDS
    root_cause = cluster.describe(cluster.world_size - 1)
    label = f"a rank {kind}"
    took = {rank: end.ended_at - fault_at for rank, end in ends.items()}
    figures = {
        "seconds": {str(rank): round(each, 2) for rank, each in took.items()},
        "exit_codes": {str(rank): end.exit_code for rank, end in ends.items()},
        "bound_seconds": bound,
    }
    for rank, end in ends.items():
        wrong = _wrong(end, took[rank], root_cause, bound)
        if wrong:
            words = f"{cluster.describe(rank)} {wrong}; {root_cause} {kind.replace('is ', 'was ')}"
            return Result("faults", label, FAIL, words, seconds, figures)
    slowest = max(took.values())
    words = f"{len(ends)} other rank(s) ended within {slowest:.1f} s ({bound:g} s allowed) and named {root_cause}"
    return Result("faults", label, OK, words, seconds, figures)


def _wrong(end: SubjectEnd, seconds: float, root_cause: str, bound: float) -> str:
    if end.why_killed:
        return f"had not ended {seconds:.1f} s after the fault and was killed"
    if end.exit_code != WorkerFailed.exit_code:
        return f"ended with {end.how}, expected {WorkerFailed.exit_code}: {end.last_words}"
    if root_cause not in end.last_words:
        return f"does not name {root_cause}: {end.last_words}"
    if seconds > bound:
        return f"ended after {seconds:.1f} s, {bound:g} s are allowed"
    return ""
