"""Only the largest elements of each gradient: Deep Gradient Compression as a bucket method.

Source: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", ICLR 2018; settings as in Fleet's ``DGCMomentumOptimizer``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.casting import as_dtype
from fleet_train.collectives.methods import flatten, unflatten
from fleet_train.collectives.modes import dynamic_mode
from fleet_train.collectives.reducers import Reducer
from fleet_train.plan import Bucket, Gradient
from fleet_train.plan.compression_settings import DgcSettings, is_sparse, kept_elements, sparsity_at

# Elements from which a bound for the selection is guessed; below this many, guessing gains nothing.
_SAMPLE = 16384


@dataclass
class _Prepared:
    """Flat copies of the gradients that are sent whole, and the share of the others that is not sent (None = whole)."""

    whole: Any
    sparsity: float | None


class DgcMethod:
    """One all-gather of (value, place) pairs per bucket, and one allreduce of the small gradients.

    What comes out is an update with momentum in it, not an average of gradients: the optimizer behind must be SGD.
    Momentum is accumulated on each rank before the selection (momentum correction), unsent updates are kept and added
    up (local accumulation), and what was sent leaves both (momentum factor masking). While gradients go whole, the
    velocity follows their average, so that the change to compression loses nothing.
    """

    kind = "dgc"
    own_state: tuple[str, ...] = (".velocity", ".pending")

    def __init__(self, bucket: Bucket, group: Any, reducer: Reducer, world_size: int, settings: DgcSettings) -> None:
        self._bucket = bucket
        self._group = group
        self._reducer = reducer
        self._world_size = world_size
        self._settings = settings
        self._sparse = [i for i, gradient in enumerate(bucket.gradients) if is_sparse(gradient, settings)]
        self._step = 0
        # By parameter's name, flat float32. Velocities of small gradients are equal on all ranks.
        self._velocities: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}
        self._results: dict[str, Any] = {}

    def prepare(self, gradients: Sequence[Any]) -> _Prepared:
        with paddle.no_grad():
            sparsity = sparsity_at(self._step, self._settings)
            self._step += 1
            whole = self._whole(sparsity)
            for position in set(range(len(gradients))).difference(whole):
                self._accumulate(self._bucket.gradients[position].name, gradients[position])
            flat = flatten([as_dtype(gradients[i], "float32") for i in whole]) if whole else None
            return _Prepared(flat, sparsity)

    def communicate(self, prepared: _Prepared) -> list[Any]:
        with paddle.no_grad():
            results: dict[int, Any] = {}
            if prepared.whole is not None:
                results |= self._reduce_whole(prepared)
            if prepared.sparsity is not None and self._sparse:
                results |= self._gather_sparse(prepared.sparsity)
            return [
                as_dtype(results[i].reshape(list(gradient.shape)), gradient.dtype)
                for i, gradient in enumerate(self._bucket.gradients)
            ]

    def state(self) -> dict[str, Any]:
        """``step``; per parameter ``<name>.velocity``, and ``<name>.pending`` if selected from. Ranks differ."""
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
        """Add this rank's clipped gradient, with momentum, to what waits to be sent."""
        update = self._accelerate(name, self._clipped(as_dtype(gradient, "float32").reshape([-1])))
        if name in self._pending:
            self._pending[name].add_(update)
        else:
            self._pending[name] = update.clone()

    def _accelerate(self, name: str, values: Any) -> Any:
        """The update with momentum; without Nesterov the velocity itself, to be copied by who keeps it."""
        if name in self._velocities:
            velocity = self._velocities[name].scale_(self._settings.momentum).add_(values)
        else:
            velocity = self._velocities[name] = values.clone()
        return velocity.scale(self._settings.momentum).add_(values) if self._settings.use_nesterov else velocity

    def _clipped(self, values: Any) -> Any:
        if self._settings.local_grad_clip_norm is None:
            return values
        bound = self._settings.local_grad_clip_norm / math.sqrt(self._world_size)
        # Neither linalg.norm nor dot: on CPU they add up one by one, and are off by 3e-6 at 78 000 elements.
        norm = values.square().sum().sqrt()
        return values * (bound / norm.clip(min=1e-30)).clip(max=1.0)

    def _reduce_whole(self, prepared: _Prepared) -> dict[int, Any]:
        """Averages with momentum, by position."""
        positions = self._whole(prepared.sparsity)
        average = self._reducer.sum(prepared.whole).scale_(1.0 / self._world_size)
        parts = unflatten(average, [[self._bucket.gradients[i].elements] for i in positions])
        if not bool(paddle.isfinite(average).all()):
            return dict(zip(positions, parts, strict=True))  # a loss scaler skips this step: remember nothing of it
        names = [self._bucket.gradients[i].name for i in positions]
        updates = [self._accelerate(name, part).clone() for name, part in zip(names, parts, strict=True)]
        return dict(zip(positions, updates, strict=True))

    def _gather_sparse(self, sparsity: float) -> dict[int, Any]:
        """All ranks' selections added up / ranks, by position; in the order of ranks, so everywhere the same bits."""
        gradients = [self._bucket.gradients[i] for i in self._sparse]
        counts = [kept_elements(gradient.elements, sparsity) for gradient in gradients]
        places = [_largest(self._pending[g.name], k) for g, k in zip(gradients, counts, strict=True)]
        values = [paddle.gather(self._pending[g.name], p) for g, p in zip(gradients, places, strict=True)]
        # As integers: bits of places are no numbers, and not every copy of a float32 keeps a NaN's.
        gathered = self._all_gather(paddle.concat([*(paddle.view(v, "int32") for v in values), *places]))
        for gradient, taken in zip(gradients, places, strict=True):
            self._take_out(gradient.name, taken)
        results = [self._kept_zeros(gradient) for gradient in gradients]
        finite = [self._add_up(results, counts, wire) for wire in gathered]
        if not all(finite):
            self._forget(gradients)
        return dict(zip(self._sparse, results, strict=True))

    def _add_up(self, results: Sequence[Any], counts: Sequence[int], wire: Any) -> bool:
        """Add one rank's selections (values, then places) / ranks to the results; False when one is not finite."""
        values, places = paddle.split(wire, 2)
        values = paddle.view(values, "float32").scale(1.0 / self._world_size)
        for result, part, where in zip(
            results, paddle.split(values, counts), paddle.split(places, counts), strict=True
        ):
            # The places of one rank differ from each other. index_add_ says this too, and takes ten times as long.
            paddle.scatter_(result, where, paddle.gather(result, where).add_(part))
        return bool(paddle.isfinite(values).all())

    def _all_gather(self, wire: Any) -> list[Any]:
        if self._world_size == 1:
            return [wire]
        gathered: list[Any] = []
        paddle.distributed.all_gather(gathered, wire, group=self._group)
        return gathered

    def _take_out(self, name: str, places: Any) -> None:
        zeros = paddle.zeros([places.shape[0]], "float32")
        paddle.scatter_(self._pending[name], places, zeros)
        if self._settings.momentum_factor_masking:
            paddle.scatter_(self._velocities[name], places, zeros)

    def _kept_zeros(self, gradient: Gradient) -> Any:
        """Zeros over the last step's result: on CPU, new memory costs more than what is done with it."""
        if gradient.name in self._results:
            return self._results[gradient.name].zero_()
        self._results[gradient.name] = paddle.zeros([gradient.elements], "float32")
        return self._results[gradient.name]

    def _forget(self, gradients: Sequence[Gradient]) -> None:
        """After an overflow on any rank, on every rank: what is kept would bring it back in each later step."""
        for gradient in gradients:
            self._pending.pop(gradient.name, None)
            self._velocities.pop(gradient.name, None)


