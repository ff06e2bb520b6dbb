"""The flight recorder of a process and what another process sees of it: real processes that hang in known lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fleet_train import timeouts
from fleet_train.cli.top import lines
from fleet_train.cluster.flight import witness
from fleet_train.cluster.flight.process import ProcessState, Turn, lacks_processor
from fleet_train.cluster.flight.ring import EVENTS, RING_BYTES, Ring, read_ring
from fleet_train.cluster.flight.rows import row_of
from fleet_train.cluster.flight.stands import Frame, Stand, parse
from fleet_train.cluster.flight.witness import Seen, Witness
from tests.support.processes import clean_environ, until

# Each function hangs in the line that ends with its name.
SCRIPT = """
import ctypes, os, re, sys, threading, time
from fleet_train.cluster.flight.ring import recorder
PASSWORD = "a-value-that-no-stack-shows"

def loop(ready=False):
    while not ready: time.sleep(0.01)  # loop

def regex():
    re.match(r"(a+)+b", "a" * 60)  # regex

def busy():
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    os.nice(19)
    while True: pass  # busy

def native():
    ctypes.PyDLL(None).pause()  # native

def fifo():
    open(sys.argv[2]).read()  # fifo

def threads():
    first, second = threading.Lock(), threading.Lock()
    def other():
        with second:
            time.sleep(0.3)
            first.acquire()  # other
    threading.Thread(target=other, name="writer", daemon=True).start()
    with first:
        time.sleep(0.2)
        second.acquire()  # threads

def forked():
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)  # forked

def events():
    first = recorder.begin("run")
    for step in range(3000):
        recorder.step = step
        with recorder.event("wire", f"bucket {step % 3}", 1000 + step, "ranks 0-3"):
            pass
    recorder.end(first)  # long gone: a newer event stays as it is
    recorder.begin("wait", "bucket 2")
    time.sleep(60)  # events

def names():
    for number in range(3000):
        with recorder.event("call", f"a name of its own {number}"):
            pass
    time.sleep(60)  # names

