"""An averaging of LocalSGD that travels while the next local steps go on.

What is sent are the values at the end of a period. A fixed number of steps later, the same on every rank, each rank
adds what they have become minus what it sent: its own progress since then is kept. Source: the delayed averaging of
Overlap-Local-SGD (Wang, Liang and Joshi 2020) and of Streaming DiLoCo (Douillard et al. 2025).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fleet_train.collectives.averaging import Held, ParameterAverager, add
from fleet_train.collectives.casting import as_dtype
from fleet_train.collectives.job import Passed
from fleet_train.collectives.methods import flatten, views


@dataclass(frozen=True)
class Sent:
    """Flat float32 copies of one rank's values at the end of a period, and the learning rate of that step."""

    parameters: Any
    statistics: Any
    """None where there are none."""
    rate: float


@dataclass(frozen=True)
class Correction:
    """What a rank adds to its values; ``agreed``: the new common parameters, flat, equal bits on every rank."""

    parameters: Any
    statistics: Any
    agreed: Any


@dataclass(frozen=True)
class Underway:
    """An averaging that has been started and not been taken in yet."""

    gate: Future[Passed]
    correction: Future[Correction]


def capture(held: Held, rate: float) -> Sent:
    """Copy what is sent; on the computing thread, before the next step changes it."""
    statistics = flatten([as_dtype(tensor, "float32") for tensor in held.statistics]) if held.statistics else None
    return Sent(flatten([as_dtype(tensor, "float32") for tensor in held.parameters]), statistics, rate)


def correct(averager: ParameterAverager, sent: Sent) -> Correction:
    """Average what was sent; on a communicator's thread."""
    agreed = averager.agree(sent.parameters if averager.keeps_anchor else sent.parameters.clone(), sent.rate)
    statistics = None
    if sent.statistics is not None:
        statistics = averager.mean_of(sent.statistics.clone()) - sent.statistics
    return Correction(agreed - sent.parameters, statistics, agreed)


def apply(correction: Correction, held: Held) -> list[Any]:
    """Add a correction to the values of now, in place; returns the agreed parameters in their shapes."""
    add(held.parameters, correction.parameters)
    if held.statistics:
        add(held.statistics, correction.statistics)
    return views(correction.agreed, [tensor.shape for tensor in held.parameters])
