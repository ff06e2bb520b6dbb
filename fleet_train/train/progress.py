"""The progress display: a bar on a terminal, one line per interval in a log, nothing on other ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from fleet_train.errors import printable


class Progress(Protocol):
    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        """An epoch (counted from 0) of `steps` steps begins, `done` of them before a resume."""

    def step(self, loss: float | None, samples: int) -> None:
        """One step over `samples` of all ranks is done; its loss if it was fetched."""

    def end(self, summary: str) -> None:
        """The epoch is done; `summary` is its one line."""

    def say(self, message: str) -> None:
        """A message, also within an epoch."""


class Pace:
    """Samples per second and the remaining time, from the steps of the current epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin(0, 0, 0, 0)

    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._began, self._made, self._samples = self._clock(), 0, 0
        self._left = steps - done + (epochs - epoch - 1) * steps

    def step(self, samples: int) -> None:
        self._made += 1
        self._samples += samples

    def describe(self) -> str:
        """`1234 samples/s, 0:12:05 left`: of all epochs, without evaluations and checkpoints."""
        seconds = self._clock() - self._began
        if not self._made or seconds <= 0:
            return ""
        left = timedelta(seconds=round((self._left - self._made) * seconds / self._made))
        return f"{self._samples / seconds:.0f} samples/s, {left} left"


class SilentProgress:
    """For ranks that do not report."""

    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        pass

    def step(self, loss: float | None, samples: int) -> None:
        pass

    def end(self, summary: str) -> None:
        pass

    def say(self, message: str) -> None:
        pass


class LineProgress:
    """One line per epoch, and one per interval within an epoch that lasts longer. For logs and pipes."""

    def __init__(self, interval_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._label, self._steps, self._done, self._said = "", 0, 0, 0.0
        self._loss: float | None = None
        self._pace = Pace(clock)

    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        self._label, self._steps, self._done, self._said = _label(epoch, epochs), steps, done, self._clock()
        self._pace.begin(epoch, epochs, steps, done)

    def step(self, loss: float | None, samples: int) -> None:
        self._done += 1
        self._pace.step(samples)
        self._loss = loss if loss is not None else self._loss
        if self._clock() - self._said >= self._interval_seconds:
            self._said = self._clock()
            shown = "" if self._loss is None else f"  loss {self._loss:.4f}"
            self.say(f"{self._label}  step {self._done}/{self._steps}{shown}  {self._pace.describe()}")

    def end(self, summary: str) -> None:
        self.say(f"{self._label}  {summary}")

    def say(self, message: str) -> None:
        print(printable(message), flush=True)


class BarProgress:
    """A tqdm bar per epoch, replaced by the epoch's line at its end."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._label, self._loss = "", ""
        self._pace = Pace(time.monotonic)

    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        from tqdm import tqdm

        self._label = _label(epoch, epochs)
        self._bar = tqdm(total=steps, initial=done, desc=self._label, unit="step", leave=False, dynamic_ncols=True)
        self._pace.begin(epoch, epochs, steps, done)

    def step(self, loss: float | None, samples: int) -> None:
        self._pace.step(samples)
        if loss is not None:
            self._loss = f"loss {loss:.4f}, "
        self._bar.set_postfix_str(self._loss + self._pace.describe(), refresh=False)
        self._bar.update(1)

    def end(self, summary: str) -> None:
        self._bar.close()
        self._bar = None
        self.say(f"{self._label}  {summary}")

    def say(self, message: str) -> None:
        if self._bar is None:
            print(printable(message), flush=True)
        else:
            self._bar.write(printable(message))  # above the bar, which stays intact


def make_progress(reporting: bool) -> Progress:
    """A bar when standard error is a terminal, lines otherwise; silence on ranks that do not report."""
    if not reporting:
        return SilentProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def _label(epoch: int, epochs: int) -> str:
    return f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}"