recorder.start(3, 4)
recorder.join(3, 4, 77, "10.0.0.4:6170")
while recorder.helper == 0: time.sleep(0.01)
print("ready", flush=True)
globals()[sys.argv[1]]()
"""
Start = Callable[[str], Seen]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    os.mkfifo(tmp_path / "pipe")
    started: list[subprocess.Popen[str]] = []

    def begin(name: str) -> Seen:
        command = [sys.executable, str(script), name, str(tmp_path / "pipe")]
        environ = clean_environ({"SECRET_TOKEN": "a-secret-that-no-stack-shows"})
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (seen,) = witness.ranks_here(lambda pid: witness.session_of(pid) == process.pid)
        assert (seen.pid, seen.ring().rank, seen.ring().world_size, seen.ring().job) == (process.pid, 3, 4, 77)
        time.sleep(0.5)  # until it is in its line
        return seen

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def the_line(name: str) -> str:
    (line,) = [line.strip() for line in SCRIPT.splitlines() if line.endswith(f"# {name}")]
    return line


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("loop", ""),
        ("regex", "computes in native code that keeps Python's lock (state R)"),
        ("native", "waits in native code that keeps Python's lock (state S"),
        ("fifo", ""),
        ("threads", ""),
        ("forked", ""),
    ],
)
def test_the_scripts_innermost_line_is_found(start: Start, name: str, state: str) -> None:
    (stand,) = witness.look([start(name)])
    assert stand.place is not None
    assert (stand.rank, os.path.basename(stand.place.file), stand.place.source) == (3, "train.py", the_line(name))
    # On a machine that is busy enough, one that computes with the lock lacks a processor as well.
    assert stand.state.startswith((state, "lacks a processor") if state.startswith("computes") else state)
    assert bool(stand.state) is bool(state)
    assert stand.sentence().endswith(f"stands in train.py:{stand.place.line} `{the_line(name)}`")
    shown = "\n".join(stand.lines(whole=True))
    assert f"in {name}: {the_line(name)}" in shown
    assert "no-stack-shows" not in shown.replace(the_line(name), "")
    assert Stand.from_json(stand.to_json()) == stand
    others = [thread for thread in stand.threads if not thread.is_main and not thread.is_ours]
    assert [(thread.name, str(thread.place).split("`")[1]) for thread in others] == (
        [("writer", the_line("other"))] if name == "threads" else []
    )


def test_a_stopped_rank_is_named_as_such_and_shows_its_line_once_it_may_go_on(start: Start) -> None:
    seen = start("loop")
    os.kill(seen.pid, signal.SIGSTOP)
    until(lambda: ProcessState.of(seen.pid).is_stopped)
    (stand,) = witness.look([seen])
    assert stand.sentence() == "rank 3 is stopped by a signal (state T)"
    (stand,) = witness.look([seen], resume=True)
    assert stand.state.startswith("is stopped by a signal")
    assert "stands in train.py" in stand.sentence()
    assert not ProcessState.of(seen.pid).is_stopped


def test_a_rank_that_goes_on_is_asked_again_and_again_and_by_several(start: Start) -> None:
    seen = start("loop")
    (other,) = witness.ranks_here(lambda pid: pid == seen.pid)
    for _ in range(3):
        ((first,), (second,)) = witness.look([seen]), witness.look([other])
        assert str(first.place) == str(second.place)
        assert (first.state, second.state) == ("", "")


def test_the_ring_keeps_the_newest_events_and_outlives_its_process(start: Start) -> None:
    seen = start("events")
    (stand,) = witness.look([seen])
    assert (stand.step, stand.doing, stand.waits) == (2999, "wait bucket 2", True)
    os.kill(seen.pid, signal.SIGKILL)
    until(lambda: not witness.is_alive(seen.pid))
    ring = read_ring(seen.data())
    assert ring is not None
    *wires, last = ring.events
    assert (len(ring.events), last.kind, last.name, last.ended) == (EVENTS, "wait", "bucket 2", 0.0)
    assert [event.step for event in wires] == list(range(3000 - EVENTS + 1, 3000))
    for event in wires:
        assert (event.kind, event.name, event.group) == ("wire", f"bucket {event.step % 3}", "ranks 0-3")
        assert event.nbytes == 1000 + event.step
        assert event.enqueued <= event.began <= event.ended <= last.began


@pytest.fixture
def hogs() -> Iterator[None]:
    """Leave a rank that is nice little of its processor."""
    first = min(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, [{first}])\nwhile True: pass"
    started = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    yield
    for each in started:
        each.kill()
        each.wait()


@pytest.mark.usefixtures("hogs")
def test_a_rank_that_lacks_a_processor_is_not_said_to_keep_pythons_lock(start: Start) -> None:
    busy = start("busy")
    with suppress(OSError):  # where sessions share the processors, being nice counts within one
        Path(f"/proc/{busy.pid}/autogroup").write_text("19")
    seen: set[str] = set()
    for _ in range(40):
        seen |= {stand.state.partition(" (")[0] for stand in witness.look([busy])}
        if seen != {""}:
            break
    assert seen - {""} == {"lacks a processor"}


def test_who_lacks_a_processor_is_seen_from_its_threads_turns() -> None:
    helper, main, other = 7, 1, 2

    def lacks(of_helper: Turn, of_main: Turn) -> bool:
        later = {helper: of_helper, main: of_main, other: Turn(0.0, 0.0, 0, False)}
        nothing = {thread: Turn(0.0, 0.0, 0, turn.is_ready) for thread, turn in later.items()}
        return lacks_processor(nothing, later, helper, 1.0) != ""

    asks, sleeps = Turn(0.01, 0.01, 180, False), Turn(0.0, 0.0, 0, False)
    assert not lacks(asks, Turn(0.98, 0.01, 9, True))  # it computes
    assert not lacks(asks, sleeps)  # it waits for something else
    assert not lacks(asks, Turn(0.3, 0.7, 90, True))  # it computes, on a busy machine
    assert not lacks(Turn(0.01, 0.8, 60, False), sleeps)  # on a busy machine it waits for something else
    assert lacks(asks, Turn(0.02, 0.9, 5, True))
    assert lacks(Turn(0.0, 0.9, 2, True), Turn(0.3, 0.7, 90, True))
    assert lacks(Turn(0.0, 0.0, 0, True), Turn(0.0, 0.0, 0, True))  # waits that have not ended
    assert lacks_processor({}, {}, helper, 1.0) == ""  # the kernel does not tell


def test_a_rank_that_cuts_its_file_off_does_not_end_who_looks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = start("loop")
    os.kill(seen.pid, signal.SIGSTOP)
    until(lambda: ProcessState.of(seen.pid).is_stopped)
    to_size = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda file, _: to_size(file, 100))
    (stand,) = witness.look([seen])
    assert (stand.rank, stand.state) == (3, "is stopped by a signal (state T)")


def test_a_strangers_process_is_no_rank_even_for_root(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = start("loop").pid
    assert [each.pid for each in witness.ranks_here(lambda each: each == pid)] == [pid]
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert witness.ranks_here(lambda each: each == pid) == []


def test_only_source_that_is_a_file_of_bounded_size_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "good.py").write_text("first\nsecond\n")
    text = "Current thread 0x01 (most recent call first):\n"
    for file, line in (
        ("pipe.py", "1"),
        ("/dev/zero", "1"),
        ("good.py", "2"),
        ("good.py", "3"),
        ("good.py", "9" * 5000),
    ):
        text += f'  File "{tmp_path / file}", line {line} in f\n'
    (thread,) = parse(text, 1)
    assert [frame.source for frame in thread.frames] == ["", "", "second", ""]


def test_names_beyond_the_table_are_empty(start: Start) -> None:
    names = [event.name for event in start("names").ring().events]
    assert len(names) == EVENTS
    assert set(names[-100:]) == {""}


def test_what_proc_says_is_put_into_words() -> None:
    def words(letter: str, later: str = "", faults: int = 0, keeps_lock: bool = False) -> str:
        first = ProcessState(2**22 + 1, 10.0, letter)
        return first.words(ProcessState(2**22 + 1, 10.5, later or letter, faults=faults), keeps_lock=keeps_lock)

    assert words("S") == words("R") == words("S", faults=7) == words("D", "S") == ""
    assert words("D") == "sleeps in the kernel (state D)"
    assert words("t") == "is stopped by a debugger (state t)"
    assert (
        words("R", faults=40) == "waits for its memory to be read from the disk (40 page faults meanwhile: swapping?)"
    )
    assert words("R", keeps_lock=True) == "computes in native code that keeps Python's lock (state R)"
    assert words("Z") == words("") == "has ended"


def test_frames_are_the_users_wherever_the_packages_are() -> None:
    ours = (
        "/home/me/fleet_train/fleet_train/convert/process.py",
        "/v/lib/python3.12/site-packages/fleet_train/fleet.py",
    )
    libraries = (
        "/v/lib/python3.12/threading.py",
        "/v/lib/python3.12/site-packages/paddle/base/executor.py",
        "<string>",
    )
    users = ("/home/me/fleet_train/train.py", "/home/me/fleet_train/data/train.py", "train.py", "<ipython-input-3>")
    frames = {file: Frame(file, 1, "f") for file in (*ours, *libraries, *users)}
    assert [file for file, frame in frames.items() if frame.is_ours] == list(ours)
    assert [file for file, frame in frames.items() if frame.is_users] == list(users)


def test_what_is_no_ring_is_none() -> None:
    assert read_ring(b"") is None
    assert read_ring(bytes(RING_BYTES)) is None


class Store(dict[str, object]):
    """The store of a job, as a dictionary."""

    def set(self, key: str, value: object) -> None:
        self[key] = value

    def keys(self, prefix: str = "") -> list[str]:  # type: ignore[override]
        return [key for key in list(self) if key.startswith(prefix)]


def test_a_question_is_answered_once_over_the_store_and_written(start: Start, tmp_path: Path) -> None:
    seen, store = start("loop"), Store()
    node = Witness(store, 1, 1, lambda: [seen], write=lambda *both: witness.write_files(tmp_path, *both))
    node.answer()
    assert store == {"stacks/witness/1": 1}
    store.set("stacks/wanted/q", [5, witness.STACKS, [3]])
    for _ in range(2):
        node.answer()
    number, answer = store["stacks/q/3"]  # type: ignore[misc]
    stand = Stand.from_json(answer)
    assert number == 5
    assert the_line("loop") in stand.sentence()
    assert (tmp_path / "stacks.3.txt").read_text().startswith(stand.sentence())
    assert read_ring((tmp_path / "flight.3.bin").read_bytes()) is not None
    for nonsense in (7, None, [], ["x"], [1, 2, 3], [1, witness.STACKS, ["a"]]):
        store.set("stacks/wanted/nonsense", nonsense)
        node.answer()
    store.set("stacks/wanted/another", [1, witness.STACKS, [2]])
    node.answer()
    assert store.keys("stacks/another/") == []
    node.close()


def empty_ring() -> Ring:
    return Ring(1, 0, 2, 0, 0, 5, 0.0, 0.0, 0.0, "", (0, 0), ())


def test_nobody_is_asked_where_no_witness_is() -> None:
    assert witness.ask_about(Store(), "why", [3], [1]) == []
    assert witness.ask_about(Store({"stacks/witness/0": 2}), "why", [3], [1]) == []
    assert witness.ask(Store(), witness.ROWS) == []


@pytest.mark.parametrize("what", [witness.ROWS, witness.STACKS])
def test_answers_that_are_none_are_left_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "STACKS_ASK_SECONDS", 0.3)
    row = row_of(empty_ring(), ProcessState(1, 1.0, "S"))
    stand = Stand(0, 1, 5, "wire \x1b[2J\nrank 9 hangs", True, "", ())
    good = (replace(row, state="\x1b[2J\n0 of 9 ranks") if what == witness.ROWS else stand).to_json()
    bad = [{}, None, 7, "x", [], {**good, "rank": float("nan")}, {**good, "pid": 10**400}, {**good, "step": "\x1b[2J"}]
    bad += [{**good, "threads" if what == witness.STACKS else "step_ms": {"a": float("inf")}}]

    class Asked(Store):
        """Answers at once, and says that there are more ranks than there are."""

        def set(self, _: str, value: object) -> None:
            number = value[0]  # type: ignore[index]
            answers = [*(([number, each]) for each in [good, *bad]), "x", None, [number], [float("nan"), good]]
            self.update({f"stacks/visitor {what}/{rank}": each for rank, each in enumerate(answers)})
            self[f"stacks/visitor {what}/no number"] = [number, good]

    told = {f"stacks/witness/{node}": many for node, many in enumerate((99, "x", None, float("inf"), [1]))}
    (found,) = witness.ask(Asked(told), what)
    assert found.rank == 0
    text = "\n".join(lines([found])) if what == witness.ROWS else "\n".join(found.lines(whole=True))
    assert text.replace("\n", "").isprintable()
    assert text.count("\n") == (4 if what == witness.ROWS else 0)


def test_visitors_get_rows_and_use_the_same_places_again(start: Start) -> None:
    seen, store = start("loop"), Store()
    node = Witness(store, 0, 1, lambda: [seen])
    node.answer()
    sizes = set()
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(witness.ask, store, witness.ROWS)
            while not asked.done():
                node.answer()
        sizes.add(len(store))
        (row,) = asked.result()
        assert (row.rank, row.pid, row.state, row.is_slowest) == (3, seen.pid, "starting", False)
        assert row.memory_bytes > 1_000_000
    assert len(sizes) == 1
    node.close()
