"""Only the largest elements of each gradient: Deep Gradient Compression as a bucket method.

Source: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", ICLR 2018; settings as in Fleet's ``DGCMomentumOptimizer``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.engine import HAND_OVER, Collective, Stage, Stages
from fleet_train.collectives.methods.dense import Allreduce, flatten, unflatten
from fleet_train.collectives.methods.registry import Parts
from fleet_train.collectives.paddle_compat import as_dtype, dynamic_mode
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket, TensorSpec
from fleet_train.profile.methods.dgc import DgcSettings, is_sparse, kept_elements, sparsity_at

# Size of the sample that estimates a threshold for the selection; smaller tensors gain nothing from it.
_SAMPLE = 16384


class DgcMethod:
    """One all-gather of (value, index) pairs per bucket, and one allreduce of the small gradients.

    The result is an update that includes momentum, not an average of gradients: the optimizer must be SGD.
    Momentum is accumulated on each rank before the selection (momentum correction), unsent updates are kept and summed
    (local accumulation), and sent elements are cleared in both (momentum factor masking). While gradients are sent
    whole, the velocity follows their average, so that the switch to compression loses nothing.
    """

    kind = "dgc"
    own_state: tuple[str, ...] = (".velocity", ".pending")

    def __init__(
        self,
        bucket: Bucket,
        group: Any,
        allreduce: Allreduce,
        world_size: int,
        settings: DgcSettings,
        reads_values: bool = True,
    ) -> None:
        self._bucket = bucket
        self._group = group
        self._allreduce = allreduce
        self._world_size = world_size
        self._settings = settings
        self._reads_values = reads_values
        self._sparse = [i for i, gradient in enumerate(bucket.gradients) if is_sparse(gradient, settings)]
        self._step = 0
        # By parameter's name, flat float32. Velocities of small gradients are equal on all ranks.
        self._velocities: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._results: dict[str, Any] = {}

    def average(self, gradients: Sequence[Any]) -> Stages[list[Any]]:
        sparsity = sparsity_at(self._step, self._settings)
        self._step += 1
        whole = self._whole(sparsity)
        for position in set(range(len(gradients))).difference(whole):
            self._accumulate(self._bucket.gradients[position].name, gradients[position])
        flat = flatten([as_dtype(gradients[i], "float32") for i in whole]) if whole else None
        yield HAND_OVER
        results: dict[int, Any] = {}
        selects = sparsity is not None and bool(self._sparse)
        if flat is not None:
            (total,) = yield from self._allreduce.sum([flat], more=selects)
            results |= self._accelerated(whole, total.scale_(1.0 / self._world_size))
        if sparsity is not None and self._sparse:
            results |= yield from self._gather_sparse(sparsity)
        return [
            as_dtype(results[i].reshape(list(gradient.shape)), gradient.dtype)
            for i, gradient in enumerate(self._bucket.gradients)
        ]

    def state(self) -> dict[str, Any]:
        """``step``; per parameter ``<name>.velocity``, and ``<name>.pending`` if elements are selected. Ranks
        differ."""
        with dynamic_mode(), paddle.no_grad():
            state = {"step": paddle.to_tensor([self._step], dtype="int64")}
            state |= {f"{name}.velocity": value.clone() for name, value in self._velocities.items()}
            state |= {f"{name}.pending": value.clone() for name, value in self._pending.items()}
            return state

    def load_state(self, state: dict[str, Any]) -> None:
        with dynamic_mode(), paddle.no_grad():
            self._step = int(state["step"].item()) if "step" in state else 0
            self._velocities = _with_suffix(state, ".velocity")
            self._pending = _with_suffix(state, ".pending")

    def _whole(self, sparsity: float | None) -> list[int]:
        """Positions of the gradients that are sent whole."""
        everything = range(len(self._bucket.gradients))
        return list(everything) if sparsity is None else [i for i in everything if i not in self._sparse]

    def _accumulate(self, name: str, gradient: Any) -> None:
        """Add this rank's clipped gradient, with momentum, to the unsent updates."""
        update = self._accelerate(name, self._clipped(as_dtype(gradient, "float32").reshape([-1])))
        if name in self._pending:
            self._pending[name].add_(update)
        else:
            self._pending[name] = update.clone()

    def _accelerate(self, name: str, values: Any) -> Any:
        """The update with momentum; without Nesterov the velocity itself, which a caller that keeps it must copy."""
        if name in self._velocities:
            velocity = self._velocities[name].scale_(self._settings.momentum).add_(values)
        else:
            velocity = self._velocities[name] = values.clone()
        return velocity.scale(self._settings.momentum).add_(values) if self._settings.use_nesterov else velocity

    def _velocity_of(self, name: str) -> Any:
        """A copy of what ``_accelerate`` will change."""
        if name in self._velocities:
            return self._velocities[name].clone()
        elements = next(gradient.elements for gradient in self._bucket.gradients if gradient.name == name)
        return paddle.zeros([elements], "float32")

    def _clipped(self, values: Any) -> Any:
        if self._settings.local_grad_clip_norm is None:
            return values
        bound = self._settings.local_grad_clip_norm / math.sqrt(self._world_size)
        # Neither linalg.norm nor dot: on CPU they sum one by one and are off by 3e-6 at 78 000 elements.
        norm = values.square().sum().sqrt()
        return values * (bound / norm.clip(min=1e-30)).clip(max=1.0)

    def _accelerated(self, positions: Sequence[int], average: Any) -> dict[int, Any]:
        """Averages with momentum, by position. A loss scaler skips a step that is not finite, so no state is kept from
        it."""
        parts = unflatten(average, [[self._bucket.gradients[i].elements] for i in positions])
        finite = paddle.isfinite(average).all()
        if self._reads_values and not bool(finite):
            return dict(zip(positions, parts, strict=True))
        names = [self._bucket.gradients[i].name for i in positions]
        before = {} if self._reads_values else {name: self._velocity_of(name) for name in names}
        updates = [self._accelerate(name, part).clone() for name, part in zip(names, parts, strict=True)]
        if not self._reads_values:
            updates = [paddle.where(finite, *pair) for pair in zip(updates, parts, strict=True)]
            self._velocities |= {n: paddle.where(finite, self._velocities[n], kept) for n, kept in before.items()}
        return dict(zip(positions, updates, strict=True))

    def _gather_sparse(self, sparsity: float) -> Stages[dict[int, Any]]:
        """The sum of all ranks' selections / ranks, by position; in rank order, so the bits are the same everywhere."""
        gradients = [self._bucket.gradients[i] for i in self._sparse]
        counts = [kept_elements(gradient.elements, sparsity) for gradient in gradients]
        places = [self._largest(self._pending[g.name], k) for g, k in zip(gradients, counts, strict=True)]
        values = [paddle.gather(self._pending[g.name], p) for g, p in zip(gradients, places, strict=True)]
        # As integers: the bits of indices are not floats, and not every copy of a float32 keeps the bits of a NaN.
        gathered = yield from self._all_gather(paddle.concat([*(paddle.view(v, "int32") for v in values), *places]))
        for gradient, positions in zip(gradients, places, strict=True):
            self._clear_sent(gradient.name, positions)
        results = [self._kept_zeros(gradient) for gradient in gradients]
        finite = [self._add_up(results, counts, wire) for wire in gathered]
        self._forget_unless(finite, gradients)
        return dict(zip(self._sparse, results, strict=True))

    def _add_up(self, results: Sequence[Any], counts: Sequence[int], wire: Any) -> Any:
        """Add one rank's selections (values, then indices) / ranks to the results; returns whether all are finite, bool
        []."""
        values, places = paddle.split(wire, 2)
        values = paddle.view(values, "float32").scale(1.0 / self._world_size)
        for result, part, where in zip(
            results, paddle.split(values, counts), paddle.split(places, counts), strict=True
        ):
            # One rank's indices are distinct. index_add_ gives the same result in ten times the time.
            paddle.scatter_(result, where, paddle.gather(result, where).add_(part))
        return paddle.isfinite(values).all()

    def _all_gather(self, wire: Any) -> Stages[list[Any]]:
        if self._world_size == 1:
            return [wire]
        gathered = paddle.empty([self._world_size * wire.shape[0]], wire.dtype)
        yield Stage((Collective("all_gather", self._group, wire, output=gathered),))
        parts: list[Any] = paddle.split(gathered, self._world_size)
        return parts

    def _largest(self, values: Any, count: int) -> Any:
        """Indices (int32) of the ``count`` largest absolute values of a flat tensor; NaN counts as largest."""
        if self._reads_values:
            return _largest(values, count)
        sizes = values.abs()
        sizes = paddle.where(paddle.isnan(sizes), paddle.full_like(sizes, float("inf")), sizes)
        return _top_on_device(sizes, count).cast("int32")

    def _clear_sent(self, name: str, places: Any) -> None:
        zeros = paddle.zeros([places.shape[0]], "float32")
        paddle.scatter_(self._pending[name], places, zeros)
        if self._settings.momentum_factor_masking:
            paddle.scatter_(self._velocities[name], places, zeros)

    def _kept_zeros(self, gradient: TensorSpec) -> Any:
        """Zeros written over the last step's result: on CPU, new memory costs more than the work on it."""
        if gradient.name in self._results:
            return self._results[gradient.name].zero_()
        self._results[gradient.name] = paddle.zeros([gradient.elements], "float32")
        return self._results[gradient.name]

    def _forget_unless(self, finite: Sequence[Any], gradients: Sequence[TensorSpec]) -> None:
        """Called on every rank after an overflow on any rank: kept state would repeat it in each later step."""
        kept = [(table, g.name) for table in (self._pending, self._velocities) for g in gradients if g.name in table]
        if not self._reads_values:
            keep = paddle.stack(list(finite)).all()
            for table, name in kept:
                table[name] = paddle.where(keep, table[name], paddle.zeros_like(table[name]))
        elif not all(map(bool, finite)):
            for table, name in kept:
                del table[name]


