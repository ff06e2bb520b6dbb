"""Rows of ``top`` from made-up rings: their times, states and marks, whatever a rank was writing meanwhile."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fleet_train.cli import cli
from fleet_train.cli.options import with_store_port
from fleet_train.cli.top import lines
from fleet_train.cluster.flight.process import ProcessState
from fleet_train.cluster.flight.ring import EVENTS, Event, Ring
from fleet_train.cluster.flight.rows import Row, rows_of
from fleet_train.cluster.flight.stands import Frame, Stand, Thread
from fleet_train.doctor import visit
from fleet_train.errors import FleetTrainError

NOW, JOB = 1000.0, 0xAB


def event(kind: str, step: int, began: float, seconds: float | None = 0.001, name: str = "") -> Event:
    """``seconds``: None: it has not ended."""
    ended = 0.0 if seconds is None else began + seconds
    return Event(kind, name, "", step, 0, began, began, ended, 7)


def ring(events: Iterable[Event] = (), rank: int = 0, **changed: Any) -> Ring:
    of = Ring(
        100 + rank, rank, 2, 0, 0, JOB, NOW - 0.1, 0.0, 0.0, "", (0, 0), tuple(sorted(events, key=lambda e: e.enqueued))
    )
    return replace(of, **changed)


def facts(of: Ring, letter: str = "S", **changed: Any) -> ProcessState:
    return replace(ProcessState(of.pid, NOW, letter, 1, 350_000_000), **changed)


def trained(steps: int, wait: float = 0.03, runs: int = 1, step_seconds: float = 0.1) -> list[Event]:
    """After the run of the startup program: the first update takes long; before each there are ``runs`` runs and
    loads of 5 ms. A run that makes an update begins before that one is counted."""
    events, at = [event("run", 0, NOW - 500)], NOW - step_seconds * steps - 100
    for step in range(steps):
        for _ in range(runs):
            events += [event("loader", step, at, 0.005), event("run", step, at + 0.01, 0.05)]
            at += step_seconds / runs
        events.append(event("wait", step + 1, at - 0.05, wait))
        at += 100 if step == 0 else 0
    return events


def row_of(events: Iterable[Event], **changed: Any) -> Row:
    of = ring(events, **changed)
    return rows_of([(of, facts(of))])[0]


@pytest.mark.parametrize("runs", [1, 4])
def test_times_are_of_updates_and_the_first_one_does_not_count(runs: int) -> None:
    assert [row_of(trained(steps, runs=runs)).step_ms for steps in (0, 1, 2)] == [None] * 3
    row = row_of(trained(30, runs=runs))
    assert (row.step, row.job, row.rank, row.ranks, row.memory_bytes) == (30, f"{JOB:016x}", 0, 2, 350_000_000)
    assert (row.step_ms, row.exposed_ms) == pytest.approx((100, 30))
    assert row.loader_ms == pytest.approx(5 * runs)


def test_a_late_batch_is_in_the_mean_and_one_slow_step_is_not_the_median() -> None:
    events = trained(30)
    late = [index for index, each in enumerate(events) if each.kind == "loader"][-5]
    row = row_of([*events[:late], replace(events[late], ended=events[late].ended + 0.06), *events[late + 1 :]])
    assert (row.step_ms, row.loader_ms) == pytest.approx((100, 5 + 6))


def test_a_full_ring_and_events_that_are_being_written_change_nothing() -> None:
    events = trained(2000, runs=4)[-EVENTS:]
    first, *_, last = (each for each in events if each.kind == "run")
    waits = [each for each in events if each.kind == "wait"]
    torn = [
        (first, replace(first, step=last.step + 1)),
        (first, replace(first, enqueued=last.enqueued + 1, began=last.began + 1)),
        (waits[-3], replace(waits[-3], ended=waits[-3].began - 100)),
    ]
    assert row_of(events).step_ms == pytest.approx(100)
    for before, written in torn:
        row = row_of(written if each is before else each for each in events)
        assert (row.step_ms, row.exposed_ms, row.loader_ms) == pytest.approx((100, 30, 20), rel=0.02)


@pytest.mark.parametrize(
    ("letter", "changed", "events", "state"),
    [
        ("S", {}, [event("run", 3, NOW - 0.5, None)], "running"),
        ("S", {}, [event("run", 3, NOW - 13, None), event("wire", 3, NOW - 12, None, "bucket 2")],
         "wire bucket 2 for 12 s"),
        ("S", {}, [event("run", 3, NOW - 9, 4)], "in the script for 5 s"),
        ("S", {}, [], "starting"),
        ("T", {}, [event("run", 3, NOW - 9, None)], "stopped"),
        ("D", {}, [event("run", 3, NOW - 9, None)], "waits for the disk"),
        ("R", {"heartbeat": NOW - 7}, [event("run", 3, NOW - 9, None)], "keeps Python's lock for 7 s"),
        ("S", {"heartbeat": NOW - 7}, [event("run", 3, NOW - 9, None)], "does not react for 7 s"),
        ("Z", {}, [event("run", 3, NOW - 9, None)], "ended"),
        ("", {}, [], "ended"),
    ],
)  # fmt: skip
def test_states(letter: str, changed: dict[str, Any], events: list[Event], state: str) -> None:
    of = ring(events, **changed)
    assert rows_of([(of, facts(of, letter))])[0].state == state


def test_the_slowest_rank_waits_least_and_equal_ranks_are_not_marked() -> None:
    def slowest(*waits: float) -> list[int]:
        rings = [ring(trained(20, wait), rank) for rank, wait in enumerate(waits)]
        return [row.rank for row in rows_of((each, facts(each)) for each in rings) if row.is_slowest]

    assert slowest(0.05, 0.001, 0.05) == [1]
    assert slowest(0.030, 0.031) == []
    assert slowest(0.03) == []


def test_who_lacks_a_processor_is_not_said_to_keep_the_lock() -> None:
    silent = ring(trained(20), heartbeat=NOW - 5)
    lacking = replace(facts(silent, "R"), lacks_processor="lacks a processor (...)")
    assert rows_of([(silent, facts(silent, "R"))])[0].state == "keeps Python's lock for 5 s"
    assert rows_of([(silent, lacking)])[0].state == "lacks a processor for 5 s"


def test_who_others_wait_for_is_who_does_not_wait_or_is_behind() -> None:
    def waited_for(*doing: Event) -> list[int]:
        rings = [ring([each], rank) for rank, each in enumerate(doing)]
        return [row.rank for row in rows_of((each, facts(each)) for each in rings) if row.is_waited_for]

    waits, saves = event("wait", 5, NOW - 4, None), event("save", 5, NOW - 9, None)
    assert waited_for(waits, saves, waits) == [1]
    assert waited_for(waits, event("barrier", 4, NOW - 4, None)) == [1]
    assert waited_for(waits, waits) == []
    assert waited_for(event("wait", 5, NOW - 0.01, None), saves) == []


def test_jobs_have_headings_and_helpers_of_ranks_are_left_out() -> None:
    ranks = [ring(trained(20), rank, job=job, pid=10 * job + rank) for job in (2, 1) for rank in (1, 0)]
    launcher, worker, starting = (ring((), pid=pid, job=0, world_size=0) for pid in (1, 5, 6))
    seen = [(each, facts(each)) for each in (*ranks, launcher)]
    seen += [(worker, facts(worker, parent=ranks[0].pid)), (starting, facts(starting, parent=99))]
    rows = [Row.from_json(json.loads(json.dumps(row.to_json()))) for row in rows_of(seen)]
    assert [(row.job[-1:], row.rank, row.pid) for row in rows] == [
        ("", 0, 6), ("1", 0, 10), ("1", 1, 11), ("2", 0, 20), ("2", 1, 21)
    ]  # fmt: skip
    shown = list(lines(rows))
    assert [line for line in shown if line.startswith(("job", "have"))] == [
        "have not joined a job yet:",
        *(f"job {job:016x}: 2 of 2 ranks" for job in (1, 2)),
    ]
    assert shown[6].split() == "0 20 100.0 ms 30.0 ms 5.0 ms 350 MB running".split()


def test_a_process_that_ends_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file can be read on, and what ``/proc`` has of it is gone."""
    own = ProcessState.of(os.getpid())
    assert (own.letter in ("R", "S"), own.parent, own.has_ended) == (True, os.getppid(), False)
    assert own.memory_bytes > 10_000_000
    assert ProcessState.of(2**22 + 1).has_ended
    monkeypatch.setattr(visit, "ranks_here", lambda _: [])
    assert visit.Here().rows() == []
    ended = CliRunner().invoke(cli, ["top", "--json"])
    assert isinstance(ended.exception, FleetTrainError)
    assert ended.exception.exit_code == 1


