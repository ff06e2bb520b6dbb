"""User-defined sinks: two methods are enough; their errors are reported once and stop nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from fleet_train.errors import FleetTrainError
from fleet_train.train.metrics.sinks import MetricSink, NullSink, Pixels, Scalars, Settings, TeeSink


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
