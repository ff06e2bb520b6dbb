"""Plot accuracy over training time, and step times split into computing and waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from tools.benchmarks.contestants import ALONE, parse
from tools.benchmarks.figures import Summary, accuracies_of, trained


def draw(path: Path, rounds: Sequence[Mapping[str, Any]], summaries: Mapping[str, Summary], target: float) -> None:
    """Writes a PNG: left the first round's accuracy over time, right the step times of all rounds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5))
    shown = [name for name in summaries if parse(name).kind != ALONE]
    for name in shown:
        ranks = next(each["ranks"] for each in rounds if each["contestant"] == name)
        times, accuracies = accuracy_curve(ranks)
        left.plot(times, accuracies, label=name, linewidth=1.2)
    left.axhline(target, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="seconds of training", ylabel="test accuracy", ylim=(0.6, 1.0))
    if shown:
        left.legend(fontsize=7)
    positions = range(len(shown))
    computing = [_computing_ms(name, summaries) for name in shown]
    waiting = [max(0.0, summaries[name].step_ms - alone) for name, alone in zip(shown, computing, strict=True)]
    right.barh(positions, computing, label="compute only")
    right.barh(positions, waiting, left=computing, label="exposed communication")
    right.set_yticks(positions, shown, fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="ms per step")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def accuracy_curve(ranks: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds of training and accuracy at every evaluation."""
    points = accuracies_of(ranks)
    return [trained(ranks, step) for step in points], list(points.values())


def _computing_ms(name: str, summaries: Mapping[str, Summary]) -> float:
    baseline = summaries.get(parse(name).baseline)
    return baseline.step_ms if baseline else 0.0
