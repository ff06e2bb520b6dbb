"""The progress display: a bar on a terminal, one line per interval in a log, nothing on other ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fleet_train.errors import printable

_PROGRESS_LINE_SECONDS = 10.0
"""Pause between two progress lines within an epoch, in a log."""


class Progress:
    """The display of ranks that do not report, which shows nothing; the others know their pace from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._label = ""
        self._loss: float | None = None
        """The loss that was fetched last."""

    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        """Note that an epoch (counted from 0) of `steps` steps begins, `done` of them before a resume."""
        self._label = f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}"
        self._began, self._made, self._samples = self._clock(), 0, 0
        self._left = steps - done + (epochs - epoch - 1) * steps

    def step(self, loss: float | None, samples: int) -> None:
        """Note that one step over `samples` of all ranks is done; its loss if it was fetched."""
        self._made += 1
        self._samples += samples
        self._loss = loss if loss is not None else self._loss

    def end(self, summary: str) -> None:
        """Note that the epoch is done; `summary` is its one line."""
        self.say(f"{self._label}  {summary}")

    def say(self, message: str) -> None:
        """Show a message, also within an epoch; ranks that do not report show none."""

    def pace(self) -> str:
        """The pace in words, `1234 samples/s, 0:12:05 left`: of all epochs, without evaluations and checkpoints."""
        seconds = self._clock() - self._began
        if not self._made or seconds <= 0:
            return ""
        left = timedelta(seconds=round((self._left - self._made) * seconds / self._made))
        return f"{self._samples / seconds:.0f} samples/s, {left} left"


class LineProgress(Progress):
    """One line per epoch, and one per interval within an epoch that lasts longer. For logs and pipes."""

    def __init__(
        self, interval_seconds: float = _PROGRESS_LINE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._interval_seconds = interval_seconds

    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        super().begin(epoch, epochs, steps, done)
        self._steps, self._done, self._shown_at = steps, done, self._began

    def step(self, loss: float | None, samples: int) -> None:
        super().step(loss, samples)
        self._done += 1
        if self._clock() - self._shown_at >= self._interval_seconds:
            self._shown_at = self._clock()
            shown = "" if self._loss is None else f"  loss {self._loss:.4f}"
            self.say(f"{self._label}  step {self._done}/{self._steps}{shown}  {self.pace()}")

    def say(self, message: str) -> None:
        print(printable(message), flush=True)


class BarProgress(Progress):
    """A tqdm bar per epoch, replaced by the epoch's line at its end."""

    _bar: Any = None

    def begin(self, epoch: int, epochs: int, steps: int, done: int) -> None:
        from tqdm import tqdm

        super().begin(epoch, epochs, steps, done)
        self._bar = tqdm(total=steps, initial=done, desc=self._label, unit="step", leave=False, dynamic_ncols=True)

    def step(self, loss: float | None, samples: int) -> None:
        super().step(loss, samples)
        shown = "" if self._loss is None else f"loss {self._loss:.4f}, "
        self._bar.set_postfix_str(shown + self.pace(), refresh=False)
        self._bar.update(1)

    def end(self, summary: str) -> None:
        self._bar.close()
        self._bar = None
        super().end(summary)

    def say(self, message: str) -> None:
        if self._bar is None:
            print(printable(message), flush=True)
        else:
            self._bar.write(printable(message))  # above the bar, which stays intact


def make_progress(reporting: bool) -> Progress:
    """A bar when standard error is a terminal, lines otherwise; silence on ranks that do not report."""
    if not reporting:
        return Progress()
    return BarProgress() if sys.stderr.isatty() else LineProgress()
