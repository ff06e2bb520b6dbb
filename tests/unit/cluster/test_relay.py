"""A tree of real servers: members see the same over relays as at one server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fleet_train.cluster.cluster import below, parent_of
from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.client import StepNote, StoreClient
from fleet_train.cluster.store.relay import Parent
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed

# Seven nodes with a fan-in of two: a root, two relays below it, four below these. Two members each.
NODES, FAN_IN, EACH = 7, 2, 2
SIZE = NODES * EACH
SILENCE_SECONDS = 1.0
RANKS = [range(node * EACH, (node + 1) * EACH) for node in range(NODES)]


class Tree:
    """The servers, and a client of each member at its own node's."""

    def __init__(self) -> None:
        self.servers = [StoreServer("127.0.0.1", 0).start() for _ in range(NODES)]
        self.servers[0].open_root("0")
        for node in range(1, NODES):
            parent = self.servers[parent_of(node, FAN_IN)]
            mask = below(node, RANKS, FAN_IN)
            place = Parent("127.0.0.1", parent.port, "0", node, f"node {node}", mask, Access(), SILENCE_SECONDS)
            self.servers[node].open_relay(place, 5.0)
        self.clients = [self.connect(member) for member in range(SIZE)]

    def connect(self, member: int, **options: Any) -> StoreClient:
        endpoint = f"{self.servers[member // EACH].endpoint}/0"
        return StoreClient.connect(endpoint, member, timeout_seconds=5, **options)

    def all(self, call: Callable[[StoreClient], Any], members: range | list[int] = range(SIZE)) -> list[Any]:
        """What each member's call gives or raises."""

        def one(member: int) -> Any:
            try:
                return call(self.clients[member])
            except FleetTrainError as error:
                return error

        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(one, members))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server in reversed(self.servers):
            server.stop()


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    tree.close()


def test_every_member_gets_all_values(tree: Tree) -> None:
    for turn in range(3):
        found = tree.all(lambda client, turn=turn: client.all_gather("values", [client.member, turn], SIZE, 10))
        assert found == [{member: [member, turn] for member in range(SIZE)}] * SIZE


@pytest.mark.parametrize("source", [0, 5, SIZE - 1])
def test_every_member_gets_the_value_of_one(tree: Tree, source: int) -> None:
    found = tree.all(lambda client: client.broadcast("port", client.member * 10, source, SIZE, 10))
    assert found == [source * 10] * SIZE


def test_different_values_are_reported_with_the_members_that_have_them(tree: Tree) -> None:
    assert tree.all(lambda client: client.compare("facts", {"a": 1}, SIZE, 10)) == [[]] * SIZE
    found = tree.all(lambda client: client.compare("facts", client.member in (3, 4, 9), SIZE, 10))
    assert found == [[([[0, 2], [5, 8], [10, 13]], False), ([[3, 4], [9, 9]], True)]] * SIZE


def test_of_many_different_values_the_first_few_are_shown(tree: Tree) -> None:
    found = tree.all(lambda client: client.compare("facts", client.member, SIZE, 10))
    assert found[1:] == found[:-1]
    assert sorted(who[0][0] for who, _ in found[0]) == list(range(SIZE))
    assert sum(value is not None for _, value in found[0]) == 4


def test_a_step_barrier_reduces_and_each_members_payload_can_be_read(tree: Tree) -> None:
    def step(client: StoreClient, number: int) -> Any:
        stop = "SIGTERM" if number == 2 and client.member in (6, 11) else None
        digest = {1: 5, 2: min(client.member, 1), 3: 0 if client.member else None}[number]
        note = StepNote(1 + client.member % 2, 10.0 * client.member, float(number), stop, digest)
        return client.barrier(f"step {number}", note, SIZE, 10)

    answers = [tree.all(lambda client, number=number: step(client, number)) for number in (1, 2, 3)]
    for found in answers:
        assert found == [found[0]] * SIZE
    assert [found[0].slowest_ms for found in answers] == [120.0] * 3  # member 12 makes one step of 120 ms
    assert [found[0].stop for found in answers] == [None, (6, "SIGTERM"), None]
    assert [found[0].same_gradients for found in answers] == [True, False, False]
    sums = {member: [3.0 * (1 + member % 2), 30.0 * member, 6.0] for member in range(SIZE)}
    assert tree.clients[13].times(answers[2][0].number) == sums  # nobody else asks
    earlier = {member: [2.0 * (1 + member % 2), 20.0 * member, 3.0] for member in range(SIZE)}
    assert tree.all(lambda client: client.times(answers[1][0].number)) == [earlier] * SIZE


def test_who_is_missing_is_named_through_the_tree(tree: Tree) -> None:
    present = [member for member in range(SIZE) if member not in (7, 12, 13)]
    began = time.monotonic()
    found = tree.all(lambda client: client.barrier("step 3", None, SIZE, 2.0), present)
    assert time.monotonic() - began < 30
    assert all(isinstance(error, JoinTimeout) for error in found)
    assert {str(error) for error in found} == {"step 3: rank 7, rank 12, rank 13 did not arrive within 2 s"}
    assert [each.member for each in found[0].absent] == [7, 12, 13]
    # The next round of the same barrier starts clean.
    assert all(not isinstance(answer, Exception) for answer in tree.all(lambda c: c.barrier("step 3", None, SIZE, 10)))


