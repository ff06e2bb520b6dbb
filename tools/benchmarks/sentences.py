"""README's sentence about what strategies cost, in English and in Chinese, from the records. Pure."""
# ruff: noqa: RUF001

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tools.benchmarks.contestants import COMPRESSED, LOCAL, OURS, PICTURED
from tools.benchmarks.record import Record, told_network
from tools.benchmarks.report import middle, paired, shown

_SENTENCES = {
    "en": "At {network}, a small language model on two machines reaches {target} bits per byte in {ours} of the time "
    "that the best of PyTorch DDP's settings takes; the best rivals that compress or train locally take {rivals}.\n"
    "{beside}In brackets: 95 % confidence over {seeds} seeds ([record](benchmarks/{name}.md), "
    "[all figures](strategies.md#what-was-measured)).",
    "zh": "在 {network} 的网络上，两台机器训练一个小语言模型达到 {target} bits per byte 所需的时间，"
    "与 PyTorch DDP 最快的设置相比：{ours}；最好的压缩方法和局部训练方法：{rivals}。\n"
    "{beside}方括号内是 {seeds} 个随机种子的 95 % 置信区间（[记录](benchmarks/{name}.md)，"
    "[全部数据](zh/strategies.md#测量结果)）。",
}
_BESIDE = {
    "en": "At 1 Gb/s a step of `multi_node` takes {} of DDP's: DDP is {}. ",
    "zh": "在 1 Gb/s 的网络上，`multi_node` 的一步是 DDP 的 {}：DDP {}。",
}
# Of DDP: its step is shorter, longer, or neither by the interval.
_ORDERS = {"en": ("ahead", "behind", "as fast"), "zh": ("更快", "更慢", "一样快")}
_AND = {"en": " and ", "zh": "、"}


def sentence(language: str, network: str, record: Record, beside: Record | None) -> str:
    """Our two first at the middle target and the best rivals of each kind; ``beside``: a record of 1 Gb/s."""
    content, summary = record.content, record.content["summary"]

    def to(name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = middle(summary[name]["targets"])
        return found

    def told(name: str) -> str:
        over = paired(to(name)["time_over"]) if name in summary else None
        return f"{over.told(2) if over else '-'} (`{name.removeprefix(f'{OURS}:')}`)"

    def seconds(name: str) -> float:
        return float((to(name)["seconds"] or {"value": math.inf})["value"])

    ours = sorted((name for name in PICTURED if name.startswith(f"{OURS}:") and name in summary), key=seconds)
    return _SENTENCES[language].format(
        network=told_network(network).removeprefix("at "),
        target=f"{to(ours[0])['target']:g}",
        ours=_AND[language].join(map(told, ours[:2])),
        rivals=_AND[language].join(told(shown(each, content)) for each in (COMPRESSED, LOCAL)),
        beside=_beside(language, beside),
        seeds=len({each["seed"] for each in content["rounds"]}),
        name=record.path.stem,
    )


def _beside(language: str, record: Record | None) -> str:
    ratio = paired(record.content["summary"][f"{OURS}:multi_node"]["ratio"]) if record else None
    if ratio is None:
        return ""
    order = 0 if ratio.low > 1 else 1 if ratio.high < 1 else 2
    return _BESIDE[language].format(ratio.told(2), _ORDERS[language][order])
