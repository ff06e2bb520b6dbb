"""Process groups: which store they use, which ranks wait for which, and the errors."""

from __future__ import annotations

import errno
import gc
import os
import socket
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives import groups
from fleet_train.collectives.groups import held_port, new_group, warm_up
from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed
from tests.unit.collectives.in_turn import in_turn

PORT = 4321
NUMBER = "5ca1ab1e"


@dataclass
class Peer:
    """A rank of three, as far as those see it who make groups."""

    rank: int
    side_by_side: bool = True
    timeout_seconds: float = 17.0
    did: list[Any] = field(default_factory=list)
    place: Any = field(default_factory=paddle.CPUPlace)
    numbers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cluster = Cluster(Cluster.imagined(3, 1).ranks, self.rank)
        self.engine = SimpleNamespace(side_by_side=self.side_by_side, run_here=self._run_here)

    def barrier(self, name: str) -> None:
        self.did.append(f"barrier {name}")

    def broadcast(self, name: str, value: Any, source: int) -> Any:
        if name.startswith("number of"):
            assert (value is not None) == (self.rank == source)
            self.numbers.append((name, value))
            return NUMBER
        self.did.append(f"broadcast {name} from {source}: {value}")
        return PORT

    def count(self, name: str) -> int:
        if name == "number":
            return len(self.numbers)
        return len([one for one in self.did if f"of {name} " in one])

    def _run_here(self, stages: Any, place: Any) -> None:
        (collective,) = next(stages).collectives
        self.did.append((collective.kind, collective.group, collective.tensor.tolist(), place))


class Store:
    """Paddle's, on paper."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class Member:
    id, ranks = 5, [1, 2]

    def __init__(self, is_in: bool = True) -> None:
        self._is_in = is_in

    def is_member(self) -> bool:
        return self._is_in


@pytest.fixture
def paddles(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is asked of Paddle: the store that it has while a group is made, and the ranks."""
    seen = SimpleNamespace(stores=[], ranks=[], delayed=[], error=None, backend="gloo", sent=[], strangers=[])

    def gather(tensor: Any, output: list[Any] | None, **options: Any) -> None:
        """All members' proofs for the root; a stranger has another one."""
        assert options.pop("sync_op")
        seen.sent.append((options["dst"], tensor.numpy().tobytes(), output is not None))
        proofs = [b"?" * 32 if rank in seen.strangers else groups._proof(NUMBER, rank) for rank in (1, 2)]
        if output is not None:
            output += [paddle.to_tensor(np.frombuffer(proof, "uint8")) for proof in proofs]

    def make(ranks: list[int]) -> Any:
        seen.stores.append(paddle.distributed.collective._default_store)
        seen.ranks.append(ranks)
        if seen.error:
            raise seen.error
        return Member()

    monkeypatch.setattr(paddle.distributed, "new_group", make)
    monkeypatch.setattr(paddle.distributed.stream, "gather", gather)
    monkeypatch.setattr(paddle.distributed.collective, "_default_store", "shared")
    monkeypatch.setattr(paddle.base.core, "TCPStore", Store)
    monkeypatch.setattr(groups, "backend_name", lambda: seen.backend)
    monkeypatch.setattr(groups, "send_at_once", seen.delayed.append)
    return seen


def test_first_rank_of_a_group_opens_its_store_and_the_others_find_it(paddles: SimpleNamespace) -> None:
    """It waits for nobody, 60 s at most."""
    first, second, outside = Peer(1), Peer(2), Peer(0)
    for peer in (first, second, outside):
        new_group(peer, (1, 2))
    assert paddles.ranks == [[1, 2]] * 3
    opened, found, none = paddles.stores
    host, port, is_master, *rest = opened.arguments
    assert (host, is_master, rest) == ("node1", True, [1, 60])
    assert first.did == [f"broadcast store of group 0 from 1: {port}"]
    assert found.arguments == ("node1", PORT, False, 1, 60)
    assert second.did == outside.did == ["broadcast store of group 0 from 1: 0"]
    assert none is None
    assert paddles.delayed == [PORT] * 3
    assert paddle.distributed.collective._default_store == "shared"


def test_each_group_has_a_store_of_its_own(paddles: SimpleNamespace) -> None:
    peer = Peer(1)
    for _ in range(2):
        new_group(peer, [1, 2])
    assert paddles.stores[0] is not paddles.stores[1]
    assert [one.split(":")[0] for one in peer.did] == [f"broadcast store of group {i} from 1" for i in range(2)]


def test_stores_and_groups_are_never_taken_down(paddles: SimpleNamespace) -> None:
    """Their threads must not be joined while the interpreter ends: somebody else holds them."""
    kept = [weakref.ref(new_group(Peer(1), [1, 2])), weakref.ref(paddles.stores.pop())]
    gc.collect()
    assert [one() is not None for one in kept] == [True, True]


def test_nccl_shares_one_store(paddles: SimpleNamespace) -> None:
    paddles.backend = "nccl"
    peer = Peer(1)
    new_group(peer, [1, 2])
    assert (paddles.stores, peer.did, paddles.delayed) == (["shared"], [], [])


