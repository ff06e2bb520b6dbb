"""Who leads, what it decides and how the others learn of it, over a real store and without any rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from fleet_train.cluster.store.access import Access
from fleet_train.errors import ClusterError, ScheduleMismatch
from fleet_train.launch.coordinator import Attempt, Coordinator, JobEnded, Kind, RunResult
from fleet_train.launch.election import (
    Heard,
    State,
    Status,
    Unheard,
    elected,
    is_at_work,
    leader_among,
    may_go_on,
)
from fleet_train.launch.membership import Membership
from fleet_train.launch.node import Node
from fleet_train.launch.report import WorkerResult
from fleet_train.launch.request import FaultPolicy
from tests.support.processes import until
from tests.unit.launch.conftest import aside, together

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
POLICY = FaultPolicy(max_restarts=3, min_nodes=2, rejoin_timeout_seconds=1.0, lost_node_timeout_seconds=2.0)
FIRST = Attempt(0, 0, (0, 1, 2))
KILLED = WorkerResult(1, "127.0.0.2:6170", 1, None, 9, 4.0, False, "log")
STORE_LOST = RunResult(Kind.FAILED, 11, "the leader has vanished", without_root_cause=True, store_lost=True)
FAILED = RunResult(Kind.FAILED, 137, ends=(KILLED,), root_cause=KILLED)


@dataclass
class Participants:
    """Launchers that start one after the other, and their messages."""

    port: int
    messages: list[str]
    policy: FaultPolicy = POLICY
    memberships: list[Membership] = field(default_factory=list)

    def take(self, index: int, facts: dict[str, Any] | None = None, policy: FaultPolicy | None = None) -> Coordinator:
        node = Node(ADDRESSES, index, self.port, 1, None, "lo")
        membership = Membership(node, policy or self.policy, 5.0, Access(source=node.address))
        self.memberships.append(membership)
        return Coordinator(membership, policy or self.policy, facts or {"a": 1})


@pytest.fixture
def seats(free_ports: Callable[..., int], messages: list[str]) -> Iterator[Participants]:
    seats = Participants(free_ports(2, list(ADDRESSES)), messages)
    yield seats
    for membership in reversed(seats.memberships):
        membership.close()


def follow(attempt: Attempt, result: RunResult, *coordinators: Coordinator) -> Attempt | None:
    """The next attempt, about which all of them agree."""
    first, *others = together(*(partial(each.next, attempt, result) for each in coordinators))
    assert others == [first] * len(others)
    assert first is None or isinstance(first, Attempt), first
    return first


def next_and_end(lead: Coordinator, attempt: Attempt) -> Attempt | None:
    following = lead.next(attempt, FAILED)
    lead.end(FAILED)
    return following


def die(coordinator: Coordinator) -> None:
    """What the kernel does when the process is killed."""
    coordinator.membership._disconnect()
    coordinator.membership._server.stop()


def leave(coordinator: Coordinator, seats: Participants) -> None:
    coordinator.membership.close()
    seats.memberships.remove(coordinator.membership)


def begin(seats: Participants) -> list[Coordinator]:
    coordinators = [seats.take(index) for index in range(3)]
    assert [coordinator.first() for coordinator in coordinators] == [FIRST] * 3
    for coordinator in coordinators:
        coordinator.begun(FIRST)
    return coordinators


def let_join(attempt: Attempt, *coordinators: Coordinator) -> Attempt | None:
    """The first of them leads, and has heard of a node that waits."""
    why = until(lambda: coordinators[0].waiting_nodes(attempt))
    return follow(attempt, RunResult(Kind.RESUMES, 12, why), *coordinators)


def led_by_another_while_frozen(lead: Coordinator, one: Coordinator, two: Coordinator) -> Attempt:
    """The attempt that the others have begun meanwhile. The leader's server neither answered nor closed anything."""
    resume = threading.Event()
    lead.membership._server._loop.call_soon_threadsafe(resume.wait)
    second = Attempt(1, 1, (1, 2))
    assert follow(FIRST, STORE_LOST, one, two) == second
    resume.set()
    return second


def test_an_absent_node_is_left_out_and_joins_at_the_next_restart(seats: Participants) -> None:
    lead, one, two = begin(seats)
    die(two)
    second, third = Attempt(1, 1, (0, 1)), Attempt(2, 2, (0, 1, 2))
    assert follow(FIRST, FAILED, lead, one) == second
    assert (
        "node 2 (127.0.0.3) did not come back within 1 s (--rejoin_timeout); continuing with fewer nodes"
    ) in seats.messages
    waiting = aside(seats.take(2).first)
    until(lambda: "the job is running; node 2 (127.0.0.3) joins at the next restart" in seats.messages)
    assert until(lambda: lead.waiting_nodes(second)) == "node 2 (127.0.0.3) can join again"
    assert one.waiting_nodes(second) is None
    assert let_join(second, lead, one) == third
    assert lead.waiting_nodes(third) is None
    # The one that comes back does not know how often the job has begun: the highest number that is proposed counts.
    assert waiting() == Attempt(2, 1, (0, 1, 2))


