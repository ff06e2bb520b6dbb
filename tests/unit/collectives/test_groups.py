"""Process groups: which store they use, who proves itself to whom, the errors, and how fast their links are."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives import groups, join
from fleet_train.collectives.groups import new_group, send_at_once, warm_up
from fleet_train.collectives.join import glance, probe
from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed
from fleet_train.plan.choose import coarse
from fleet_train.plan.price import Link
from tests.support.processes import clean_environ, python
from tests.unit.collectives.played import Group, PaperRank, form

PORT = 4321
NUMBER = "5ca1ab1e"


@dataclass
class Peer(PaperRank):
    """A rank of three, as far as those see it who make groups."""

    world_size: int = 3
    side_by_side: bool = True
    did: list[Any] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def _run_here(self, stages: Any, place: Any) -> None:
        (collective,) = next(stages).collectives
        self.did.append((collective.kind, collective.group, collective.tensor.tolist(), place))


class Store:
    """Paddle's, on paper."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class Member(SimpleNamespace):
    """Paddle's group."""


def member(is_in: bool = True) -> Member:
    return Member(id=5, ranks=[1, 2], is_member=lambda: is_in)


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
        return member()

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


def test_only_connections_to_that_port_send_at_once() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(open(os.devnull, "rb"))  # no socket
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        clients = [stack.enter_context(socket.create_connection(one.getsockname())) for one in servers]
        before = sorted(os.listdir("/proc/self/fd"))
        send_at_once(servers[0].getsockname()[1])
        at_once = [bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for one in clients]
        assert at_once == [True, False]
        assert sorted(os.listdir("/proc/self/fd")) == before


# A store of Paddle's as new_group opens one; exits without the end of the interpreter, as ranks do.
_A_STORE = """
import os, socket
import paddle, psutil
from fleet_train.collectives.groups import held_port, send_at_once

def delayed(port):
    links = [one.fd for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]
    copies = [socket.socket(fileno=os.dup(link)) for link in links]
    return [not copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for copy in copies]

with held_port() as port:
    store = paddle.base.core.TCPStore("127.0.0.1", port, True, 1, 60)
before = delayed(port)
send_at_once(port)
store.set("a", "b")
print(before, delayed(port), store.get("a"), flush=True)
os._exit(0)
"""


