"""Launchers that meet, as threads over a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet_train.errors import JoinTimeout, ScheduleMismatch, WorkerFailed
from fleet_train.launch.ends import RankEnd
from fleet_train.launch.meeting import Meeting, refuse_differences
from fleet_train.launch.node import Node

FACTS = {"the number of processes per node": 2, "the Paddle version": "3.3.1"}
END = RankEnd(0, "127.0.0.1:6170", 0, 3, None, 1.5, False, "/logs/workerlog.0", ("x",))


@pytest.fixture
def nodes(free_ports: Callable[..., int]) -> list[Node]:
    addresses = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    port = free_ports(3)
    return [Node(addresses[:2], index, port, 1, None, "lo") for index in range(2)]


@pytest.fixture
def meetings(nodes: list[Node]) -> Iterator[list[Meeting]]:
    opened = [Meeting.open(node, 5.0) for node in nodes]
    yield opened
    for meeting in reversed(opened):
        meeting.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls side by side; each one's result, or the error that it raised."""
    results: list[Any] = [None] * len(calls)

    def one(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return results


def quiet(_: str) -> None: ...


def test_nodes_that_agree_start_together(meetings: list[Meeting]) -> None:
    assert together(*(lambda m=m: m.join(FACTS, 5.0, quiet) for m in meetings)) == [None, None]
    assert abs(meetings[0].start - meetings[1].start) < 0.5
    assert meetings[0].failure() is None


def test_nodes_that_differ_are_both_told_what_differs(meetings: list[Meeting]) -> None:
    other = {**FACTS, "the number of processes per node": 4}
    first, second = together(lambda: meetings[0].join(FACTS, 5.0, quiet), lambda: meetings[1].join(other, 5.0, quiet))
    assert isinstance(first, ScheduleMismatch)
    assert isinstance(second, ScheduleMismatch)
    assert "node 1 (127.0.0.2) and node 0 (127.0.0.1) were not started alike" in str(first)
    assert "the number of processes per node is 4 there and 2 here" in str(first)
    assert "the Paddle version" not in str(first)


def test_a_fact_that_only_one_side_has_differs(nodes: list[Node]) -> None:
    with pytest.raises(ScheduleMismatch, match="b is None there and 1 here"):
        refuse_differences(nodes[0], {"a": 1, "b": 1}, 1, {"a": 1})


def test_a_missing_node_is_named(nodes: list[Node]) -> None:
    said: list[str] = []
    meeting = Meeting.open(nodes[0], 1.0)
    with pytest.raises(JoinTimeout, match=r"node 1 \(127.0.0.2\) did not come within 1.5 s"):
        meeting.join(FACTS, 1.5, said.append)
    assert said[0].startswith("waiting for node 1 (127.0.0.2)")
    meeting.close()


def test_a_missing_store_is_named(nodes: list[Node]) -> None:
    with pytest.raises(JoinTimeout, match=r"the launcher of node 0 \(127.0.0.1\).*did not come within 0.3 s"):
        Meeting.open(nodes[1], 0.3)


def test_a_shared_folder_is_noticed_by_the_later_node(meetings: list[Meeting], tmp_path: Path) -> None:
    assert together(*(lambda m=m: m.shares_folder(tmp_path) for m in meetings)) == [False, True]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    pairs = zip(meetings, folders, strict=True)
    assert together(*(lambda m=m, f=f: m.shares_folder(f) for m, f in pairs)) == [False, False]
    assert list(tmp_path.rglob(".launcher-*")) == []


def test_ends_are_told_and_a_silent_node_is_named(meetings: list[Meeting]) -> None:
    meetings[0].tell_ends([END])
    assert meetings[1].ends_of_others(2.0) == ([END], [])
    assert meetings[0].ends_of_others(0.3) == ([], ["node 1 (127.0.0.2)"])


def test_the_first_failure_reaches_the_other_node(meetings: list[Meeting]) -> None:
    meetings[1].fail("rank 1 failed", 7)
    meetings[0].fail("rank 0 failed", 1)
    for meeting in meetings:
        assert meeting.failure() == {"message": "rank 1 failed", "exit_code": 7, "node": 1, "no_culprit": False}


def test_a_lost_launcher_is_reported(meetings: list[Meeting]) -> None:
    meetings[1]._client.close()  # what the kernel does when the process is killed
    failure = None
    for _ in range(50):
        failure = failure or meetings[0].failure()
    assert failure is not None
    assert "the launcher of node 1 (127.0.0.2) was lost" in failure["message"]


def test_the_host_that_left_is_not_missed(meetings: list[Meeting]) -> None:
    meetings[0]._client.leave()
    assert meetings[1].failure() is None
    meetings[0].close()
    assert meetings[1].failure() is None


def test_the_host_that_was_killed_is_missed(meetings: list[Meeting]) -> None:
    assert meetings[0]._server is not None
    meetings[0]._server.stop()
    with pytest.raises(WorkerFailed, match=r"the launcher of node 0 \(127.0.0.1\).*has vanished"):
        meetings[1].failure()


def test_the_host_lingers_for_the_others_within_its_bound(meetings: list[Meeting]) -> None:
    said: list[str] = []
    began = time.monotonic()
    assert meetings[1].linger(5.0, said.append) is None  # hosts nothing: goes at once
    assert time.monotonic() - began < 0.5
    assert meetings[0].linger(0.5, said.append) is None
    assert 0.5 <= time.monotonic() - began < 2.0
    assert meetings[0].linger(5.0) is None  # it has waited once
    assert time.monotonic() - began < 2.5


def test_the_host_that_lingers_hears_of_a_failure_even_if_nobody_is_left(meetings: list[Meeting]) -> None:
    meetings[1].fail("rank 1 failed", 7)
    meetings[1].close()
    failure = meetings[0].linger(5.0, quiet)
    assert failure is not None
    assert failure["exit_code"] == 7