def test_too_few_nodes_end_the_job_and_the_others_hear_why(seats: Participants) -> None:
    lead, one, two = begin(seats)
    die(one)
    die(two)
    assert next_and_end(lead, FIRST) is None
    why = (
        "not restarted: node 1 (127.0.0.2), node 2 (127.0.0.3) did not come back within 1 s (--rejoin_timeout), and "
        "2 nodes are needed (--min_nodes)"
    )
    assert seats.messages[-1] == why
    with pytest.raises(JobEnded, match="not restarted: node 1") as caught:
        seats.take(1).first()
    assert caught.value.exit_code == 137


def test_a_deliberate_exit_between_two_attempts_reaches_node_0(seats: Participants) -> None:
    lead, one, two = begin(seats)
    two.stop(143, "node 2 (127.0.0.3) was stopped by SIGTERM")
    assert together(lambda: next_and_end(lead, FIRST), lambda: one.next(FIRST, FAILED)) == [None, None]
    why = "not restarted: node 2 (127.0.0.3) was stopped by SIGTERM"
    assert why in seats.messages
    assert f"node 0 (127.0.0.1) ended the job: {why}" in seats.messages


def test_the_exit_of_a_launcher_that_waits_to_join_does_not_end_the_job(seats: Participants) -> None:
    lead, one, two = begin(seats)
    leave(two, seats)
    waiting = seats.take(2)
    waiting.stop(143, "node 2 (127.0.0.3) was stopped by SIGTERM")
    leave(waiting, seats)
    assert follow(FIRST, FAILED, lead, one) == Attempt(1, 1, (0, 1))


def test_a_launcher_that_was_started_differently_or_is_late_does_not_disturb_the_job(seats: Participants) -> None:
    leave(begin(seats)[2], seats)
    other = seats.take(2, {"a": 2, "b": 1})
    with pytest.raises(ScheduleMismatch, match=r"a is 1 there and 2 here.*b is None there and 1 here"):
        other.first()
    leave(other, seats)
    with pytest.raises(ClusterError, match="started without this launcher of node 2"):
        seats.take(2, policy=FaultPolicy()).first()


def test_the_first_living_node_leads_when_the_leader_is_lost_and_continues_the_count(seats: Participants) -> None:
    seats.policy = replace(POLICY, max_restarts=2)
    lead, one, two = begin(seats)
    second, third, fourth = Attempt(1, 1, (0, 1, 2)), Attempt(2, 2, (1, 2)), Attempt(3, 3, (0, 1, 2))
    assert follow(FIRST, FAILED, lead, one, two) == second
    die(lead)
    assert follow(second, STORE_LOST, one, two) == third
    assert (one.membership.leader, two.membership.leader, one.membership.term) == (1, 1, 1)
    assert "node 1 (127.0.0.2) is the leader from now on" in seats.messages
    assert "node 1 (127.0.0.2) is the leader" in seats.messages
    assert any("restart 2 of 2" in line for line in seats.messages)
    assert one.membership.place_of(third.nodes).store_endpoint == f"127.0.0.2:{seats.port + 1}"
    # Node 0 comes back, and whoever leads keeps the lead.
    back = seats.take(0)
    assert (back.membership.is_leader, back.membership.leader) == (False, 1)
    waiting = aside(back.first)
    assert until(lambda: one.waiting_nodes(third)) == "node 0 (127.0.0.1) can join again"
    assert let_join(third, one, two) == fourth
    assert waiting().nodes == fourth.nodes
    others = [partial(each.next, fourth, FAILED) for each in (two, back)]
    assert together(lambda: next_and_end(one, fourth), *others) == [None] * 3
    assert "not restarted: all restarts are used up (--max_restarts=2)" in seats.messages


def test_a_leader_that_was_away_gives_way_to_the_later_one(seats: Participants) -> None:
    seats.policy = replace(POLICY, rejoin_timeout_seconds=4.0)
    lead, one, two = begin(seats)
    second = led_by_another_while_frozen(lead, one, two)
    lost = RunResult(Kind.FAILED, 11, "the launcher of node 1 was lost", without_root_cause=True)
    waiting = aside(lambda: lead.next(FIRST, lost))
    assert let_join(second, one, two) == Attempt(2, 2, (0, 1, 2))
    assert waiting().nodes == (0, 1, 2)
    assert "this launcher was unreachable for too long; node 1 (127.0.0.2) is the leader now" in seats.messages


