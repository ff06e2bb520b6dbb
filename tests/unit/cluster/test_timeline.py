"""Traces and timelines: what a rank keeps of its steps, one clock for all, and why a made-up step was not shorter."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fleet_train.cli.timeline import command, read_rings
from fleet_train.cluster.flight import trace
from fleet_train.cluster.flight.ring import RING_BYTES, Event, Recorder, Ring, read_ring
from fleet_train.cluster.flight.timeline import RankTimeline, Span, TimelineStep, chrome_trace, common_steps, timelines
from fleet_train.cluster.flight.trace import Trace, read_steps
from fleet_train.doctor.slow_steps import reasons
from fleet_train.errors import ClusterError, FleetTrainError
from fleet_train.train.step_picture import step_picture

PROGRAM, COMMUNICATOR = 10, 11


def ring(rank: int, events: list[Event], *, host: str = "10.0.0.1", offset: float = 0.0, error: float = 1e-5) -> Ring:
    return Ring(rank, rank, 2, 0, 0, 1, 0.0, offset, error, f"{host}:{6170 + rank}", (0, 0), tuple(events))


def one_step(
    step: int, at: float, *, script: int = 0, backward: int = 20, arrived: int = 0, clock: float = 0.0
) -> list[Event]:
    """A step that begins ``at`` a second of the job. In milliseconds: the script, 10 forward, the backward pass with a
    copy of 1 at its end, a bucket that is on the wire for 8 from ``arrived`` on, 2 for its code, and an update of 5.
    """

    def event(kind: str, name: str, began: float, ended: float, thread: int = PROGRAM, number: int = step) -> Event:
        since, until = (clock + at + each / 1e3 for each in (began, ended))
        return Event(kind, name, "ranks 0-1" if kind == "wire" else "", number, 0, since, since, until, thread)

    sent = script + 10 + backward
    on_the_wire = max(sent, arrived) + 8
    return [
        event("run", "", script, on_the_wire + 7, number=step - 1),
        event("backward", "", script + 10, script + 10),
        event("copy", "bucket 0", sent - 1, sent),
        event("wire", "bucket 0", sent, on_the_wire, COMMUNICATOR),
        event("wait", "bucket 0", sent, on_the_wire + 2),
        event("code", "bucket 0", on_the_wire, on_the_wire + 2, COMMUNICATOR),
    ]


def two_ranks(clocks: tuple[float, float] = (0.0, 0.0), **of_rank_1: int) -> list[Ring]:
    """Steps 1 and 2 of two ranks; what is given applies to step 2 of rank 1, for which rank 0 waits."""
    late = of_rank_1.get("script", 0) + 10 + of_rank_1.get("backward", 20)
    first = [one_step(1, 0.0, clock=clock) for clock in clocks]
    second = one_step(2, 0.045, clock=clocks[0], arrived=late), one_step(2, 0.045, clock=clocks[1], **of_rank_1)
    hosts = ("10.0.0.1", "10.0.0.2")
    return [ring(rank, first[rank] + second[rank], host=hosts[rank], offset=clocks[rank]) for rank in (0, 1)]


def spent(rings: list[Ring], step: int) -> tuple[float, dict[tuple[str, str, int], float]]:
    step_ms, found = reasons(timelines(rings), [step])
    assert sum(reason.ms for reason in found) == pytest.approx(step_ms)
    assert sum(reason.share for reason in found) == pytest.approx(1.0)
    return step_ms, {(r.cause.kind, r.cause.name, r.cause.rank): pytest.approx(r.ms) for r in found if r.ms > 1e-6}


def test_equal_ranks_spend_a_step_on_computing_and_on_what_is_exposed() -> None:
    everywhere = {("forward", "", -1): 10, ("backward", "", -1): 19, ("copy", "bucket 0", -1): 1, ("update", "", -1): 5}
    assert spent(two_ranks(), 2) == (
        pytest.approx(45),
        everywhere | {("wire", "bucket 0", -1): 8, ("code", "bucket 0", -1): 2},
    )


@pytest.mark.parametrize(("what", "kind"), [("script", "script"), ("backward", "backward")])
def test_a_slow_rank_is_the_first_reason_with_what_it_did_longer(what: str, kind: str) -> None:
    longer = 50 + (20 if what == "backward" else 0)
    step_ms, found = spent(two_ranks(**{what: longer}), 2)
    assert step_ms == pytest.approx(95)
    assert found[kind, "", 1] == 50
    _, sentences = reasons(timelines(two_ranks(**{what: longer})), [2])
    assert sentences[0].text.startswith("50.0 ms (53 %): rank 1 was longer in the")


def test_a_wait_is_for_a_late_rank_then_the_wire_then_the_code_and_else_for_the_barrier_or_nothing() -> None:
    def step(waited: float, sent: float, met: float) -> TimelineStep:
        wait = Span("wait", "bucket 0", 10, 10 + waited)
        pieces = (Span("backward", "", 0, 10), wait, Span("update", "", 10 + waited, 40))
        barrier, wire = Span("barrier", "", met, 12), Span("wire", "bucket 0", sent, 19, "ranks 0-1")
        return TimelineStep(1, 0, 40, pieces, (barrier, wire, Span("code", "bucket 0", 19, 21)))

    ranks = [
        RankTimeline(rank, "", 0, 0, (), {1: each}) for rank, each in enumerate([step(14, 13, 2), step(20, 16, 11)])
    ]
    _, found = reasons(ranks, [1])
    assert {(r.cause.kind, r.cause.name, r.cause.rank): round(r.ms / 1e3, 6) for r in found} == {
        ("backward", "", -1): 10,
        ("update", "", -1): 10,
        ("update", "", 0): 6,
        ("late", "the barrier", 1): 1,  # 10 to 11
        ("barrier", "", -1): 1,
        ("nothing", "bucket 0", -1): 1 + 3,  # 12 to 13, 21 to 24
        ("late", "bucket 0", 1): 3,  # 13 to 16
        ("wire", "bucket 0", -1): 3,
        ("code", "bucket 0", -1): 2,
    }


def test_the_clocks_of_machines_are_aligned_and_one_machine_has_one() -> None:
    plain, shifted = timelines(two_ranks()), timelines(two_ranks(clocks=(100.0, 5000.5)))
    for rank, other in zip(plain, shifted, strict=True):
        assert [span.began for span in rank.events] == pytest.approx([span.began for span in other.events])
    rings = [
        ring(0, [], offset=7.0, error=2e-3),
        ring(1, [], offset=7.1, error=1e-3),
        ring(2, [], host="b", offset=9.0),
    ]
    assert [(rank.clock_offset, rank.clock_error) for rank in timelines(rings)] == [
        (7.1, 1e-3),
        (7.1, 1e-3),
        (9.0, 1e-5),
    ]


def test_the_file_for_perfetto_has_its_fields_and_nothing_overlaps_on_a_track() -> None:
    rings = two_ranks(script=30)
    hanging = Event("wire", "bucket 1", "ranks 0-1", 3, 64, 0.2, 0.2, 0.0, COMMUNICATOR)
    rings[1] = ring(1, [*rings[1].events, hanging], host="10.0.0.2")
    made = json.loads(json.dumps(chrome_trace(timelines(rings))))
    assert made["otherData"]["clocks"][1] == {"rank": 1, "offset_seconds": 0.0, "error_seconds": 1e-5}
    threads, spans = set(), defaultdict(list)
    for event in made["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "thread_name":
            threads.add((event["pid"], event["args"]["name"]))
    assert threads == {(rank, name) for rank in (0, 1) for name in ("program", "copies and waits", "communicator 0")}
    for track in spans.values():
        for earlier, later in zip(sorted(track), sorted(track)[1:], strict=False):
            assert earlier[1] <= later[0] + 1e-3
    names = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 (10.0.0.1:6170)", "rank 1 (10.0.0.2:6171)"]
    assert [event["name"] for event in made["traceEvents"] if event["args"].get("unfinished")] == ["wire bucket 1"]


def test_a_picture_shows_at_most_sixteen_ranks() -> None:
    few, many = (timelines(ring(rank, one_step(1, 0.0)) for rank in range(number)) for number in (16, 40))
    assert common_steps(many) == [1]
    assert step_picture(few, 1).shape == step_picture(many, 1).shape


@pytest.fixture(scope="module")
def joined() -> Recorder:
    """Its thread stays."""
    made = Recorder()
    made.join(1, 2, 5, "10.0.0.2:6171")
    return made


@pytest.fixture
def recorder(joined: Recorder, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    joined.step = 0
    monkeypatch.setattr(trace, "recorder", joined)
    return joined


def run_steps(recorder: Recorder, traced: Trace, steps: range) -> None:
    for step in steps:
        run = recorder.begin("run")
        recorder.step = step
        with recorder.event("wait", "bucket 0"):
            pass
        recorder.end(run)
        traced.after_run()


def test_a_trace_has_its_steps_whole_and_the_clock_at_its_end(recorder: Recorder, tmp_path: Path) -> None:
    traced = Trace(5, 7, tmp_path / "log", 1, lambda: (3.0, 1e-4))
    run_steps(recorder, traced, range(1, 7))
    late = recorder.begin("wire", "averaging")
    assert not traced.data
    recorder.end(late)
    run_steps(recorder, traced, range(7, 10))
    kept = read_ring((tmp_path / "log" / "trace.1.bin").read_bytes())
    assert kept is not None
    assert (kept.rank, kept.endpoint, kept.clock_offset, kept.clock_error) == (1, "10.0.0.2:6171", 3.0, 1e-4)
    assert [event.ended > 0 for event in kept.events if event.kind == "wire"] == [True]
    assert len(traced.data) < RING_BYTES
    [timeline] = timelines([kept])
    assert list(timeline.steps) == [5, 6, 7]


def test_a_trace_of_steps_that_are_over_writes_nothing_and_one_that_is_cut_short_what_it_has(
    recorder: Recorder, tmp_path: Path
) -> None:
    run_steps(recorder, Trace(5, 7, tmp_path, 1, lambda: (0.0, 0.0)), range(100, 102))
    assert not list(tmp_path.iterdir())
    short = Trace(105, 107, tmp_path, 1, lambda: (0.0, 0.0))
    run_steps(recorder, short, range(102, 107))
    short.end()
    [timeline] = timelines(filter(None, [read_ring(short.data)]))
    assert list(timeline.steps) == [105, 106]


@pytest.mark.parametrize("text", ["", "0", "5-4", "a", "5-", "1-201", "-3"])
def test_steps_that_cannot_be_traced_are_refused(text: str) -> None:
    with pytest.raises(ClusterError, match="such as 100-104"):
        read_steps(text)


def damaged(whole: bytes, seed: int) -> bytes:
    """A recording with bytes, names, numbers and clocks that no recorder writes."""
    random = np.random.default_rng(seed)
    content = np.frombuffer(whole, np.uint8).copy()
    head, events = content[: 1 << 15], content[1 << 15 :].reshape(-1, 48)
    strange = [float("nan"), float("inf"), -1.0, 1e300, 5e-324, 3.0, 1e9]
    for _ in range(random.integers(1, 60)):
        at = 8 * random.integers(0, 4)
        events[random.integers(0, len(events)), at : at + 8] = list(struct.pack("<d", random.choice(strange)))
    if seed % 3 == 0:
        at = random.choice([144, 257, 260])  # its address, and the names of its events
        head[at : at + 8] = list(b"\x1b[2J\n\t\r\x9b")
    if seed % 4 == 0:
        at = 8 + 4 * random.integers(0, 34)
        head[at : at + 4] = random.integers(0, 256, 4)
    if seed % 5 == 0:
        at = 64 + 8 * random.integers(0, 3)
        head[at : at + 8] = list(struct.pack("<d", random.choice(strange)))
    return content.tobytes()[: random.choice([len(content), 40000, 33000, 100])]


def test_a_recording_that_somebody_else_wrote_is_shown_or_left_out(tmp_path: Path, recorder: Recorder) -> None:
    traced = Trace(1, 7, tmp_path, 0, lambda: (3.0, 1e-4))
    run_steps(recorder, traced, range(1, 9))
    seen = set()
    for seed in range(60):
        (tmp_path / "trace.1.bin").write_bytes(damaged(traced.data, seed))
        shown = CliRunner().invoke(command, [str(tmp_path), *(["--json"] if seed % 2 else [])])
        assert shown.exception is None or isinstance(shown.exception, (FleetTrainError, SystemExit)), seed
        assert shown.output.replace("\n", "").isprintable(), seed
        seen.add(shown.exit_code)
        if shown.exit_code == 0:
            assert "NaN" not in (tmp_path / "timeline.json").read_text(), seed
    assert seen == {0, 1}


def test_only_recordings_that_are_files_of_bounded_size_are_read(tmp_path: Path, recorder: Recorder) -> None:
    (tmp_path / "trace.0.bin").write_bytes(recorder.copy())
    os.mkfifo(tmp_path / "trace.1.bin")
    (tmp_path / "trace.2.bin").symlink_to("/dev/zero")
    (tmp_path / "trace.3.bin").mkdir()
    with (tmp_path / "trace.4.bin").open("wb") as endless:
        endless.truncate(1 << 42)
    assert [each.rank for each in read_rings(tmp_path)] == [1]
    (tmp_path / "timeline.json").mkdir()
    refused = CliRunner().invoke(command, [str(tmp_path)])
    assert "timeline.json cannot be written" in str(refused.exception)


def test_a_job_of_billions_of_ranks_is_none(recorder: Recorder) -> None:
    content = bytearray(recorder.copy())
    struct.pack_into("<ii", content, 12, 0, 2**31 - 1)
    assert read_ring(bytes(content)) is None


def test_the_command_wants_one_job_with_recordings(tmp_path: Path, recorder: Recorder) -> None:
    nothing = CliRunner().invoke(command, [str(tmp_path)])
    assert "trace steps with launch --trace" in str(nothing.exception)
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        (tmp_path / node / "flight.0.bin").write_bytes(recorder.copy())
    two = CliRunner().invoke(command, [str(tmp_path)])
    assert "give the folder of one job" in str(two.exception)
    one = CliRunner().invoke(command, [str(tmp_path / "a"), "--json"])
    assert one.exit_code == 0
    assert json.loads(one.stdout)["clocks"][0][:2] == [1, "10.0.0.2:6171"]
