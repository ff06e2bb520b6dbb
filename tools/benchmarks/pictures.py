"""The picture of a record of strategies: the score over time, and where a step's milliseconds go."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tools.benchmarks.contestants import ALONE, AVERAGE_ONCE, NOTHING, OURS, PICTURED, parse
from tools.benchmarks.record import network_named, told_network
from tools.benchmarks.report import Curve, Mean, middle, paired, score_of, shown, turns_of

COLOURS = ("#888888", "#b07a4f", "#2ca02c", "#d62728", "#1f4e79", "#ff7f0e", "#17a2b8", "#9467bd", "#e377c2")
_OF_STEPS = (("compute", "computing alone", "#2f5d8c"), ("exposed", "exposed: what communication adds", "#f2a65a"))
# Of the picture's height, what a label takes at least.
_BETWEEN_LABELS = 0.05


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
            1, len(wide), figsize=(12 if score else 7, 5), width_ratios=wide, squeeze=False, layout="constrained"
        )
        if score:
            _draw_curves(axes[0][0], record, score.name, score.targets)
        _draw_bars(axes[0][-1], bars, record["summary"])
        figure.suptitle(title(record), fontsize=10)
        into = io.BytesIO()
        figure.savefig(into, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return into.getvalue().decode()


def title(record: Mapping[str, Any]) -> str:
    """What came out: our first at the middle target beside PyTorch DDP's best; without targets our fastest step."""
    lab, score, summary = record["lab"], score_of(record), record["summary"]
    network = told_network(network_named(lab))
    where = f"{record['task']['name']}, {lab['nodes']} machines {network}, CPU and Gloo"
    ours = [name for name in summary if name.startswith(f"{OURS}:")]
    told = []
    for name in ours:
        to = middle(summary[name]["targets"]) if score else None
        compared = paired(to["time_over"] if to else summary[name]["ratio"])
        if compared:
            told.append((compared.value, name, compared, to))
    if not told:
        return where
    _, name, compared, to = min(told, key=lambda each: each[0])
    what = f"{score.name} {to['target']:g} takes" if score and to else "a step takes"
    return f"{where}\n{what} {compared.told(2)} of the time of PyTorch DDP's best with {name.removeprefix(f'{OURS}:')}"


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, Mean]]:
    """Mean seconds and score over seeds, at every evaluation."""
    found = []
    for points in zip(*curves, strict=True):
        score = Mean.of([each[2] for each in points])
        if score is not None:
            found.append((fmean(each[1] for each in points), score))
    return found


def _draw_curves(axis: Any, record: Mapping[str, Any], name: str, targets: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    turns = turns_of(record)
    labels: list[tuple[float, float, str, str]] = []
    for colour, wanted in zip(COLOURS, PICTURED, strict=True):
        found = shown(wanted, record)
        if found not in turns:
            continue
        points = mean_curve([each["evaluations"] for each in turns[found].values()])
        seconds, means = [point for point, _ in points], [mean.value for _, mean in points]
        low, high = ([mean.value + sign * mean.error for _, mean in points] for sign in (-1, 1))
        # Dashes on top: a rival's line that lies on ours hides neither.
        is_ours = found.startswith(f"{OURS}:")
        axis.plot(seconds, means, color=colour, linewidth=1.6, dashes=(None, None) if is_ours else (3, 2),
                  zorder=2 if is_ours else 3)  # fmt: skip
        axis.fill_between(seconds, low, high, color=colour, alpha=0.2, linewidth=0)
        labels.append((seconds[-1], means[-1], "each rank alone" if found == NOTHING else found, colour))
    for target in targets:
        axis.axhline(target, color="#000000", linewidth=0.6, linestyle=":")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("seconds of training")
    axis.set_ylabel(f"{name}; dotted: targets")
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
    for kind, words, colour in _OF_STEPS:
        values = [_of_step(summary[name], kind) for name in names]
        axis.barh(list(names), values, left=left, color=colour, label=words)
        left = [one + other for one, other in zip(left, values, strict=True)]
    for number, name in enumerate(names):
        axis.annotate(f" {summary[name]['step_ms']:.0f}", (left[number], number), va="center", fontsize=8)
    axis.set_xlim(0, 1.12 * max(left))
    axis.invert_yaxis()
    axis.set_xlabel("ms of a step")
    axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(_OF_STEPS))


def _of_step(figures: Mapping[str, Any], kind: str) -> float:
    exposed = paired(figures["exposed_ms"])
    added = max(0.0, exposed.value) if exposed else 0.0
    return added if kind == "exposed" else max(0.0, float(figures["step_ms"]) - added)
