"""What node 0 decides and how the others hear of it, over a real store and without any rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fleet_train.errors import ClusterError, ScheduleMismatch
from fleet_train.launch.council import Council, JobEnded
from fleet_train.launch.ends import RankEnd
from fleet_train.launch.node import Node
from fleet_train.launch.request import FaultPolicy
from fleet_train.launch.restart import Attempt, Kind, Outcome
from fleet_train.launch.roster import Roster

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
POLICY = FaultPolicy(max_restarts=3, min_nodes=2, rejoin_timeout_seconds=1.0, lost_node_timeout_seconds=2.0)
FIRST = Attempt(0, 0, (0, 1, 2))
KILLED = RankEnd(1, "127.0.0.2:6170", 1, None, 9, 4.0, False, "log")
FAILED = Outcome(Kind.FAILED, 137, ends=(KILLED,), culprit=KILLED)


@dataclass
class Seats:
    """Launchers that sit down one after the other, and what each of them has said."""

    port: int
    policy: FaultPolicy = POLICY
    rosters: list[Roster] = field(default_factory=list)
    said: dict[int, list[str]] = field(default_factory=dict)

    def take(self, index: int, facts: dict[str, Any] | None = None, policy: FaultPolicy | None = None) -> Council:
        node = Node(ADDRESSES, index, self.port, 1, None, "lo")
        roster = Roster(node, policy or self.policy, 5.0)
        self.rosters.append(roster)
        self.said[index] = []
        return Council(roster, policy or self.policy, facts or {"a": 1}, self.said[index].append)


@pytest.fixture
def seats(free_ports: Callable[..., int]) -> Iterator[Seats]:
    seats = Seats(free_ports(2, list(ADDRESSES)))
    yield seats
    for roster in reversed(seats.rosters):
        roster.close()


def together(**calls: Callable[[], Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def one(name: str) -> None:
        try:
            results[name] = calls[name]()
        except Exception as error:
            results[name] = error

    threads = [threading.Thread(target=one, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return results


def begin(seats: Seats) -> list[Council]:
    councils = [seats.take(index) for index in range(3)]
    assert [council.first() for council in councils] == [FIRST] * 3
    for council in councils:
        council.begun(FIRST)
    return councils


def test_all_nodes_go_on_after_a_rank_was_killed(seats: Seats) -> None:
    lead, one, two = begin(seats)
    found = together(
        lead=lambda: lead.next(FIRST, FAILED), one=lambda: one.next(FIRST, FAILED), two=lambda: two.next(FIRST, FAILED)
    )
    assert found == dict.fromkeys(("lead", "one", "two"), Attempt(1, 1, (0, 1, 2)))
    assert seats.said[0] == [
        "attempt 0: rank 1 (127.0.0.2:6170) failed first: killed by SIGKILL after 4.0 s; restart 1 of 3 in 1 s"
    ]


def test_a_node_that_stays_away_is_left_behind_and_taken_in_at_the_next_restart(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two.roster._client.close()  # what the kernel does when the process is killed
    found = together(lead=lambda: lead.next(FIRST, FAILED), one=lambda: one.next(FIRST, FAILED))
    second = Attempt(1, 1, (0, 1))
    assert found == {"lead": second, "one": second}
    assert seats.said[0][-1] == ("node 2 (127.0.0.3) did not come back within 1 s (--rejoin_timeout); going on without")
    back = seats.take(2)
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(back.first()))
    thread.start()
    while not seats.said[2]:
        time.sleep(0.01)
    assert seats.said[2] == ["the job is at work; node 2 (127.0.0.3) is taken in when it next restarts"]
    while (why := lead.newcomers(second)) is None:
        time.sleep(0.01)
    assert why == "node 2 (127.0.0.3) can be taken in again"
    assert one.newcomers(second) is None
    resumes = Outcome(Kind.RESUMES, 12, why)
    found = together(lead=lambda: lead.next(second, resumes), one=lambda: one.next(second, resumes))
    thread.join(timeout=10)
    third = Attempt(2, 2, (0, 1, 2))
    assert found == {"lead": third, "one": third}
    assert lead.newcomers(third) is None
    # The one that comes back does not know how often the job has begun: the highest number that is proposed counts.
    assert waiting == [Attempt(2, 1, (0, 1, 2))]


def test_too_few_nodes_end_the_job_and_the_others_hear_why(seats: Seats) -> None:
    lead, one, two = begin(seats)
    for council in (one, two):
        council.roster._client.close()
    assert lead.next(FIRST, FAILED) is None
    said = (
        "not restarted: node 1 (127.0.0.2), node 2 (127.0.0.3) did not come back within 1 s (--rejoin_timeout), and "
        "2 nodes are needed (--min_nodes)"
    )
    assert seats.said[0][-1] == said
    lead.end(FAILED)
    with pytest.raises(JobEnded, match="not restarted: node 1") as caught:
        seats.take(1).first()
    assert caught.value.exit_code == 137


def test_an_end_on_purpose_between_two_attempts_is_heard_by_node_0(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two.stop(143, "node 2 (127.0.0.3) was stopped by SIGTERM")

    def decide() -> Attempt | None:
        following = lead.next(FIRST, FAILED)
        lead.end(FAILED)
        return following

    assert together(lead=decide, one=lambda: one.next(FIRST, FAILED)) == {"lead": None, "one": None}
    why = "not restarted: node 2 (127.0.0.3) was stopped by SIGTERM"
    assert seats.said[0][-1] == why
    assert seats.said[1][-1] == f"node 0 (127.0.0.1) has ended the job: {why}"


def test_the_end_of_a_launcher_that_only_waits_to_be_taken_in_does_not_end_the_job(seats: Seats) -> None:
    lead, one, two = begin(seats)
    two.roster.close()
    seats.rosters.remove(two.roster)
    waiting = seats.take(2)
    waiting.stop(143, "node 2 (127.0.0.3) was stopped by SIGTERM")
    waiting.roster.close()
    seats.rosters.remove(waiting.roster)
    found = together(lead=lambda: lead.next(FIRST, FAILED), one=lambda: one.next(FIRST, FAILED))
    assert found == {"lead": Attempt(1, 1, (0, 1)), "one": Attempt(1, 1, (0, 1))}


def test_a_launcher_that_was_started_differently_does_not_disturb_the_job(seats: Seats) -> None:
    begin(seats)[2].roster.close()
    seats.rosters.pop()
    with pytest.raises(ScheduleMismatch, match="a is 1 there and 2 here"):
        seats.take(2, {"a": 2}).first()


def test_without_restarts_a_late_launcher_is_refused(seats: Seats) -> None:
    begin(seats)[2].roster.close()
    seats.rosters.pop()
    with pytest.raises(ClusterError, match="has begun without this launcher of node 2"):
        seats.take(2, policy=FaultPolicy()).first()
