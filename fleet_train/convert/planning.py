"""Which profile and plan a program is trained with: what the script asks for, what the process and its device can carry
out, and what all ranks agree on.

Flags of the command line win over the script, the script over a profile's file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paddle

from fleet_train.cluster.at_import import advised, set_noted
from fleet_train.cluster.environment import asked_settings, asked_strategy
from fleet_train.cluster.store.client import Variants
from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.engine import Engine
from fleet_train.collectives.engines import CALC, OWN
from fleet_train.collectives.job import Job
from fleet_train.collectives.join import glance, refuse_other_ranks
from fleet_train.convert import process
from fleet_train.convert.paddle_optimizers import Unwrapped, reads_whole_parameters, state_values_per_parameter
from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ConversionError, ProfileError, ScheduleMismatch
from fleet_train.log import log_once
from fleet_train.plan import CommPlan, TensorSpec, build_plan, first_difference
from fleet_train.plan.choose import MOST_COMMUNICATORS, ChoiceConditions, choose, is_worth_cutting, needs_link
from fleet_train.plan.price import ENQUEUED, PAPER, TYPICAL, Network
from fleet_train.profile import Profile, check_flags, load_profile
from fleet_train.profile.catalogue import with_assignments
from fleet_train.profile.fleet_objects import asked_of_stock
from fleet_train.profile.knobs import AUTO, hidden, refuse_unknown, shown
from fleet_train.profile.methods import compression_of
from fleet_train.profile.methods.base import CollectiveSpec
from fleet_train.profile.profile import comparable, first_differing_knob

BARRIER_EVERY_STEPS_ON_NCCL = 10


def resolve(
    strategy: Any, by_init: Any, offered: Profile | None, wrappers: Unwrapped, node_num: int
) -> tuple[Profile, list[str]]:
    """The profile, and sentences for rank 0 about what was asked for in vain.

    ``strategy`` is that of ``distributed_optimizer``, ``by_init`` that of ``init``: the first one in which something
    was set is the script's, else ``offered``, that of ``spawn``. The launcher's ``--strategy`` replaces it, ``--set``
    changes single knobs of either. Raises ProfileError.
    """
    flag, settings = asked_strategy(os.environ), asked_settings(os.environ)
    given = [each for each in (strategy, by_init) if not _is_empty(each)]
    notices = []
    if len(given) == 2 and strategy is not by_init:
        notices.append("the strategy of fleet.distributed_optimizer is used, that of fleet.init is not")
    if given and offered is not None:
        notices.append(f"the function gives its own strategy; that of spawn is not used ({offered.name})")
    of_script = _profile_of(given[0]) if given else offered
    if flag is not None:
        profile = wrappers.under(load_profile(flag))
    else:
        profile = of_script or load_profile("multi_node" if node_num > 1 else "single_node")
        profile = wrappers.added_to(profile)
    if not given and (strategy is not None or by_init is not None):
        notices.append(f"nothing was set in the script's strategy: profile '{profile.name}' is used")
    profile = with_assignments(profile, settings)
    wrappers.refuse_steps_without_updates(profile)
    asked = {knob: getattr(of_script, knob) for knob in of_script.explicit} if of_script else {}
    asked |= wrappers.asked
    flags = " and ".join([f"--strategy {flag}"] * (flag is not None) + ["--set"] * bool(settings))
    return profile, notices + _overruled(flags, profile, asked)


def _overruled(flags: str, used: Profile, asked: Mapping[str, Any]) -> list[str]:
    """The sentence about what the script asks for and does not get."""
    lost = [
        f"{knob} is {_in_words(knob, getattr(used, knob))}, not {_in_words(knob, value)}"
        for knob, value in sorted(asked.items())
        if getattr(used, knob) != value
    ]
    return [f"{flags} wins over the script: {'; '.join(lost)}"] if lost and flags else []


def _in_words(knob: str, value: Any) -> str:
    return shown(hidden(value) if knob == "environment" else value)


def _is_empty(strategy: Any) -> bool:
    """Whether a strategy of ours or of Paddle asks for nothing: no object, or one in which nothing was set."""
    if strategy is None or isinstance(strategy, (str, Path, Profile)):
        return strategy is None
    return strategy.is_empty() if isinstance(strategy, DistributedStrategy) else not asked_of_stock(strategy)


def _profile_of(strategy: Any) -> Profile:
    if isinstance(strategy, (str, Path)):
        return load_profile(str(strategy))
    if isinstance(strategy, Profile):
        return strategy
    if isinstance(strategy, DistributedStrategy):
        return strategy.to_profile()
    return DistributedStrategy.from_stock(strategy).to_profile()


def apply_environment(profile: Profile) -> list[str]:
    """Set what can still be set; returns notes to the user.

    Paddle's flags take effect at run time; other variables are read at process start, which has passed. A variable that
    the user or the script has set in the environment is left unchanged; what the launcher has set by default or for a
    profile of its own, and what an earlier call has set, gives way. Raises ProfileError for unknown ``FLAGS_*``.
    """
    check_flags(profile, paddle.base.core.globals().keys())
    wanted, ours = profile.worker_environment(), advised(os.environ)
    differing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    kept = sorted(name for name in differing if name in os.environ and name not in ours)
    missing = {name: value for name, value in differing.items() if name not in kept}
    flags = {
        name: _typed(name, value)
        for name, value in wanted.items()
        if name.startswith("FLAGS_") and (name in missing or (name not in kept and process.has_set(name)))
    }
    late = sorted(missing.keys() - flags.keys())
    if late:
        set_noted(os.environ, {name: missing[name] for name in late})
    if flags:
        process.set_flags(flags)
    notices = []
    if kept:
        notices.append(f"the environment's own {', '.join(kept)} overrides profile '{profile.name}'")
    if late:
        notices.append(
            f"profile '{profile.name}' sets {', '.join(late)} after this process started, too late for variables "
            "read at start: start with fleet_train launch --strategy"
        )
    return notices


def _typed(name: str, text: str) -> Any:
    """``text`` converted to the type of this flag in Paddle; ``set_flags`` takes no other."""
    kind = type(paddle.get_flags(name)[name])
    try:
        return text.strip().lower() in ("1", "true") if kind is bool else kind(text)
    except ValueError:
        raise ProfileError(f"environment.{name}: its value is not of Paddle's type {kind.__name__}") from None


def refuse_on_this_device(profile: Profile, place: Any) -> None:
    """Raise ProfileError for settings that the backend of ``place`` cannot carry out."""
    if profile.compression == "fp16" and isinstance(place, paddle.CPUPlace):
        raise ProfileError(
            "compression: fp16 is refused on Gloo: Paddle 3.3.1's Gloo returns inf for every sum of float16; use "
            "compression: bf16 (the same bytes, float32's range), or NCCL"
        )


def fitted_to(engine: Engine, profile: Profile) -> tuple[Profile, list[str]]:
    """The profile as ``engine`` carries it out, and rank 0's notes on the difference."""
    refuse_unknown("collective_stream", profile.collective_stream, (AUTO, CALC, OWN), "way to communicate")
    stream = f"collective_stream: {profile.collective_stream} ({profile.origin('collective_stream')})"
    if engine.side_by_side:
        no_effect = f"{stream} has no effect on Gloo, whose calls block the host"
        return profile, [no_effect] if profile.collective_stream != AUTO else []
    notices, mapped = [], dict[str, Any]()
    if profile.collective_stream == AUTO:
        mapped["collective_stream"] = CALC
    if profile.nccl_comm_num not in (1, AUTO):
        mapped["nccl_comm_num"] = 1
        notices.append(
            f"nccl_comm_num: {profile.nccl_comm_num} ({profile.origin('nccl_comm_num')}) is mapped to 1 on NCCL: "
            "kernels of several communicators over the same ranks may run in a different order on each device, which "
            "can deadlock; one communicator has several channels (NCCL_MIN_NCHANNELS)"
        )
    if profile.use_hierarchical_allreduce and not profile.force_hierarchical_allreduce:
        mapped["use_hierarchical_allreduce"] = False
        notices.append(
            f"use_hierarchical_allreduce: true ({profile.origin('use_hierarchical_allreduce')}) is flat on NCCL, which "
            "itself uses the links between and inside nodes; force_hierarchical_allreduce: true carries it out"
        )
    if "barrier_every_steps" not in profile.explicit:
        mapped["barrier_every_steps"] = BARRIER_EVERY_STEPS_ON_NCCL
    if said := compression_of(profile.compression).on_streams(profile):
        notices.append(said)
    return profile.with_choices("mapped on NCCL", **mapped), notices


