"""Pipes that are read, not read, read late, or closed: a writer never blocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from fleet_train.launch.terminal import Outlet


class Pipes:
    """Two streams of one process, each with a reader of its own."""

    def __init__(self) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.readers = [reader for reader, _ in pipes]
        self.streams: list[TextIO] = [os.fdopen(writer, "w") for _, writer in pipes]
        moved = threading.Condition()
        self.one, self.two = (Outlet(stream, moved) for stream in self.streams)

    def read(self, index: int) -> bytes:
        return os.read(self.readers[index], 1 << 20)

    def close(self) -> None:
        for reader in self.readers:
            os.close(reader)
        for outlet in (self.one, self.two):
            outlet.drain()
        for stream in self.streams:
            stream.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


def fill(outlet: Outlet) -> None:
    """Until its memory is full, and the pipe too."""
    while outlet.has_room():
        outlet.put(b"x" * 65_535 + b"\n")
        if not outlet.has_room():
            outlet.drain()


def test_what_is_put_is_written(pipes: Pipes) -> None:
    pipes.one.put(b"one\n")
    pipes.one.put(b"two\n")
    assert pipes.one.drain()
    assert pipes.read(0) == b"one\ntwo\n"


def test_two_streams_of_one_screen_keep_their_order(pipes: Pipes) -> None:
    os.dup2(pipes.streams[0].fileno(), pipes.streams[1].fileno())
    for number in range(200):
        first, second = (pipes.one, pipes.two) if number % 3 else (pipes.two, pipes.one)
        first.put(b"%d a\n" % number, after=second)
        second.put(b"%d b\n" % number, after=first)
    assert pipes.one.drain()
    assert pipes.two.drain()
    assert pipes.read(0) == b"".join(b"%d a\n%d b\n" % (number, number) for number in range(200))


def test_an_unread_stream_blocks_neither_the_caller_nor_the_other_stream(pipes: Pipes) -> None:
    fill(pipes.one)
    pipes.one.put(b"lost\nlost\n")
    pipes.two.put(b"the job has failed\n", after=pipes.one)
    assert not pipes.one.drain()
    assert pipes.two.drain()
    assert pipes.read(1) == b"the job has failed\n"


def test_a_late_reader_gets_the_number_of_lines_it_missed(pipes: Pipes) -> None:
    fill(pipes.one)
    pipes.one.put(b"lost\nlost\n")
    pipes.one.leave_out(3)
    read = b""
    while not read.endswith(b"in time\n"):
        read += pipes.read(0)
    assert read.count(b"x\n") >= 16
    assert read.splitlines()[-1] == b"fleet_train: 5 lines could not be shown here in time"


def test_dropped_lines_are_counted_even_if_nothing_follows(pipes: Pipes) -> None:
    pipes.one.leave_out(2)
    assert pipes.one.drain()
    assert pipes.read(0) == b"fleet_train: 2 lines could not be shown here in time\n"


def test_a_closed_pipe_and_a_missing_stream_take_everything_in_silence(pipes: Pipes) -> None:
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), pipes.readers[0])  # which closes the pipe
    missing = Outlet(None, threading.Condition())
    for outlet in (pipes.one, missing):
        for _ in range(100):
            outlet.put(b"x" * 65_535)
        assert outlet.drain()
        assert outlet.has_room()


def test_a_full_disk_costs_the_lines_and_nothing_else() -> None:
    with open("/dev/full", "w") as full:
        outlet = Outlet(full, threading.Condition())
        outlet.put(b"one\n")
        assert outlet.drain()
        outlet.put(b"two\n")
        assert outlet.drain()
