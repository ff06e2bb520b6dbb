"""The arithmetic of the checkpoint benchmark."""

from __future__ import annotations

from tools.bench_checkpoint import page, summarise


def block(kind: str, seconds: float, processor_seconds: float, stood_ms: float = 0.0) -> dict[str, object]:
    times = {"seconds": seconds, "processor_seconds": processor_seconds, "stood_ms": stood_ms, "late_ms": 0.0}
    return {"kind": kind} | times


# The machine is half as fast in the second round: only blocks of one round are compared.
ROUNDS = [
    [block("none", 1.0, 1.0), block("background", 1.01, 1.03, 5.0), block("waiting", 1.1, 1.04, 90.0)],
    [block("waiting", 2.4, 2.1, 110.0), block("none", 2.0, 2.0), block("background", 2.06, 2.02, 9.0)],
]


def test_shares_are_of_the_block_without_a_checkpoint_in_the_same_round() -> None:
    found = summarise(ROUNDS, steps=50)
    assert found["step_ms"] == 30.0
    assert (found["background"]["share_percent"], found["waiting"]["share_percent"]) == (2.0, 15.0)
    assert found["background"]["processor_share_percent"] == 2.0
    assert (found["background"]["stood_ms"], found["waiting"]["stood_ms"]) == (7.0, 100.0)


def test_page_has_a_row_for_each_way_and_number_of_ranks() -> None:
    job = {"ranks": 2, "steps_per_block": 50, "rounds": ROUNDS, "checkpoint_bytes": 23_400_000}
    at = {
        "date": "2026-11-21T11:00:00",
        "processor": "some processor",
        "processors": 2,
        "load_average_before": [0.1],
        "versions": {"paddlepaddle": "3.3.1"},
        "commit": "0123456789abcdef",
        "uncommitted_changes": False,
        "command": "python tools/bench_checkpoint.py",
    }
    record = {"circumstances": at, "task": "a network", "jobs": [job | {"summary": summarise(ROUNDS, steps=50)}]}
    rows = [line for line in page(record).splitlines() if line.startswith("| 2 |")]
    assert rows[0].startswith("| 2 | 30.0 ms | in the background | +2.00 % (")
    assert rows[1].endswith("| +4.50 % | 100.0 ms |")
