"""Every profile of the catalogue as a candidate: its risk, plan and predicted time, or why it is ruled out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.errors import FleetTrainError
from fleet_train.plan import CommPlan, TensorSpec
from fleet_train.plan.build import build_chosen
from fleet_train.plan.choose import MOST_COMMUNICATORS, ChoiceConditions, choose
from fleet_train.plan.price import ENQUEUED, PAPER, TYPICAL, Compute, Costs, Link, Network, Prediction, predict
from fleet_train.plan.pricing import traffic
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.profile.catalogue import with_assignments
from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.recommend.options import LOCAL_STEPS, LOSSY, NONE, ROUNDING

_PROGRAM_KNOBS = ("amp_level", "accumulate_steps", "recompute_segments", "sync_batch_norm")


@dataclass(frozen=True)
class Measurements:
    """Measurements: the script's gradients and other exchanged values, its computing, the links."""

    gradients: tuple[TensorSpec, ...]
    averaged: tuple[TensorSpec, ...]
    statistics: tuple[CollectiveSpec, ...]
    state_values: int
    compute_seconds: float
    network: Network
    is_gloo: bool = True

    @property
    def costs(self) -> Costs:
        """What exchanges take beside the link: typical ones, since trials decide."""
        return TYPICAL if self.is_gloo else ENQUEUED


@dataclass(frozen=True)
class Candidate:
    """One profile of the catalogue with the chosen numbers, and the prediction of its step after any warm-up."""

    name: str
    risk: str
    profile: Profile
    plan: CommPlan
    prediction: Prediction
    codec_seconds: float
    leaving_bytes: float

    @property
    def step(self) -> float:
        return self.prediction.step


@dataclass(frozen=True)
class RuledOut:
    name: str
    reason: str


def network_of(links: Mapping[str, Any]) -> Network:
    """Measured links by location, as JSON; links that the cluster lacks get the defaults."""
    network = PAPER
    if "between nodes" in links:
        network = replace(network, between=Link(**links["between nodes"]["link"]))
    if "inside a node" in links:
        network = replace(network, inside=Link(**links["inside a node"]["link"]))
    return network


def risk_of(profile: Profile) -> str:
    """A profile's risk to accuracy, the greatest of several."""
    if profile.use_local_sgd:
        return LOCAL_STEPS
    if profile.compression == "none":
        return NONE
    return ROUNDING if profile.compression in ("bf16", "fp16") else LOSSY


def consider(
    measured: Measurements, cluster: Cluster, most_communicators: int = MOST_COMMUNICATORS, settings: Sequence[str] = ()
) -> tuple[list[Candidate], list[RuledOut]]:
    """The catalogue, each profile with ``settings`` (``knob=value``), with predictions from the measurements; the
    shortest predicted step first.
    """
    candidates: list[Candidate] = []
    ruled_out: list[RuledOut] = []
    for name in profile_names():
        shipped = load_profile(name)
        try:
            profile = with_assignments(shipped, settings)
            reason = _unfit(shipped, profile, measured, cluster)
            if not reason:
                candidates.append(_price(name, profile, measured, cluster, most_communicators))
                continue
        except FleetTrainError as error:
            reason = str(error)
        ruled_out.append(RuledOut(name, reason))
    distinct, same = _distinct(sorted(candidates, key=lambda candidate: candidate.step))
    return distinct, [*ruled_out, *same]


def _price(name: str, profile: Profile, measured: Measurements, cluster: Cluster, most_communicators: int) -> Candidate:
    compute = Compute.of(measured.compute_seconds)
    conditions = ChoiceConditions(measured.network, measured.costs, compute, most_communicators, "measured")
    chosen = choose(profile, measured.gradients, cluster, conditions).profile
    plan = build_chosen(
        measured.gradients, cluster, chosen, measured.averaged, measured.statistics, measured.state_values
    )
    prediction = predict(plan, cluster, measured.network, compute, costs=measured.costs)
    codec = measured.costs.of(profile.compression).codec * plan.gradient_bytes
    counted: Any = traffic(plan, cluster)
    leaving = counted.most_leaving if cluster.node_num > 1 else counted.most_sent
    return Candidate(name, risk_of(profile), chosen, plan, prediction, codec, leaving)


def _unfit(shipped: Profile, profile: Profile, measured: Measurements, cluster: Cluster) -> str:
    """Why a profile is not a candidate here, or nothing. ``profile``: the shipped one with the user's settings."""
    changes = [knob for knob in _PROGRAM_KNOBS if getattr(shipped, knob) != getattr(Profile(), knob)]
    if changes:
        return f"{changes[0]} changes what a rank computes, not what it sends: decide about it separately"
    if measured.is_gloo and any(name.startswith("NCCL_") for name in profile.environment):
        return "sets variables that NCCL reads, but these ranks use Gloo"
    per_node = len(cluster.ranks_on_node(0))
    if profile.use_hierarchical_allreduce and not 1 < per_node < cluster.world_size:
        return "these ranks form no hierarchy: it needs several nodes with several ranks each"
    if shipped.num_threads != 1:
        return "shows the old recipe's knobs; multi_node is its equivalent with today's"
    return ""


def _distinct(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[RuledOut]]:
    """Profiles with the same plan here are one candidate."""
    by_digest: dict[str, Candidate] = {}
    same: list[RuledOut] = []
    for candidate in candidates:
        plan = replace(candidate.plan, profile_name="", profile_digest="", chosen="", notes=())
        if plan.digest in by_digest:
            same.append(RuledOut(candidate.name, f"has the same plan here as {by_digest[plan.digest].name}"))
        else:
            by_digest[plan.digest] = candidate
    return list(by_digest.values()), same
