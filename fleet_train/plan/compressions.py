"""The compressions: every value of the knob ``compression``, and what the plan needs to know about it.

To add one, add it to the schema and here, to `fleet_train.collectives.methods.registry.METHODS`, to
`fleet_train.plan.simulate.methods.METHODS`, to the table of strategies that go together, and to the effects of knobs in
the tests. A missing entry in one of them is an error when a plan or a program is made, never another compression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleet_train.plan.compression_settings import (
    FLOAT_BYTES,
    SPARSE_BYTES,
    dgc_kept_elements,
    dgc_settings,
    powersgd_reduced_elements,
    powersgd_settings,
)
from fleet_train.plan.phases import CollectiveSpec
from fleet_train.plan.plan import ITEM_BYTES, Bucket
from fleet_train.plan.quantised import gradient_settings
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of

Exchanges = tuple[CollectiveSpec, ...]


@dataclass(frozen=True)
class Compression:
    """``sent``: the exchanges of a bucket in a step at full strength; True = a hierarchical allreduce carries it."""

    sent: Callable[[Bucket, Profile, bool], Exchanges]
    wire_dtype: str = ""
    """The dtype on the wire; empty = the gradient's own. With local groups, only between their leaders."""
    keeps_nan: bool = False
    """Whether a NaN of a gradient would stay in the kept state and be sent later."""


def _dense(bucket: Bucket, _: Profile, __: bool) -> Exchanges:
    return (CollectiveSpec("allreduce", bucket.nbytes, ITEM_BYTES[bucket.dtype]),)


def _in_16_bits(bucket: Bucket, _: Profile, hierarchical: bool) -> Exchanges:
    if hierarchical:
        return (CollectiveSpec("allreduce", bucket.nbytes, ITEM_BYTES[bucket.dtype], between_item_bytes=2),)
    return (CollectiveSpec("allreduce", 2 * bucket.elements, 2),)


def _in_few_bits(bucket: Bucket, profile: Profile, _: bool) -> Exchanges:
    return (CollectiveSpec("quantised", bucket.nbytes, ITEM_BYTES[bucket.dtype], quantised=gradient_settings(profile)),)


def _factors(bucket: Bucket, profile: Profile, _: bool) -> Exchanges:
    elements = powersgd_reduced_elements(bucket, powersgd_settings(profile))
    return tuple(CollectiveSpec("allreduce", FLOAT_BYTES * number, FLOAT_BYTES) for number in elements)


def _largest(bucket: Bucket, profile: Profile, _: bool) -> Exchanges:
    settings = dgc_settings(profile)
    selected, whole = dgc_kept_elements(bucket, settings, settings.rampup_begin_step + settings.rampup_step)
    sparse = (CollectiveSpec("allgather", SPARSE_BYTES * selected, SPARSE_BYTES),) if selected else ()
    return sparse + ((CollectiveSpec("allreduce", FLOAT_BYTES * whole, FLOAT_BYTES),) if whole else ())


COMPRESSIONS: dict[str, Compression] = {
    "none": Compression(_dense),
    "bf16": Compression(_in_16_bits, wire_dtype="bfloat16"),
    "fp16": Compression(_in_16_bits, wire_dtype="float16"),
    "int8": Compression(_in_few_bits),
    "int4": Compression(_in_few_bits),
    "powersgd": Compression(_factors, keeps_nan=True),
    "dgc": Compression(_largest, keeps_nan=True),
}


def compression_of(name: str) -> Compression:
    """The plan's entry for a compression, by the knob's value. Raises ConversionError for an unknown one."""
    return entry_of("compression", name, COMPRESSIONS, "bytes in the plan")


def collectives_of(bucket: Bucket, profile: Profile, hierarchical: bool) -> Exchanges:
    """The exchanges of a bucket in a step at full strength, by its compression."""
    return compression_of(bucket.compression).sent(bucket, profile, hierarchical)