@dataclass(frozen=True)
class ReadyGradient:
    """A parameter, its gradient's value, and where in the block that value is made."""

    parameter: Any
    value: Any
    position: int
    rows: int = 0
    """The number of an embedding's rows that are sent, as in `TensorSpec`; 0: the whole gradient."""

    @property
    def gradient(self) -> TensorSpec:
        shape = tuple(int(size) for size in self.value.shape)
        return TensorSpec(self.parameter.name, shape, dtype_name(self.value.dtype), rows=self.rows)


def summed_over_uses(
    params_grads: Sequence[tuple[Any, Any]], is_clipped: bool = False
) -> tuple[list[tuple[Any, Any]], list[str]]:
    """One pair per parameter, in the order of first appearance, and the names of those that had several.

    PIR makes a value for each use of a name (``ParamAttr(name="w")`` in two places), so ``backward`` gives a gradient
    for each. Their sum is the gradient of the parameter; Paddle 3.3.1 alone updates once per use, which is the same
    for SGD without weight decay and clip only. Raises ConversionError for uses whose updates would differ
    (``is_clipped``: whether the optimizer has a clip): one update cannot be that of both.
    """
    uses: dict[str, list[tuple[Any, Any]]] = {}
    for parameter, value in params_grads:
        uses.setdefault(parameter.name, []).append((parameter, value))
    for name, pairs in uses.items():
        _refuse_unlike_uses(name, [parameter for parameter, value in pairs if value is not None], is_clipped)
    several = [name for name, pairs in uses.items() if len(pairs) > 1]
    return [(pairs[0][0], _sum(pairs)) for pairs in uses.values()], several


