"""An averaging of LocalSGD that overlaps the next local steps.

The values at the end of a period are sent. A fixed number of steps later, the same on every rank, each rank adds the
new agreed values minus what it sent: its own progress since then is kept. Source: the delayed averaging of
Overlap-Local-SGD (Wang, Liang and Joshi 2020) and of Streaming DiLoCo (Douillard et al. 2025).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fleet_train.collectives.engines.engine import Running
from fleet_train.collectives.engines.stages import HAND_OVER, Stages
from fleet_train.collectives.job.job import Passed
from fleet_train.collectives.local_sgd.averager import Held
from fleet_train.collectives.local_sgd.flats import add, cut, flats
from fleet_train.collectives.local_sgd.fragments import Fragment


@dataclass(frozen=True)
class Sent:
    """Copies of one rank's values at the end of a period, as `flats`, and the learning rate of that step."""

    parameters: list[Any]
    statistics: list[Any]
    rate: float


@dataclass(frozen=True)
class Correction:
    """What a rank adds to its values; ``agreed``: the new common parameters, equal bits on every rank. As `flats`."""

    parameters: list[Any]
    statistics: list[Any]
    agreed: list[Any]


@dataclass(frozen=True)
class Underway:
    """An averaging that has started and has not been applied yet."""

    barrier: Future[Passed]
    correction: Running[Correction]
    fragment: Fragment


def capture(held: Held, rate: float) -> Sent:
    """Copy the values to send; on the computing thread, before the next step changes them."""
    return Sent(flats(held.parameters), flats(held.statistics), rate)


def correct(fragment: Fragment, sent: Sent) -> Stages[Correction]:
    """Average the sent values."""
    yield HAND_OVER
    parameters = sent.parameters if fragment.keeps_anchor else _copies(sent.parameters)
    agreed, means = yield from fragment.agree(parameters, sent.rate, _copies(sent.statistics))
    return Correction(_less(agreed, sent.parameters), _less(means, sent.statistics), agreed)


def apply(correction: Correction, held: Held) -> list[Any]:
    """Add a correction to the current values, in place; returns the agreed parameters in their shapes."""
    add(held.parameters, correction.parameters)
    add(held.statistics, correction.statistics)
    return cut(correction.agreed, held.parameters)


def _copies(buffers: list[Any]) -> list[Any]:
    return [buffer.clone() for buffer in buffers]


def _less(buffers: list[Any], others: list[Any]) -> list[Any]:
    return [buffer - other for buffer, other in zip(buffers, others, strict=True)]
