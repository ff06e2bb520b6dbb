"""What a bucket's gradients become, by its method of compression, with the bytes that it takes."""

from __future__ import annotations

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
from fleet_train.plan.legs import Sent
from fleet_train.plan.plan import Bucket, CommPlan
from fleet_train.plan.simulate.compression import DgcSimulation, Gradients, PowerSgdSimulation
from fleet_train.plan.simulate.wire import SimulatedWire
from fleet_train.profile import Profile

WIRE_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class SimulatedMethod(Protocol):
    """One bucket over all steps."""

    def average(self, gradients: Gradients) -> list[Array]:
        """``gradients[rank][position]`` of the bucket's shapes -> what every rank gets, in its order and shapes."""
        ...


class DenseMethod:
    """Everything in one buffer, as it is or in 16 bits."""

    def __init__(self, bucket: Bucket, wire: SimulatedWire, dtype: str, between: str) -> None:
        self._bucket, self._wire, self._dtype, self._between = bucket, wire, dtype, between

    def average(self, gradients: Gradients) -> list[Array]:
        flat = [np.concatenate([np.ravel(values) for values in rank]) for rank in gradients]
        return cut(self._wire.mean(flat, self._dtype, self._between), [g.shape for g in self._bucket.gradients])


class PowerSgd:
    """Two allreduces of factors."""

    def __init__(self, bucket: Bucket, world_size: int, wire: SimulatedWire, settings: PowerSgdSettings) -> None:
        self._bucket, self._wire, self._settings = bucket, wire, settings
        self._twin = PowerSgdSimulation(bucket, world_size, settings)
        self._step = 0

    def average(self, gradients: Gradients) -> list[Array]:
        self._step += 1
        whole = self._step <= self._settings.start_step
        elements = [self._bucket.elements] if whole else powersgd_reduced_elements(self._bucket, self._settings)
        for number in elements:
            self._wire.count(Sent("allreduce", FLOAT_BYTES * number, FLOAT_BYTES))
        return [values.astype(np.float32) for values in self._twin.step(gradients)]


class Dgc:
    """An all-gather of the largest elements, and an allreduce of what goes whole."""

    def __init__(self, bucket: Bucket, world_size: int, wire: SimulatedWire, settings: DgcSettings) -> None:
        self._bucket, self._wire, self._settings = bucket, wire, settings
        self._twin = DgcSimulation(bucket, world_size, settings)
        self._step = 0

    def average(self, gradients: Gradients) -> list[Array]:
        selected, whole = dgc_kept_elements(self._bucket, self._settings, self._step)
        self._step += 1
        self._wire.count(Sent("allgather", SPARSE_BYTES * selected, SPARSE_BYTES))
        self._wire.count(Sent("allreduce", FLOAT_BYTES * whole, FLOAT_BYTES))
        return [values.astype(np.float32) for values in self._twin.step(gradients)]


def make_method(
    bucket: Bucket, plan: CommPlan, profile: Profile, wire: SimulatedWire, momentum: float, use_nesterov: bool
) -> SimulatedMethod:
    """The method of one bucket; ``momentum`` and ``use_nesterov`` are what DGC takes over from the optimizer."""
    if bucket.compression == "powersgd":
        return PowerSgd(bucket, plan.world_size, wire, powersgd_settings(profile))
    if bucket.compression == "dgc":
        return Dgc(bucket, plan.world_size, wire, dgc_settings(profile, momentum, use_nesterov))
    sent = WIRE_DTYPES.get(bucket.compression, bucket.dtype)
    return DenseMethod(bucket, wire, bucket.dtype if plan.team_size else sent, sent)


def cut(buffer: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
    """A flat array as arrays of these shapes, one behind the other."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(buffer, ends[:-1]), shapes, strict=True)]
