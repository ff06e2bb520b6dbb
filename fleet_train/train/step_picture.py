"""A picture of one step of all ranks, drawn with Pillow: for VisualDL, and for ``fleet_train timeline``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_train.cluster.flight.timeline import BOTH_PASSES, OTHER_RUN, SCRIPT, RankTimeline, Span

MOST_RANKS = 16
_WIDTH, _LEFT, _RIGHT, _TOP = 1400, 190, 20, 56
_PROGRAM, _BESIDE, _GAP = 24, 16, 14
_COLOURS = {
    "forward": (160, 200, 240),
    "backward": (66, 133, 214),
    BOTH_PASSES: (104, 162, 226),
    "copy": (120, 84, 176),
    "wait": (232, 232, 232),
    "update": (72, 160, 104),
    "code": (178, 148, 214),
    "wire": (236, 148, 52),
    "barrier": (201, 68, 44),
    "loader": (214, 190, 60),
    "save": (120, 100, 80),
    "evaluate": (160, 130, 100),
    SCRIPT: (190, 190, 170),
    OTHER_RUN: (140, 150, 160),
    "call": (180, 120, 140),
}
"""The colour of each kind of piece and event; also the order in the legend."""
_TICKS = (1, 2, 5)


def step_picture(ranks: Sequence[RankTimeline], number: int) -> NDArray[np.uint8]:
    """A picture with the ranks below each other, each with its program and its communicators' threads: uint8 [height,
    width, 3].

    Of more than 16 ranks, those that wait least are shown: the others wait for them.
    """
    from PIL import Image, ImageDraw, ImageFont

    shown = sorted(ranks, key=lambda rank: rank.steps[number].waited)[:MOST_RANKS]
    shown.sort(key=lambda rank: rank.rank)
    steps = [rank.steps[number] for rank in shown]
    began, ended = min(step.began for step in steps), max(step.ended for step in steps)
    threads = [sorted({event.thread for event in step.events}) for step in steps]
    height = _TOP + sum(_PROGRAM + _BESIDE * len(each) + _GAP for each in threads) + 34
    picture = Image.new("RGB", (_WIDTH, height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    canvas = _Canvas(draw, font, began, (_WIDTH - _LEFT - _RIGHT) / max(ended - began, 1e-9))
    left_out = f", {len(shown)} of {len(ranks)} ranks" if len(shown) < len(ranks) else ""
    draw.text((_LEFT, 10), f"step {number}: {1e3 * (ended - began):.1f} ms{left_out}", fill="black", font=font)
    canvas.axis(ended, height - 34)
    top = _TOP
    for rank, step, own in zip(shown, steps, threads, strict=True):
        draw.text((6, top + _PROGRAM / 2), rank.name, fill="black", font=font, anchor="lm")
        canvas.row(step.pieces, top, _PROGRAM)
        top += _PROGRAM
        for thread in own:
            canvas.row([event for event in step.events if event.thread == thread], top, _BESIDE)
            top += _BESIDE
        top += _GAP
    canvas.legend({span.kind for step in steps for span in (*step.pieces, *step.events)}, height - 24)
    return np.asarray(picture)


class _Canvas:
    """Draws times to scale: ``began`` at the left, so many pixels for a second."""

    def __init__(self, draw: Any, font: Any, began: float, scale: float) -> None:
        self._draw, self._font = draw, font
        self._began, self._scale = began, scale

    def _x(self, at: float) -> float:
        """The horizontal place of a time; what ends after the step ends at the edge."""
        return min(max(0.0, _LEFT + (at - self._began) * self._scale), float(_WIDTH))

    def row(self, spans: Sequence[Span], top: int, height: int) -> None:
        """Draw spans in a row, with their words where they fit."""
        for span in spans:
            left, right = self._x(span.began), self._x(span.ended)
            colour = _COLOURS.get(span.kind, (128, 128, 128))
            box = (left, top + 1, max(left, right - 1), top + height - 2)
            self._draw.rectangle(box, fill=colour)
            if self._draw.textlength(span.words, font=self._font) + 6 < right - left:
                ink = "white" if sum(colour) < 400 else "black"
                centre = ((left + right) / 2, top + height / 2)
                self._draw.text(centre, span.words, fill=ink, font=self._font, anchor="mm")

    def axis(self, ended: float, bottom: int) -> None:
        """Draw a line at every round number of milliseconds, at most 14 of them."""
        length = 1e3 * (ended - self._began)
        tick = next(t for power in range(-3, 19) for t in (each * 10.0**power for each in _TICKS) if length / t <= 14)
        for index in range(int(length / tick) + 1):
            x = self._x(self._began + index * tick / 1e3)
            self._draw.line((x, _TOP - 8, x, bottom), fill=(225, 225, 225))
            self._draw.text((x, _TOP - 18), f"{index * tick:g} ms", fill="black", font=self._font, anchor="mm")

    def legend(self, kinds: set[str], top: int) -> None:
        left = float(_LEFT)
        for kind in (kind for kind in _COLOURS if kind in kinds):
            self._draw.rectangle((left, top, left + 12, top + 12), fill=_COLOURS[kind])
            self._draw.text((left + 17, top + 6), kind, fill="black", font=self._font, anchor="lm")
            left += 34 + self._draw.textlength(kind, font=self._font)
