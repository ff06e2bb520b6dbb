"""What reaches the terminal: whole logs, no lines of Paddle's start, and no writer that blocks on a reader."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from fleet_train.launch import worker_group
from fleet_train.launch.node import Node
from fleet_train.launch.processes import end_of
from fleet_train.launch.terminal import Follower, Outlet, StartupLines, without_startup_lines


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


def test_what_is_put_is_written_and_what_was_dropped_is_counted(pipes: Pipes) -> None:
    pipes.one.put(b"one\n")
    pipes.one.put(b"two\n")
    assert pipes.one.drain()
    assert pipes.read(0) == b"one\ntwo\n"
    pipes.one.leave_out(2)  # even if nothing follows
    assert pipes.one.drain()
    assert pipes.read(0) == b"fleet_train: 2 lines could not be shown here in time\n"


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
        for _ in range(2):
            outlet.put(b"one\n")
            assert outlet.drain()


# What Paddle 3.3.1 prints in a job of two ranks on CPUs, and what its sources print on GPUs.
PADDLES = """\
/opt/venv/lib/paddle/utils/cpp_extension/extension_utils.py:712: UserWarning: No ccache found. Be
  warnings.warn(warning_message)
I1123 00:22:11.288606 27353 tcp_store.cc:336] create libuv server at port: 46113
I1123 00:22:11.288967 27353 tcp_utils.cc:132] Successfully connected to 127.0.0.1:46113
======================= Modified FLAGS detected =======================
FLAGS(name='FLAGS_enable_pir_in_executor', current_value=True, default_value=False)
FLAGS(name='FLAGS_new_executor_serial_run', current_value=True, default_value=False)
=======================================================================
W1123 00:22:12.850771 27353 eager_utils.cc:3584] Paddle static graph(PIR) not support input out tensor for now!!!!!
/opt/venv/lib/paddle/pir/math_op_patch.py:241: UserWarning: Tensor do not have 'place' interface
  warnings.warn(
I1123 00:22:13.023294 27353 pir_interpreter.cc:1529] New Executor is Running ...
WARNING: Logging before InitGoogleLogging() is written to STDERR
W1123 00:22:13.023294 27353 gpu_resources.cc:119] Please NOTE: device: 0, GPU Compute Capability: 8.0
"""
SHOWN = """\
fleet_train: profile multi_node
epoch 1/1  train loss 1.6878
I1123 00:22:13.023294 27353 train.py:30] a line of absl's logging
I1123 00:22:13.023294 27353 my_operator.cc:30] of the user's own operator
W1123 00:22:13.023294 27353 comm_task_manager.cc:200] a collective is late
E1123 00:22:13.023294 27353 pir_interpreter.cc:1529] an error
F1123 00:22:13.023294 27353 tcp_store.cc:336] a fatal one
W1123 00:22:13.023294 27353 eager_utils.cc:3584] something else
/home/me/train.py:3: UserWarning: No ccache found
  warnings.warn("No ccache found")
/home/me/paddle/utils/my.py:3: DeprecationWarning: old
  warnings.warn(
/opt/venv/lib/paddle/pir/math_op_patch.py:241: UserWarning: Tensor do not have 'is_cuda' interface
  warnings.warn(
=======================================================================
WARNING: Logging of mine
FLAGS of mine
"""


def in_pieces(text: str, size: int) -> str:
    startup_lines = StartupLines()
    data = text.encode()
    shown = b"".join(startup_lines.feed(data[at : at + size]) for at in range(0, len(data), size))
    return (shown + startup_lines.rest()).decode()


@pytest.mark.parametrize("size", [1, 2, 7, 50, 4096])
def test_paddles_lines_are_left_out_and_all_others_stay_in_pieces_of_any_size(size: int) -> None:
    assert in_pieces(PADDLES, size) == ""
    assert in_pieces(SHOWN, size) == SHOWN
    mixed = [line for pair in zip(PADDLES.splitlines(True)[2:4], SHOWN.splitlines(True), strict=False) for line in pair]
    assert in_pieces("".join(mixed) + SHOWN, size) == "".join(mixed[1::2]) + SHOWN


def test_progress_bars_and_prompts_are_shown_before_their_line_ends() -> None:
    startup_lines = StartupLines()
    assert startup_lines.feed(b"\repoch 1 |##  |") == b"\repoch 1 |##  |"
    assert startup_lines.feed(b"\repoch 1 |####|") == b"\repoch 1 |####|"
    assert startup_lines.feed(b"\nWorking") == b"\n"
    assert startup_lines.rest() == b"Working"
    assert startup_lines.feed(b" ... done\n") == b" ... done\n"
    assert startup_lines.feed(b"=" * 5000) == b"=" * 5000
    assert StartupLines().feed(b"\xff\x00\xfe\n") == b"\xff\x00\xfe\n", "no text"
    lines = PADDLES.splitlines(True)
    assert without_startup_lines("".join([*lines[4:6], "step 1\n", *lines[6:]])) == "step 1\n", "amid the table"


def test_the_terminal_is_spared_and_the_log_has_everything(tmp_path: Path) -> None:
    path, shown = tmp_path / "workerlog.0", bytearray()
    follower = Follower(path, write=shown.extend, passing=StartupLines())
    follower.pump()
    with path.open("w") as log:
        log.write(PADDLES + "one\n" + PADDLES + "Wait")
        log.flush()
        follower.pump()
        assert bytes(shown) == b"one\n"
        follower.pump()  # nothing has come since
        assert bytes(shown) == b"one\nWait"
        log.write("50%\r100%")
    follower.close()
    assert bytes(shown) == b"one\nWait50%\r100%\n"
    assert end_of(path).count("ccache") == 2


NODE = Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0")


class Screen:
    """Stands in for the terminal: has room for so many chunks, and gets more of it ``reads`` times when waited for."""

    def __init__(self, room: int = 100, reads: int = 0) -> None:
        self.shown: list[bytes] = []
        self.left_out = 0
        self._room, self._reads = room, reads

    def has_room(self) -> bool:
        return len(self.shown) < self._room

    def show(self, text: bytes) -> None:
        self.shown.append(text)

    def drain(self) -> bool:
        self._reads -= 1
        self._room += 1
        return self._reads >= 0

    def leave_out(self, lines: int) -> None:
        self.left_out += lines


def test_connections_of_an_earlier_job_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    listed = {"old"}

    def connections_at(endpoints: Iterable[tuple[str, int]]) -> frozenset[str]:
        asked[:] = endpoints
        return frozenset(listed)

    monkeypatch.setattr(worker_group, "connections_at", connections_at)
    connections = worker_group.Connections(NODE)
    assert asked == [(f"10.0.0.{node}", port) for node in (1, 2) for port in (6170, 6171)]
    connections.look()
    assert not connections.seen
    listed.add("new")
    connections.look()
    listed.clear()
    connections.look()
    assert connections.seen, "it has ended"


def test_a_slow_reader_gets_everything_and_a_blocked_one_the_number_of_missed_lines(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"x" * 65_535 + b"\n" + b"y" * 65_535 + b"\n" + b"z\nz\nz\n")
    slow, stuck = Screen(room=1, reads=9), Screen(room=1)
    for screen in (slow, stuck):
        follower = Follower(path, screen, screen.show)  # type: ignore[arg-type]
        for _ in range(3):
            follower.pump()
        assert len(screen.shown) == 1
        follower.close()
    assert b"".join(slow.shown) == path.read_bytes()
    assert (slow.left_out, stuck.left_out) == (0, 4)
