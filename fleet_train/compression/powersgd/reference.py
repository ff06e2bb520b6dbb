"""PowerSGD in numpy for all ranks: the reference for tests of the real one, written from the paper."""

from __future__ import annotations

import numpy as np

from fleet_train.compression.powersgd.description import (
    Matrix,
    PowerSgdSettings,
    low_rank_families,
    powersgd_settings,
    random_factor,
)
from fleet_train.plan import Bucket
from fleet_train.plan.simulate_methods import Array, Gradients, SimulatedParts, average, mean


def simulation(parts: SimulatedParts) -> PowerSgdSimulation:
    """The simulation of all ranks, with the profile's settings."""
    return PowerSgdSimulation(parts.bucket, parts.plan.world_size, powersgd_settings(parts.profile))


class PowerSgdSimulation:
    """PowerSGD of one bucket. Source: Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2.

    Left factors with linearly dependent columns keep a zero column here, where a QR decomposition puts any other
    direction: the sum is the same, the next start is not.
    """

    def __init__(self, bucket: Bucket, world_size: int, settings: PowerSgdSettings) -> None:
        families, self._whole = low_rank_families(bucket, settings)
        self._matrices = [matrix for family in families for matrix in family]
        self._settings = settings
        self._step = 0
        self.errors: list[dict[str, Array]] = [
            {m.name: np.zeros((m.rows, m.columns)) for m in self._matrices} for _ in range(world_size)
        ]
        self._rights: dict[str, Array] = {}

    def step(self, gradients: Gradients) -> list[Array]:
        """The result on every rank, in the bucket's order and shapes, float64."""
        self._step += 1
        results = mean(gradients)
        if self._step <= self._settings.start_step:
            return results
        for matrix in self._matrices:
            shape = results[matrix.position].shape
            local = [rank[matrix.position].reshape(matrix.rows, matrix.columns) for rank in gradients]
            results[matrix.position] = self._compress(matrix, local).reshape(shape)
        return results

    def _compress(self, matrix: Matrix, local: list[Array]) -> Array:
        corrected = [values + errors[matrix.name] for values, errors in zip(local, self.errors, strict=True)]
        joint = average(corrected)
        left = orthonormal(joint @ self._start(matrix))
        self._rights[matrix.name] = joint.T @ left
        result: Array = left @ self._rights[matrix.name].T
        if self._settings.error_feedback:
            for errors, values in zip(self.errors, corrected, strict=True):
                errors[matrix.name] = values - result
        return result

    def _start(self, matrix: Matrix) -> Array:
        shape = (matrix.rank, matrix.columns)
        step = 0 if self._settings.warm_start else self._step
        start: Array = random_factor(self._settings.seed, matrix.name, shape, step).T
        if self._settings.warm_start and matrix.name in self._rights:
            right = self._rights[matrix.name]
            start = np.where(np.abs(right).max(axis=0, keepdims=True) > 0, right, start)
        return start


def orthonormal(columns: Array) -> Array:
    """Gram-Schmidt, twice; columns that add nothing become zero. [rows, rank] float64."""
    result = np.zeros(columns.shape)
    for j in range(columns.shape[1]):
        rest = columns[:, j].astype(np.float64)
        length = np.linalg.norm(rest)
        for _ in range(2):
            rest = rest - result[:, :j] @ (result[:, :j].T @ rest)
        if np.linalg.norm(rest) > 1e-6 * length:
            result[:, j] = rest / np.linalg.norm(rest)
    return result
