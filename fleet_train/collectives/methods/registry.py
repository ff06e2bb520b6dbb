"""What the method of a bucket is made from; the compression's description makes it.

A method without state needs nothing else: see `Parts.stateless` and the tensors' functions beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import paddle

from fleet_train.collectives.engine import HAND_OVER, Collective, Stage, Stages
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import (
    Allreduce,
    BucketMethod,
    CastAllreduce,
    Cut,
    DenseMethod,
    Remembers,
    Stateless,
    cast_for,
    cut_for,
    flatten,
)
from fleet_train.collectives.methods.quantised import QuantisedMethod, QuantisedSums
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket, CommPlan
from fleet_train.profile import Profile
from fleet_train.profile.methods import compression_of, description_of
from fleet_train.profile.methods.quantised import quantised_settings


@dataclass(frozen=True)
class Parts:
    """The parts of a method. ``allreduce`` is its communicator's, and casts if the plan is hierarchical. ``quantised``:
    if the plan has quantised sums."""

    bucket: Bucket
    job: Job
    plan: CommPlan
    profile: Profile
    allreduce: Allreduce
    quantised: QuantisedSums | None = None
    lookups: Mapping[str, Any] = field(default_factory=dict)
    """The lookups of embeddings' tables, by parameter: a `fleet_train.collectives.methods.rows.Lookups`."""

    @property
    def reads_values(self) -> bool:
        """Whether the host may read a value in a step."""
        return self.job.engine.reads_values

    @property
    def cut(self) -> Cut:
        """How the bucket's buffer is split into gradients."""
        return cut_for(self.reads_values)

    @property
    def group(self) -> Any:
        """The process group of the bucket's communicator."""
        return self.job.communicators(self.plan.communicators)[self.bucket.communicator]

    hand_over: ClassVar[Stage] = HAND_OVER
    """What a method yields once it no longer reads the gradients."""

    def flatten(self, tensors: Sequence[Any]) -> Any:
        """All elements in one [elements] tensor."""
        return flatten(tensors)

    def split(self, buffer: Any) -> list[Any]:
        """A buffer [elements] that is no longer needed, as tensors of the gradients' shapes."""
        return self.cut(buffer, [gradient.shape for gradient in self.bucket.gradients])

    def cast(self, tensor: Any, dtype: str) -> Any:
        """``tensor`` in ``dtype``, by name."""
        return cast_for(self.reads_values)(tensor, dtype)

    def all_gather(self, tensor: Any, more: bool = False) -> Stages[Any]:
        """The flat ``tensor`` of each rank, [ranks, elements], on every rank. ``more``: collectives follow it."""
        gathered = paddle.empty([self.plan.world_size * tensor.shape[0]], tensor.dtype)
        yield Stage((Collective("all_gather", self.group, tensor, output=gathered),), more)
        return gathered.reshape([self.plan.world_size, -1])

    def stateless(self, average: Callable[[Sequence[Any]], Stages[list[Any]]]) -> BucketMethod:
        """A method that keeps nothing between steps; ``average`` as in `BucketMethod`."""
        return _FromStages(average)

    def make(self) -> BucketMethod:
        """The method of the bucket's compression. Raises ConversionError for an unknown one."""
        method: BucketMethod = description_of(self.bucket).on_ranks(self)
        return method


class _FromStages(Stateless):
    def __init__(self, average: Callable[[Sequence[Any]], Stages[list[Any]]]) -> None:
        self.average = average


def dense(parts: Parts) -> BucketMethod:
    """The method that sends all of a gradient, or 16 bits of it."""
    return DenseMethod(parts.bucket, allreduce_of(parts), parts.plan.world_size, parts.cut)


def allreduce_of(parts: Parts) -> Allreduce:
    """The sum of whole gradients in the compression's dtype; that between the leaders of local groups casts by
    itself."""
    wire_dtype = compression_of(parts.bucket.compression).wire_dtype
    if not wire_dtype or parts.plan.group_size:
        return parts.allreduce
    return CastAllreduce(parts.allreduce, wire_dtype, cast_for(parts.reads_values))


def quantised(parts: Parts) -> BucketMethod:
    """The method that sends integers of a few bits with a scale per block."""
    bucket = parts.bucket
    if parts.quantised is None:
        raise ConversionError(f"compression: {bucket.compression} was planned without links for quantised sums")
    settings = quantised_settings(parts.profile, bucket.compression)
    rounded_sum = parts.quantised.make(bucket.communicator, bucket.gradients[0].name, bucket.elements, settings)
    return QuantisedMethod(bucket, rounded_sum, parts.plan.world_size, parts.cut)


Array = np.ndarray[Any, Any]
Methods = Sequence[tuple[Bucket, Remembers]]


def read_state(methods: Methods) -> tuple[dict[str, Array], dict[str, Array]]:
    """Read the methods' state: (state that is equal on all ranks, this rank's own state), saved on one cluster, loaded
    on another.

    Names are ``<kind>/<parameter>.<what>`` and ``<kind>/step``, without the bucket: another profile may form other
    buckets.
    """
    alike: dict[str, Array] = {}
    own: dict[str, Array] = {}
    for _, method in methods:
        for name, tensor in method.state().items():
            target = own if name.endswith(method.own_state) else alike
            target[f"{method.kind}/{name}"] = np.array(tensor.numpy())
    return alike, own


def write_state(methods: Methods, arrays: Mapping[str, Array], place: Any) -> list[str]:
    """Restore what ``read`` returned; returns the names that belong to no method here.

    A method that finds nothing of its kind starts as new.
    """
    used: set[str] = set()
    with dynamic_mode():
        for bucket, method in methods:
            wanted = _of_bucket(bucket, method.kind, arrays)
            used.update(f"{method.kind}/{name}" for name in wanted)
            method.load_state({name: paddle.to_tensor(array, place=place) for name, array in wanted.items()})
    return sorted(arrays.keys() - used)


def _of_bucket(bucket: Bucket, kind: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    members = {gradient.name for gradient in bucket.gradients}
    mine = {name.removeprefix(f"{kind}/"): array for name, array in arrays.items() if name.startswith(f"{kind}/")}
    return {name: array for name, array in mine.items() if name == "step" or name.rpartition(".")[0] in members}
