"""From a program's gradients to the plan that all ranks carry out: their order, open settings, the agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.cluster.store.client import Variants
from fleet_train.collectives.averaging import Held
from fleet_train.collectives.job import Job
from fleet_train.collectives.join import glance, refuse_other_ranks
from fleet_train.convert.paddle_optimizers import state_values_per_parameter
from fleet_train.errors import ConversionError, ScheduleMismatch
from fleet_train.log import log_once
from fleet_train.plan import CommPlan, TensorSpec, build_plan, first_difference
from fleet_train.plan.choose import JUDGED, MOST_COMMUNICATORS, PAPER, Choice, Conditions, choose, decline, needs_link
from fleet_train.plan.price import ENQUEUED, TYPICAL, Network
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.profile.profile import comparable, first_differing_knob


@dataclass(frozen=True)
class ReadyGradient:
    """A parameter, its gradient's value, and where in the block that value is made."""

    parameter: Any
    value: Any
    position: int

    @property
    def gradient(self) -> TensorSpec:
        return TensorSpec(
            self.parameter.name, tuple(int(size) for size in self.value.shape), dtype_name(self.value.dtype)
        )


def summed_over_uses(params_grads: Sequence[tuple[Any, Any]]) -> tuple[list[tuple[Any, Any]], list[str]]:
    """One pair per parameter, in the order of first appearance, and the names of those that had several.

    PIR makes a value for each use of a name (``ParamAttr(name="w")`` in two places), so ``backward`` gives a gradient
    for each. Their sum is the gradient of the parameter; Paddle 3.3.1 alone updates once per use, which is the same
    for plain SGD only.
    """
    uses: dict[str, list[tuple[Any, Any]]] = {}
    for parameter, value in params_grads:
        uses.setdefault(parameter.name, []).append((parameter, value))
    several = [name for name, pairs in uses.items() if len(pairs) > 1]
    return [(pairs[0][0], _sum(pairs)) for pairs in uses.values()], several