def _with_suffix(state: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {key.removesuffix(suffix): value.clone() for key, value in state.items() if key.endswith(suffix)}


def _largest(values: Any, count: int) -> Any:
    """Places (int32) of the ``count`` largest absolute values of a flat tensor, exactly; NaN counts as largest.

    A selection among all elements is the dear part of DGC on CPU. A sample gives a bound that a few more than
    ``count`` elements reach, and the selection is made among these. Source: section 5 of the paper.
    """
    sizes = values.abs()
    if values.shape[0] > 4 * _SAMPLE and 2 * count < values.shape[0]:
        candidates = _above_guess(sizes, count)
        if candidates.shape[0] >= count:
            return paddle.gather(candidates, _top(paddle.gather(sizes, candidates), count)).cast("int32")
    return _top(sizes, count).cast("int32")


def _above_guess(sizes: Any, count: int) -> Any:
    """Places (int64) of all elements that are not below a guessed bound: most likely ``count`` of them, or more."""
    sample = sizes[:: (sizes.shape[0] // _SAMPLE) | 1]  # odd: widths of layers are even, and a column is no sample
    expected = count * sample.shape[0] / sizes.shape[0]
    bound = sample[_top(sample, math.ceil(expected + 3 * math.sqrt(expected) + 1))].min()
    return paddle.logical_not(sizes < bound).nonzero().reshape([-1])


def _top(sizes: Any, count: int) -> Any:
    """Places (int64) of the ``count`` largest elements, in no order."""
    if not sizes.place.is_cpu_place():
        return paddle.topk(sizes, count, sorted=False)[1]
    # Paddle's CPU kernel sorts: three times slower than this for 0.1 % of the elements, worse for more.
    first = sizes.shape[0] - count
    return paddle.to_tensor(np.argpartition(sizes.numpy(), first)[first:] if first else np.arange(count))
