"""Every profile of the catalogue as a candidate: its risk, plan and predicted time, or why it is ruled out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fleet_train.cluster import Cluster
from fleet_train.errors import FleetTrainError
from fleet_train.plan import CommPlan, TensorSpec
from fleet_train.plan.build import build_chosen
from fleet_train.plan.choose import MOST_COMMUNICATORS, Conditions, choose
from fleet_train.plan.price import PAPER, Compute, Costs, Link, Network, Prediction, predict
from fleet_train.plan.pricing import traffic
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.profile.catalogue import check_assignments, with_assignments
from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.recommend.options import LOCAL_STEPS, LOSSY, NONE, ROUNDING

RATES_GIGABITS = tuple(0.01 * 10 ** (step / 4) for step in range(17))
"""The bandwidths for which the choice is evaluated: 10 Mb/s to 100 Gb/s, four per decade."""
_PAYS = 0.95
"""Relative to the step of the shipped profile: changed knobs that are slower than this are not used."""
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
    costs: Costs
    is_gloo: bool = True


@dataclass(frozen=True)
class Candidate:
    """One profile with the chosen numbers, and the prediction of its step after any warm-up.

    ``name``: that of the catalogue's profile ``extends``, with ``changes`` to it if there are any.
    """

    name: str
    extends: str
    changes: Mapping[str, Any]
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
    fixed = check_assignments(settings).keys()
    candidates: list[Candidate] = []
    ruled_out: list[RuledOut] = []
    for name in profile_names():
        shipped = load_profile(name)
        try:
            profile = with_assignments(shipped, settings)
            reason = _unfit(shipped, profile, measured, cluster)
            if not reason:
                allowed = [{}, *(changes for changes in variants(profile) if not fixed & changes.keys())]
                priced = [_price(name, profile, each, measured, cluster, most_communicators) for each in allowed]
                candidates += _worth_trying(priced[0], priced[1:])
                continue
        except FleetTrainError as error:
            reason = str(error)
        ruled_out.append(RuledOut(name, reason))
    distinct, same = _distinct(sorted(candidates, key=lambda candidate: candidate.step))
    return distinct, [*ruled_out, *same]


def predicted_at(candidate: Candidate, measured: Measurements, cluster: Cluster, gigabits: float) -> float:
    """Seconds of the candidate's step if the link between nodes, or inside the only one, had that bandwidth."""
    network = measured.network
    if cluster.node_num > 1:
        network = replace(network, between=replace(network.between, bytes_per_second=gigabits * 1e9 / 8))
    else:
        network = replace(network, inside=replace(network.inside, bytes_per_second=gigabits * 1e9 / 8))
    return predict(candidate.plan, cluster, network, Compute.of(measured.compute_seconds), costs=measured.costs).step


def thresholds(candidates: Sequence[Candidate], measured: Measurements, cluster: Cluster) -> list[tuple[float, str]]:
    """(Gb/s, name): from this rate on the named candidate has the shortest predicted step."""
    changes: list[tuple[float, str]] = []
    for rate in RATES_GIGABITS:
        steps: Mapping[str, float] = {
            candidate.name: predicted_at(candidate, measured, cluster, rate) for candidate in candidates
        }
        best = min(steps, key=lambda name: steps[name])
        kept = changes[-1][1] if changes else best
        # A gain below 1 % does not justify a change.
        best = kept if kept in steps and steps[kept] <= 1.01 * steps[best] else best
        if not changes or changes[-1][1] != best:
            changes.append((rate, best))
    return changes


def _price(
    name: str,
    profile: Profile,
    changes: Mapping[str, Any],
    measured: Measurements,
    cluster: Cluster,
    most_communicators: int,
) -> Candidate:
    compute = Compute.of(measured.compute_seconds)
    conditions = Conditions(measured.network, measured.costs, compute, most_communicators, "measured")
    changed = profile.with_settings("the recommendation", **changes) if changes else profile
    chosen = choose(changed, measured.gradients, cluster, conditions).profile
    plan = build_chosen(
        measured.gradients, cluster, chosen, measured.averaged, measured.statistics, measured.state_values
    )
    prediction = predict(plan, cluster, measured.network, compute, costs=measured.costs)
    codec = measured.costs.of(profile.compression).codec * plan.gradient_bytes
    counted: Any = traffic(plan, cluster)
    leaving = counted.most_leaving if cluster.node_num > 1 else counted.most_sent
    called = f"{name} {in_words(changes)}".rstrip()
    return Candidate(called, name, changes, risk_of(profile), chosen, plan, prediction, codec, leaving)


def _worth_trying(shipped: Candidate, turned: Sequence[Candidate]) -> list[Candidate]:
    """The shipped profile and, if changing its knobs pays, the mildest change that is about as good as any."""
    best = min((candidate.step for candidate in turned), default=shipped.step)
    if best > _PAYS * shipped.step:
        return [shipped]
    enough = min(best / _PAYS, _PAYS * shipped.step)
    return [shipped, next(candidate for candidate in turned if candidate.step <= enough)]


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


_LONGER = (1, 2, 4)
_COARSER = {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}
"""Other dtypes for averaging parameters or outer differences. int4 is streaming_diloco's, with its requirements."""


def variants(profile: Profile) -> Iterator[dict[str, Any]]:
    """Settings that change how often and how exactly replicas are averaged, the mildest first; none if gradients are
    exchanged in every step: each of their compressions has its own profile.
    """
    if not profile.use_local_sgd:
        return
    dtypes = (profile.local_sgd_dtype, *_COARSER.get(profile.local_sgd_dtype, ()))
    longer = _LONGER if profile.local_sgd_schedule == "constant" else (1,)
    turned = [(factor, dtype) for factor, dtype in product(longer, dtypes)][1:]
    for factor, dtype in sorted(turned, key=lambda change: change[0] * (1 + dtypes.index(change[1]))):
        changes: dict[str, Any] = {"local_sgd_steps": factor * profile.local_sgd_steps} if factor > 1 else {}
        if dtype != profile.local_sgd_dtype:
            changes["local_sgd_dtype"] = dtype
        yield changes


def in_words(changes: Mapping[str, Any]) -> str:
    """The suffix of a candidate's name after that of the profile."""
    return " ".join(f"{knob}={value}" for knob, value in changes.items())
