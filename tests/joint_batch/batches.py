"""Joint batches, and how ranks share them: unlike sizes, and valid values that become more with a sample's number."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Batch = dict[str, Array]

STEPS = 3
SAMPLES = 20
IN_EACH_PART = 6
"""Samples of every part where they have to be equally many."""
SIZES: dict[int, list[list[int]]] = {
    2: [[6, 14], [5, 15], [19, 1]],
    3: [[4, 10, 6], [5, 8, 7], [7, 12, 1]],
    4: [[3, 8, 4, 5], [2, 3, 9, 6], [6, 8, 5, 1]],
    6: [[2, 5, 3, 4, 1, 5], [2, 3, 6, 4, 3, 2], [3, 5, 1, 4, 6, 1]],
    8: [[2, 3, 1, 4, 2, 3, 3, 2], [2, 3, 1, 4, 3, 2, 3, 2], [2, 4, 1, 3, 3, 3, 3, 1]],
}
"""By parts (ranks x micro-batches), the samples of each in each step."""
_BLANK_STEP, _BLANK = 1, 5
"""In this step the first samples have nothing valid: with any number of parts, one of them has nothing else."""


@dataclass(frozen=True)
class Samples:
    """What is drawn for: ``rising``, per sample, from almost 0 to 1; ``blank``: those that have nothing valid."""

    random: np.random.Generator
    rising: Array
    blank: Array

    @property
    def number(self) -> int:
        return len(self.rising)

    def valid(self, *shape: int) -> Array:
        """Of each sample more the later it stands; everything of the last."""
        wide = (self.number, *shape)
        chance = self.rising.reshape(-1, *[1] * len(shape))
        return (self.random.random(wide) < chance) & ~self.blank.reshape(chance.shape)


Draw = Callable[[Samples], Array]


@dataclass(frozen=True)
class Input:
    """One input. ``draw``: for the joint batch. ``counts``: it decides what is valid, and where all ranks are to have
    equal counts they get the same of it. ``length``: the input by which its second dimension is padded."""

    dtype: str
    draw: Draw
    counts: bool = True
    length: str = ""


@dataclass(frozen=True)
class Number:
    """An input that a script computes from all ranks' batches: ``of(joint batch, own batch, number of ranks)``."""

    dtype: str
    of: Callable[[Batch, Batch, int], Any]


@dataclass(frozen=True)
class Feeds:
    """The joint batches of one case, and their shares. ``mode``: ``unlike`` sizes and counts, ``static`` sizes and
    unlike counts, or ``equal`` sizes and counts."""

    case: str
    mode: str
    parts: int
    """Ranks x micro-batches."""
    ends_empty: bool = False

    @property
    def steps(self) -> int:
        return STEPS + self.ends_empty

    def sizes(self, step: int) -> list[int]:
        return SIZES[self.parts][step % STEPS] if self.mode == "unlike" else [IN_EACH_PART] * self.parts

    def joint(self, inputs: Mapping[str, Input | Number], step: int) -> Batch:
        drawn = {name: one for name, one in inputs.items() if isinstance(one, Input)}
        return {name: self._drawn(name, one, step).astype(one.dtype) for name, one in drawn.items()}

    def share(self, joint: Batch, inputs: Mapping[str, Input | Number], step: int, part: int | None) -> Batch:
        """The feed of one part; None: of the process that has all."""
        sizes = self.sizes(step)
        first = sum(sizes[: part or 0])
        own = joint if part is None else {name: one[first : first + sizes[part]] for name, one in joint.items()}
        own = {name: _trimmed(one, own, inputs[name]) for name, one in own.items()}
        ranks = 1 if part is None else self.parts
        made = {name: one.of(joint, own, ranks) for name, one in inputs.items() if isinstance(one, Number)}
        return own | {name: np.asarray(value, inputs[name].dtype) for name, value in made.items()}

    def _drawn(self, name: str, one: Input, step: int) -> Array:
        random = np.random.default_rng([zlib.crc32(f"{self.case}/{name}".encode()), step])
        if self.mode == "equal" and one.counts:
            return np.concatenate([one.draw(self._samples(random, IN_EACH_PART, step))] * self.parts)
        total = sum(self.sizes(step))
        return one.draw(self._samples(random, total, step))

    def _samples(self, random: np.random.Generator, number: int, step: int) -> Samples:
        blank = np.zeros(number, bool)
        if step == _BLANK_STEP and self.mode != "equal":
            blank[: _BLANK if self.mode == "unlike" else IN_EACH_PART] = True
        blank |= step == STEPS
        return Samples(random, (1 + np.arange(number)) / number, blank)


def _trimmed(values: Array, own: Batch, one: Input | Number) -> Array:
    """Without the columns that are padding for all samples of this part."""
    if not isinstance(one, Input) or not one.length:
        return values
    return values[:, : max(1, int(own[one.length].max(initial=0)))]


def total(batches: Sequence[Batch], name: str) -> float:
    return float(sum(batch[name].sum() for batch in batches))
