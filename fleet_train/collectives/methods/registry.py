"""Creates the method that carries out a plan's bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import (
    Allreduce,
    BucketMethod,
    CastAllreduce,
    DenseMethod,
    Remembers,
    cast_for,
    cut_for,
)
from fleet_train.collectives.methods.dgc import DgcMethod
from fleet_train.collectives.methods.powersgd import PowerSgdMethod
from fleet_train.collectives.methods.quantised import QuantisedMethod
from fleet_train.collectives.methods.quantised_sum import QuantisedSums
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket, CommPlan
from fleet_train.plan.compressions import DgcSettings, compression_of, powersgd_settings
from fleet_train.plan.phases import gradient_settings
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of


@dataclass(frozen=True)
class _Parts:
    """The parts of a method. ``allreduce`` is its communicator's, and casts if the plan is hierarchical."""

    bucket: Bucket
    job: Job
    plan: CommPlan
    profile: Profile
    allreduce: Allreduce
    dgc: DgcSettings | None
    quantised: QuantisedSums | None


def _dense(parts: _Parts) -> BucketMethod:
    return DenseMethod(parts.bucket, parts.allreduce, parts.plan.world_size, cut_for(parts.job.engine.reads_values))


def _in_16_bits(parts: _Parts) -> BucketMethod:
    if parts.plan.team_size:
        return _dense(parts)
    on_host = parts.job.engine.reads_values
    allreduce = CastAllreduce(parts.allreduce, compression_of(parts.bucket.compression).wire_dtype, cast_for(on_host))
    return DenseMethod(parts.bucket, allreduce, parts.plan.world_size, cut_for(on_host))


def _in_few_bits(parts: _Parts) -> BucketMethod:
    bucket = parts.bucket
    if parts.quantised is None:
        raise ConversionError(f"compression: {bucket.compression} was planned without links for quantised sums")
    settings = gradient_settings(parts.profile)
    name = bucket.gradients[0].name
    carried = parts.quantised.make(bucket.communicator, name, bucket.elements, settings)
    return QuantisedMethod(bucket, carried, parts.plan.world_size, cut_for(parts.job.engine.reads_values))


def _powersgd(parts: _Parts) -> BucketMethod:
    settings, engine = powersgd_settings(parts.profile), parts.job.engine
    return PowerSgdMethod(
        parts.bucket, parts.allreduce, parts.plan.world_size, settings, engine.reads_values, engine.device.to_device
    )


def _dgc(parts: _Parts) -> BucketMethod:
    if parts.dgc is None:
        raise ConversionError("compression: dgc was planned for an optimizer whose momentum it has not taken over")
    group: Any = parts.job.communicators(parts.plan.communicators)[parts.bucket.communicator]
    reads_values = parts.job.engine.reads_values
    return DgcMethod(parts.bucket, group, parts.allreduce, parts.plan.world_size, parts.dgc, reads_values)


METHODS: dict[str, Callable[[_Parts], BucketMethod]] = {
    "none": _dense,
    "bf16": _in_16_bits,
    "fp16": _in_16_bits,
    "int8": _in_few_bits,
    "int4": _in_few_bits,
    "powersgd": _powersgd,
    "dgc": _dgc,
}
"""By the bucket's compression: `fleet_train.plan.compressions.COMPRESSIONS` has the same keys."""


def make_method(
    bucket: Bucket,
    job: Job,
    plan: CommPlan,
    profile: Profile,
    allreduce: Allreduce,
    dgc: DgcSettings | None,
    quantised: QuantisedSums | None,
) -> BucketMethod:
    """The method of one bucket. Raises ConversionError for a compression without a method."""
    make = entry_of("compression", bucket.compression, METHODS, "method on real ranks")
    return make(_Parts(bucket, job, plan, profile, allreduce, dgc, quantised))


def dtype_between_groups(compression: str) -> str:
    """The dtype in which the leaders of a hierarchical allreduce send float32 gradients to one another."""
    return compression_of(compression).wire_dtype or "float32"


# The state that the methods of all buckets keep between steps, by parameter: saved on one cluster, loaded on another.
#
# Names are ``<kind>/<parameter>.<what>`` and ``<kind>/step``, without the bucket: another profile may form other
# buckets.


Array = np.ndarray[Any, Any]
Methods = Sequence[tuple[Bucket, Remembers]]


def read_state(methods: Methods) -> tuple[dict[str, Array], dict[str, Array]]:
    """(state that is equal on all ranks, this rank's own state)."""
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
