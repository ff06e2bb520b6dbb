"""Opens the sinks of a run: always JSON lines, VisualDL if it works, none on other ranks."""

from __future__ import annotations

from pathlib import Path

from fleet_train.train.metrics.jsonl import JsonLinesSink
from fleet_train.train.metrics.sinks import MetricSink, NullSink, TeeSink
from fleet_train.train.metrics.visualdl import VisualDLSink


def open_sinks(output: Path, reporting: bool, resume_step: int = 0) -> MetricSink:
    """`metrics.jsonl`, `images/` and `visualdl/` below `output` on the reporting rank, nothing on the others.

    One file of each kind, also after restarts. Records of an earlier run after `resume_step` (of a checkpoint:
    `TrainState.recorded_step`) are dropped: this run repeats those steps.
    """
    if not reporting:
        return NullSink()
    return TeeSink([JsonLinesSink(output, resume_step), VisualDLSink(output / "visualdl", resume_step)])
