"""The page of the control plane's record."""

from __future__ import annotations

from typing import Any

from tools.benchmarks.record import told_circumstances

_BEFORE_MS = {32: "3", 128: "19", 512: "214", 1000: "810 (1024 ranks)"}
_ATTACKS = {
    "idle": "10,000 silent connections",
    "large": "values of 60 MB, one after another",
    "deep": "nested, huge and incomplete headers",
}


def page(record: dict[str, Any]) -> str:
    medians: dict[str, dict[str, Any]] = record["medians"]
    sizes = [each for name, each in medians.items() if " x " in name]
    latency = {name: each for name, each in medians.items() if name.startswith("latency")}
    relays = [each for name, each in medians.items() if name.startswith("relay")]
    turns = len(next(iter(record["rounds"].values())))
    return "\n".join(
        [
            f"# The control plane, {record['date'][:10]}: barriers, joining, relays, strangers",
            "",
            *told_circumstances(record, "loopback"),
            f"- Medians of {turns} rounds, the parts in turn.",
            "- Servers and relays are the real ones; ranks are event-driven stand-ins that speak the real protocol. "
            "Wall-clock times contain the stand-ins' own processor time; the root's processor time is its own.",
            "",
            "| ranks | nodes | barrier | sessions of the root | root: ms of processor per barrier | "
            "before (one server) | "
            "root: bytes sent per barrier | barrier, wall ms | join, wall s | join, root's processor s |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(_size_row, sizes),
            "",
            "Before: the store as it was, measured earlier on 2 cores, not in this run; it sent every member's note to "
            "every member.",
            "",
            "| two ranks, one barrier | median ms | 95th percentile | longest |",
            "| --- | --- | --- | --- |",
            *(_latency_row(name, each) for name, each in latency.items()),
            "",
            "| signal to one of three relays | all others had an error after | timeout | the error |",
            "| --- | --- | --- | --- |",
            *(
                f"| {each['signal']} | {each['seconds_until_all_were_told']:.2f} s | {each['timeout_seconds']:g} s | "
                f"`{each['words'].split('}', 1)[-1].strip()}` |"
                for each in relays
            ),
            "",
        ]
    )


def _size_row(each: dict[str, Any]) -> str:
    before = _BEFORE_MS.get(each["ranks"], "-")
    return (
        f"| {each['ranks']} | {each['nodes']} | {'over relays' if each['relays'] else 'at the root'} | "
        f"{each['children_of_root']} | {each['root_cpu_ms_per_gate']:.2f} | {before} | "
        f"{each['root_bytes_per_gate']:.0f} | {each['gate_ms_wall']:.1f} | {each['join_seconds_wall']:.2f} | "
        f"{each['join_root_cpu_seconds']:.2f} |"
    )


def _latency_row(name: str, each: dict[str, float]) -> str:
    attack = name.partition("attack: ")[2]
    words = f"while there are {_ATTACKS[attack]}" if attack else "before" if name.endswith("before") else "now"
    return f"| {words} | {each['median_ms']:.3f} | {each['p95_ms']:.3f} | {each['longest_ms']:.2f} |"