def _with_suffix(state: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {key.removesuffix(suffix): value.clone() for key, value in state.items() if key.endswith(suffix)}


def _largest(values: Any, count: int) -> Any:
    """Indices (int32) of the ``count`` largest absolute values of a flat tensor, exactly; NaN counts as largest.

    Selecting among all elements is the expensive part of DGC on CPU. A sample gives a threshold that slightly more than
    ``count`` elements reach, and the selection is made among these. Source: section 5 of the paper.
    """
    sizes = values.abs()
    if values.shape[0] > 4 * _SAMPLE and 2 * count < values.shape[0]:
        candidates = _above_guess(sizes, count)
        if candidates.shape[0] >= count:
            return paddle.gather(candidates, _top(paddle.gather(sizes, candidates), count)).cast("int32")
    return _top(sizes, count).cast("int32")


def _above_guess(sizes: Any, count: int) -> Any:
    """Indices (int64) of all elements not below an estimated threshold: most likely ``count`` of them, or more."""
    sample = sizes[:: (sizes.shape[0] // _SAMPLE) | 1]  # odd: layer widths are even, and one column is not a sample
    expected = count * sample.shape[0] / sizes.shape[0]
    bound = sample[_top(sample, math.ceil(expected + 3 * math.sqrt(expected) + 1))].min()
    return paddle.logical_not(sizes < bound).nonzero().reshape([-1])


def _top_on_device(sizes: Any, count: int) -> Any:
    """As ``_top``; the host reads no value."""
    return paddle.topk(sizes, count, sorted=False)[1]


def _top(sizes: Any, count: int) -> Any:
    """Indices (int64) of the ``count`` largest elements, in no order."""
    if not sizes.place.is_cpu_place():
        return _top_on_device(sizes, count)
    # Paddle's CPU kernel sorts: three times slower than this for 0.1 % of the elements, worse for more.
    first = sizes.shape[0] - count
    return paddle.to_tensor(np.argpartition(sizes.numpy(), first)[first:] if first else np.arange(count))


def make_method(parts: Parts) -> DgcMethod:
    """The method of a plan's bucket."""
    if parts.dgc is None:
        raise ConversionError("compression: dgc was planned for an optimizer whose momentum it has not taken over")
    return DgcMethod(parts.bucket, parts.group, parts.allreduce, parts.plan.world_size, parts.dgc, parts.reads_values)
