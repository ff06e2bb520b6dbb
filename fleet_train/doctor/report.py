"""The examination as text: a line per check, a matrix of the network, a verdict. Text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fleet_train.doctor.facts import Examination, to_json
from fleet_train.doctor.judge.finding import PASS, Finding, exit_code, rate, verdict

_MOST_SHOWN = 2


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Hosts that pass a check share one line, at the place of the check's first finding."""
    passed: dict[str, list[Finding]] = {}
    for one in findings:
        if one.level == PASS:
            passed.setdefault(one.id, []).append(one)
    for one in findings:
        if one.level != PASS:
            yield one.line
        elif (same := passed.pop(one.id, None)) is not None:
            yield _together(same).line


def _together(same: Sequence[Finding]) -> Finding:
    if len(same) == 1:
        return same[0]
    told = list(dict.fromkeys(one.measured for one in same))
    rest = f"; and {len(told) - _MOST_SHOWN} more" if len(told) > _MOST_SHOWN else ""
    unit = "pairs" if len(same[0].hosts) == 2 else "hosts"
    first = same[0]
    return Finding(
        first.group, first.id, PASS, (f"{len(same)} {unit}",), "; ".join(told[:_MOST_SHOWN]) + rest, first.threshold
    )


def matrix(examined: Examination) -> list[str]:
    """Rows send, columns receive; below the bandwidth the round trip time of a small message."""
    speeds = {
        (one.source, one.target): one.error or rate(one.bytes_per_second)
        for report in examined.reports.values()
        for one in report.streams
    }
    if not speeds:
        return []
    times = {}
    for index, report in examined.reports.items():
        for echo in report.echoes:
            times[index, echo.target] = times[echo.target, index] = f"{echo.median * 1e3:.2f} ms"
    nodes = sorted(examined.reports)
    rows = [["from \\ to", *(f"node {node}" for node in nodes)]]
    for source in nodes:
        rows.append([f"node {source}", *(_cell(speeds, source, target) for target in nodes)])
        rows.append(["", *(times.get((source, target), "") if source != target else "" for target in nodes)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(speeds: dict[tuple[int, int], str], source: int, target: int) -> str:
    return "-" if source == target else speeds.get((source, target), "not measured")


def as_json(examined: Examination, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """The complete result. It contains addresses and names of hosts, but no values of variables."""
    return {
        "verdict": verdict(findings, seconds),
        "exit_code": exit_code(findings),
        "seconds": round(seconds, 1),
        "nodes": list(examined.addresses),
        "findings": [one.to_json() for one in findings],
        "facts": to_json(examined),
    }
