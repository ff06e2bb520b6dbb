"""Gradients as products of two thin factors: PowerSGD as a bucket method.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.engine import HAND_OVER, Stages
from fleet_train.collectives.methods.dense import Allreduce, DenseMethod, flatten, unflatten
from fleet_train.collectives.methods.registry import Parts
from fleet_train.collectives.paddle_compat import as_dtype, dynamic_mode
from fleet_train.compression.powersgd.description import (
    Matrix,
    PowerSgdSettings,
    low_rank_families,
    powersgd_settings,
    random_factor,
)
from fleet_train.plan import Bucket


class PowerSgdMethod:
    """PowerSGD of a bucket. Two allreduces per step: left factors with all uncompressed gradients, then right factors.

    Large matrices are handled one by one (a stacked copy costs more than all products together), their thin factors in
    batches of equal shape. The factors are orthonormalised from sums that are bit-equal on every rank, so ranks on
    equal hardware decompress to the same bits. ``reads_values``: whether the host may read a value in a step; on a
    stream that waits for everything enqueued before.
    """

    kind = "powersgd"
    own_state: tuple[str, ...] = (".error",)

    def __init__(
        self,
        bucket: Bucket,
        allreduce: Allreduce,
        world_size: int,
        settings: PowerSgdSettings,
        reads_values: bool = True,
        to_device: Callable[[np.ndarray], Any] = paddle.to_tensor,
    ) -> None:
        self._bucket = bucket
        self._allreduce = allreduce
        self._scale = 1.0 / world_size
        self._settings = settings
        self._reads_values = reads_values
        self._to_device = to_device
        self._dense = DenseMethod(bucket, allreduce, world_size)
        self._families, self._whole = low_rank_families(bucket, settings)
        self._step = 0
        self._errors: dict[str, Any] = {}  # parameter's name -> [rows, columns] float32
        self._results: dict[str, Any] = {}  # the same: the last step's result
        self._factors: list[Any] = []  # per family: right factors [matrices, rank, columns] float32
        self._fresh: list[Any] = []  # per family: replacements for right factors that have become zero

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        self._step += 1
        if self._step <= self._settings.start_step or not self._families:
            return (yield from self._dense.average(gradients))
        matrices = [[self._with_error(m, gradients[m.position]) for m in family] for family in self._families]
        rest = flatten([as_dtype(gradients[i], "float32") for i in self._whole]) if self._whole else None
        yield HAND_OVER
        lefts, whole = yield from self._reduce_left(matrices, rest)
        finite = [paddle.isfinite(left).all() for left in lefts]
        if not self._reads_values:
            keep = partial(_or_else, paddle.stack(finite).all())
            lefts = [keep(_orthonormal(keep(left, 0.0)), float("nan")) for left in lefts]
        elif all(map(bool, finite)):
            lefts = [_orthonormal(left) for left in lefts]
        else:
            return self._give_up(whole)
        rights = yield from self._reduce_right(matrices, lefts)
        results = dict(zip(self._whole, whole, strict=True))
        for family, values, left, right in zip(self._families, matrices, lefts, rights, strict=True):
            for i, matrix in enumerate(family):
                results[matrix.position] = self._decompress(matrix, values[i], left[i], right[i])
        if not self._reads_values:
            # As in _give_up, decided on the device: results of NaN factors are NaN and are not kept.
            self._errors = {name: keep(error, 0.0) for name, error in self._errors.items()}
            self._factors = [keep(factors, 0.0) for factors in self._factors]
        return self._in_order(results)

    def state(self) -> dict[str, Any]:
        """``step``; per compressed parameter ``<name>.error`` (differs between ranks) and ``<name>.factor``."""
        with dynamic_mode(), paddle.no_grad():
            state = {"step": paddle.to_tensor([self._step], dtype="int64")}
            state |= {f"{name}.error": error.clone() for name, error in self._errors.items()}
            for family, factors in zip(self._families, self._factors, strict=False):
                state |= {f"{matrix.name}.factor": factors[i].clone() for i, matrix in enumerate(family)}
            return state

    def load_state(self, state: dict[str, Any]) -> None:
        with dynamic_mode(), paddle.no_grad():
            self._step = int(state["step"].item()) if "step" in state else 0
            self._errors = {
                matrix.name: state[f"{matrix.name}.error"].clone()
                for family in self._families
                for matrix in family
                if _has(state, f"{matrix.name}.error", [matrix.rows, matrix.columns])
            }
            factors = [
                [state[f"{matrix.name}.factor"] for matrix in family]
                for family in self._families
                if all(_has(state, f"{matrix.name}.factor", [matrix.rank, matrix.columns]) for matrix in family)
            ]
            self._factors = [paddle.stack(f) for f in factors] if len(factors) == len(self._families) else []

    def _with_error(self, matrix: Matrix, gradient: Any) -> Any:
        """Gradient + error, [rows, columns] float32; in the error's own memory, which saves a copy."""
        values = as_dtype(gradient, "float32").reshape([matrix.rows, matrix.columns])
        if not self._settings.error_feedback:
            return values.clone()
        if matrix.name not in self._errors:
            self._errors[matrix.name] = values.clone()
            return self._errors[matrix.name]
        return self._errors[matrix.name].add_(values)

    def _reduce_left(self, matrices: list[list[Any]], rest: Any) -> Stages[tuple[list[Any], list[Any]]]:
        """Reduce left factors: (per family their sum [matrices, rows, rank]; averages of uncompressed gradients)."""
        products = [
            paddle.matmul(matrix, factors[i], transpose_y=True).reshape([-1])
            for family, factors in zip(matrices, self._start_factors(), strict=True)
            for i, matrix in enumerate(family)
        ]
        parts = products if rest is None else [*products, rest]
        (buffer,) = yield from self._allreduce.sum([paddle.concat(parts)], more=True)
        shapes = [[len(family), family[0].rows, family[0].rank] for family in self._families]
        whole_shapes = [self._bucket.gradients[i].shape for i in self._whole]
        pieces = unflatten(buffer, [*shapes, *whole_shapes])
        return pieces[: len(shapes)], [piece.scale(self._scale) for piece in pieces[len(shapes) :]]

    def _reduce_right(self, matrices: list[list[Any]], lefts: list[Any]) -> Stages[list[Any]]:
        """Per family averaged right factors [matrices, rank, columns]; kept for the next step."""
        products = [
            paddle.matmul(left[i], matrix, transpose_x=True).reshape([-1])
            for family, left in zip(matrices, lefts, strict=True)
            for i, matrix in enumerate(family)
        ]
        (buffer,) = yield from self._allreduce.sum([paddle.concat(products)])
        self._factors = unflatten(
            buffer.scale_(self._scale), [[len(f), f[0].rank, f[0].columns] for f in self._families]
        )
        return self._factors

    def _decompress(self, matrix: Matrix, values: Any, left: Any, right: Any) -> Any:
        """The matrix that every rank gets; this rank's ``values`` minus it becomes the error.

        It overwrites the last step's: on CPU, new memory costs more than the product that fills it.
        """
        if matrix.name not in self._results:
            self._results[matrix.name] = paddle.zeros_like(values)
        result = self._results[matrix.name]
        paddle.addmm_(result, left, right, beta=0.0, alpha=1.0)
        if self._settings.error_feedback:
            paddle.addmm_(values, left, right, beta=1.0, alpha=-1.0)
        return result.reshape(list(self._bucket.gradients[matrix.position].shape))

    def _give_up(self, whole: list[Any]) -> list[Any]:
        """Treat an infinity or NaN on any rank: return NaN gradients, which a loss scaler skips, and do not keep
        them."""
        self._errors, self._factors = {}, []
        results = dict(zip(self._whole, whole, strict=True))
        for matrix in (matrix for family in self._families for matrix in family):
            shape = list(self._bucket.gradients[matrix.position].shape)
            results[matrix.position] = paddle.full(shape, float("nan"), "float32")
        return self._in_order(results)

    def _in_order(self, results: dict[int, Any]) -> list[Any]:
        return [as_dtype(results[i], gradient.dtype) for i, gradient in enumerate(self._bucket.gradients)]

    def _start_factors(self) -> list[Any]:
        """Per family right factors [matrices, rank, columns] to start from, with rows of length 1."""
        if not self._settings.warm_start:
            return self._random_factors(self._step)
        if not self._fresh:
            self._fresh = self._random_factors(0)
        if not self._factors:
            return self._fresh
        return [_revived(*pair) for pair in zip(self._factors, self._fresh, strict=True)]

    def _random_factors(self, step: int) -> list[Any]:
        seed = self._settings.seed
        families = [
            np.stack([random_factor(seed, matrix.name, (matrix.rank, matrix.columns), step) for matrix in family])
            for family in self._families
        ]
        return [self._to_device(f / np.linalg.norm(f, axis=2, keepdims=True)) for f in families]


