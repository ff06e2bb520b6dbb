"""What will be communicated: gradients -> buckets -> collectives, as pure data. No Paddle."""

from fleet_train.plan.choose import build_plan
from fleet_train.plan.explain import explain
from fleet_train.plan.plan import CommPlan, first_difference
from fleet_train.profile.methods.base import Bucket, TensorSpec

Gradient = TensorSpec
"""The former name of `TensorSpec`."""

__all__ = ["Bucket", "CommPlan", "Gradient", "TensorSpec", "build_plan", "explain", "first_difference"]