def _refuse_unlike_uses(name: str, uses: Sequence[Any], is_clipped: bool) -> None:
    first, *others = ({field: _in_attr(use, field) for field in _OF_AN_UPDATE} for use in uses or [None])
    for field in _OF_AN_UPDATE:
        unlike = [other[field] for other in others if other[field] != first[field]]
        if unlike and (is_clipped or field != "need_clip"):
            raise ConversionError(
                f"parameter '{name}' is used by name in several places, with {field}: {first[field]} in one and "
                f"{unlike[0]} in another; its gradients are summed and it is updated once, so write the same {field} "
                f"into every ParamAttr(name='{name}'), or give one of the places a name of its own"
            )


_OF_AN_UPDATE = ("learning_rate", "regularizer", "need_clip")
"""What a ``ParamAttr`` says of a parameter's update. Of ``trainable=False`` there is no gradient to add."""


def _in_attr(use: Any, field: str) -> Any:
    """A field as ``ParamAttr`` was given it, comparable: a regularizer may be another object in each use."""
    if field == "learning_rate":
        return (getattr(use, "optimize_attr", None) or {}).get("learning_rate", 1.0)
    if field == "need_clip":
        return bool(getattr(use, "need_clip", True))
    regularizer = getattr(use, "regularizer", None)
    if regularizer is None:
        return None
    return f"{type(regularizer).__name__}({', '.join(map(str, vars(regularizer).values()))})"


