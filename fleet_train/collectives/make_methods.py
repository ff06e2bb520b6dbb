"""From a plan's bucket to the method that carries it out."""

from __future__ import annotations

from typing import Any

from fleet_train.collectives.dgc import DgcMethod
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods import BucketMethod, DenseMethod
from fleet_train.collectives.powersgd import PowerSgdMethod
from fleet_train.collectives.reducers import CastReducer, Reducer
from fleet_train.plan import Bucket, CommPlan
from fleet_train.plan.compression_settings import DgcSettings, powersgd_settings
from fleet_train.profile import Profile

WIRE_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def make_method(
    bucket: Bucket, job: Job, plan: CommPlan, profile: Profile, reducer: Reducer, dgc: DgcSettings | None
) -> BucketMethod:
    """The method of one bucket. ``reducer`` is its communicator's; it casts already where the plan is hierarchical."""
    if bucket.compression == "powersgd":
        return PowerSgdMethod(bucket, reducer, plan.world_size, powersgd_settings(profile))
    if bucket.compression == "dgc" and dgc is not None:
        group: Any = job.communicators(plan.communicators)[bucket.communicator]
        return DgcMethod(bucket, group, reducer, plan.world_size, dgc)
    if bucket.compression in WIRE_DTYPES and not plan.team_size:
        reducer = CastReducer(reducer, WIRE_DTYPES[bucket.compression])
    return DenseMethod(bucket, reducer, plan.world_size)
