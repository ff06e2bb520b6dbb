"""The results of a bucket's gradients by compression method, and the bytes sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fleet_train.plan.compression_settings import (
    FLOAT_BYTES,
    SPARSE_BYTES,
    Array,
    DgcSettings,
    PowerSgdSettings,
    dgc_kept_elements,
    dgc_settings,
    powersgd_reduced_elements,
    powersgd_settings,
)
from fleet_train.plan.compressions import compression_of
from fleet_train.plan.phases import CollectiveSpec
from fleet_train.plan.plan import Bucket, CommPlan
from fleet_train.plan.quantised import QuantisedSettings, gradient_settings
from fleet_train.plan.simulate.compression import DgcSimulation, Gradients, PowerSgdSimulation
from fleet_train.plan.simulate.quantised import QuantisedSum
from fleet_train.plan.simulate.wire import SimulatedWire
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of


class SimulatedMethod(Protocol):
    """One bucket over all steps."""

    def average(self, gradients: Gradients) -> list[Array]:
        """``gradients[rank][position]`` of the bucket's shapes -> the result on every rank, in its order and shapes."""
        ...


class DenseMethod:
    """Everything in one buffer, unchanged or in 16 bits."""

    def __init__(self, bucket: Bucket, wire: SimulatedWire, dtype: str, between: str) -> None:
        self._bucket, self._wire, self._dtype, self._between = bucket, wire, dtype, between

    def average(self, gradients: Gradients) -> list[Array]:
        flat = [np.concatenate([np.ravel(values) for values in rank]) for rank in gradients]
        return cut(self._wire.mean(flat, self._dtype, self._between), [g.shape for g in self._bucket.gradients])


class PowerSgd:
    """Two allreduces of factors."""

    def __init__(self, bucket: Bucket, world_size: int, wire: SimulatedWire, settings: PowerSgdSettings) -> None:
        self._bucket, self._wire, self._settings = bucket, wire, settings
        self._reference = PowerSgdSimulation(bucket, world_size, settings)
        self._step = 0

    def average(self, gradients: Gradients) -> list[Array]:
        self._step += 1
        whole = self._step <= self._settings.start_step
        elements = [self._bucket.elements] if whole else powersgd_reduced_elements(self._bucket, self._settings)
        for number in elements:
            self._wire.count(CollectiveSpec("allreduce", FLOAT_BYTES * number, FLOAT_BYTES))
        return [values.astype(np.float32) for values in self._reference.step(gradients)]


class Dgc:
    """An all-gather of the largest elements, and an allreduce of gradients sent whole."""

    def __init__(self, bucket: Bucket, world_size: int, wire: SimulatedWire, settings: DgcSettings) -> None:
        self._bucket, self._wire, self._settings = bucket, wire, settings
        self._reference = DgcSimulation(bucket, world_size, settings)
        self._step = 0

    def average(self, gradients: Gradients) -> list[Array]:
        selected, whole = dgc_kept_elements(self._bucket, self._settings, self._step)
        self._step += 1
        self._wire.count(CollectiveSpec("allgather", SPARSE_BYTES * selected, SPARSE_BYTES))
        self._wire.count(CollectiveSpec("allreduce", FLOAT_BYTES * whole, FLOAT_BYTES))
        return [values.astype(np.float32) for values in self._reference.step(gradients)]


class FewBits:
    """Integers with a scale per block; between the local groups' leaders, if there are local groups."""

    def __init__(self, bucket: Bucket, plan: CommPlan, wire: SimulatedWire, settings: QuantisedSettings) -> None:
        self._bucket, self._wire = bucket, wire
        name = bucket.gradients[0].name
        self._sum = QuantisedSum(name, bucket.elements, plan.world_size, plan.team_size, settings)

    def average(self, gradients: Gradients) -> list[Array]:
        self._wire.count(self._bucket.sent[0])
        flat = [np.concatenate([np.ravel(values) for values in rank]) for rank in gradients]
        mean = self._sum.sum(flat) * np.float32(1.0 / len(flat))
        return cut(mean, [gradient.shape for gradient in self._bucket.gradients])


@dataclass(frozen=True)
class _Parts:
    """The parts of a method; DGC takes over ``momentum`` and ``use_nesterov`` from the optimizer."""

    bucket: Bucket
    plan: CommPlan
    profile: Profile
    wire: SimulatedWire
    momentum: float
    use_nesterov: bool


def _dense(parts: _Parts) -> SimulatedMethod:
    sent = compression_of(parts.bucket.compression).wire_dtype or parts.bucket.dtype
    return DenseMethod(parts.bucket, parts.wire, parts.bucket.dtype if parts.plan.team_size else sent, sent)


def _in_few_bits(parts: _Parts) -> SimulatedMethod:
    return FewBits(parts.bucket, parts.plan, parts.wire, gradient_settings(parts.profile))


def _powersgd(parts: _Parts) -> SimulatedMethod:
    return PowerSgd(parts.bucket, parts.plan.world_size, parts.wire, powersgd_settings(parts.profile))


def _dgc(parts: _Parts) -> SimulatedMethod:
    settings = dgc_settings(parts.profile, parts.momentum, parts.use_nesterov)
    return Dgc(parts.bucket, parts.plan.world_size, parts.wire, settings)


METHODS: dict[str, Callable[[_Parts], SimulatedMethod]] = {
    "none": _dense,
    "bf16": _dense,
    "fp16": _dense,
    "int8": _in_few_bits,
    "int4": _in_few_bits,
    "powersgd": _powersgd,
    "dgc": _dgc,
}
"""By the bucket's compression: `fleet_train.plan.compressions.COMPRESSIONS` has the same keys."""


def make_method(
    bucket: Bucket, plan: CommPlan, profile: Profile, wire: SimulatedWire, momentum: float, use_nesterov: bool
) -> SimulatedMethod:
    """The method of one bucket. Raises ConversionError for a compression without a simulation."""
    make = entry_of("compression", bucket.compression, METHODS, "method in the simulation")
    return make(_Parts(bucket, plan, profile, wire, momentum, use_nesterov))


def cut(buffer: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    """Split a flat array into consecutive arrays of these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(buffer, ends[:-1]), shapes, strict=True)]