def _or_else(condition: Any, values: Any, other: float) -> Any:
    """``values`` where ``condition`` (bool []) holds, on the device."""
    return paddle.where(condition, values, paddle.full_like(values, other))


def _has(state: dict[str, Any], name: str, shape: list[int]) -> bool:
    return name in state and list(state[name].shape) == shape


def _orthonormal(left: Any) -> Any:
    """Orthonormal columns that span those of ``left`` [matrices, rows, rank]; a zero matrix of rank 1 stays zero."""
    if left.shape[2] > 1:
        return paddle.linalg.qr(left)[0]
    # Scaled by the largest element first: squares of small gradients underflow.
    largest = left.abs().max(axis=1, keepdim=True)
    scaled = left / paddle.where(largest > 0, largest, paddle.ones_like(largest))
    return scaled / (scaled * scaled).sum(axis=1, keepdim=True).sqrt().clip(min=1.0)


def _revived(factors: Any, fresh: Any) -> Any:
    """``factors`` [matrices, rank, columns] with rows of length 1; a zero row is replaced by that of ``fresh``.

    A factor that is zero once (a layer without gradient in one step) would give zero products forever.
    """
    length = (factors * factors).sum(axis=2, keepdim=True).sqrt()
    alive = length > 0
    return paddle.where(alive, factors / paddle.where(alive, length, paddle.ones_like(length)), fresh)


def make_method(parts: Parts) -> PowerSgdMethod:
    """The method of a plan's bucket."""
    settings, to_device = powersgd_settings(parts.profile), parts.job.engine.device.to_device
    return PowerSgdMethod(parts.bucket, parts.allreduce, parts.plan.world_size, settings, parts.reads_values, to_device)
