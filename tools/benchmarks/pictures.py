"""The picture of a record of strategies: the score over time, and where a step's milliseconds go."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tools.benchmarks.contestants import ALONE, AVERAGE_ONCE, NOTHING, PICTURED, REFERENCE, parse
from tools.benchmarks.report import Curve, Mean, ddp_of, score_of, turns_of

COLOURS = ("#888888", "#b07a4f", "#2ca02c", "#d62728", "#1f4e79", "#17a2b8", "#9467bd", "#e377c2")
_OF_STEPS = (("compute_ms", "computing", "#2f5d8c"), ("exposed_ms", "exposed", "#f2a65a"),
             ("hidden_ms", "hidden", "#dddddd"))  # fmt: skip
# Of the picture's height, what a label takes at least.
_BETWEEN_LABELS = 0.045


def picture(record: Mapping[str, Any]) -> str:
    """SVG; nothing as long as only compute-only runs are there."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    bars = [name for name in record["summary"] if name != AVERAGE_ONCE and parse(name).kind != ALONE]
    if not bars:
        return ""
    score = score_of(record)
    wide = [1.25, 1.0] if score else [1.0]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fleet_train", "font.size": 9}):
        figure, axes = pyplot.subplots(
            1, len(wide), figsize=(11 if score else 6, 4.6), width_ratios=wide, squeeze=False, layout="constrained"
        )
        if score:
            _draw_curves(axes[0][0], record, score.name, score.target)
        _draw_bars(axes[0][-1], bars, record["summary"])
        lab = record["lab"]
        figure.suptitle(f"{record['task']['name']}, {lab['nodes']} nodes, {lab['rate']}; CPU and Gloo", fontsize=10)
        into = io.BytesIO()
        figure.savefig(into, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return into.getvalue().decode()


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, Mean]]:
    """Mean seconds and score over seeds, at every evaluation."""
    found = []
    for points in zip(*curves, strict=True):
        score = Mean.of([each[2] for each in points])
        if score is not None:
            found.append((fmean(each[1] for each in points), score))
    return found


def _draw_curves(axis: Any, record: Mapping[str, Any], name: str, target: float) -> None:
    from matplotlib.ticker import NullFormatter

    turns = turns_of(record)
    labels: list[tuple[float, float, str, str]] = []
    best = ddp_of(turns)
    for colour, wanted in zip(COLOURS, PICTURED, strict=True):
        shown = best if wanted == REFERENCE and best else wanted
        if shown not in turns:
            continue
        points = mean_curve([each["evaluations"] for each in turns[shown].values()])
        seconds, means = [point for point, _ in points], [mean.value for _, mean in points]
        low, high = ([mean.value + sign * mean.error for _, mean in points] for sign in (-1, 1))
        axis.plot(seconds, means, color=colour, linewidth=1.4)
        axis.fill_between(seconds, low, high, color=colour, alpha=0.2, linewidth=0)
        labels.append((seconds[-1], means[-1], shown, colour))
    axis.axhline(target, color="#000000", linewidth=0.6, linestyle=":")
    # What only ranks reach that learn by heart what they see is outside the picture.
    ends = [value for _, value, shown, _ in labels if shown not in (NOTHING, AVERAGE_ONCE)]
    begins = [next(iter(turns[shown].values()))["evaluations"][0][2] for _, _, shown, _ in labels]
    shown_scores = [*ends, *begins, target]
    lowest, highest = min(shown_scores), max(shown_scores)
    axis.set_ylim(lowest - 0.03 * (highest - lowest), highest + 0.03 * (highest - lowest))
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("seconds of training")
    axis.set_ylabel(f"{name}, mean and standard error of the seeds")
    _label_ends(axis, labels)


def _label_ends(axis: Any, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the lines' ends, right of the picture, apart from each other."""
    low, high = axis.get_ylim()
    rising = sorted(labels, key=lambda each: each[1])
    places = [min(max((value - low) / (high - low), 0.0), 1.0) for _, value, _, _ in rising]
    for number in range(1, len(places)):
        places[number] = max(places[number], places[number - 1] + _BETWEEN_LABELS)
    for number in reversed(range(len(places))):
        above = places[number + 1] if number + 1 < len(places) else 1.0 + _BETWEEN_LABELS
        places[number] = min(places[number], above - _BETWEEN_LABELS)
    for (seconds, value, name, colour), place in zip(rising, places, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)}
        axis.annotate(
            name, (seconds, min(max(value, low), high)), xytext=(1.02, place), textcoords="axes fraction",
            color=colour, va="center", arrowprops=leader, annotation_clip=False,
        )  # fmt: skip


def _draw_bars(axis: Any, names: Sequence[str], summary: Mapping[str, Mapping[str, Any]]) -> None:
    left = [0.0] * len(names)
    for key, words, colour in _OF_STEPS:
        values = [max(0.0, summary[name][key] or 0.0) for name in names]
        axis.barh(list(names), values, left=left, color=colour, label=words)
        left = [one + other for one, other in zip(left, values, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("ms of a step; hidden: wire behind computing")
    axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(_OF_STEPS))
