"""The rendezvous of launchers, as threads over a real store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleet_train import timeouts
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.reports import FailureReport
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import JoinTimeout, ScheduleMismatch
from fleet_train.launch.node import Node
from fleet_train.launch.rendezvous import Rendezvous
from fleet_train.launch.report import WorkerResult
from tests.support.processes import until
from tests.unit.launch.conftest import aside, together

FACTS = {"the number of processes per node": 2, "the Paddle version": "3.3.1"}
END = WorkerResult(0, "127.0.0.1:6170", 0, 3, None, 1.5, False, "/logs/workerlog.0", ("x",))


@pytest.fixture
def nodes(free_ports: Callable[..., int]) -> list[Node]:
    addresses = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    port = free_ports(3)
    return [Node(addresses[:2], index, port, 1, None, "lo") for index in range(2)]


@pytest.fixture
def server(nodes: list[Node]) -> Iterator[StoreServer]:
    server = StoreServer(nodes[0].address, nodes[0].store_port).start()
    yield server
    server.stop()


@pytest.fixture
def pair(nodes: list[Node], server: StoreServer) -> Iterator[list[Rendezvous]]:
    assert server.port == nodes[0].store_port
    opened = [Rendezvous(node, 0, 5.0) for node in nodes]
    yield opened
    for rendezvous in reversed(opened):
        rendezvous.close()


@pytest.mark.usefixtures("server")
def test_a_missing_node_is_named(nodes: list[Node]) -> None:
    rendezvous = Rendezvous(nodes[0], 0, 1.0)
    with pytest.raises(JoinTimeout, match=r"node 1 \(127.0.0.2\) did not connect within 1.5 s"):
        rendezvous.join(FACTS, 0, 1.5)
    rendezvous.close()


def test_nodes_that_differ_both_get_the_difference(pair: list[Rendezvous]) -> None:
    other = {**FACTS, "the number of processes per node": 4}
    first, second = together(lambda: pair[0].join(FACTS, 0, 5.0), lambda: pair[1].join(other, 0, 5.0))
    assert isinstance(first, ScheduleMismatch)
    assert isinstance(second, ScheduleMismatch)
    assert "node 1 (127.0.0.2) and node 0 (127.0.0.1) were started differently" in str(first)
    assert "the number of processes per node is 4 there and 2 here" in str(first)
    assert "the Paddle version" not in str(first)


def test_a_shared_folder_is_noticed_by_the_later_node(pair: list[Rendezvous], tmp_path: Path) -> None:
    assert together(*(lambda m=m: m.shares_folder(tmp_path) for m in pair)) == [False, True]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    pairs = zip(pair, folders, strict=True)
    assert together(*(lambda m=m, f=f: m.shares_folder(f) for m, f in pairs)) == [False, False]
    assert list(tmp_path.rglob(".launcher-*")) == []


def test_exits_are_reported_and_a_silent_node_is_named(pair: list[Rendezvous]) -> None:
    pair[0].report_results([END])
    assert pair[1].results_of_others(2.0) == ([END], [])
    assert pair[0].results_of_others(0.3) == ([], ["node 1 (127.0.0.2)"])


def test_the_first_failure_reaches_the_other_node(pair: list[Rendezvous]) -> None:
    pair[1].fail("rank 1 failed", 7)
    pair[0].fail("rank 0 failed", 1)
    first = {"message": "rank 1 failed", "exit_code": 7, "node": 1, "no_root_cause": False, "final": False}
    assert [rendezvous.failure() for rendezvous in pair] == [first, first]
    # also if no rank is left there
    pair[1].report_results([])
    pair[1].close()
    assert pair[0].exit_barrier(5.0) == first


REPORT = FailureReport(1, 0, "missing", "did not arrive at step 4", "step 4: rank 1 ...", 11)


def test_the_failure_report_is_the_same_on_all_nodes_and_a_launchers_report_has_precedence(
    pair: list[Rendezvous], server: StoreServer
) -> None:
    together(*(lambda m=m: m.join(FACTS, 0, 5.0) for m in pair))
    rank = StoreClient.connect(f"{server.endpoint}/0", 0, timeout_seconds=5)
    rank.fail(REPORT.to_json())
    word, reports = pair[0].failures()
    assert word is None
    assert [replace(report, seconds=0.0) for report in reports] == [REPORT]
    assert 0.0 <= reports[0].seconds < 60.0
    assert pair[1].failures() == (None, reports)  # also the time is the same number
    failure = pair[1].failure()
    assert failure is not None
    assert failure["message"] == "step 4: rank 1 ..."
    pair[1].fail("rank 1 failed first", 1)
    word, reports = pair[0].failures()
    assert word is not None
    assert word["message"] == "rank 1 failed first"
    assert pair[0].reports() == reports
    assert len(reports) == 1


def test_a_lost_launcher_says_more_than_ranks_that_miss_those_of_its_node(
    pair: list[Rendezvous], server: StoreServer
) -> None:
    rank = StoreClient.connect(f"{server.endpoint}/0", 0, timeout_seconds=5)
    rank.fail(REPORT.to_json())
    pair[1].client.close()  # what the kernel does when the process is killed
    word = until(lambda: pair[0].failures()[0])
    assert "the launcher of node 1 (127.0.0.2) was lost" in word["message"]
    assert word["no_root_cause"]
    assert pair[0].failure() == word


def test_the_host_that_left_is_not_missed(pair: list[Rendezvous]) -> None:
    pair[0].client.leave()
    assert pair[1].failure() is None
    pair[0].close()
    assert pair[1].failure() is None


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FIRST_WAITING_SECONDS", 0.0)


@pytest.mark.usefixtures("told_at_once")
def test_a_node_that_succeeded_waits_for_the_others_within_a_timeout(
    pair: list[Rendezvous], messages: list[str]
) -> None:
    began = time.monotonic()
    assert pair[0].exit_barrier(0.5) is None
    assert 0.5 <= time.monotonic() - began < 30.0
    assert messages == ["this node's ranks have ended; waiting for those of node 1 (127.0.0.2), 0.5 s at most"]
    pair[1].report_results([])
    began = time.monotonic()
    assert pair[0].exit_barrier(60.0) is None
    assert time.monotonic() - began < 30.0


@pytest.mark.usefixtures("told_at_once")
def test_a_wait_without_a_timeout_ends_if_nodes_leave_or_are_lost(pair: list[Rendezvous], messages: list[str]) -> None:
    waiting = aside(lambda: pair[0].exit_barrier(math.inf))
    until(lambda: messages)
    pair[1].close()
    assert waiting() is None
    assert messages == ["this node's ranks have ended; waiting for those of node 1 (127.0.0.2)"]
    pair[1].client = StoreClient.connect(pair[1].node.store_endpoint + "/0", 1, group="node", timeout_seconds=5.0)
    pair[1].client.close()  # without a goodbye
    lost = pair[0].exit_barrier(math.inf)
    assert lost is not None
    assert lost["exit_code"] == 11


@pytest.mark.usefixtures("told_at_once")
@pytest.mark.parametrize("how", ["left", "lost"])
def test_no_node_waits_for_a_lost_leader_whichever_node_it_is(nodes: list[Node], messages: list[str], how: str) -> None:
    led = [replace(node, leader=1) for node in nodes]
    server = StoreServer(led[1].address, led[1].store_port).start()
    first, leader = (Rendezvous(node, 0, 5.0) for node in led)
    try:
        waiting = aside(lambda: first.exit_barrier(math.inf))
        until(lambda: messages)
        if how == "left":
            leader.close()
        else:
            server.stop()
        assert waiting() is None
    finally:
        first.close()
        leader.close()
        server.stop()