def test_a_leader_that_was_away_while_it_waited_does_not_go_on_beside_the_later_one(
    seats: Participants, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats.policy = replace(POLICY, min_nodes=1, rejoin_timeout_seconds=4.0)
    lead, one, two = begin(seats)
    second = led_by_another_while_frozen(lead, one, two)
    # It was frozen behind its last look for another leader, and its patience was over when it came back.
    looks = iter([False])
    real = lead.membership.gives_way
    monkeypatch.setattr(lead.membership, "gives_way", lambda: next(looks, None) is None and real())
    monkeypatch.setattr(lead, "policy", replace(seats.policy, rejoin_timeout_seconds=-1.0))
    waiting = aside(lambda: lead.next(FIRST, FAILED))
    assert let_join(second, one, two) == Attempt(2, 2, (0, 1, 2))
    assert waiting().nodes == (0, 1, 2)
    assert "this launcher was unreachable for too long; node 1 (127.0.0.2) is the leader now" in seats.messages


def test_members_that_answer_and_are_not_connected_are_another_side(seats: Participants) -> None:
    lead, one, two = begin(seats)
    for other in (one, two):
        other.membership._publish(State.LOOKING)
    assert not lead.membership.may_go_on_without({1, 2}, {0})
    assert lead.membership.may_go_on_without({2}, {0, 1})
    two.membership._publish(State.FRESH)
    assert lead.membership.may_go_on_without({1, 2}, {0})  # of two halves that with the first node; the third is new


def test_a_launcher_that_waits_to_join_follows_the_next_leader(seats: Participants) -> None:
    lead, one, two = begin(seats)
    die(two)
    second = Attempt(1, 1, (0, 1))
    assert follow(FIRST, FAILED, lead, one) == second
    back = seats.take(2)
    waiting = aside(back.first)
    until(lambda: any("joins at the next restart" in message for message in seats.messages))
    die(lead)
    assert follow(second, STORE_LOST, one) == Attempt(2, 2, (1, 2))
    assert waiting() == Attempt(2, 1, (1, 2))
    assert (back.membership.leader, back.membership.term) == (1, 1)


LOOKING = Status(State.LOOKING, 0, 3)
FRESH = Status(State.FRESH)
FOLLOWING = Status(State.FOLLOWING, 0, 3)
NODES = (0, 1, 2)


@pytest.mark.parametrize(
    ("me", "heard", "term"),
    [
        (1, {0: Unheard.DEAD, 2: LOOKING}, 4),
        (2, {0: Unheard.DEAD, 1: LOOKING}, None),  # node 1 comes before it
        (1, {0: Unheard.SILENT, 2: LOOKING}, 4),  # two of three
        (1, {0: Unheard.SILENT, 2: Unheard.SILENT}, None),  # one of three
        (1, {0: Unheard.DEAD, 2: Unheard.SILENT}, 4),  # two halves: it has the first living node
        (2, {0: Unheard.DEAD, 1: Unheard.SILENT}, None),
        (2, {0: Unheard.DEAD, 1: Unheard.DEAD}, 4),
        (1, {0: FRESH, 2: LOOKING}, 4),  # started again, knows nothing: it has nothing to decide with
        (1, {0: Unheard.DEAD, 2: FOLLOWING}, None),  # node 2 still hears the leader, or has not noticed yet
        (1, {0: Unheard.DEAD, 2: Status(State.LOOKING, 1, 7)}, 8),
    ],
)
def test_the_first_living_node_of_the_larger_side_is_elected(me: int, heard: Heard, term: int | None) -> None:
    assert elected(me, 3, heard, NODES) == term


def test_the_latest_term_leads_and_a_job_is_running_if_a_node_has_known_a_leader() -> None:
    heard = {0: Status(State.LEADING, 0, 3), 1: Status(State.LEADING, 1, 4), 2: FOLLOWING}
    assert leader_among(heard, 3) == 1
    assert leader_among(heard, 5) is None
    assert not is_at_work({0: FRESH, 1: Unheard.DEAD})
    assert is_at_work({0: FRESH, 1: LOOKING})
    # nodes that took no part do not count
    assert elected(1, 0, {0: Unheard.DEAD, 2: Unheard.SILENT, 3: Unheard.SILENT}, (0, 1)) == 1


def test_both_sides_of_a_broken_network_never_continue() -> None:
    for count in range(2, 7):
        everybody = set(range(count))
        for bits in range(1, 2**count - 1):
            here = {node for node in everybody if bits >> node & 1}
            assert may_go_on(here, everybody - here) != may_go_on(everybody - here, here)


def test_a_status_that_is_none_is_refused() -> None:
    for told in (None, {}, {"state": "king", "leader": 0, "term": 0}, {"state": "leading", "leader": "x", "term": 1}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Status.from_json(told)
    assert Status.from_json(LOOKING.to_json()) == LOOKING
