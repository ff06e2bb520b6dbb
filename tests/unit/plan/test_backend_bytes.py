"""Literal figures below were counted on sockets (Paddle 3.3.1, Gloo, one network namespace per rank)."""

from __future__ import annotations

import pytest

from fleet_train.plan.phases import RECEIVER_BYTES_PER_MESSAGE, SENDER_BYTES_PER_MESSAGE, Flow, flows, rounds

MEGABYTE = 2**20


def socket_bytes(kind: str, size: int, nbytes: int) -> list[float]:
    """Bytes that each rank gives to TCP: payload and Gloo's messages."""
    sent = [0.0] * size
    for (sender, receiver), flow in flows(kind, range(size), nbytes).items():
        sent[sender] += flow.nbytes + SENDER_BYTES_PER_MESSAGE * flow.messages
        sent[receiver] += RECEIVER_BYTES_PER_MESSAGE * flow.messages
    return sent


@pytest.mark.parametrize(
    ("size", "nbytes", "counted"),
    [
        (2, 4, [148, 148]),
        (2, 4096, [4672, 4672]),
        (2, 4 * MEGABYTE, [4194880, 4194880]),
        (2, 5 * MEGABYTE, [5243744, 5243744]),
        (2, 10 * MEGABYTE, [10487200, 10487200]),
        (3, 4, [148, 196, 248]),
        (3, 4096, [6616, 6608, 6616]),
        (3, 4 * MEGABYTE, [5593560, 5593552, 5593560]),
        (4, 65536, [100032] * 4),
        (4, 4 * MEGABYTE, [6293184] * 4),
    ],
)
def test_allreduce_sends_what_was_counted(size: int, nbytes: int, counted: list[int]) -> None:
    assert socket_bytes("allreduce", size, nbytes) == counted


def test_allreduce_of_a_large_buffer_stays_even() -> None:
    # 10 segments of at most 1 MB for 4 ranks: 12 of equal length, not 10 of 1 MB. Two ranks' sockets, towards the ring:
    found = flows("allreduce", range(4), 10 * MEGABYTE)
    assert [found[edge].nbytes + SENDER_BYTES_PER_MESSAGE * found[edge].messages for edge in ((0, 3), (1, 0))] == [
        15730384,
        15730352,
    ]


@pytest.mark.parametrize(
    ("size", "nbytes", "counted"),
    [
        (2, 65536, [33104, 65920]),
        (2, 4 * MEGABYTE, [2097488, 4194688]),
        (2, 6 * MEGABYTE, [4194928, 7340704]),
        (2, 7 * MEGABYTE, [5243696, 9438096]),
        (3, 4 * MEGABYTE, [2796872, 4194976, 4194976]),
        (4, 4 * MEGABYTE, [3146736, 4195264, 4195264, 4195264]),
    ],
)
def test_reduce_to_the_first_rank_sends_what_was_counted(size: int, nbytes: int, counted: list[int]) -> None:
    assert socket_bytes("reduce", size, nbytes) == counted


def test_reduce_of_a_large_buffer_sends_most_of_the_last_chunk_without_need() -> None:
    payload = {edge: flow.nbytes / (16 * MEGABYTE) for edge, flow in flows("reduce", [0, 1], 16 * MEGABYTE).items()}
    assert payload == {(0, 1): 0.875, (1, 0): 1.375}


@pytest.mark.parametrize(
    ("size", "counted"),
    [(2, [4194400, 48]), (3, [8388800, 48, 48]), (4, [8388800, 4194448, 48, 48])],
)
def test_broadcast_sends_what_was_counted(size: int, counted: list[int]) -> None:
    assert socket_bytes("broadcast", size, 4 * MEGABYTE) == counted


def test_allgather_sends_what_was_counted() -> None:
    assert socket_bytes("allgather", 2, 65536) == [65824, 65824]
    assert socket_bytes("allgather", 4, 65536) == [197472] * 4


def test_edges_carry_the_names_of_the_ranks() -> None:
    assert flows("broadcast", [4, 6], 8) == {(4, 6): Flow(8, 1)}


def test_nothing_is_sent_alone_or_without_bytes() -> None:
    assert flows("allreduce", [0], 8) == {}
    assert flows("allreduce", [0, 1], 0) == {}


def test_rounds_that_pay_the_latency() -> None:
    assert [rounds("allreduce", size) for size in (1, 2, 4)] == [0, 2, 6]
    assert [rounds("reduce", size) for size in (1, 2, 4)] == [0, 2, 4]
    assert [rounds("broadcast", size) for size in (1, 2, 4, 5)] == [0, 1, 2, 3]
    assert [rounds("allgather", size) for size in (1, 2, 4)] == [0, 1, 3]
    # Pairs in turn: three need three rounds, in each of which one has nobody to meet; so do four.
    assert [rounds("alltoall", size) for size in (1, 2, 3, 4, 5, 6)] == [0, 1, 3, 3, 5, 5]
