"""A run's numbers, texts and images: what is reported, where it goes, and the progress display.

Scripts import the names below from here; `reporter` is the trainer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_train.lazy import load_on_use

if TYPE_CHECKING:
    from fleet_train.train.metrics.sinks import MetricSink, NullSink, TeeSink
    from fleet_train.train.metrics.visualdl import open_sinks
    from fleet_train.train.progress import make_progress

__all__ = ["MetricSink", "NullSink", "TeeSink", "make_progress", "open_sinks"]

__getattr__ = load_on_use(
    __name__,
    {
        "MetricSink": "sinks",
        "NullSink": "sinks",
        "TeeSink": "sinks",
        "make_progress": "fleet_train.train.progress",
        "open_sinks": "visualdl",
    },
)
