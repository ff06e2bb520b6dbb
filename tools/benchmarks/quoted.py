"""Figures of records as profiles and pages of docs/ quote them. Pure text.

A page has a block for each table:

    <!-- figures: task=mlp network=1gbit -->
    ...
    <!-- end of figures -->

tools/write_measured.py writes the lines between, from the newest record of that task and network, 2 nodes x 1
rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tools.benchmarks.contestants import ALONE, OURS, REFERENCE, parse
from tools.benchmarks.records import Record

_BLOCK = re.compile(r"(<!-- figures: (?P<settings>[^>]*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_TABLE_WITHOUT_BLOCK = re.compile(r"^ *\|[^\n]*/ (?:best )?DDP\b", re.MULTILINE)
_NETWORKS = {"unlimited": "none"}
_HEADINGS = [
    "strategy", "step / best DDP", "step / PyTorch's own", "times fewer bytes", "accuracy, points from synchronous",
    "best DDP's time to target / its",
]  # fmt: skip
_NO_RECORD = "No record has these figures under the present rules."
_RECORD = (
    "[{name}]({page}): {rounds} of {asked} rounds, {seeds} seeds, target {target:.0%}, commit {commit}, {processor}, "
    "{date}. Accuracy: mean (smallest to largest)."
)


def line(record: Record, name: str) -> str:
    """One contestant's figures as a line of a profile's ``measured`` section."""
    content, figures = record.content, record.content["summary"][name]
    lab = content["lab"]
    rate = "an unlimited link" if lab["rate"] == "none" else lab["rate"]
    parts = [
        f"{record.circumstances['date'][:10]}, {content['task']['name']}, {lab['nodes']} nodes x "
        f"{lab['ranks_per_node']} on {rate}, CPU, {len(figures['round_step_ms'])} rounds",
        f"step {figures['step_ms']:.1f} ms{_than(figures)}",
        f"{figures['interface_bytes'] / 1e6:.3g} MB sent per step and node",
        _accuracy(figures),
        _target(content, figures),
    ]
    return f"{'; '.join(parts)}; {record.source}"


def _than(figures: Mapping[str, Any]) -> str:
    told = [f"{figures['ratio']:.2f} of PyTorch DDP's best"] if figures["ratio"] else []
    if figures["twin"] and figures["over_twin"] and not figures["twin"].startswith(REFERENCE):
        told.append(f"{figures['over_twin']:.2f} of {figures['twin']}'s")
    over_compute = figures.get("over_compute")
    if over_compute and over_compute < 1:  # no strategy can do that: read it as computing alone
        told.append(f"but {over_compute:.2f} of computing alone, which is unexplained")
    whole = [] if figures["whole_periods"] else ["less than its own start and one period"]
    return f" ({', '.join(told + whole)})" if told or whole else ""


def _accuracy(figures: Mapping[str, Any]) -> str:
    values = figures["accuracies"].values()
    points = figures["points_from_synchronous"]
    return f"accuracy {sum(values) / len(values):.2%}" + (f" ({points[0]:+.2f} points)" if points else "")


def _target(content: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    seconds = figures["seconds_to_target"].values()
    if not seconds:
        return f"{content['target']:.0%} not reached"
    ratio = f" (DDP needs {figures['target_ratio']:.2f} times that)" if figures["target_ratio"] else ""
    return f"{content['target']:.0%} after {sum(seconds) / len(seconds):.1f} s{ratio}"


def with_blocks(text: str, records: Sequence[Record]) -> str:
    """A page of docs/ with its blocks rewritten; ``records``: those that may be quoted, newest first."""
    return _BLOCK.sub(lambda found: found[1] + _block(found["settings"], records) + found[3], text)


def tables_outside_blocks(text: str) -> list[str]:
    """Headings of tables that compare with DDP without a record."""
    return [found[0] for found in _TABLE_WITHOUT_BLOCK.finditer(_BLOCK.sub("", text))]


def _block(settings: str, records: Sequence[Record]) -> str:
    words = dict(word.split("=", 1) for word in settings.split())
    rate = _NETWORKS.get(words["network"], words["network"])
    newest = next((each for each in records if each.setting == (words["task"], rate, 2, 1) and _has_rival(each)), None)
    if newest is None:
        return f"\n{_NO_RECORD}\n\n"
    return f"\n{_table(newest)}\n\n{_told(newest)}\n\n"


def _has_rival(record: Record) -> bool:
    return REFERENCE in record.content["summary"]


def _table(record: Record) -> str:
    lines = [f"| {' | '.join(_HEADINGS)} |", "|" + " --- |" * len(_HEADINGS)]
    for name, figures in record.content["summary"].items():
        if parse(name).kind != ALONE:
            lines.append(f"| {' | '.join(_cells(name, figures))} |")
    return "\n".join(lines)


def _cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    contestant = parse(name)
    label = contestant.variant.rpartition("/")[2] if contestant.kind == OURS else name
    points = figures["points_from_synchronous"]
    return [
        f"`{label}`" + (" (tuned file)" if figures["tuned"] else ""),
        _number(figures["ratio"], 2),
        _number(figures["over_twin"], 2),
        _number(figures["times_fewer_bytes"], 1),
        f"{points[0]:+.2f} ({points[1]:+.2f} … {points[2]:+.2f})" if points else "",
        _number(figures["target_ratio"], 2) if figures["seconds_to_target"] else "not reached",
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _told(record: Record) -> str:
    content, at = record.content, record.circumstances
    return _RECORD.format(
        name=record.path.stem,
        page=f"benchmarks/{record.path.stem}.md",
        rounds=content["whole_rounds"],
        asked=content["repeats"],
        seeds=len({each["seed"] for each in content["rounds"]}),
        target=content["target"],
        commit=at["commit"][:10],
        processor=at["processor"],
        date=at["date"][:10],
    )
