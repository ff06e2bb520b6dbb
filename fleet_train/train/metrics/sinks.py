"""The interface of metric sinks, one that discards everything, and several as one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np

from fleet_train.errors import FleetTrainError

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


# User-defined sinks: two methods are enough; their errors are reported once and stop nothing.


class OwnSink(Protocol):
    """The methods that your own sink must have. It may also have `text`, `hparams` and `image` of `MetricSink`."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Points of curves. A value may be NaN or infinite."""

    def close(self) -> None:
        """Called once, when `Trainer.fit` has ended, with or without an error."""


class GuardedSink:
    """A user's sink as a `MetricSink`. After its first exception only `close` is called."""

    def __init__(self, sink: Any) -> None:
        """Raises FleetTrainError for an object that is not a sink."""
        for name in ("write", "close"):
            if isinstance(sink, type) or not callable(getattr(sink, name, None)):
                raise FleetTrainError(
                    f"sinks: {sink!r} is not a sink: it takes an object with write(step, scalars) and close(), see "
                    "docs/watching.md"
                )
        self._sink = sink
        self._works = True

    def write(self, step: int, scalars: Scalars) -> None:
        self._call("write", step, scalars)

    def text(self, step: int, tag: str, text: str) -> None:
        self._call("text", step, tag, text)

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        self._call("hparams", settings, metrics)

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        self._call("image", step, tag, pixels)

    def ranks(self, step_ms: Sequence[float], wait_ms: Sequence[float]) -> None:
        self._call("ranks", step_ms, wait_ms)

    def close(self) -> None:
        works, self._works = self._works, True
        self._call("close", is_told=works)
        self._works = False

    def _call(self, name: str, *arguments: Any, is_told: bool = True) -> None:
        method = getattr(self._sink, name, None)
        if method is None or not self._works:
            return
        try:
            method(*arguments)
        except Exception as error:
            self._works = False
            if is_told:
                what = f"{type(self._sink).__name__}.{name}: {type(error).__name__}: {error}"
                print(f"fleet_train: {what}; it is no longer called, training goes on", file=sys.stderr, flush=True)


class OwnedSinks(TeeSink):
    """The list given to a trainer, on the reporting rank: the trainer closes it."""


def sinks_of(given: MetricSink | OwnSink | Sequence[OwnSink] | None, reporting: bool) -> MetricSink:
    """One sink for the argument of `Trainer`. A list, or an object with two methods, is guarded, called only on the
    reporting rank, and closed by the trainer; a full `MetricSink` is called unchanged, on every rank, and closed by the
    caller.

    Raises FleetTrainError, on every rank, for anything that is not a sink.
    """
    if given is None:
        return NullSink()
    if not isinstance(given, Sequence):
        if all(hasattr(given, name) for name in ("text", "hparams", "image")):
            return cast(MetricSink, given)
        given = [given]
    guarded = [GuardedSink(sink) for sink in given]
    return OwnedSinks(guarded) if reporting else NullSink()


@contextmanager
def closed_at_the_end(sinks: MetricSink) -> Iterator[None]:
    """Those that the trainer has to close."""
    try:
        yield
    finally:
        if isinstance(sinks, OwnedSinks):
            sinks.close()