def _sum(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The sum of values, appended after the last of them; a single value unchanged, None for no value."""
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


_IN_TWO_HALVES = {f"pd_op.{name}_grad" for name in ("conv2d", "conv3d", "depthwise_conv2d", "matmul")}
"""Operators with two gradients, of which neither uses the other's work on a CPU."""


def parameters_first(params_grads: Sequence[tuple[Any, Any]], held: Collection[int] = ()) -> list[tuple[Any, Any]]:
    """The pairs, after an operator that makes the gradients of a parameter and of an activation is cut into one for
    each, that of the parameter first: it is sent while the other is computed. The same kernels compute the same bits.
    Only in float32: oneDNN, which computes bfloat16 on CPUs, ends the process where a product has to make one of two.
    Paddle's own fails there too where the operand of the other gradient has no rows, as in a batch without samples: a
    layer's parameter has its gradient from another operator, and any other product whose rows are unknown stays whole.
    ``held``: operators, by their ids, that stay, because a script may hold their results.
    """
    return [(parameter, value if value is None else _alone_first(value, held)) for parameter, value in params_grads]


def _alone_first(gradient: Any, held: Collection[int]) -> Any:
    both = gradient.get_defining_op()
    if both is None or both.id() in held or both.name() not in _IN_TWO_HALVES or gradient.dtype != paddle.float32:
        return gradient
    results = both.results()
    if not all(result.initialized() for result in results) or results[1 - gradient.index()].use_empty():
        return gradient
    first, second, above = both.operands_source()
    for forward in first.all_used_ops():
        if f"{forward.name()}_grad" == both.name() and forward.operand_source(1).is_same(second):
            given, own = forward.attrs(), both.attrs()
            # The same two values may be multiplied otherwise as well, for something that is only watched.
            if all(given[name] == own[name] for name in given.keys() & own.keys() - {"stop_gradient"}):
                break
    else:
        return gradient
    mine = gradient.index()
    is_product = both.name() == "pd_op.matmul_grad"
    is_layer = is_product and mine == 1 and len(first.shape) >= 2 == len(second.shape) and not given["transpose_x"]
    if is_product and not is_layer and min((first, second)[1 - mine].shape, default=1) < 1:
        return gradient
    paddle.pir.set_insertion_point(both)
    if is_layer:
        alone = _summed_over_rows(*((above, first) if given["transpose_y"] else (first, above)), second)
    else:
        alone = _half(forward, above, mine)
    results[mine].replace_all_uses_with(alone)
    results[1 - mine].replace_all_uses_with(_half(forward, above, 1 - mine))
    both.get_parent_block().remove_op(both)
    paddle.pir.reset_insertion_point_to_end()
    return alone


def _half(forward: Any, above: Any, wanted: int) -> Any:
    """The gradient of one of an operator's first two operands, without the other's."""
    operands = [[value] for value in forward.operands_source()[:2]]
    stops = [[place != wanted] for place in range(2)]
    return paddle.base.core.call_vjp(forward, operands, [[forward.result(0)]], [[above]], stops)[wanted][0]


def _summed_over_rows(left: Any, right: Any, like: Any) -> Any:
    """The sum over rows of the outer products of left's and right's, in the shape of ``like``; of no rows, 0."""
    product = paddle._C_ops.matmul_with_flatten(left, like, len(left.shape) - 1, 1)
    forward = product.get_defining_op()
    (found,) = paddle.base.core.call_vjp(forward, [[left], [like]], [[product]], [[right]], [[True], [False]])[1]
    forward.get_parent_block().remove_op(forward)
    return found


def uses_a_name_twice(program: Any) -> bool:
    """Whether ``program`` has several values for one parameter."""
    names = [op.attrs()["parameter_name"] for op in program.global_block().ops if op.name() == "builtin.parameter"]
    return len(set(names)) < len(names)


def positions_of(value: Any) -> dict[int, int]:
    """The position of each operator in the main block of the program of ``value``, by its id."""
    main = value.get_defining_op().get_parent_block().program.global_block()
    return {op.id(): position for position, op in enumerate(main.ops)}


def in_ready_order(
    params_grads: Sequence[tuple[Any, Any]], rows: Mapping[str, int] | None = None
) -> list[ReadyGradient]:
    """The gradients by the position of the operator that makes each; parameters without a gradient are left out.

    ``rows``: of embeddings' tables whose rows are sent, by parameter. Raises ConversionError for gradients that cannot
    be averaged as dense tensors.
    """
    present = [(parameter, value) for parameter, value in params_grads if value is not None]
    if not present:
        raise ConversionError(
            "no parameter has a gradient: does the loss depend on a parameter that is not frozen? It does not where it "
            "is computed, in a copy of a program (program.clone()), with values of the original"
        )
    positions = positions_of(present[0][1])
    ready = [_locate(parameter, value, positions) for parameter, value in present]
    ready = [replace(item, rows=(rows or {}).get(item.parameter.name, 0)) for item in ready]
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


def spec_of(value: Any) -> TensorSpec:
    """A parameter's or statistic's name, shape and dtype."""
    name = str(value.get_defining_op().attrs().get("parameter_name", value.name))
    return TensorSpec(name, tuple(int(size) for size in value.shape), dtype_name(value.dtype))


def agree(job: Job, name: str, value: Any) -> None:
    """Raise ScheduleMismatch on every rank unless all of them pass the same JSON value for ``name``."""
    brought = job.compare(f"agree on {name} {job.count(f'agree on {name}')}", {name: value})
    refuse_other_ranks(brought, job.cluster)


def agreed_plan(
    job: Job,
    profile: Profile,
    ready: Sequence[ReadyGradient],
    values: HeldValues,
    exchanges: Sequence[CollectiveSpec],
    optimizer: Any,
) -> tuple[CommPlan, Profile]:
    """The plan that all ranks carry out, and the profile with the settings chosen for it; all ranks call it.

    Open settings get numbers, which rank 0 reports. The link is measured only if that decides something. ``values``:
    what LocalSGD averages; ``exchanges``: what passes over the program send.
    """
    is_whole = profile.sharding and reads_whole_parameters(optimizer)
    gradients = [replace(item.gradient, is_whole=is_whole) for item in ready]
    averaged = [spec_of(value) for value in (*values.parameters, *values.statistics)]

    def planned(chosen: Profile) -> CommPlan:
        return build_plan(gradients, job.cluster, chosen, averaged, exchanges, state_values_per_parameter(optimizer))

    plan = planned(profile)
    # Compare the request first: ranks with other scripts or profiles would not measure together.
    agree_on_plan(job, plan, profile)
    orders = profile.overlap_next_step and is_worth_cutting(gradients, job.cluster)
    if job.network is None and (orders or needs_link(profile, gradients, job.cluster)):
        job.network = _measured(job)
    choice = choose(profile, gradients, job.cluster, _conditions(job))
    log_once(choice.sentences, job.cluster.rank)
    if choice.profile != profile:
        plan = planned(choice.profile)
        agree_on_plan(job, plan, choice.profile)
    return plan, choice.profile


def _measured(job: Job) -> Network:
    """The measured link over which the ranks communicate: that between nodes, if there are several."""
    link = glance(job)
    return Network(link, PAPER.inside) if job.cluster.node_num > 1 else Network(PAPER.between, link)


def _conditions(job: Job) -> ChoiceConditions:
    source = job.network_source if job.network else "assumed"
    most, costs = (MOST_COMMUNICATORS, TYPICAL) if job.engine.side_by_side else (1, ENQUEUED)
    return ChoiceConditions(job.network or PAPER, costs, most_communicators=most, source=source)


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
