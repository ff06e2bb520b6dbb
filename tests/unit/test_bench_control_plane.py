"""The benchmark of the control plane: its stand-ins join and meet at real servers and relays, and look at every answer;
its page is what the raw figures give."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fleet_train.cluster.store.wire import Decoder, encode, parse, to_json
from tools.benchmarks import control_plane
from tools.benchmarks.control_plane import measure_gates, measure_latency, measure_lost_relay, page
from tools.benchmarks.record import FOLDER, circumstances
from tools.benchmarks.stand_ins import STRANGERS, Crowd, apart, serve


def answer_bytes(ranks: int) -> int:
    """Of a gate, whose number has one digit: the last rank is the slowest."""
    to = ["rank", "barrier", "step 1"]
    return len(encode({"slowest": round(23 + (ranks - 1) / 1e4, 4), "stop": None, "number": 5, "to": to}))


def test_stand_ins_of_32_ranks_join_and_pass_gates_at_a_real_server() -> None:
    found = measure_gates(4, 8, False, 4)
    assert (found["ranks"], found["nodes"], found["speak_to_root"]) == (32, 4, 32)
    assert found["root_bytes"] == 32 * answer_bytes(32)
    assert found["root_ms"] > 0
    assert 0 < found["join_root_seconds"] < found["join_seconds"]


def test_over_relays_the_root_answers_its_own_ranks_and_the_relays() -> None:
    found = measure_gates(34, 1, True, 2)  # the relay of node 33 speaks to that of node 1
    assert (found["ranks"], found["speak_to_root"]) == (34, 33)
    assert found["root_bytes"] == 33 * answer_bytes(34)


@pytest.mark.parametrize("kind", STRANGERS)
def test_two_clients_meet_while_a_stranger_does_what_it_is_for(kind: str) -> None:
    found = measure_latency(300, kind)
    assert found["done_meanwhile"] > 0
    assert 0 < found["median_ms"] <= found["p95_ms"] <= found["longest_ms"]


def test_all_that_wait_are_told_of_a_killed_relay() -> None:
    found = measure_lost_relay(signal.SIGKILL)
    assert found["told"] == 16
    assert found["seconds"] < found["bound_seconds"]
    assert found["words"] == 'gone: [[[[16,23]],"the relay of node 2 was lost"]]'


def test_a_process_that_fails_ends_the_benchmark() -> None:
    nowhere = apart(serve, [range(1), range(1, 2)], range(1, 2), {}, 5.0)
    with pytest.raises(click.ClickException, match="has ended"), nowhere as pipe:
        pipe.recv()


def passed(answer_of: Callable[[dict[str, Any]], dict[str, Any]]) -> float:
    """Two gates of three stand-ins, whose store answers each with this, made of what it has sent."""

    async def run() -> float:
        crowd = Crowd([0, 0, 0])

        def send(frame: bytes) -> None:
            ((head, _),) = Decoder().feed(frame)
            crowd.answered(to_json(answer_of(parse(head))), b"")

        for each in crowd.ranks:
            each.send = send  # type: ignore[method-assign]
        return await crowd.pass_gates("step", 2)

    return asyncio.run(run())


def test_stand_ins_refuse_an_answer_that_a_store_does_not_owe() -> None:
    assert passed(lambda _: {"slowest": 23.0002}) < 1
    with pytest.raises(ValueError, match=r"a barrier's answer is \{'slowest': 23.0001\}"):
        passed(lambda _: {"slowest": 23.0001})
    with pytest.raises(ValueError, match=r"a barrier's answer is \{'error': 'timeout'\}"):
        passed(lambda _: {"error": "timeout"})
    with pytest.raises(ValueError, match="too many values to unpack"):
        passed(lambda asked: {"slowest": asked["slowest"]})


def size(root_ms: float, gate_ms: float) -> dict[str, Any]:
    job = {"gates": 60, "ranks": 512, "nodes": 64, "meet": "over relays", "speak_to_root": 40}
    times = {"root_ms": root_ms, "gate_ms": gate_ms, "join_seconds": 0.254, "join_root_seconds": 0.03}
    return {**job, "root_bytes": 3310.4, **times}


def latency(stranger: str, longest: float, done: int) -> dict[str, Any]:
    times = {"median_ms": 0.3, "p95_ms": 0.5, "longest_ms": longest}
    return {"gates": 3000, "stranger": stranger, "done_meanwhile": done, **times}


def lost(seconds: float, words: str) -> dict[str, Any]:
    return {"signal": "SIGSTOP", "bound_seconds": 5.0, "seconds": seconds, "told": 16, "words": words}


def test_a_page_gives_medians_and_of_what_is_longest_the_longest() -> None:
    parts = {
        "64 x 8 over relays": [size(2.0, 30.0), size(9.0, 20.0), size(3.0, 40.0)],
        "two ranks": [latency("", each, 0) for each in (4.0, 2.0, 21.0)],
        "two ranks beside x": [latency("x", 5.0, done) for done in (10_000, 9_000, 9_500)],
        "relay SIGSTOP": [lost(4.0, "one"), lost(4.5, "other"), lost(3.0, "one")],
    }
    said = page({"circumstances": circumstances(), "parts": parts})
    for line in (
        "| 512 | 64 | over relays | 40 | 3.00 | 3310 | 30.0 | 0.25 | 0.03 |",
        "| alone | - | 0.300 | 0.500 | 21.00 |",
        "| beside x | 9500 | 0.300 | 0.500 | 5.00 |",
        "| SIGSTOP | 4.50 s | 5 s | `one`; `other` |",
    ):
        assert line in said
    assert any(line.startswith("- Rounds: 3; the parts in turn.") for line in said)
    begun = {name: rounds[: 3 - (name != "64 x 8 over relays")] for name, rounds in parts.items()}
    said = page({"circumstances": circumstances(), "parts": begun})
    assert any(line.startswith("- Rounds: 3, the last one in part;") for line in said)


def test_an_interrupted_run_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(control_plane, "parts_of", lambda _: {"a": lambda: lost(1.0, "x"), "b": interrupted})
    result = CliRunner().invoke(control_plane.main, ["--record", str(tmp_path), "--name", "kept"])
    assert result.exit_code == 1
    record = json.loads((tmp_path / "kept.json").read_text())
    assert record["parts"] == {"a": [lost(1.0, "x")]}
    assert "\n".join([*page(record), ""]) == (tmp_path / "kept.md").read_text()


def test_a_records_page_is_what_its_rounds_give() -> None:
    for path in FOLDER.glob("*-control-plane.json"):
        record = json.loads(path.read_text())
        assert "\n".join([*page(record), ""]) == path.with_suffix(".md").read_text(), path.name