def _sum(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Appended after the last of the values; a single value unchanged, None for no value."""
    values = [value for _, value in pairs if value is not None]
    if len(values) < 2:
        return values[0] if values else None
    positions = positions_of(values[0])
    last = max(
        (_locate(parameter, value, positions) for parameter, value in pairs if value is not None),
        key=lambda item: item.position,
    )
    paddle.pir.set_insertion_point_after(last.value.get_defining_op())
    total = paddle.add_n(values)
    paddle.pir.reset_insertion_point_to_end()
    return total


def uses_a_name_twice(program: Any) -> bool:
    """Whether ``program`` has several values for one parameter."""
    names = [op.attrs()["parameter_name"] for op in program.global_block().ops if op.name() == "builtin.parameter"]
    return len(set(names)) < len(names)


def positions_of(value: Any) -> dict[int, int]:
    """The position of each operator in the block that makes ``value``, by its id."""
    return {op.id(): position for position, op in enumerate(value.get_defining_op().get_parent_block().ops)}


def in_ready_order(params_grads: Sequence[tuple[Any, Any]]) -> list[ReadyGradient]:
    """The gradients by the position of the operator that makes each; parameters without a gradient are left out.

    Raises ConversionError for gradients that cannot be averaged as dense tensors.
    """
    present = [(parameter, value) for parameter, value in params_grads if value is not None]
    if not present:
        raise ConversionError("no parameter has a gradient: does the loss depend on a parameter that is not frozen?")
    positions = positions_of(present[0][1])
    ready = [_locate(parameter, value, positions) for parameter, value in present]
    return sorted(ready, key=lambda item: (item.position, item.parameter.name))


def _locate(parameter: Any, value: Any, positions: dict[int, int]) -> ReadyGradient:
    if not value.is_dense_tensor_type():
        raise ConversionError(
            f"the gradient of '{parameter.name}' is sparse (selected rows); build its layer with sparse=False, so that "
            "it can be averaged over the ranks"
        )
    if any(size < 0 for size in value.shape):
        raise ConversionError(f"the gradient of '{parameter.name}' has the unknown shape {list(value.shape)}")
    position = positions.get(value.get_defining_op().id())
    if position is None:
        raise ConversionError(
            f"the gradient of '{parameter.name}' is computed inside a control-flow block; compute the loss in the "
            "main block"
        )
    return ReadyGradient(parameter, value, position)


def dtype_name(dtype: Any) -> str:
    """``float32`` for ``paddle.float32``."""
    return str(dtype).rsplit(".", 1)[-1]


def agree(job: Job, name: str, value: Any) -> None:
    """Raise ScheduleMismatch on every rank unless all of them pass the same JSON value for ``name``."""
    brought = job.compare(f"agree on {name} {job.count(f'agree on {name}')}", {name: value})
    refuse_other_ranks(brought, job.cluster)


def agreed_plan(
    job: Job,
    profile: Profile,
    ready: Sequence[ReadyGradient],
    values: Held,
    exchanges: Sequence[CollectiveSpec],
    optimizer: Any,
) -> tuple[CommPlan, Profile]:
    """The plan that all ranks carry out, and the profile with the settings chosen for it; all ranks call it.

    Open settings get numbers, and, if the profile asks for that, a compression that does not pay is left out; rank 0
    reports both. The link is measured only if that decides something. ``values``: what LocalSGD averages;
    ``exchanges``: what passes over the program send.
    """
    gradients = [item.gradient for item in ready]
    averaged = [_spec_of(value) for value in (*values.parameters, *values.statistics)]

    def planned(chosen: Profile) -> CommPlan:
        return build_plan(gradients, job.cluster, chosen, averaged, exchanges, state_values_per_parameter(optimizer))

    plan = planned(profile)
    # Compare the request first: ranks with other scripts or profiles would not measure together.
    agree_on_plan(job, plan, profile)
    judged = JUDGED if profile.compression_declines else frozenset[str]()
    if job.network is None and needs_link(profile, gradients, job.cluster, judged):
        job.network = _measured(job)
    conditions = _conditions(job)
    is_known = job.network is not None or (profile.link_gigabits > 0 and profile.link_latency_ms > 0)
    kept = decline(profile, gradients, job.cluster, conditions, JUDGED) if is_known else Choice(profile)
    choice = choose(kept.profile, gradients, job.cluster, conditions)
    log_once([*kept.sentences, *choice.sentences], job.cluster.rank)
    if choice.profile != profile:
        plan = planned(choice.profile)
        agree_on_plan(job, plan, choice.profile)
    job.agreed(plan)
    return plan, choice.profile


def _measured(job: Job) -> Network:
    """The ranks communicate over the link between nodes, if there are several."""
    link = glance(job)
    return Network(link, PAPER.inside) if job.cluster.node_num > 1 else Network(PAPER.between, link)


def _conditions(job: Job) -> Conditions:
    source = job.network_source if job.network else "assumed"
    most, costs = (MOST_COMMUNICATORS, TYPICAL) if job.engine.side_by_side else (1, ENQUEUED)
    return Conditions(job.network or PAPER, costs, most_communicators=most, source=source)


def _spec_of(value: Any) -> TensorSpec:
    """A parameter's or statistic's name, shape and dtype."""
    name = str(value.get_defining_op().attrs().get("parameter_name", value.name))
    return TensorSpec(name, tuple(int(size) for size in value.shape), dtype_name(value.dtype))


def agree_on_plan(job: Job, plan: CommPlan, profile: Profile) -> None:
    """Raise ScheduleMismatch on every rank unless all have the same plan and profile.

    Digests are exchanged first; full plans and profiles only if the digests differ.
    """
    number = job.count("plan")
    if job.compare(f"plan {number}", plan.digest):
        brought = job.compare(f"plan {number} in full", {"plan": plan.to_json(), "profile": comparable(profile)})
        raise ScheduleMismatch(_explain(job, brought))


def _explain(job: Job, brought: Variants) -> str:
    (zero, ours), (others, theirs) = brought[:2]
    other = others[0][0]
    differing = job.world_size - sum(last - first + 1 for first, last in zero)
    where = first_differing_knob(ours["profile"], theirs["profile"]) or first_difference(ours["plan"], theirs["plan"])
    return (
        f"{job.cluster.describe(0)} and {job.cluster.describe(other)} would communicate differently: {where} "
        f"(here = rank 0, there = rank {other}); {differing} of {job.world_size} ranks differ from rank 0. "
        "Start every rank with the same script, arguments and profile"
    )
