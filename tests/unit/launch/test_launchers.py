"""Who leads, what it decides and how the others learn of it: real launchers over a real store, without any rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import Any
from unittest.mock import Mock

import pytest

from fleet_train.cluster.store.access import Access
from fleet_train.errors import ClusterError, ScheduleMismatch
from fleet_train.launch.attempts import Attempt, Kind, RunResult
from fleet_train.launch.events import Action, Event, Finish, Look, Why
from fleet_train.launch.job import begun
from fleet_train.launch.job_state import JobState
from fleet_train.launch.launcher import Launcher
from fleet_train.launch.membership import Membership
from fleet_train.launch.node import Node
from fleet_train.launch.processes import StopRequested
from fleet_train.launch.report import WorkerResult
from fleet_train.launch.request import FaultPolicy
from tests.support.processes import until

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
POLICY = FaultPolicy(max_restarts=3, min_nodes=2, rejoin_timeout_seconds=1.0, lost_node_timeout_seconds=2.0)
FIRST = Attempt(0, 0, (0, 1, 2))
KILLED = WorkerResult(1, "127.0.0.2:6170", 1, None, 9, 4.0, False, "log")
STORE_LOST = RunResult(Kind.FAILED, 11, "the leader has vanished", without_root_cause=True, store_lost=True)
FAILED = RunResult(Kind.FAILED, 137, ends=(KILLED,), root_cause=KILLED)


class Seat(Launcher):
    """A launcher in a thread; the test ends its attempts."""

    def __init__(self, index: int, port: int, policy: FaultPolicy, facts: dict[str, Any]) -> None:
        node = Node(ADDRESSES, index, port, 1, None, "lo")
        self._launch = Mock(node=node)
        self._signpost = Mock()
        self._spares = Mock()
        self._membership = Membership(node, policy, Access(source=node.address), facts)
        self._job = JobState(index, len(ADDRESSES), policy, 5.0, node.describe, node.store_endpoint)
        self._attempts: Queue[Attempt | BaseException | Finish] = Queue()
        self._ends: Queue[RunResult | BaseException | None] = Queue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._attempts.put(self.run())
        except BaseException as error:
            self._attempts.put(error)

    def _run_one(self, attempt: Attempt) -> tuple[Attempt, RunResult]:
        self._attempts.put(attempt)
        while (end := self._ends.get()) is None:  # all are connected
            self._job, actions = begun(self._job, attempt)
            self._do(actions)
        if isinstance(end, BaseException):
            raise end
        return attempt, end

    def _prepare_spares(self) -> None:
        """It has no ranks."""

    def next(self) -> Any:
        """The next attempt, or how the launcher ended."""
        return self._attempts.get(timeout=30.0)

    def end(self, result: RunResult) -> None:
        self._ends.put(result)

    @property
    def job(self) -> JobState:
        return self._job

    def waiting_nodes(self, attempt: Attempt) -> str | None:
        return self._waiting_nodes(attempt)

    def die(self) -> None:
        """What the kernel does when the process is killed."""
        self._membership._disconnect()
        self._membership._server.stop()

    def _await(self, action: Action) -> Event:
        if self._is_over.is_set():
            raise SystemExit
        return super()._await(action)

    def leave(self) -> None:
        """The end of its process in good order."""
        self._is_over.set()
        self._ends.put(SystemExit())
        self._thread.join(20.0)
        with contextlib.suppress(Exception):  # it is dead
            self._membership.close()


@dataclass
class Seats:
    """Launchers that start one after the other, and their messages."""

    port: int
    messages: list[str]
    policy: FaultPolicy = POLICY
    taken: list[Seat] = field(default_factory=list)

    def take(self, index: int, facts: dict[str, Any] | None = None, policy: FaultPolicy | None = None) -> Seat:
        self.taken.append(Seat(index, self.port, policy or self.policy, facts or {"a": 1}))
        return self.taken[-1]


@pytest.fixture
def seats(free_ports: Callable[..., int], messages: list[str]) -> Iterator[Seats]:
    seats = Seats(free_ports(2, list(ADDRESSES)), messages)
    yield seats
    for seat in reversed(seats.taken):
        seat.leave()


def follow(result: RunResult, *taken: Seat) -> Any:
    """The next attempt after this result, about which all of them agree; or how they ended."""
    for seat in taken:
        seat.end(result)
    first, *others = (seat.next() for seat in taken)
    assert others == [first] * len(others)
    return first


def begin(seats: Seats) -> list[Seat]:
    taken = [seats.take(index) for index in range(3)]
    assert [seat.next() for seat in taken] == [FIRST] * 3
    for seat in taken:
        seat._ends.put(None)
    until(lambda: taken[0].job.decision)
    return taken


def let_join(attempt: Attempt, *taken: Seat) -> Any:
    """The first of them leads, and has heard of a node that waits."""
    why = str(until(lambda: taken[0].waiting_nodes(attempt)))
    return follow(RunResult(Kind.RESUMES, 12, why), *taken)


def over(result: RunResult = FAILED) -> Finish:
    return Finish(Why.RESULT, result=result)


def test_an_absent_node_is_left_out_and_joins_at_the_next_restart(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two.die()
    second, third = Attempt(1, 1, (0, 1)), Attempt(2, 2, (0, 1, 2))
    assert follow(FAILED, lead, one) == second
    assert (
        "node 2 (127.0.0.3) did not come back within 1 s (--rejoin_timeout); continuing with fewer nodes"
    ) in seats.messages
    back = seats.take(2)
    until(lambda: "the job is running; node 2 (127.0.0.3) joins at the next restart" in seats.messages)
    assert until(lambda: lead.waiting_nodes(second)) == "node 2 (127.0.0.3) can join again"
    assert one.waiting_nodes(second) is None
    assert let_join(second, lead, one) == third
    assert lead.waiting_nodes(third) is None
    # The one that comes back does not know how often the job has begun: the highest number that is proposed counts.
    assert back.next() == Attempt(2, 1, (0, 1, 2))


def test_too_few_nodes_end_the_job_and_the_others_hear_why(seats: Seats) -> None:
    lead, one, two = begin(seats)
    one.die()
    two.die()
    assert follow(FAILED, lead) == over()
    why = (
        "not restarted: node 1 (127.0.0.2), node 2 (127.0.0.3) did not come back within 1 s (--rejoin_timeout), and "
        "2 nodes are needed (--min_nodes)"
    )
    assert seats.messages[-1] == why
    late = seats.take(1).next()
    assert (late.why, late.exit_code, late.message) == (Why.ENDED, 137, why)


def test_a_deliberate_exit_between_two_attempts_reaches_node_0(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two._ends.put(StopRequested(15))
    assert isinstance(two.next(), StopRequested)
    assert follow(FAILED, lead, one) == over()
    why = "not restarted: node 2 (127.0.0.3) was stopped by SIGTERM"
    assert why in seats.messages
    assert f"node 0 (127.0.0.1) ended the job: {why}" in seats.messages


def test_the_exit_of_a_launcher_that_waits_to_join_does_not_end_the_job(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two.leave()
    seats.take(2)
    until(lambda: any("joins at the next restart" in message for message in seats.messages))
    waiting = seats.taken.pop()
    waiting._stop(StopRequested(15))
    waiting.leave()
    assert follow(FAILED, lead, one) == Attempt(1, 1, (0, 1))


def test_a_launcher_that_was_started_differently_or_is_late_does_not_disturb_the_job(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two.leave()
    other = seats.take(2, {"a": 2, "b": 1})
    told = other.next()
    assert isinstance(told, ScheduleMismatch)
    assert "a is 1 there and 2 here; b is None there and 1 here" in str(told)
    other.leave()
    late = seats.take(2, policy=FaultPolicy()).next()
    assert isinstance(late, ClusterError)
    assert "started without this launcher of node 2" in str(late)
    seats.taken[-1].leave()
    assert follow(FAILED, lead, one) == Attempt(1, 1, (0, 1))


def test_the_first_living_node_leads_when_the_leader_is_lost_and_continues_the_count(seats: Seats) -> None:
    seats.policy = replace(POLICY, max_restarts=2)
    lead, one, two = begin(seats)
    second, third, fourth = Attempt(1, 1, (0, 1, 2)), Attempt(2, 2, (1, 2)), Attempt(3, 3, (0, 1, 2))
    assert follow(FAILED, lead, one, two) == second
    lead.die()
    assert follow(STORE_LOST, one, two) == third
    assert (one.job.leader, two.job.leader, one.job.term) == (1, 1, 1)
    assert "node 1 (127.0.0.2) is the leader from now on" in seats.messages
    assert "node 1 (127.0.0.2) is the leader" in seats.messages
    assert any("restart 2 of 2" in line for line in seats.messages)
    assert one._membership.place_of(third.nodes).store_endpoint == f"127.0.0.2:{seats.port + 1}"
    # Node 0 comes back, and whoever leads keeps the lead.
    back = seats.take(0)
    assert until(lambda: one.waiting_nodes(third)) == "node 0 (127.0.0.1) can join again"
    assert back.job.leader == 1
    assert let_join(third, one, two) == fourth
    assert back.next().nodes == fourth.nodes
    assert follow(FAILED, one, two, back) == over()
    assert "not restarted: all restarts are used up (--max_restarts=2)" in seats.messages


def test_a_leader_that_was_away_gives_way_to_the_later_one(seats: Seats) -> None:
    seats.policy = replace(POLICY, rejoin_timeout_seconds=4.0)
    lead, one, two = begin(seats)
    # Its launcher is frozen: its server neither answers nor closes anything.
    resume = threading.Event()
    lead._membership._server._loop.call_soon_threadsafe(resume.wait)
    second = Attempt(1, 1, (1, 2))
    assert follow(STORE_LOST, one, two) == second
    resume.set()
    lead.end(RunResult(Kind.FAILED, 11, "the launcher of node 1 was lost", without_root_cause=True))
    assert let_join(second, one, two) == Attempt(2, 2, (0, 1, 2))
    assert lead.next().nodes == (0, 1, 2)
    assert "this launcher was unreachable for too long; node 1 (127.0.0.2) is the leader now" in seats.messages


def test_a_leader_that_was_away_while_it_waited_does_not_go_on_beside_the_later_one(seats: Seats) -> None:
    seats.policy = replace(POLICY, min_nodes=1, rejoin_timeout_seconds=4.0)
    lead, one, two = begin(seats)
    # It is frozen in its wait for the others, for longer than its patience.
    resume, is_waiting = threading.Event(), threading.Event()
    look = lead._membership.look

    def looks_and_freezes(what: Look) -> dict[str, Any]:
        seen = look(what)
        if not is_waiting.is_set():
            lead._membership._server._loop.call_soon_threadsafe(resume.wait)
            is_waiting.set()
            resume.wait()
        return {**seen, "here": frozenset()}

    lead._membership.look = looks_and_freezes  # type: ignore[method-assign]
    lead.end(FAILED)
    assert is_waiting.wait(20.0)
    second = Attempt(1, 1, (1, 2))
    assert follow(STORE_LOST, one, two) == second
    lead._job = replace(lead.job, began=lead.job.began - 60.0)
    resume.set()
    assert let_join(second, one, two) == Attempt(2, 2, (0, 1, 2))
    assert lead.next().nodes == (0, 1, 2)
    assert "this launcher was unreachable for too long; node 1 (127.0.0.2) is the leader now" in seats.messages


def test_a_launcher_that_waits_to_join_follows_the_next_leader(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two.die()
    second = Attempt(1, 1, (0, 1))
    assert follow(FAILED, lead, one) == second
    back = seats.take(2)
    until(lambda: any("joins at the next restart" in message for message in seats.messages))
    lead.die()
    assert follow(STORE_LOST, one) == Attempt(2, 2, (1, 2))
    assert back.next() == Attempt(2, 1, (1, 2))
    assert (back.job.leader, back.job.term) == (1, 1)
