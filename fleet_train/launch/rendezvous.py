"""The rendezvous of one attempt's launchers: before its first rank starts, while its ranks run, at its end.

Each attempt has its own round in the job store, which its ranks join too. Launchers are the group ``node``.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.client import JOINED, StoreClient, Variants
from fleet_train.cluster.store.reports import FailureReport
from fleet_train.errors import FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
from fleet_train.launch.node import Node
from fleet_train.launch.report import WorkerResult
from fleet_train.log import logger

GROUP = "node"
_STOP = "launch/stop"
_ZERO = "launch/zero"  # when all launchers had joined, on the store's clock
_ENDS, _OVER = "launch/ends/", "launch/over/"
# Up to this many nodes, the results of all ranks are read.
_MOST_READ = 32

Facts = dict[str, Any]


class Rendezvous:
    """This launcher in one attempt. ``start`` is the monotonic time at which all nodes had joined."""

    def __init__(
        self,
        node: Node,
        round_number: int,
        timeout_seconds: float,
        answer_seconds: float = timeouts.STORE_ANSWER_SECONDS,
        access: Access | None = None,
    ) -> None:
        """Connect. Raises JoinTimeout if the leader, which hosts the store, does not answer."""
        self.node = node
        self.start = time.monotonic()
        self.launched = ""
        """A unique identifier of this launch of the job; known once all have joined."""
        self.addresses = node.addresses
        """The nodes' addresses in this attempt; known once all have joined."""
        self._host_left = False
        self.client = StoreClient.connect(
            f"{node.store_endpoint}/{round_number}",
            node.index,
            group=GROUP,
            timeout_seconds=timeout_seconds,
            describe=node.describe,
            machine=node.address,
            answer_seconds=answer_seconds,
            access=access,
        )

    # before the first rank

    def join(
        self,
        facts: Facts,
        attempt: int,
        timeout_seconds: float,
        launched: str = "",
        refuse: Callable[[], None] = lambda: None,
    ) -> int:
        """The attempt's number (the highest that a node proposed), once every node has joined with the same facts.
        ``refuse`` is called meanwhile, every second, and may raise.

        Raises JoinTimeout with the missing nodes, ScheduleMismatch with the differences.
        """
        deadline = time.monotonic() + timeout_seconds
        count = len(self.node.addresses)
        try:
            for ranges, theirs in self._compare(facts, deadline, timeout_seconds, refuse):
                if theirs is not None and theirs != facts:
                    refuse_other_launcher(self.node, facts, ranges[0][0], theirs)
            left = max(1.0, deadline - time.monotonic())
            proposals = self.client.all_gather("attempt", [attempt, self.node.address], count, left)
            self.launched = self.client.broadcast("launched", launched, self.node.leader, count, left)
        except FleetTrainError as error:
            self.fail(str(error), type(error).exit_code)
            raise
        self.start = time.monotonic()
        if self.node.is_leader:
            self.client.set(_ZERO, self.client.clock())
        self.addresses = tuple(str(proposals[index][1]) for index in range(count))
        return int(max(number for number, _ in proposals.values()))

    def _compare(self, facts: Facts, deadline: float, timeout_seconds: float, refuse: Callable[[], None]) -> Variants:
        """The facts of each node, once all have joined; reports periodically which nodes it waits for."""
        count, word_at = len(self.node.addresses), time.monotonic() + 0.9
        while True:
            left = deadline - time.monotonic()
            try:
                return self.client.compare("facts", facts, count, max(0.1, min(1.0, left)))
            except JoinTimeout as error:
                self._refuse_failure()
                refuse()
                awaited = ", ".join(self.node.describe(each.member) for each in error.absent) or "the other nodes"
                left = deadline - time.monotonic()
                if left <= 0:
                    raise JoinTimeout(
                        f"{awaited} did not connect within {timeout_seconds:g} s (--join_timeout); start the launcher "
                        "there with the same node list in the same order, --nproc_per_node and --started_port"
                    ) from None
                if time.monotonic() > word_at:
                    logger.info(f"waiting for {awaited} (until --join_timeout, {left:.0f} s more)")
                    word_at = time.monotonic() + timeouts.REPORT_WAITING_SECONDS
            except WorkerFailed:
                self._refuse_failure()
                raise

    def _refuse_failure(self) -> None:
        failure = self.failure()
        if failure is not None:
            kind = ScheduleMismatch if failure.get("exit_code") == ScheduleMismatch.exit_code else WorkerFailed
            raise kind(f"the job ends before it has started: {failure.get('message', 'another node failed')}")

    def shares_folder(self, folder: Path) -> bool:
        """Whether a node before this one in the list writes into the very same folder (a network file system)."""
        marker = f".launcher-{secrets.token_hex(8)}"
        with suppress(OSError):  # the disk may be full by now: the others still wait for our result
            (folder / marker).touch()
        try:
            markers = self.client.all_gather(
                "folders", marker, len(self.node.addresses), timeouts.COMPARE_FOLDERS_SECONDS
            )
            shared = any((folder / markers[index]).exists() for index in range(self.node.index))
            self.client.barrier("folders compared", None, len(self.node.addresses), timeouts.COMPARE_FOLDERS_SECONDS)
            return shared
        finally:
            (folder / marker).unlink(missing_ok=True)

    # while the job runs

    def failure(self) -> dict[str, Any] | None:
        """The report of a launcher or a rank, or of a lost launcher; None if there is no failure.

        Raises WorkerFailed if the leader, and its store, was lost before its ranks had ended.
        """
        notice, reports = self.failures()
        return notice or (reports[0].to_json() if reports else None)

    def failures(
        self, ask_more: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any] | None, list[FailureReport]]:
        """(the report of a launcher, or of a lost one; the reports of ranks). Raises as ``failure`` does.

        ``ask_more`` has other questions to the store: whichever has no answer shows that it is lost.
        """
        if self._host_left:
            return None, []
        try:
            gone = self.client.gone(GROUP)
            entries = self.client.failures()
            zero = float(self.client.get(_ZERO) or 0.0) if entries else 0.0
            ask_more()
        except FleetTrainError:
            raise WorkerFailed(
                f"the launcher of {self.node.describe(self.node.leader)}, which hosts the job store at "
                f"{self.node.store_endpoint}, was lost: it was killed, or its machine cannot be reached any more"
            ) from None
        reports = FailureReport.of_store(entries, zero)
        notice = next((report for report, _ in entries if "node" in report), None) or self._lost(gone)
        self._host_left = not entries and gone.get(self.node.leader) == "left" and not self.node.is_leader
        return notice, reports

    def _lost(self, gone: Mapping[int, str]) -> dict[str, Any] | None:
        """A lost launcher takes its ranks with it: reports about these add nothing."""
        lost = [self.node.describe(index) for index, how in sorted(gone.items()) if how != "left"]
        if not lost:
            return None
        silent = next((how for how in gone.values() if how.startswith("not heard")), "")
        message = f"the launcher of {', '.join(lost)} was lost{silent and f' ({silent})'}"
        message += ": it was killed, or its machine cannot be reached"
        return {"message": message, "exit_code": WorkerFailed.exit_code, "node": None, "no_root_cause": True}

    def reports(self) -> list[FailureReport]:
        """The ranks' reports so far; empty if the store does not answer."""
        with suppress(FleetTrainError):
            return self.failures()[1]
        return []

    def fail(self, message: str, exit_code: int, *, no_root_cause: bool = False, final: bool = False) -> None:
        """Report to all why the attempt ends; the first report counts. ``final``: there is no further attempt."""
        report = {"message": message, "exit_code": exit_code, "node": self.node.index, "no_root_cause": no_root_cause}
        with suppress(FleetTrainError):
            self.client.fail({**report, "final": final})

    def report_finished(self, rank: int) -> None:
        """Its process ended with 0: ranks that wait for it in ``fleet.init`` learn that it will not connect."""
        with suppress(FleetTrainError):
            self.client.ended("rank", rank)

    def report_ranks_over(self) -> None:
        """All processes of this node's ranks have ended, and some have failed."""
        with suppress(FleetTrainError):
            self.client.set(f"{_OVER}{self.node.index}", True)

    def all_ranks_are_over(self) -> bool:
        """Whether that is so on every node; False if the store does not answer."""
        with suppress(FleetTrainError):
            return len(self.client.keys(_OVER)) == len(self.node.addresses)
        return False

    def ranks_have_joined(self) -> bool:
        """Whether all ranks have called ``fleet.init``; True if the store does not answer."""
        with suppress(FleetTrainError):
            return self.client.get(JOINED) is not None
        return True

    def announce_stop(self, why: str, grace_seconds: float, *, again: bool = False) -> None:
        """Ask all ranks to save their state within that time. ``again``: there is another attempt."""
        with suppress(FleetTrainError):
            self.client.set(_STOP, {"why": why, "grace_seconds": grace_seconds, "again": again})

    def stop_announced(self) -> dict[str, Any] | None:
        """The announcement of ``announce_stop`` on some node; None if there is none, or the store does not answer."""
        with suppress(FleetTrainError):
            notice: dict[str, Any] | None = self.client.get(_STOP)
            return notice
        return None

    # at the end

    def report_results(self, ends: list[WorkerResult]) -> None:
        with suppress(FleetTrainError):
            self.client.set(f"{_ENDS}{self.node.index}", [end.to_json() for end in ends])

    def results_of_others(self, timeout_seconds: float) -> tuple[list[WorkerResult], list[str]]:
        """(results of the other nodes' ranks, nodes that have not reported theirs within the bound).

        In a job of many nodes, only those of the nodes whose ranks failed first, by their reports, are read.
        """
        deadline = time.monotonic() + timeout_seconds
        missing = self._others_of_interest()
        ends: list[WorkerResult] = []
        silent: set[int] = set()
        with suppress(FleetTrainError):  # the store may be gone: then what has arrived is complete
            while missing - silent and time.monotonic() < deadline:
                silent = {index for index, how in self.client.gone(GROUP).items() if how != "left"}
                for index in sorted(missing & self._ended_nodes()):
                    missing.remove(index)
                    results = self.client.get(f"{_ENDS}{index}") or []
                    ends += [WorkerResult.from_json(end) for end in results]
                time.sleep(self._poll_seconds if missing - silent else 0)
        return ends, [self.node.describe(index) for index in sorted(missing)]

    def _others_of_interest(self) -> set[int]:
        count = len(self.node.addresses)
        if count <= _MOST_READ:
            return set(range(count)) - {self.node.index}
        first = [self.node.node_of(report.rank) for report in self.reports()]
        return {index for index in list(dict.fromkeys(first))[:_MOST_READ] if index < count} - {self.node.index}

    def _ended_nodes(self) -> set[int]:
        """The nodes whose launchers have reported how their ranks ended."""
        return {int(key.removeprefix(_ENDS)) for key in self.client.keys(_ENDS)}

    @property
    def _poll_seconds(self) -> float:
        return polling_seconds(self.node, timeouts.LAUNCHERS_POLL_SECONDS)

    def exit_barrier(self, seconds: float) -> dict[str, Any] | None:
        """After this node's ranks succeeded: wait until those of the others have ended, at most this long.

        A failure elsewhere ends the wait and is returned, even one from before it. A launcher that has left reports
        nothing more.
        """
        deadline = time.monotonic() + seconds
        word_at = time.monotonic() + timeouts.FIRST_WAITING_SECONDS
        missing = set(range(len(self.node.addresses))) - {self.node.index}
        while True:
            try:
                failure = self.failure()
                missing -= self._ended_nodes()
                # Lost nodes are not skipped: the next poll finds them, as a failure.
                missing -= {index for index, how in self.client.gone(GROUP).items() if how == "left"}
            except FleetTrainError:
                return None  # the host has ended; our ranks succeeded
            if failure is not None or not missing or time.monotonic() > deadline:
                return failure
            if time.monotonic() > word_at:
                awaited = ", ".join(self.node.describe(index) for index in sorted(missing))
                bound = f", {seconds:g} s at most" if math.isfinite(seconds) else ""
                logger.info(f"this node's ranks have ended; waiting for those of {awaited}{bound}")
                word_at = deadline
            time.sleep(self._poll_seconds)

    def close(self) -> None:
        with suppress(FleetTrainError):
            self.client.leave()
        self.client.close()


def polling_seconds(node: Node, least: float) -> float:
    """How often a launcher polls the leader: the more launchers there are, the less often."""
    return max(least, len(node.addresses) / timeouts.STORE_QUESTIONS_PER_SECOND)


def refuse_other_launcher(node: Node, ours: Mapping[str, Any], index: int, theirs: Mapping[str, Any]) -> None:
    """Raises ScheduleMismatch with every fact in which two launchers differ."""
    if difference := difference_of(node.describe(index), node.describe(), ours, theirs):
        raise ScheduleMismatch(difference)


def difference_of(there: str, here: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The message with every fact in which two launchers differ; empty if they do not."""
    different = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    parts = [f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in different]
    said = (
        f"{there} and {here} were started differently: {'; '.join(parts)}; start every node with the same flags "
        "(except --node_ip) and the same installation"
    )
    if any("processes per node" in name for name in different):
        said += (
            "; for unlike numbers of processes write each node's number into the list, the same on every node: "
            "--cluster_node_ips=A:2,B:1"
        )
    return said if different else ""
