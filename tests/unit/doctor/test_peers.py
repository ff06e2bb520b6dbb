"""Doctors of one process on loopback addresses: rendezvous, clocks, streams, packets, refusals."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fleet_train.cluster.store.access import Access, Refused
from fleet_train.cluster.store.wire import encode
from fleet_train.doctor import channel
from fleet_train.doctor.channel import dialled
from fleet_train.doctor.participants import Participants, without_loopback_name
from fleet_train.doctor.peer_group import PeerGroup, rounds, stream_seconds
from fleet_train.doctor.responder import ReplicatedState, Responder
from tests.support.ports import free_ports

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@contextmanager
def doctor(index: int, port: int, clock: Callable[[], float] = time.time, job: str = "job") -> Iterator[PeerGroup]:
    access = Access(job, source=HOSTS[index])
    participants = Participants(HOSTS, index, ((port, port + 1),) * 3, 1, access)
    state = ReplicatedState()
    responder = Responder(HOSTS[index], participants.ports[index], access, HOSTS, state, clock).start()
    presence = {"open": responder.ports, "extra": responder.extra_port, "udp": responder.udp_port}
    state.put(f"here/{index}", presence)
    try:
        yield PeerGroup(participants, state, responder)
    finally:
        responder.close()


def rendezvous(groups: list[PeerGroup], seconds: float) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.wait_for_nodes(seconds), groups))


def test_all_doctors_gather_all_facts_and_wait_for_an_absent_one_until_their_time_is_over() -> None:
    port = free_ports(2, HOSTS)
    with doctor(0, port) as first, doctor(1, port) as second:
        began = time.monotonic()
        assert rendezvous([first, second], 1.5) == [(0, 1)] * 2
        assert time.monotonic() - began < 30.0
    with doctor(0, port) as first, doctor(1, port) as second, doctor(2, port) as third:
        assert rendezvous([first, second, third], 10.0) == [(0, 1, 2)] * 3
        second.state.put("report/1", {"of": "node 1"})
        assert first.collect("report", [1], 5.0) == set()
        assert first.state.get("report/1") == {"of": "node 1"}
        first.leave([0, 1], 5.0)


def test_a_clock_that_goes_wrong_is_measured() -> None:
    port = free_ports(2, HOSTS)
    with doctor(0, port) as first, doctor(1, port, clock=lambda: time.time() - 7.5) as second:
        assert rendezvous([first, second], 1.0) == [(0, 1)] * 2
        (echo,), streams = first.measure_pairs((0, 1), 2.0)
        assert abs(echo.ahead - 7.5) <= echo.uncertainty + 0.01  # half of the way there and back, on a busy machine too
        assert echo.uncertainty < 2.0
        assert [(stream.source, stream.target, stream.error) for stream in streams] == [(0, 1, ""), (1, 0, "")]
        assert all(stream.best >= stream.bytes_per_second > 0 for stream in streams)
        assert second.measure_pairs((0, 1), 2.0) == ([], [])  # the lower one has begun it


def test_a_port_that_another_program_has_is_held_and_named() -> None:
    port = free_ports(2, HOSTS)
    with socket.create_server((HOSTS[1], port)), doctor(0, port) as first, doctor(1, port) as second:
        assert list(second.responder.held) == [port]
        assert str(second.responder.held[port]).startswith("process ")
        assert rendezvous([first, second], 1.0) == [(0, 1)] * 2
        assert {attempt.outcome for attempt in first.try_ports((0, 1))} == {"open"}


def test_doctors_of_other_jobs_and_strangers_are_refused() -> None:
    port = free_ports(2, HOSTS)
    with doctor(1, port):
        with pytest.raises(Refused, match="another job"), dialled(HOSTS[1], port, Access("other"), 0):
            pass
        with (
            pytest.raises(Refused, match="comes from 127"),
            dialled(HOSTS[1], port, Access("job", source="127.0.0.9"), 0),
        ):
            pass
        with socket.create_connection((HOSTS[1], port), timeout=5) as stranger:
            assert stranger.recv(4096)  # the challenge
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert stranger.recv(100) == b""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_no_doctor_says_ends_its_connection_without_a_word() -> None:
    port = free_ports(2, HOSTS)
    with doctor(1, port):
        for wrong in ({"member": []}, {"nonce": "\ud800"}, {"member": None}):
            with socket.create_connection((HOSTS[1], port), timeout=5, source_address=(HOSTS[0], 0)) as stranger:
                stranger.sendall(encode({"do": "hello", "job": "job", "nonce": "n", "member": 0, **wrong}))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass


def test_packets_of_every_size_are_answered_on_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        done = threading.Event()

        def serve() -> None:
            sock.settimeout(0.2)
            while not done.is_set():
                channel.answer_datagrams(sock, b"12345678")

        thread = threading.Thread(target=serve)
        thread.start()
        largest, known = channel.sweep_packet_sizes("127.0.0.1", sock.getsockname()[1], "127.0.0.1", b"12345678", 9000)
        silent, _ = channel.sweep_packet_sizes("127.0.0.1", sock.getsockname()[1], "127.0.0.1", b"87654321", 600)
        done.set()
        thread.join()
    assert (largest, known >= 9000, silent) == (9000, True, 0)


def test_each_pair_once_and_each_node_once_a_round() -> None:
    for number in range(2, 17):
        made = rounds(range(number))
        pairs = [pair for each in made for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(number) for b in range(a + 1, number)]
        assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in made)
    assert len(rounds(range(16))) == 15
    assert 15 * 2 * (stream_seconds(16, 14.0) + 0.1) < 15.0


def test_lists_without_a_loopback_name_stay_as_they_are() -> None:
    for addresses in (("10.0.0.1", "10.0.0.2"), ("127.0.0.1",), ("127.0.0.2", "127.0.0.3")):
        assert without_loopback_name(addresses, addresses, None) == (addresses, None)
