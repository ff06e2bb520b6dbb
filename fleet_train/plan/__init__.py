"""What will be communicated: gradients -> buckets -> collectives, as pure data. No Paddle."""

from fleet_train.plan.choose import build_plan
from fleet_train.plan.explain import explain
from fleet_train.plan.plan import Bucket, CommPlan, Gradient, first_difference

__all__ = ["Bucket", "CommPlan", "Gradient", "build_plan", "explain", "first_difference"]