def test_a_machine_of_the_node_list_has_its_store_behind_its_own_ranks() -> None:
    nodes = ["10.0.0.1", "10.0.0.2:2", "gpu-a:1000", "10.0.0.3:6180"]
    stores = ["10.0.0.1", "10.0.0.2:6172", "gpu-a:7170", "10.0.0.3:6180"]
    assert [with_store_port(node, 6170) for node in nodes] == stores


@pytest.mark.parametrize(
    ("ips", "words"),
    [
        ("localhost:1009", "no job answers at localhost:1009 "),
        ("a..b", "is no host name"),
        ("127.0.0.1:x", "not of the form host:port"),
        ("\x1b[31m", r"\\x1b\[31m' is neither"),
        (" , ", "names no machine"),
    ],
)
def test_a_machine_that_cannot_be_asked_is_named(ips: str, words: str) -> None:
    asked = CliRunner().invoke(cli, ["top", "--ips", ips])
    assert isinstance(asked.exception, FleetTrainError)
    assert re.search(words, str(asked.exception))
    assert str(asked.exception).isprintable()


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"store": 7, "job": []}', b'{"store": "a..b:80", "job": ""}', b'{"store": "\\u001b[2J", "job": 1}'],
)
def test_a_log_folder_of_somebody_else_names_no_job(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.json").write_bytes(content)
    for command in ("top", "stacks"):
        asked = CliRunner().invoke(cli, [command, "--log_dir", str(tmp_path)])
        assert isinstance(asked.exception, FleetTrainError)
        assert "job.json cannot be read" in str(asked.exception)
        assert str(asked.exception).isprintable()


def test_a_rank_without_a_stack_is_counted_by_what_kept_it() -> None:
    standing = Stand(0, 7, 1, "", False, "", (Thread("main", True, (Frame("/a/train.py", 4, "f", "x = 1"),)),))
    stopped, silent = (replace(standing, threads=(), state=state) for state in ("is stopped by a signal (state T)", ""))
    (_, *lines) = visit.sampled([[standing], [standing], [stopped], [silent]])
    assert lines == ["   50 % train.py:4 `x = 1`", "   25 % is stopped by a signal (state T)", "   25 % gave no stack"]