def test_paddles_own_connection_is_found() -> None:
    said = subprocess.run(python("-c", _A_STORE), env=clean_environ(), capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "[True] [False] b'b'"


LATENCY, BYTES_PER_SECOND = 1e-4, 1e8
KIB = 1024


class Probed(PaperRank):
    """A job whose allreduces take what a link of this latency and bandwidth needs, by a ring of two."""

    slower = 0.0
    """By how many seconds another rank is slower than this one."""
    wakes_up = 0.0
    """By how many seconds the first allreduce of each row is slower."""
    rested = 1.0
    """What share of its time the first one takes otherwise: a cloud's link has saved up credit for it."""

    def __init__(self, nodes: int, per_node: int, rank: int = 0) -> None:
        super().__init__(rank, nodes * per_node)
        self.cluster = Cluster(Cluster.imagined(nodes, per_node).ranks, rank)
        moment = SimpleNamespace(await_passed=self._end)
        self.engine = SimpleNamespace(run_here=self._run, device=SimpleNamespace(moment=lambda: moment))
        self.now = 100.0
        """Time goes on where an allreduce is carried out."""
        self.timed: list[tuple[str, int]] = []
        """Where, and bytes, of each allreduce."""
        self.met: list[str] = []
        self._row = ""
        self._underway = 0.0

    def perf_counter(self) -> float:
        return self.now

    def barrier(self, name: str) -> None:
        self.met.append(name)

    def communicators(self, number: int) -> list[Group]:
        return [Group(index, range(self.world_size)) for index in range(number)]

    def all_gather(self, name: str, value: Any) -> dict[int, Any]:
        self.met.append(name)
        value = value or 0.1  # of the others, where this one takes no part
        return dict.fromkeys(range(self.world_size), value) | {self.world_size - 1: value + self.slower}

    def times_of(self, nbytes: int) -> int:
        return [one for _, one in self.timed].count(nbytes)

    def _run(self, stages: Any, place: Any) -> None:
        ((collective,),) = [stage.collectives for stage in stages]
        nbytes = 4 * collective.tensor.size
        assert (collective.kind, collective.tensor.dtype) == ("all_reduce", paddle.float32)
        self.timed.append((place.what.removeprefix("measuring "), nbytes))
        seconds = 2 * LATENCY + nbytes / BYTES_PER_SECOND
        if place.moment != self._row:
            seconds = self.rested * seconds + self.wakes_up
        self._underway, self._row = seconds, place.moment

    def _end(self) -> None:
        """On a GPU the call returns at once: it is the device that takes the time."""
        self.now += self._underway
        self._underway = 0.0


@pytest.fixture
def make_probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(*arguments: int, **options: int) -> Probed:
        job = Probed(*arguments, **options)
        monkeypatch.setattr(join, "time", job)
        monkeypatch.setattr(join, "new_group", form)
        return job

    return make


def test_link_of_two_nodes_is_found_again(make_probed: Callable[..., Any]) -> None:
    job = make_probed(2, 1)
    found = probe(job, 60.0)
    assert list(found) == ["between nodes"]
    measured = found["between nodes"]
    assert measured.link.latency_seconds == pytest.approx(LATENCY)
    assert measured.link.bytes_per_second == pytest.approx(BYTES_PER_SECOND)
    assert [sample.nbytes / KIB for sample in measured.samples] == [4, 16, 64, 256, 1024, 4096, 16384]
    assert [group.ranks for group in job.formed] == [(0, 1)]
    assert job.met == [name for i in range(14) for name in (f"probe {i}", f"probed {i}")]


def test_sizes_that_take_too_long_are_left_out_but_for_the_first_two(make_probed: Callable[..., Any]) -> None:
    job = make_probed(2, 1)
    found = probe(job, 7 * 0.001)
    # 1 ms each: 256 KiB take 2.8 ms.
    assert [sample.nbytes / KIB for sample in found["between nodes"].samples] == [4, 16, 64]
    assert job.times_of(64 * KIB) == 2 + 3
    found = probe(job, 1e-9)
    assert [sample.nbytes / KIB for sample in found["between nodes"].samples] == [4, 16]


def test_nodes_are_linked_by_their_first_ranks_and_measured_inside_at_the_same_time(
    make_probed: Callable[..., Any],
) -> None:
    job = make_probed(2, 2, rank=3)
    found = probe(job, 14.0)
    assert list(found) == ["between nodes", "inside a node"]
    assert [group.ranks for group in job.formed] == [(0, 2), (0, 1), (2, 3)]
    assert {where for where, _ in job.timed} == {"inside a node"}  # this rank is no first one
    assert [found[where].group_size for where in found] == [2, 2]
    # Half of 14 s for each of two: as often as with 7 s for one.
    assert job.times_of(16384 * KIB) == 7


def test_a_glance_finds_the_link_on_its_grid_whatever_the_first_of_a_row_takes(
    make_probed: Callable[..., Any],
) -> None:
    job = make_probed(2, 1)
    job.wakes_up = 0.04
    assert glance(job) == coarse(Link(LATENCY, BYTES_PER_SECOND))
    assert job.formed == []
    # 256 KiB in 2.8 ms: three of 4 MiB would take 0.135 s, which is within a quarter of a second.
    assert [nbytes / KIB for _, nbytes in job.timed] == [4] * 9 + [256] * 2 + [4096] * 3


@pytest.mark.parametrize(("slower", "largest"), [(0.0, 4096), (0.004, 2048), (0.012, 1024), (0.03, 512), (0.05, 256)])
def test_a_glance_at_a_slow_link_is_content_with_less(
    make_probed: Callable[..., Any], slower: float, largest: int
) -> None:
    """Three of 4 MiB take 48 times what 256 KiB take, of 2 MiB 24 times, ..: within 0.25 s."""
    for rested in (1.0, 0.1):
        job = make_probed(2, 1)
        job.slower, job.rested = slower, rested
        glance(job)
        assert [nbytes / KIB for _, nbytes in job.timed][11:] == ([largest] * 3 if largest > 256 else [])


def test_a_link_is_as_slow_as_the_slowest_rank_of_its_largest_group(
    make_probed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_probed(4, 1)
    times = {0: 0.002, 1: 0.005, 2: 0.001, 3: 0.009}
    monkeypatch.setattr(job, "all_gather", lambda _, value: times | {0: value})
    sweep = join._Sweep("between nodes", [[3], [0, 1, 2]], None)
    assert [join._slowest(job, sweep, own) for own in (0.002, 0.007)] == [0.005, 0.007]
    assert list(probe(make_probed(1, 2), 7.0)) == ["inside a node"]


def test_a_group_and_its_store_are_its_own_and_never_taken_down(paddles: SimpleNamespace) -> None:
    """Their threads must not be joined while the interpreter ends: somebody else holds them."""
    peer = Peer(1)
    kept = [weakref.ref(new_group(peer, [1, 2])) for _ in range(2)]
    assert paddles.stores[0] is not paddles.stores[1]
    assert [one.split(":")[0] for one in peer.did] == [f"broadcast store of group {i} from 1" for i in range(2)]
    kept += [weakref.ref(paddles.stores.pop()) for _ in range(2)]
    gc.collect()
    assert [one() is not None for one in kept] == [True] * 4


def test_nccl_shares_one_store_proves_nothing_and_is_used_once_before_it_is_given_out(
    paddles: SimpleNamespace,
) -> None:
    paddles.backend, peer = "nccl", Peer(1, side_by_side=False)
    group = new_group(peer, [1, 2])
    assert (paddles.stores, paddles.delayed, paddles.sent, peer.numbers) == (["shared"], [], [], [])
    (kind, of, values, place), met = peer.did
    assert (kind, of, values, met) == ("all_reduce", group, [1.0], "barrier group 5 formed")
    assert (place.moment, place.what, place.timeout_seconds) == ("group 5", "forming the group of ranks [1, 2]", 9.0)
    outside = Peer(0, side_by_side=False)
    warm_up(outside, member(is_in=False))
    assert outside.did == ["barrier group 5 formed"]
