"""The interface of metric sinks, one that discards everything, and several as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Scalars = Mapping[str, float]
Settings = Mapping[str, "bool | int | float | str"]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class MetricSink(Protocol):
    """Tags look like `train/loss`: the part before the `/` groups them on VisualDL's pages."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Points of curves. A value may be NaN or infinite."""

    def text(self, step: int, tag: str, text: str) -> None:
        """A text, as of that step."""

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        """The settings of this run, once, and the tags of the scalars by which runs are compared."""

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        """An image, uint8 [height, width, 3]."""

    def close(self) -> None: ...


class NullSink:
    """For ranks that do not report, so that call sites need no `if rank == 0`."""

    def write(self, step: int, scalars: Scalars) -> None:
        pass

    def text(self, step: int, tag: str, text: str) -> None:
        pass

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        pass

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        pass

    def close(self) -> None:
        pass


class TeeSink:
    """Forwards everything to several sinks. Refuses tags that a page could not show."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = sinks

    def write(self, step: int, scalars: Scalars) -> None:
        check_tags(scalars)
        for sink in self._sinks:
            sink.write(step, scalars)

    def text(self, step: int, tag: str, text: str) -> None:
        check_tags([tag])
        for sink in self._sinks:
            sink.text(step, tag, text)

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        check_tags([*settings, *metrics])
        for sink in self._sinks:
            sink.hparams(settings, metrics)

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        check_tags([tag])
        for sink in self._sinks:
            sink.image(step, tag, pixels)

    def ranks(self, step_ms: Sequence[float], wait_ms: Sequence[float]) -> None:
        """Each rank's reported step times since the last record, for sinks that use them; 0 = no report."""
        for sink in self._sinks:
            told = getattr(sink, "ranks", None)
            if told is not None:
                told(step_ms, wait_ms)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def check_tags(tags: Mapping[str, Any] | Sequence[str]) -> None:
    """Raises ValueError for a tag that is empty or has a `%`, on which VisualDL's pages fail."""
    for tag in tags:
        if not tag or "%" in tag:
            raise ValueError(f"{tag!r} is not a tag: it must not be empty and must not contain a percent sign")
