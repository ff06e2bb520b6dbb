"""The launchers of one attempt meet: before its first rank starts, while its ranks run, at its end.

Each attempt has a scope of its own in the job store, where its ranks meet too. Launchers are the group ``node``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet_train.cluster.failure_report import FailureReport
from fleet_train.cluster.store_client import StoreClient
from fleet_train.errors import FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
from fleet_train.launch.ends import RankEnd
from fleet_train.launch.node import Node

GROUP = "node"
_STOP = "launch/stop"
_ZERO = "launch/zero"
_POLL_SECONDS = 0.2
_SAY_EVERY_SECONDS = 10.0
_FOLDER_SECONDS = 60.0

Facts = dict[str, Any]
Say = Callable[[str], None]


class Meeting:
    """This launcher's place in one attempt. ``start`` is the monotonic time at which all nodes had come."""

    def __init__(self, node: Node, client: StoreClient) -> None:
        self.node = node
        self.start = time.monotonic()
        self._client = client
        self._host_left = False

    @classmethod
    def open(cls, node: Node, scope: int, timeout_seconds: float, answer_seconds: float = 10.0) -> Meeting:
        """Take the place. Raises JoinTimeout when node 0's launcher, which hosts the store, does not come."""
        client = StoreClient.connect(
            f"{node.store_endpoint}/{scope}",
            node.index,
            group=GROUP,
            timeout_seconds=timeout_seconds,
            describe=node.describe,
            machine=node.address,
            answer_seconds=answer_seconds,
        )
        return cls(node, client)

    # before the first rank

    def join(self, facts: Facts, attempt: int, timeout_seconds: float, say: Say) -> int:
        """The attempt's number (the highest that a node proposed), when every node has come with the same facts.

        Raises JoinTimeout naming the nodes that are missing, ScheduleMismatch naming what differs.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            self._await_all(facts, deadline, timeout_seconds, say)
            proposed = self._client.gather(
                "launch", attempt, len(self.node.addresses), max(1.0, deadline - time.monotonic())
            )
        except FleetTrainError as error:
            self.fail(str(error), type(error).exit_code)
            raise
        self.start = time.monotonic()
        if self.node.index == 0:
            self._client.set(_ZERO, self._client.clock())
        return int(max(proposed.values()))

    def _await_all(self, facts: Facts, deadline: float, timeout_seconds: float, say: Say) -> None:
        self._client.set(f"launch/facts/{self.node.index}", facts)
        missing = set(range(len(self.node.addresses))) - {self.node.index}
        next_word = time.monotonic() + min(1.0, _SAY_EVERY_SECONDS)
        while missing:
            for index in sorted(missing):
                theirs = self._client.get(f"launch/facts/{index}")
                if theirs is not None:
                    missing.remove(index)
                    refuse_differences(self.node, facts, index, theirs)
            self._refuse_failure()
            awaited = ", ".join(self.node.describe(index) for index in sorted(missing))
            if missing and time.monotonic() > deadline:
                raise JoinTimeout(
                    f"{awaited} did not come within {timeout_seconds:g} s (--join_timeout); start the launcher there "
                    "with the same node list in the same order"
                )
            if missing and time.monotonic() > next_word:
                say(f"waiting for {awaited} (until --join_timeout, {deadline - time.monotonic():.0f} s more)")
                next_word = time.monotonic() + _SAY_EVERY_SECONDS
            time.sleep(_POLL_SECONDS if missing else 0)

    def _refuse_failure(self) -> None:
        failure = self.failure()
        if failure is not None:
            kind = ScheduleMismatch if failure.get("exit_code") == ScheduleMismatch.exit_code else WorkerFailed
            raise kind(f"the job ends before it has started: {failure.get('message', 'another node has failed')}")

    def shares_folder(self, folder: Path) -> bool:
        """Whether a node before this one in the list writes into the very same folder (a network file system)."""
        marker = f".launcher-{secrets.token_hex(8)}"
        (folder / marker).touch()
        try:
            told = self._client.gather("folders", marker, len(self.node.addresses), _FOLDER_SECONDS)
            shared = any((folder / told[index]).exists() for index in range(self.node.index))
            self._client.gather("folders compared", shared, len(self.node.addresses), _FOLDER_SECONDS)
            return shared
        finally:
            (folder / marker).unlink(missing_ok=True)

    # while the job runs

    def failure(self) -> dict[str, Any] | None:
        """What a launcher or a rank has reported, or that a launcher was lost; None while all is well.

        Raises WorkerFailed when node 0's launcher, and with it the store, has vanished before its ranks had ended.
        """
        word, reports = self.failures()
        return word or (reports[0].to_json() if reports else None)

    def failures(self) -> tuple[dict[str, Any] | None, list[FailureReport]]:
        """(what a launcher has said, or that one was lost; what ranks have reported). Raises as ``failure`` does."""
        if self._host_left:
            return None, []
        try:
            gone = self._client.gone(GROUP)
            told = self._client.failures()
            zero = self._zero() if told else 0.0
        except FleetTrainError:
            raise WorkerFailed(
                f"the launcher of {self.node.describe(0)}, which hosts the job store at {self.node.store_endpoint}, "
                "has vanished: it was killed, or its machine cannot be reached any more"
            ) from None
        reports = [FailureReport.from_json(report).at(at - zero) for report, at in told if "reporter" in report]
        word = next((report for report, _ in told if "node" in report), None) or self._lost(gone)
        self._host_left = not told and gone.get(0) == "left" and self.node.index != 0
        return word, reports

    def _lost(self, gone: Mapping[int, str]) -> dict[str, Any] | None:
        """A launcher that was lost takes its ranks with it: what others say of these is no news."""
        lost = [self.node.describe(index) for index, how in sorted(gone.items()) if how != "left"]
        if not lost:
            return None
        silent = next((how for how in gone.values() if how.startswith("not heard")), "")
        message = f"the launcher of {', '.join(lost)} was lost{silent and f' ({silent})'}"
        message += ": it was killed, or its machine cannot be reached"
        return {"message": message, "exit_code": WorkerFailed.exit_code, "node": None, "no_culprit": True}

    def reports(self) -> list[FailureReport]:
        """What ranks have reported so far; empty when the store does not answer."""
        with suppress(FleetTrainError):
            return self.failures()[1]
        return []

    def _zero(self) -> float:
        """When the launchers had met, on the store's clock."""
        return float(self._client.get(_ZERO) or 0.0)

    def fail(self, message: str, exit_code: int, *, no_culprit: bool = False, final: bool = False) -> None:
        """Tell everybody why the attempt ends; the first report stands. ``final``: it is not to be tried again."""
        report = {"message": message, "exit_code": exit_code, "node": self.node.index, "no_culprit": no_culprit}
        with suppress(FleetTrainError):
            self._client.fail({**report, "final": final})

    def tell_finished(self, rank: int) -> None:
        """Its process has ended with 0: those who wait for it in ``fleet.init`` are told that it will not come."""
        with suppress(FleetTrainError):
            self._client.ended("rank", rank)

    def announce_stop(self, why: str, grace_seconds: float, *, again: bool = False) -> None:
        """Tell everybody that ranks are to save their state, in that time. ``again``: there is another attempt."""
        with suppress(FleetTrainError):
            self._client.set(_STOP, {"why": why, "grace_seconds": grace_seconds, "again": again})

    def stop_announced(self) -> dict[str, Any] | None:
        """What ``announce_stop`` said on some node; None while nobody has, or when the store does not answer."""
        with suppress(FleetTrainError):
            notice: dict[str, Any] | None = self._client.get(_STOP)
            return notice
        return None

    # at the end

    def tell_ends(self, ends: list[RankEnd]) -> None:
        with suppress(FleetTrainError):
            self._client.set(f"launch/ends/{self.node.index}", [end.to_json() for end in ends])

    def ends_of_others(self, timeout_seconds: float) -> tuple[list[RankEnd], list[str]]:
        """(ends of the other nodes' ranks, nodes that have not told theirs within the bound)."""
        deadline = time.monotonic() + timeout_seconds
        missing = set(range(len(self.node.addresses))) - {self.node.index}
        ends: list[RankEnd] = []
        silent: set[int] = set()
        with suppress(FleetTrainError):  # the store may be gone: what was heard is what there is
            while missing - silent and time.monotonic() < deadline:
                silent = {index for index, how in self._client.gone(GROUP).items() if how != "left"}
                for index in sorted(missing):
                    told = self._client.get(f"launch/ends/{index}")
                    if told is not None:
                        missing.remove(index)
                        ends += [RankEnd.from_json(end) for end in told]
                time.sleep(_POLL_SECONDS if missing - silent else 0)
        return ends, [self.node.describe(index) for index in sorted(missing)]

    def await_others(self, seconds: float, say: Say) -> dict[str, Any] | None:
        """After this node's ranks have ended well: wait until those of the others have ended, at most so long.

        A failure elsewhere ends the wait and is returned, also one that came before it.
        """
        deadline = time.monotonic() + seconds
        word_at = time.monotonic() + 2.0
        missing = set(range(len(self.node.addresses))) - {self.node.index}
        while True:
            try:
                failure = self.failure()
                missing = {index for index in missing if self._client.get(f"launch/ends/{index}") is None}
            except FleetTrainError:
                return None  # the host has ended; our ranks have ended well
            if failure is not None or not missing or time.monotonic() > deadline:
                return failure
            if time.monotonic() > word_at:
                awaited = ", ".join(self.node.describe(index) for index in sorted(missing))
                say(f"this node's ranks have ended; waiting for those of {awaited}, {seconds:g} s at most")
                word_at = deadline
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        with suppress(FleetTrainError):
            self._client.leave()
        self._client.close()


def refuse_differences(node: Node, ours: Mapping[str, Any], index: int, theirs: Mapping[str, Any]) -> None:
    """Raises ScheduleMismatch that lists every fact in which two launchers differ."""
    different = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    if different:
        parts = [f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in different]
        raise ScheduleMismatch(
            f"{node.describe(index)} and {node.describe()} were not started alike: {'; '.join(parts)}; start every "
            "node with the same flags (except --node_ip) and the same installation"
        )


def check_told(facts: Facts) -> Facts:
    """Facts travel as JSON: a tuple would come back as a list and differ from itself."""
    assert all(isinstance(value, (str, int)) for value in facts.values()), facts
    return facts