@pytest.mark.parametrize(("interface", "told"), [("eth7", "eth7"), (None, "chosen by the backend")])
def test_a_failed_group_is_reported_with_its_interface_and_leaves_the_shared_store(
    paddles: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, interface: str | None, told: str
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    paddles.error = RuntimeError("Traceback\nconnect: timed out\n")
    with pytest.raises(LinkFailed) as raised:
        new_group(Peer(1), (1, 2))
    assert str(raised.value) == (
        f"the group of ranks [1, 2] could not be formed: connect: timed out (interface {told}); look at the network "
        "between the ranks, and whether strangers can reach the ports of Paddle (SECURITY.md)"
    )
    assert raised.value.__cause__ is paddles.error
    assert paddle.distributed.collective._default_store == "shared"


def test_an_interface_that_does_not_exist_is_a_mistake_and_other_errors_of_ours_stay(
    paddles: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    paddles.error = RuntimeError("Unable to find address for: eth7")
    with pytest.raises(ClusterError, match=r"^GLOO_SOCKET_IFNAME=eth7: this machine has no such .*; it has lo, eth0$"):
        new_group(Peer(1), (1, 2))
    paddles.error = FleetTrainError("rank 0 was lost")
    with pytest.raises(FleetTrainError, match=r"^rank 0 was lost$"):
        new_group(Peer(1), (1, 2))


def test_every_two_members_prove_each_other_who_they_are(paddles: SimpleNamespace) -> None:
    first, second, outside = Peer(1), Peer(2), Peer(0)
    for peer in (first, second, outside):
        new_group(peer, (1, 2))
    proofs = {rank: groups._proof(NUMBER, rank) for rank in (1, 2)}
    assert len({len(proof) for proof in proofs.values()}) == 1
    assert proofs[1] != proofs[2] != groups._proof("another", 2)
    assert paddles.sent == [(root, proofs[rank], root == rank) for rank in (1, 2) for root in (1, 2)]
    (one, random), (_, nothing), _ = first.numbers + second.numbers + outside.numbers
    assert (one, len(random), nothing) == ("number of group 0", 32, None)
    new_group(first, (1, 2))
    name, other = first.numbers[1]
    assert name == "number of group 1"
    assert other != random


@pytest.mark.parametrize("rank", [1, 2])
def test_a_stranger_in_the_place_of_a_member_is_found_and_its_neighbour_named(
    paddles: SimpleNamespace, rank: int
) -> None:
    paddles.strangers.append(3 - rank)
    with pytest.raises(LinkFailed) as raised:
        new_group(Peer(rank), (1, 2))
    there = [Peer(0).cluster.describe(each) for each in (rank, 3 - rank)]
    assert str(raised.value) == (
        f"the group of ranks [1, 2] could not be formed: {there[0]} is connected to another process than {there[1]}; "
        "close the ports of Paddle to strangers (SECURITY.md)"
    )
    new_group(Peer(0), (1, 2))


def test_nccl_groups_prove_nothing(paddles: SimpleNamespace) -> None:
    paddles.backend, peer = "nccl", Peer(1)
    new_group(peer, (1, 2))
    assert (paddles.sent, peer.numbers) == ([], [])


def test_first_sum_of_a_group_on_streams_is_met_by_all_and_bounded() -> None:
    member, outside, threads = Peer(1, side_by_side=False), Peer(0, side_by_side=False), Peer(1)
    group = Member()
    warm_up(member, group)
    warm_up(outside, Member(is_in=False))
    warm_up(threads, group)
    (kind, of, values, place), met = member.did
    assert (kind, of, values) == ("all_reduce", group, [1.0])
    assert (place.moment, place.what, place.timeout_seconds) == ("group 5", "forming the group of ranks [1, 2]", 17.0)
    assert met == "barrier group 5 formed"
    assert outside.did == ["barrier group 5 formed"]
    assert threads.did == []


def test_group_on_streams_is_used_once_before_it_is_given_out(paddles: SimpleNamespace) -> None:
    paddles.backend = "nccl"
    peer = Peer(1, side_by_side=False)
    group = new_group(peer, [1, 2])
    (kind, of, *_), met = peer.did
    assert (kind, of, met) == ("all_reduce", group, "barrier group 5 formed")


def test_first_sum_is_one_collective() -> None:
    """Nothing is left behind it that a rank would still wait for."""
    stages = groups._one_sum(Peer(0), SimpleNamespace(id=0, ranks=[0]))
    assert [one.kind for one in in_turn([stages])[1]] == ["all_reduce"]


def test_a_held_port_can_be_listened_on_and_is_not_given_away() -> None:
    with held_port() as port:
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("0.0.0.0", port))
            store.listen()
        with socket.socket() as other, pytest.raises(OSError, match="in use") as raised:
            other.bind(("0.0.0.0", port))
        assert raised.value.errno == errno.EADDRINUSE
    with socket.socket() as later:
        later.bind(("0.0.0.0", port))


def test_looking_for_connections_leaves_no_descriptor_open() -> None:
    """Also of files, which are no sockets."""
    with open(os.devnull, "rb"):
        before = sorted(os.listdir("/proc/self/fd"))
        groups.send_at_once(9)
        assert sorted(os.listdir("/proc/self/fd")) == before
