"""Figures of records as profiles and READMEs quote them. Pure text.

A README has a block for each table:

    <!-- figures: task=mlp network=1gbit language=en -->
    ...
    <!-- end of figures -->

What is between is written by tools/write_measured.py from the newest record of that task and network, 2 nodes x 1
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
_HEADINGS = {
    "en": [
        "strategy", "step / best DDP", "step / PyTorch's own", "times fewer bytes", "accuracy, points from synchronous",
        "best DDP's time to target / its",
    ],
    "cn": [
        "策略", "每步时间 / 最好的 DDP", "每步时间 / PyTorch 的同类", "数据量减少倍数",
        "准确率与同步训练之差(百分点)", "最好的 DDP 的达标时间 / 它的",
    ],
}  # fmt: skip
_WORDS = {
    "en": {
        "tuned": " (tuned file)",
        "missed": "not reached",
        "none": "No record has these figures under the present rules.",
        "record": "[{name}]({page}): {rounds} of {asked} rounds, {seeds} seeds, target {target:.0%}, commit {commit}, "
        "{processor}, {date}. Accuracy: mean (smallest to largest).",
    },
    "cn": {
        "tuned": "(调整过的文件)",
        "missed": "未达标",
        "none": "还没有符合现行规则的记录。",
        "record": "[{name}]({page}):{asked} 轮中的 {rounds} 轮,{seeds} 个随机种子,目标 {target:.0%},提交 {commit},"
        "{processor},{date}。准确率:平均值(最小到最大)。",
    },
}


def line(record: Record, name: str) -> str:
    """One contestant's figures as a profile's ``measured`` section has them."""
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
    """A README with its blocks written anew; ``records``: those that may be quoted, the newest first."""
    return _BLOCK.sub(lambda found: found[1] + _block(found["settings"], records) + found[3], text)


def tables_outside_blocks(text: str) -> list[str]:
    """Headings of tables that compare with DDP and no record stands behind."""
    return [found[0] for found in _TABLE_WITHOUT_BLOCK.finditer(_BLOCK.sub("", text))]


def _block(settings: str, records: Sequence[Record]) -> str:
    words = dict(word.split("=", 1) for word in settings.split())
    language = words["language"]
    rate = _NETWORKS.get(words["network"], words["network"])
    newest = next((each for each in records if each.setting == (words["task"], rate, 2, 1) and _has_rival(each)), None)
    if newest is None:
        return f"\n{_WORDS[language]['none']}\n\n"
    return f"\n{_table(newest, language)}\n\n{_told(newest, language)}\n\n"


def _has_rival(record: Record) -> bool:
    return REFERENCE in record.content["summary"]


def _table(record: Record, language: str) -> str:
    headings = _HEADINGS[language]
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    for name, figures in record.content["summary"].items():
        if parse(name).kind != ALONE:
            lines.append(f"| {' | '.join(_cells(name, figures, language))} |")
    return "\n".join(lines)


def _cells(name: str, figures: Mapping[str, Any], language: str) -> list[str]:
    contestant = parse(name)
    label = contestant.variant.rpartition("/")[2] if contestant.kind == OURS else name
    points, words = figures["points_from_synchronous"], _WORDS[language]
    return [
        f"`{label}`" + (words["tuned"] if figures["tuned"] else ""),
        _number(figures["ratio"], 2),
        _number(figures["over_twin"], 2),
        _number(figures["times_fewer_bytes"], 1),
        f"{points[0]:+.2f} ({points[1]:+.2f} … {points[2]:+.2f})" if points else "",
        _number(figures["target_ratio"], 2) if figures["seconds_to_target"] else words["missed"],
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _told(record: Record, language: str) -> str:
    content, at = record.content, record.circumstances
    return _WORDS[language]["record"].format(
        name=record.path.stem,
        page=record.source.replace(".json", ".md"),
        rounds=content["whole_rounds"],
        asked=content["repeats"],
        seeds=len({each["seed"] for each in content["rounds"]}),
        target=content["target"],
        commit=at["commit"][:10],
        processor=at["processor"],
        date=at["date"][:10],
    )
