"""Compressions that do not pay off: coding costs processor time, which a fast link does not save. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import fsum

from fleet_train.cluster import Cluster
from fleet_train.plan.build import build_settled
from fleet_train.plan.plan import CommPlan, TensorSpec
from fleet_train.plan.price.choose import (
    Choice,
    Conditions,
    assumed_computing,
    choose,
    is_worth_cutting,
    link_in_words,
    with_given_link,
)
from fleet_train.plan.price.predict import Compute, Paths, predict
from fleet_train.profile import Profile
from fleet_train.profile.buckets import DECLINED

JUDGED = frozenset({"int8", "int4"})
"""Compressions whose coding is expensive enough to be judged; others are always carried out."""
_INSTEAD = ("bf16", "none")
_IN_WORDS = {"none": "float32", "bf16": "bfloat16"}
_CLEARLY = 0.97
"""Relative to the price of the requested compression: anything above this does not count as faster."""


def decline(
    profile: Profile,
    gradients: Sequence[TensorSpec],
    cluster: Cluster,
    conditions: Conditions,
    judged: Collection[str] = JUDGED,
) -> Choice:
    """``profile``, with bfloat16 or float32 instead of a compression of ``judged`` if that makes a shorter step.

    Each is priced with the buckets chosen for it; computing times as in `fleet_train.plan.price.choose`.
    """
    if profile.compression not in judged or not is_worth_cutting(gradients, cluster):
        return Choice(profile)
    network = with_given_link(conditions.network, cluster, profile)
    paths = Paths(cluster, network, conditions.costs)
    others = {name: profile.with_choices("", compression=name) for name in (profile.compression, *_INSTEAD)}
    plans = {
        name: build_settled(gradients, cluster, choose(other, gradients, cluster, conditions).profile)
        for name, other in others.items()
    }
    computing = (conditions.compute,) if conditions.compute else assumed_computing(plans["none"], paths)
    prices = {name: _price(plan, cluster, paths, computing) for name, plan in plans.items()}
    best = min(_INSTEAD, key=lambda name: prices[name])
    if prices[best] > _CLEARLY * prices[profile.compression]:
        return Choice(profile)
    link, asked = link_in_words(network, cluster, profile, conditions), profile.compression
    settled = profile.with_choices(f"{DECLINED} for {link}", compression=best)
    return Choice(settled, (_sentence(asked, best, link, prices[best] / prices[asked]),))


def _price(plan: CommPlan, cluster: Cluster, paths: Paths, computing: Sequence[Compute]) -> float:
    """The step time, computing plus exposed communication, summed over ``computing``."""
    return fsum(predict(plan, cluster, paths.network, compute, warm_up=True, paths=paths).step for compute in computing)


def _sentence(asked: str, best: str, link: str, share: float) -> str:
    return (
        f"compression: {asked} is declined: over {link} encoding costs more than the saved bytes gain; "
        f"{_IN_WORDS[best]} is sent instead, for {share:.0%} of the predicted steps"
    )
