"""The monitor's decisions, with everything around it replaced by plain values and a test clock."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fleet_train.cluster.store.reports import NO_RANK, FailureReport
from fleet_train.errors import WorkerFailed
from fleet_train.launch.node import Node
from fleet_train.launch.processes import Stopping
from fleet_train.launch.report import WorkerResult
from fleet_train.launch.supervise import EndCause, GracefulStop, Monitor, Verdict
from tests.unit.launch.conftest import missed, own

NODE = Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 2, None, "eth0")


def end(
    rank: int, seconds: float, code: int | None = None, killed: int | None = None, asked: bool = False
) -> WorkerResult:
    return WorkerResult(rank, f"10.0.0.1:{6170 + rank}", 0, code, killed, seconds, asked, "log")


@dataclass
class World:
    """Stands in for the ranks and the rendezvous."""

    node: Node = NODE
    start: float = 0.0
    now: float = 0.0
    ended: dict[int, WorkerResult] = field(default_factory=dict)
    word: dict[str, Any] | None = None
    reports: list[FailureReport] = field(default_factory=list)
    store_is_lost: bool = False
    notice: dict[str, Any] | None = None
    announced: list[tuple[str, float, bool]] = field(default_factory=list)
    waiting_nodes: str | None = None
    finished: list[int] = field(default_factory=list)
    stopping: Stopping = field(default_factory=Stopping)
    over: set[int] = field(default_factory=set)

    def ask_to_stop(self) -> None: ...

    def announce_stop(self, why: str, grace_seconds: float, *, again: bool) -> None:
        self.announced.append((why, grace_seconds, again))

    def stop_announced(self) -> dict[str, Any] | None:
        return self.notice

    def ends(self, _: float) -> dict[int, WorkerResult]:
        return dict(self.ended)

    def failures(self, _: object = None) -> tuple[dict[str, Any] | None, list[FailureReport]]:
        if self.store_is_lost:
            raise WorkerFailed("vanished")
        return self.word, self.reports

    def report_ranks_over(self) -> None:
        self.over.add(self.node.index)

    def all_ranks_are_over(self) -> bool:
        return len(self.over) == len(self.node.addresses)

    def report_finished(self, rank: int) -> None:
        self.finished.append(rank)


def monitored(world: World, **more: Any) -> Monitor:
    def clock() -> float:
        return world.now

    stop = GracefulStop(world, world, world.stopping, 30.0, lambda: world.waiting_nodes, clock)  # type: ignore[arg-type]
    return Monitor(world, world, stop, clock=clock, **more)  # type: ignore[arg-type]


def look_at(world: World, monitor: Monitor, now: float) -> Verdict | None:
    world.now = now
    return monitor.look()


def looks(world: World, monitor: Monitor, *times: float) -> list[Verdict | None]:
    return [look_at(world, monitor, now) for now in times]


def test_it_waits_until_all_ranks_have_ended() -> None:
    world = World(ended={0: end(0, 1, code=0)})
    monitor = monitored(world)
    assert looks(world, monitor, 1.0, 1.5) == [None, None]
    assert world.finished == [0]  # others may wait for it in fleet.init
    world.ended[1] = end(1, 2, code=0)
    assert look_at(world, monitor, 2.0) == Verdict(EndCause.ALL_ENDED_WELL)
    # until then: a store that has vanished ends the job
    world = World(store_is_lost=True)
    assert look_at(world, monitored(world), 1.0) == Verdict(EndCause.STORE_LOST, message="vanished")


def test_connections_are_looked_at_now_and_then_while_ranks_run() -> None:
    world, seen = World(), []
    monitor = monitored(world, look_at_connections=lambda: seen.append(world.now))
    looks(world, monitor, 0.0, 0.1, 9.9, 10.0, 10.1, 25.0)
    assert seen == [0.0, 10.0, 25.0]


def test_a_failed_rank_ends_the_job_at_once() -> None:
    world = World(ended={1: end(1, 1, code=3)})
    assert look_at(world, monitored(world), 1.0) == Verdict(EndCause.RANK_FAILED, root_cause=world.ended[1])


def test_an_echo_waits_for_its_cause_on_this_or_another_node_and_not_for_ever() -> None:
    world = World(ended={0: end(0, 1.0, code=11)})
    here, elsewhere = monitored(world), monitored(world)
    assert look_at(world, here, 1.0) is look_at(world, elsewhere, 1.0) is None
    world.word = {"message": "rank 2 failed", "exit_code": 7, "node": 1}
    assert look_at(world, elsewhere, 1.4) == Verdict(EndCause.REPORTED, world.word)
    world.word = None
    assert look_at(world, elsewhere, 3.1) == Verdict(EndCause.RANK_FAILED, root_cause=world.ended[0])
    world.ended[1] = end(1, 1.2, killed=9)
    assert look_at(world, here, 1.3) == Verdict(EndCause.RANK_FAILED, root_cause=world.ended[1])


def judged(world: World, monitor: Monitor, now: float) -> tuple[EndCause, int] | None:
    """Cause and root cause at this time; of a rank elsewhere, the one that the report is about."""
    verdict = look_at(world, monitor, now)
    if verdict is None:
        return None
    if verdict.root_cause is not None:
        return verdict.cause, verdict.root_cause.rank
    assert verdict.report is not None
    return verdict.cause, int(str(verdict.report["rank"]))


def test_a_rank_that_reports_a_failure_itself_gets_time_to_exit_with_its_own_code_and_not_for_ever() -> None:
    world = World(reports=[own(1, 0.9)])
    hung, exits = monitored(world), monitored(world)
    assert look_at(world, hung, 1.0) is look_at(world, exits, 1.0) is None
    world.ended[0] = end(0, 1.2, code=11)  # whoever heard of it is quicker
    assert look_at(world, exits, 4.0) is None
    assert judged(world, hung, 5.9) is None
    assert judged(world, hung, 6.1) == (EndCause.RANK_FAILED, 1)
    world.ended[1] = end(1, 4.5, code=1)
    verdict = look_at(world, exits, 4.5)
    assert verdict == Verdict(EndCause.RANK_FAILED, root_cause=replace(world.ended[1], report=own(1, 0.9)))


@pytest.mark.parametrize(
    ("world", "root_cause_at"),
    [
        (World(reports=[own(1, 0.9)]), 6.1),  # it does not exit
        (World(reports=[missed(1, 0.9)], ended={0: end(0, 1.0, code=11)}), 3.1),  # others have missed it
        (World(reports=[missed(1, 0.9, "left")], ended={1: end(1, 0.8, code=0)}), 2.1),  # whoever misses it says a line
    ],
)
def test_a_rank_that_is_reported_is_the_root_cause_soon(world: World, root_cause_at: float) -> None:
    monitor = monitored(world)
    assert judged(world, monitor, 1.0) is None
    assert judged(world, monitor, root_cause_at) == (EndCause.RANK_FAILED, 1)


def test_nobody_is_waited_for_once_all_ranks_of_all_nodes_have_ended() -> None:
    ended = {0: end(0, 1.0, code=11), 1: end(1, 0.8, killed=9)}
    for others_are_over, verdict in ((False, None), (True, (EndCause.RANK_FAILED, 1))):
        world = World(reports=[missed(1, 0.9)], ended=dict(ended), over={1} if others_are_over else set())
        assert judged(world, monitored(world), 1.0) == verdict
        assert 0 in world.over  # and the other node waits no longer for this one
    world = World(reports=[missed(1, 0.9)], ended={1: ended[1]}, over={1})
    assert judged(world, monitored(world), 1.0) is None  # rank 0 still has a line to print
    assert 0 not in world.over


LINK = FailureReport(NO_RANK, 1, "link", "...", "step 4: all ranks are alive", 11, (), 0.9)
OF_NO_RANK = {"exit_code": 11, "no_root_cause": True}


def test_ranks_that_live_and_cannot_communicate_are_no_root_cause_and_one_that_failed_by_itself_is() -> None:
    world, other = World(reports=[LINK]), World(reports=[LINK], ended={0: end(0, 1.0, code=11)})
    monitor, beside = monitored(world), monitored(other)
    assert look_at(world, monitor, 1.0) is look_at(other, beside, 1.0) is None
    world.ended[0] = end(0, 1.2, code=11)
    world.ended[1] = end(1, 1.3, killed=15, asked=True)
    told = Verdict(EndCause.REPORTED, {"message": LINK.message, **OF_NO_RANK})
    assert looks(world, monitor, 2.9, 3.1) == [None, told]
    other.ended[1] = end(1, 0.9, killed=9)
    assert look_at(other, beside, 1.2) == Verdict(EndCause.RANK_FAILED, root_cause=other.ended[1])


def test_a_rank_that_raises_another_ones_error_is_not_the_root_cause() -> None:
    told = replace(own(0, 0.9), reporter=1)
    world = World(reports=[told], ended={1: end(1, 1.0, code=1)})
    monitor = monitored(world)
    assert look_at(world, monitor, 1.0) is None
    world.ended[0] = end(0, 2.0, code=1)
    world.reports.append(own(0, 1.9))
    assert judged(world, monitor, 2.0) == (EndCause.RANK_FAILED, 0)


def test_a_failure_on_another_node_is_that_launchers_to_tell_within_a_bound() -> None:
    for report, patience in ((own(2, 0.9), 8.0), (missed(2, 0.9), 5.0)):
        world = World(reports=[report], ended={0: end(0, 1.0, code=11), 1: end(1, 1.1, code=1)})
        monitor = monitored(world)
        assert judged(world, monitor, 1.0) is None
        assert judged(world, monitor, 0.9 + patience) is None
        assert judged(world, monitor, 1.1 + patience) == (EndCause.REPORTED, 2)
        world.word = {"message": "rank 2 failed first: exit code 1", "exit_code": 1, "node": 1}
        assert look_at(world, monitored(world), 2.0) == Verdict(EndCause.REPORTED, world.word)


def test_a_node_that_misses_a_rank_that_was_stopped_waits_for_that_stop() -> None:
    notice = {"why": "node 1 was asked to stop by SIGTERM", "grace_seconds": 10.0}
    world = World(reports=[missed(2, 0.9, "left")], ended={0: end(0, 1.0, code=11)}, notice=notice)
    found = looks(world, monitored(world), 1.0, 9.0, 15.9, 16.1)
    assert found == [None, None, None, Verdict(EndCause.STOPPED)]


def test_ranks_that_were_asked_to_stop_end_in_good_order_or_without_an_answer_were_stopped() -> None:
    for last, cause in (
        ({"code": 12}, EndCause.PREEMPTED),
        ({"killed": 15, "asked": True}, EndCause.STOPPED),
    ):
        world = World()
        monitor = monitored(world)
        world.stopping.asked = signal.SIGTERM
        assert look_at(world, monitor, 1.0) is None
        assert world.announced == [("node 0 (10.0.0.1) was asked to stop by SIGTERM", 30.0, False)]
        world.ended[0] = end(0, 2, **last)  # type: ignore[arg-type]
        assert look_at(world, monitor, 2.0) is None  # the other one may be saving
        world.ended[1] = end(1, 9, **last)  # type: ignore[arg-type]
        assert look_at(world, monitor, 9.0) == Verdict(cause)
        assert len(world.announced) == 1


def test_the_grace_is_bounded_here_and_for_a_stop_that_was_asked_for_elsewhere() -> None:
    here, elsewhere, of_a_rank = World(), World(notice={"why": "node 1 ...", "grace_seconds": 10.0}), World()
    here.stopping.asked = signal.SIGTERM
    of_a_rank.ended[0] = end(0, 1.0, code=12)
    for world, patience in ((here, 30.0), (elsewhere, 15.0), (of_a_rank, 30.0)):
        found = looks(world, monitored(world), 1.0, 1.0 + patience, 1.1 + patience)
        assert found == [None, None, Verdict(EndCause.STOPPED)]


def test_a_stop_whose_state_was_not_saved_is_a_failure_but_not_one_that_waits_for_nodes() -> None:
    for waiting, cause in ((None, EndCause.RANK_FAILED), ("node 2 can join again", EndCause.STOPPED)):
        world = World(waiting_nodes=waiting)
        if waiting is None:
            world.stopping.asked = signal.SIGTERM
        monitor = monitored(world)
        assert look_at(world, monitor, 21.0) is None
        world.ended = {rank: end(rank, 21.5, code=14) for rank in range(2)}
        verdict = look_at(world, monitor, 22.0)
        assert verdict is not None
        assert verdict.cause == cause
        assert verdict.root_cause == (world.ended[0] if waiting is None else None)


def test_nodes_that_returned_cause_a_graceful_stop_once_the_ranks_have_settled() -> None:
    world = World(waiting_nodes="node 2 (10.0.0.3) can join again")
    monitor = monitored(world)
    assert look_at(world, monitor, 19.0) is None
    assert world.announced == []
    assert look_at(world, monitor, 21.0) is None
    assert world.announced == [("node 2 (10.0.0.3) can join again", 30.0, True)]
    world.stopping.asked = signal.SIGTERM  # whoever ends the job is stronger
    assert look_at(world, monitor, 22.0) is None
    assert world.announced[1:] == [("node 0 (10.0.0.1) was asked to stop by SIGTERM", 30.0, False)]
    # a signal reaches the ranks of this node also when another node had one first
    world = World(notice={"why": "node 1 ...", "grace_seconds": 10.0})
    monitor = monitored(world)
    assert look_at(world, monitor, 1.0) is None
    world.stopping.asked = signal.SIGTERM
    assert look_at(world, monitor, 2.0) is None
    assert len(world.announced) == 1