def test_whose_patience_ends_first_is_not_missed_by_the_others(tree: Tree) -> None:
    present = [member for member in range(SIZE) if member != 4]
    found = tree.all(lambda client: client.barrier("s", None, SIZE, 1.5 if client.member == 9 else 4.0), present)
    assert {str(error).partition(" within")[0] for error in found} == {"s: rank 4 did not arrive"}


def test_a_member_that_dies_is_named_to_all_at_once(tree: Tree) -> None:
    waiting = [member for member in range(SIZE) if member != 11]
    threading.Timer(0.5, tree.clients[11].close).start()
    began = time.monotonic()
    found = tree.all(lambda client: client.barrier("step 4", None, SIZE, 60), waiting)
    assert time.monotonic() - began < 40
    assert all(str(error).startswith("rank 11 was lost (its connection broke") for error in found), found
    assert tree.clients[0].gone() == {11: "its connection broke"}


def test_a_member_that_leaves_is_distinguished(tree: Tree) -> None:
    tree.clients[8].leave()
    error = tree.all(lambda client: client.barrier("step 4", None, SIZE, 60), [0])[0]
    assert "rank 8 finished and left the job" in str(error)


def test_a_killed_relay_is_named_with_all_below_it(tree: Tree) -> None:
    """Node 1 relays for nodes 3 and 4: its members and theirs are lost."""
    threading.Timer(0.5, tree.servers[1].stop).start()
    outside = [member for node in (0, 2, 5, 6) for member in RANKS[node]]
    found = tree.all(lambda client: client.barrier("step 5", None, SIZE, 60), [*outside, 6, 7, 8, 9])
    outside, below_it = found[: len(outside)], found[len(outside) :]
    assert all(isinstance(error, WorkerFailed) for error in found), found
    for error in outside:
        text = str(error)
        assert "was lost (the relay of node 1 was lost" in text or "its connection broke" in text, text
    for error in below_it:
        assert "the parent of this node's relay" in str(error)
    lost = {member for node in (1, 3, 4) for member in RANKS[node]}
    deadline = time.monotonic() + 10
    while set(tree.clients[0].gone()) != lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(tree.clients[0].gone()) == lost


def test_a_frozen_relay_is_named_within_its_silence(tree: Tree) -> None:
    resume = threading.Event()
    tree.servers[2]._loop.call_soon_threadsafe(resume.wait)
    waiting = [member for node in (0, 1, 3, 4) for member in RANKS[node]]
    began = time.monotonic()
    try:
        found = tree.all(lambda client: client.barrier("step 6", None, SIZE, 60), waiting)
    finally:
        resume.set()
    assert time.monotonic() - began < 40 * SILENCE_SECONDS
    assert all("the relay of node 2 was not heard of for 1 s" in str(error) for error in found), found


def test_members_below_a_frozen_root_get_an_error(tree: Tree) -> None:
    resume = threading.Event()
    tree.servers[0]._loop.call_soon_threadsafe(resume.wait)
    try:
        found = tree.all(lambda client: client.barrier("step 6", None, SIZE, 60), list(RANKS[6]))
    finally:
        resume.set()
    assert all("no longer answers" in str(error) for error in found), found


def test_members_at_different_points_get_an_error(tree: Tree) -> None:
    def meet(client: StoreClient) -> Any:
        return client.barrier("step 12" if client.member < 9 else "all_reduce 0", None, SIZE, 30)

    found = tree.all(meet)
    assert all(isinstance(error, ScheduleMismatch) for error in found)
    assert "ranks 0-8 (9 in all) at 'step 12', rank 9, rank 10, rank 11, rank 12, rank 13 at 'all_reduce 0'" in str(
        found[0]
    )


def test_a_disagreement_on_the_number_of_members_is_an_error(tree: Tree) -> None:
    found = tree.all(lambda client: client.barrier("join", None, SIZE if client.member else 20, 5))
    assert any("says that the job has" in str(error) for error in found)
    assert all(isinstance(error, FleetTrainError) for error in found)


def test_values_failures_and_the_clock_are_those_of_the_root(tree: Tree) -> None:
    tree.clients[13].set("port", 6170)
    assert tree.all(lambda client: client.get("port")) == [6170] * SIZE
    assert tree.clients[12].get("nothing") is None
    assert tree.clients[0].clock() <= tree.clients[13].clock() <= tree.clients[0].clock()
    threading.Timer(0.3, lambda: tree.connect(5, watched=False).fail({"message": "rank 5 ran out of memory"})).start()
    found = tree.all(lambda client: client.barrier("step", None, SIZE, 30), [0, 7, 13])
    assert [str(error) for error in found] == ["rank 5 ran out of memory"] * 3
    assert tree.all(lambda c: c.failures()[0][0]) == [{"message": "rank 5 ran out of memory"}] * SIZE


def test_the_same_member_twice_is_refused(tree: Tree) -> None:
    with pytest.raises(ClusterError, match="rank 9 has joined this job already"):
        tree.connect(9)


def test_a_namespace_within_a_namespace_has_its_tree(tree: Tree) -> None:
    def meet(member: int) -> Any:
        endpoint = f"{tree.servers[member // EACH].endpoint}/0.selftest"
        client = StoreClient.connect(endpoint, member, group="supervisor", timeout_seconds=10)
        try:
            return client.all_gather("facts", member, SIZE, 10)
        finally:
            client.close()

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(meet, range(SIZE))) == [{member: member for member in range(SIZE)}] * SIZE
