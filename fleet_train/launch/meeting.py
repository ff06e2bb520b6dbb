"""The launchers of all nodes meet in the job store: before the first rank starts, while the job runs, at the end.

Node 0's launcher hosts the store, so it outlives the ranks. Every launcher is a member of the store's group ``node``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet_train.cluster.store_client import StoreClient
from fleet_train.cluster.store_server import StoreServer
from fleet_train.errors import FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
from fleet_train.launch.ends import RankEnd
from fleet_train.launch.node import Node

GROUP = "node"
_POLL_SECONDS = 0.2
_SAY_EVERY_SECONDS = 10.0
_FOLDER_SECONDS = 60.0
_GOODBYE_SECONDS = 1.5  # three looks of a launcher that is still at work

Facts = dict[str, Any]
Say = Callable[[str], None]


class Meeting:
    """This launcher's seat in the store. ``start`` is the monotonic time at which all nodes had come."""

    def __init__(self, node: Node, client: StoreClient, server: StoreServer | None) -> None:
        self.node = node
        self.start = time.monotonic()
        self._client = client
        self._server = server
        self._host_left = False
        self._lingered = False

    @classmethod
    def open(cls, node: Node, timeout_seconds: float) -> Meeting:
        """Host the store (node 0) and take the seat. Raises JoinTimeout when node 0's launcher does not come."""
        server = StoreServer(node.addresses[0], node.store_port).start() if node.index == 0 else None
        try:
            client = StoreClient.connect(
                node.store_endpoint, node.index, group=GROUP, timeout_seconds=timeout_seconds, describe=node.describe
            )
        except JoinTimeout:
            raise JoinTimeout(
                f"the launcher of {node.describe(0)}, which hosts the job store at {node.store_endpoint}, did not come "
                f"within {timeout_seconds:g} s; start it with the same --cluster_node_ips and --started_port, or check "
                "that this port is not blocked by a firewall"
            ) from None
        except BaseException:
            if server is not None:
                server.stop()
            raise
        return cls(node, client, server)

    # before the first rank

    def join(self, facts: Facts, timeout_seconds: float, say: Say) -> None:
        """Return when every node has come with the same facts.

        Raises JoinTimeout naming the nodes that are missing, ScheduleMismatch naming what differs.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            self._await_all(facts, deadline, timeout_seconds, say)
            self._client.gather("launch", facts, len(self.node.addresses), max(1.0, deadline - time.monotonic()))
        except FleetTrainError as error:
            self.fail(str(error), type(error).exit_code)
            raise
        self.start = time.monotonic()

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
        """What another node or a rank has reported, or that a launcher was lost; None while all is well.

        Raises WorkerFailed when node 0's launcher, and with it the store, has vanished before its ranks had ended.
        """
        if self._host_left:
            return None
        try:
            failure = self._client.failure()
            gone = {} if failure else self._client.gone(GROUP)
        except FleetTrainError:
            raise WorkerFailed(
                f"the launcher of {self.node.describe(0)}, which hosts the job store at {self.node.store_endpoint}, "
                "has vanished: it was killed, or its machine cannot be reached any more"
            ) from None
        lost = [self.node.describe(index) for index, how in sorted(gone.items()) if how != "left"]
        self._host_left = gone.get(0) == "left" and self.node.index != 0
        if lost:
            message = f"the launcher of {', '.join(lost)} was lost: it was killed, or its machine cannot be reached"
            return {"message": message, "exit_code": WorkerFailed.exit_code, "node": None, "no_culprit": True}
        return failure

    def fail(self, message: str, exit_code: int, *, no_culprit: bool = False) -> None:
        """Tell everybody why the job ends; the first report stands."""
        report = {"message": message, "exit_code": exit_code, "node": self.node.index, "no_culprit": no_culprit}
        with suppress(FleetTrainError):
            self._client.fail(report)

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

    def linger(self, seconds: float, say: Say | None = None) -> dict[str, Any] | None:
        """Node 0 keeps the store while other nodes are at work, at most this long and once; the others go at once.

        With ``say`` (after success) a failure elsewhere ends the wait and is returned, also one that came before it.
        """
        deadline = time.monotonic() + seconds
        word_at = time.monotonic() + 2.0
        with suppress(FleetTrainError):
            while True:
                failure = self._client.failure() if say is not None else None
                others = self._server is not None and self._server.connected_members(GROUP) > 1
                if failure is not None:
                    return failure
                if self._lingered or not others or time.monotonic() > deadline:
                    self._lingered = True
                    return None
                if say is not None and time.monotonic() > word_at:
                    say(f"this node's ranks have ended; keeping the job store for the others, {seconds:g} s at most")
                    word_at = deadline
                time.sleep(_POLL_SECONDS)
        return None

    def close(self) -> None:
        """Leave, and end the store where it is hosted here."""
        with suppress(FleetTrainError):
            self._client.leave()
        if self._server is not None and self._server.connected_members(GROUP):
            time.sleep(_GOODBYE_SECONDS)  # so that those who are still at work can see that we left in order
        self._client.close()
        if self._server is not None:
            self._server.stop()


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
