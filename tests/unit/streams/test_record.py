"""The tool's verdict and page, from rows of a run."""

from __future__ import annotations

from typing import Any

from tools.benchmarks.streams import failures_of, page


def a_record(**changed: Any) -> dict[str, Any]:
    """Of one profile on two clusters and one control, all as it must be."""
    row = {"profile": "multi_node", "ranks_per_node": 1, "mismatches": [], "interleavings": 50, "deadlocks": 0}
    control = {"name": "old code", "profile": "multi_node", "ranks": 2, "one_resident": False, "interleavings": 9}
    cycle = ["rank 0 waits for rank 1", "rank 1 waits for rank 0"]
    at = {
        "date": "2026-11-21T00:00:00", "processor": "a processor", "processors": 2, "kernel": "6", "commit": "c" * 40,
        "load_average_before": [0.1], "versions": {"python": "3.11"}, "uncommitted_changes": False, "command": "python",
    }  # fmt: skip
    times = {"compute_ms": 9.0, "communication_ms": 2.0, "ideal_ms": 0.5, "ours_ms": 0.625, "old_ms": 2.25}
    record: dict[str, Any] = {
        "circumstances": at,
        "interleavings": 100,
        "steps": 5,
        "seed": 1,
        "rates": {"kernel": 3e-5, "latency": 3e-5, "bytes_per_second": 6e7, "barrier": 1e-4},
        "replays": [row | {"nodes": nodes, "ranks": nodes, "example": []} for nodes in (2, 3)],
        "controls": [control | {"deadlocks": 8, "found": "deadlock", "expected": "deadlock", "example": cycle}],
        "exposed": [{"profile": "multi_node", "ranks": 2} | times],
    } | changed
    return record | {"failures": failures_of(record)}


def test_a_record_passes_without_deadlocks_and_with_the_control_found() -> None:
    record = a_record()
    assert record["failures"] == []
    said = "\n".join(page(record))
    assert "| multi_node | 2 x 1, 3 x 1 | 100 | 0 | 0 | 2.000 | 0.500 | 0.625 | 2.250 |" in said
    assert "| old code | multi_node | 2 | False | 8 | 9 | deadlock | deadlock |" in said
    assert "in 100 replays; every control as expected" in said
    assert "**old code**: rank 0 waits for rank 1; rank 1 waits for rank 0." in said


def test_a_deadlock_a_mismatch_or_an_undetected_control_fails() -> None:
    fine = a_record()
    replays = [
        fine["replays"][0] | {"deadlocks": 3, "example": ["a waits for b", "b waits for a"]},
        fine["replays"][1] | {"mismatches": ["collective 4 differs"]},
    ]
    record = a_record(replays=replays, controls=[fine["controls"][0] | {"deadlocks": 0, "found": "nothing"}])
    assert record["failures"] == [
        "multi_node on 2 x 1: 3 deadlocks; a waits for b; b waits for a",
        "multi_node on 3 x 1: collective 4 differs",
        "control 'old code': found nothing, expected deadlock",
    ]
    assert "- Result: **failed**: multi_node on 2 x 1: 3 deadlocks" in "\n".join(page(record))
