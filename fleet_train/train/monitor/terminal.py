"""A run's numbers as a table with small curves, for a terminal without a browser."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from fleet_train.errors import printable

_MOST = 1e300
_LEVELS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32

Curves = dict[str, list[float]]


def read_curves(path: Path) -> tuple[int, Curves]:
    """The last step and the values of each curve of a `metrics.jsonl`, in order; an incomplete last line is ignored."""
    step, curves = 0, Curves()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or "kind" in record or not isinstance(record.get("step"), int):
            continue
        step = record["step"]
        for tag, value in record.items():
            if "/" in tag and isinstance(value, (int, float)) and abs(value) < _MOST:
                curves.setdefault(printable(tag), []).append(float(value))
    return step, curves


def sparkline(values: list[float], width: int = _CURVE_WIDTH) -> str:
    """`values` as at most `width` blocks, the lowest as the lowest block; each block is a mean of its share."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_LEVELS[min(len(_LEVELS) - 1, int((mean - low) / span * len(_LEVELS)))] for mean in means)


def table(run: Path) -> str:
    """One line per curve: its name, the newest, lowest and highest value, and a sparkline."""
    step, curves = read_curves(run / "metrics.jsonl")
    if not curves:
        return f"{run}: no record yet"
    width = max(map(len, curves))
    lines = [f"{run}, step {step}", f"{'':{width}}  {'newest':>10}  {'lowest':>10}  {'highest':>10}"]
    for tag, values in sorted(curves.items()):
        numbers = "  ".join(f"{value:>10.4g}" for value in (values[-1], min(values), max(values)))
        lines.append(f"{tag:{width}}  {numbers}  {sparkline(values)}")
    return "\n".join(lines)
