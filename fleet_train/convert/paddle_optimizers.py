"""What conversion knows of Paddle's optimizers.

`unwrap` takes off the optimizers that Paddle wraps around another one, and turns their settings into knobs: on PIR
programs most of them fail inside Paddle, even on one card. What the profile also offers is carried out by its own
pass; the rest is refused with the knob to use. `updates_each_alone` says whether parameters may be updated bucket by
bucket.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle import nn, optimizer
from paddle.incubate import LookAhead, ModelAverage
from paddle.incubate.optimizer import (
    GradientMergeOptimizer,
    LarsMomentumOptimizer,
    PipelineOptimizer,
    RecomputeOptimizer,
)

from fleet_train.collectives.exchange import UNKNOWN_ROWS, Kept
from fleet_train.convert import process
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.profile import Profile
from fleet_train.profile.catalogue import laid_over
from fleet_train.profile.fleet_sections import lists_what_happens
from fleet_train.profile.knobs import shown

Around = Callable[[Callable[[Any], Any], Any], Any]


@dataclass
class Unwrapped:
    """The inner optimizer, and the wrappers around it."""

    optimizer: Any
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Knob -> value and the wrapper that asks for it."""
    sentences: list[str] = field(default_factory=list)
    around: Around | None = None
    """What a wrapper does after an update, for ``DistributedOptimizer.around_update``."""

    def ask(self, wrapper: str, **settings: Any) -> None:
        """Record what a wrapper asks for. Raises ProfileError if two wrappers contradict each other."""
        for knob, value in settings.items():
            before, other = self.settings.get(knob, (value, wrapper))
            if before != value:
                raise ProfileError(
                    f"{wrapper}: asks for {knob}: {shown(value)}, but {other} asks for {shown(before)}; keep one of "
                    "the two"
                )
            self.settings[knob] = (value, wrapper)

    @property
    def asked(self) -> dict[str, Any]:
        """The settings that the wrappers ask for: knob -> value."""
        return {knob: value for knob, (value, _) in self.settings.items()}

    def added_to(self, profile: Profile) -> Profile:
        """The profile with the wrappers' settings. Raises ProfileError if the profile sets something else."""
        for knob, (value, wrapper) in self.settings.items():
            own = getattr(profile, knob)
            if knob in profile.explicit and own != value:
                raise ProfileError(
                    f"{wrapper}: asks for {knob}: {shown(value)}, but the profile sets {knob}: {shown(own)} "
                    f"({profile.origin(knob)}); keep one of the two"
                )
        if self.settings:
            profile = profile.with_settings("the optimizer's wrapper", **self.asked)
        self.refuse_steps_without_updates(profile)
        return profile.with_notes(self.sentences) if self.sentences else profile

    def under(self, profile: Profile) -> Profile:
        """The profile of a flag, which wins over the wrappers' settings."""
        if not self.settings:
            return profile
        wrappers = Profile().with_settings("the optimizer's wrapper", **self.asked)
        return laid_over(wrappers, profile).with_notes(self.sentences)

    def refuse_steps_without_updates(self, profile: Profile) -> None:
        """Raise ProfileError where the wrapper that counts updates would count wrongly."""
        if self.around is not None and (profile.use_local_sgd or profile.accumulate_steps > 1):
            raise ProfileError(
                "paddle.incubate.LookAhead: counts updates in the program, but use_local_sgd and accumulate_steps "
                "have steps without an update of all ranks; wrap the inner optimizer alone, or choose another profile"
            )


def unwrap(optimizer: Any) -> Unwrapped:
    """Remove the wrappers, from the outermost inwards. Raises ConversionError for one that cannot be carried out."""
    result = Unwrapped(optimizer)
    while (take_off := _TAKE_OFF.get(_kind(result.optimizer))) is not None:
        take_off(result)
    kind = _kind(result.optimizer)
    if kind in _REFUSED:
        raise ConversionError(f"distributed_optimizer was given {kind}: {_REFUSED[kind]}")
    inner = [name for name in _INNER_NAMES if name in vars(result.optimizer)] if kind else []
    if inner:
        raise ConversionError(
            f"distributed_optimizer was given {kind}, which wraps another optimizer ({inner[0]}) in an unknown way; "
            "give it the optimizer inside, and set what the wrapper does in the profile"
        )
    return result


_INNER_NAMES = ("inner_optimizer", "inner_opt", "_inner_opt", "_inner", "_optimizer")


def owner_of(optimizer: Any, name: str) -> Any:
    """The optimizer that has the attribute ``name``: ``optimizer``, or one that a user's own class wraps; if none has
    it, ``optimizer``."""
    owner = optimizer
    while owner is not None and name not in vars(owner) and not hasattr(type(owner), name):
        owner = next((vars(owner)[inner] for inner in _INNER_NAMES if inner in vars(owner)), None)
    return optimizer if owner is None else owner


def _kind(optimizer: Any) -> str:
    """The class of an optimizer of Paddle or ours; empty for a user's own class, which is used unchanged."""
    kind = type(optimizer)
    return kind.__name__ if kind.__module__.partition(".")[0] in ("paddle", "fleet_train") else ""


def _take_off_amp(result: Unwrapped) -> None:
    """Take off ``paddle.static.amp.decorate`` or its bfloat16 reference."""
    wrapper, name = result.optimizer, "paddle.static.amp.decorate"
    if hasattr(wrapper, "_use_pure_bf16"):
        level, dtype = ("O2" if wrapper._use_pure_bf16 else "O1"), "bfloat16"
    else:
        level, dtype = wrapper._amp_level, _dtype_name(wrapper._amp_vartype)
    _refuse_custom_lists(wrapper._amp_lists, level)
    if getattr(wrapper, "use_promote", False):
        raise ProfileError(
            f"{name}: use_promote=True: which operators run in {dtype} follows from amp_level; leave it out"
        )
    level = "O1" if level == "OD" else level
    result.ask(name, amp_level=level)
    result.optimizer = wrapper._optimizer
    if level == "O0":
        return
    result.ask(name, amp_dtype=dtype)
    if dtype == "float16":
        result.ask(name, **_loss_scaling(wrapper))
    scale = "" if dtype == "float16" else " and no loss scale, which bfloat16 does not need"
    result.sentences.append(
        f"{name} is mapped: read as amp_level: {level} and amp_dtype: {dtype}; parameters and gradients stay float32, "
        f"and the whole program is converted, without fp16_guard's regions{scale}"
    )


def _loss_scaling(wrapper: Any) -> dict[str, Any]:
    dynamic = bool(wrapper._use_dynamic_loss_scaling)
    asked = {"amp_init_loss_scaling": float(wrapper._init_loss_scaling), "amp_dynamic_loss_scaling": dynamic}
    if not dynamic:
        return asked
    return asked | {
        "amp_incr_every_n_steps": int(wrapper._incr_every_n_steps),
        "amp_decr_every_n_nan_or_inf": int(wrapper._decr_every_n_nan_or_inf),
        "amp_incr_ratio": float(wrapper._incr_ratio),
        "amp_decr_ratio": float(wrapper._decr_ratio),
    }


def _dtype_name(vartype: Any) -> str:
    """Paddle stores the precision as a DataType of PIR, or of the old IR: BFLOAT16, BF16, FLOAT16, FP16."""
    return "bfloat16" if "B" in str(vartype).rpartition(".")[2].upper() else "float16"


def _refuse_custom_lists(lists: Any, level: str) -> None:
    names = (
        "_custom_white_list",
        "_custom_black_list",
        "black_varnames",
        "_custom_bf16_list",
        "_custom_fp32_list",
        "fp32_varnames",
    )
    given = [
        name.strip("_")
        for name in names
        if (listed := getattr(lists, name, None)) and not lists_what_happens(f"amp_configs.{name.strip('_')}", listed)
    ]
    if given and level != "OD":
        raise ProfileError(
            f"paddle.static.amp.decorate: amp_lists with {', '.join(given)}: which operators run in low precision "
            "follows from amp_level; leave amp_lists out"
        )


def _take_off_gradient_merge(result: Unwrapped) -> None:
    wrapper, name = result.optimizer, "GradientMergeOptimizer"
    if not wrapper.avg and wrapper.k_steps > 1:
        raise ProfileError(
            f"{name}: avg=False asks for the sum of the micro-batches' gradients, which are averaged here; leave it at "
            "True and scale the learning rate"
        )
    result.ask(name, accumulate_steps=int(wrapper.k_steps))
    result.sentences.append(f"{name} is mapped: read as accumulate_steps: {wrapper.k_steps}")
    result.optimizer = wrapper.inner_optimizer


def _take_off_recompute(result: Unwrapped) -> None:
    wrapper, name = result.optimizer, "RecomputeOptimizer"
    checkpoints = list(wrapper._checkpoints or [])
    if wrapper.enable_offload:
        raise ProfileError(f"{name}: offload is not supported; remove _enable_offload()")
    if not checkpoints or not all(isinstance(checkpoint, str) for checkpoint in checkpoints):
        raise ProfileError(
            f"{name}: values have no names in PIR programs, so it cannot split at them; _set_checkpoints takes "
            "names of parameters here, or set recompute_segments or recompute_every_blocks in the profile and wrap "
            "the inner optimizer alone"
        )
    result.ask(name, recompute_checkpoints=checkpoints)
    result.sentences.append(f"{name} is mapped: read as recompute_checkpoints: {', '.join(checkpoints)}")
    result.optimizer = wrapper._optimizer


def _take_off_look_ahead(result: Unwrapped) -> None:
    """LookAhead's own operators update the slow weights after the update, which is equal on all ranks."""
    wrapper = result.optimizer
    if result.around is not None:
        raise ConversionError("distributed_optimizer was given LookAhead around LookAhead; keep one of the two")

    def around(update: Callable[[Any], Any], params_grads: Any) -> Any:
        operators = update(params_grads)
        wrapper._increment_global_var()
        wrapper._apply_optimize(None, paddle.static.default_startup_program(), params_grads)
        return operators

    result.around = around
    result.optimizer = wrapper.inner_optimizer


_TAKE_OFF: dict[str, Callable[[Unwrapped], None]] = {
    "OptimizerWithMixedPrecision": _take_off_amp,
    "GradientMergeOptimizer": _take_off_gradient_merge,
    "RecomputeOptimizer": _take_off_recompute,
    "LookAhead": _take_off_look_ahead,
}


_REFUSED = {
    "DistributedOptimizer": "it was returned by distributed_optimizer; wrap an optimizer only once",
    "PipelineOptimizer": "it splits the model, and only data parallelism is supported; wrap the inner optimizer, "
    "and set accumulate_steps in the profile for its micro-batches",
    "ModelAverage": "it only averages what another optimizer updates; wrap that one, and for a moving "
    "average of the weights use fleet_train.train.Trainer(average=...)",
    "DGCMomentumOptimizer": "it compresses gradients by itself, on GPUs only; wrap paddle.optimizer.Momentum, and set "
    "compression: int4 in the profile (as `int4_compression`), or use `streaming_diloco`, whatever the optimizer",
    "DistributedFusedLamb": "it communicates by itself, on GPUs only; wrap paddle.optimizer.Lamb",
    "LBFGS": "it evaluates the loss several times per step, which a static program cannot; wrap another optimizer",
}


def refuse_wrapping_ours() -> None:
    """Let Paddle's wrappers refuse from now on what ``distributed_optimizer`` returned, with the way out: their own
    steps around it would fail inside Paddle, or go on without the other ranks."""
    from paddle.static.amp import bf16, decorator

    def refused(optimizer: Any, wrapper: str) -> None:
        if _kind(optimizer) == "DistributedOptimizer":
            raise ConversionError(
                f"{wrapper} was given what fleet.distributed_optimizer returned: give it the optimizer itself, and "
                "what it returns to fleet.distributed_optimizer, or set what it does in the profile"
            )

    def set_multi_precision(optimizer: Any, multi_precision: Any) -> Any:
        refused(optimizer, "paddle.static.amp.decorate")
        return original(optimizer, multi_precision)

    original = process.replace(decorator, "_set_multi_precision", set_multi_precision)
    amp = (decorator.OptimizerWithMixedPrecision, bf16.decorator.OptimizerWithMixedPrecision)
    for wrapper in (*amp, GradientMergeOptimizer, RecomputeOptimizer, PipelineOptimizer, LookAhead, ModelAverage):
        _refuse_in(wrapper, "paddle.static.amp.decorate" if wrapper in amp else wrapper.__name__, refused)


def _refuse_in(wrapper: Any, name: str, refused: Callable[[Any, str], None]) -> None:
    """Let the class look at its first argument."""

    @functools.wraps(wrapper.__init__)
    def checked(self: Any, *args: Any, **named: Any) -> None:
        for given in (*args[:1], *named.values()):
            refused(given, name)
        initialize(self, *args, **named)

    initialize = process.replace(wrapper, "__init__", checked)


def state_values_per_parameter(optimizer: Any) -> int:
    """How many moments or velocities a Paddle optimizer keeps for each parameter, from its accumulator names."""
    names = [name for name in dir(type(optimizer)) if name.endswith("_acc_str")]
    return len([name for name in names if "pow" not in name])


# Exactly these classes, not subclasses, which may read all gradients at once.
_EACH_ALONE = (
    optimizer.SGD,
    optimizer.Momentum,
    optimizer.Adam,
    optimizer.AdamW,
    optimizer.Adamax,
    optimizer.Adagrad,
    optimizer.Adadelta,
    optimizer.RMSProp,
    optimizer.Lamb,
)


@contextmanager
def one_learning_rate(inner: Any, main: Any) -> Iterator[None]:
    """Within the block the updates of ``main`` read one variable for the learning rate, made now.

    Paddle 3.3.1 makes it in the first ``apply_gradients``, and with a schedule another one, which nothing reads, in
    each further one. Owners make different numbers of updates; all ranks' startup programs must store the same
    variables.
    """
    owner = owner_of(inner, "_create_global_learning_rate")
    if not hasattr(owner, "_create_global_learning_rate"):
        yield
        return
    if owner._global_learning_rate(main) is None:
        owner._create_global_learning_rate()
        made, first = owner._global_learning_rate(main).get_defining_op(), main.global_block().ops[0]
        if made.id() != first.id():
            made.move_before(first)  # an update may be in the middle of the backward pass
    paddle.pir.reset_insertion_point_to_end()
    owner._create_global_learning_rate = lambda: None
    try:
        yield
    finally:
        del owner._create_global_learning_rate


_CLIPS_EACH_ALONE = (type(None), nn.ClipGradByValue, nn.ClipGradByNorm)


def updates_each_alone(inner: Any) -> bool:
    """True if ``apply_gradients`` may be called several times, each for a part of the parameters, with equal bits.

    Not with a clip by the global norm, which needs all gradients first, nor with Paddle's multi-tensor updates.
    """
    return (
        type(inner) in _EACH_ALONE
        and type(inner._grad_clip) in _CLIPS_EACH_ALONE
        and not getattr(inner, "_use_multi_tensor", False)
    )


_NORMS = (optimizer.Lamb, LarsMomentumOptimizer)
"""The optimizers whose update reads the norm of a whole parameter."""
_ONE_BY_ONE = (
    *_EACH_ALONE,
    optimizer.NAdam,
    optimizer.RAdam,
    optimizer.Rprop,
    optimizer.ASGD,
    LarsMomentumOptimizer,
)
_CLIPS_OF_OWNERS = (type(None), nn.ClipGradByGlobalNorm)  # Paddle 3.3.1 has no other one for PIR programs
_DTYPES_OF_OWNERS = ("float32", "float64")


def reads_whole_parameters(inner: Any) -> bool:
    """Whether an update needs a whole parameter at once, so that none may be cut."""
    return type(inner) in _NORMS


def refuse_to_shard(inner: Any, wraps: Sequence[Any], dtypes: Mapping[str, str]) -> None:
    """Raise ConversionError, with the way out, for what cannot be updated by owners. ``wraps``: what surrounds the
    update; ``dtypes``: of the parameters, by name."""
    kind = type(inner).__name__
    problem = ""
    if type(inner) not in _ONE_BY_ONE:
        known = ", ".join(each.__name__ for each in _ONE_BY_ONE)
        problem = f"{kind} is not known to update parameters one by one, as {known} do"
    elif type(inner._grad_clip) not in _CLIPS_OF_OWNERS:
        problem = f"the clip {type(inner._grad_clip).__name__} is not known; use paddle.nn.ClipGradByGlobalNorm"
    elif getattr(inner, "_use_multi_tensor", False):
        problem = "use_multi_tensor=True joins the parameters of an update; leave it out"
    elif any(not getattr(wrap, "is_for_owners", False) for wrap in wraps):
        problem = (
            "what surrounds the update (LookAhead, or a function given to around_update) would see only this rank's "
            "parameters; leave it out, or mark a function that treats each pair alone with is_for_owners = True"
        )
    low = [name for name, dtype in dtypes.items() if dtype not in _DTYPES_OF_OWNERS]
    if not problem and low:
        problem = (
            f"parameter '{low[0]}' is {dtypes[low[0]]}, whose master weights would start "
            "before rank 0's values arrive; create it in float32 and set amp_level"
        )
    if problem:
        raise ConversionError(f"sharding: {problem}; or train without sharding")


@contextmanager
def noting_state(optimizer: Any, kept: dict[str, Kept]) -> Iterator[None]:
    """Within the block every variable that a Paddle optimizer makes for a parameter is noted in ``kept``, by its name:
    a name guard puts its prefix before it, so that the name alone does not say whose it is."""
    owner = owner_of(optimizer, "_add_accumulator")
    add = getattr(owner, "_add_accumulator", None)
    if add is None:
        yield
        return
    signature = inspect.signature(add)

    def add_and_note(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        made = add(*args, **named)
        name = str(made.get_defining_op().attrs()["name"])
        kept[name] = Kept(given["param"].name, _axis_of_rows(given.get("shape"), list(given["param"].shape)))
        return made

    owner._add_accumulator = add_and_note
    try:
        yield
    finally:
        del owner._add_accumulator


def _axis_of_rows(shape: Any, of_parameter: list[int]) -> int | None:
    """The axis of a variable that has a parameter's rows, as in `Kept`. Without a shape, state has its parameter's."""
    if shape is None:
        return 0
    shape = list(shape)
    if shape == [1]:
        return None
    more = len(shape) - len(of_parameter)
    return more if more >= 0 and shape[more:] == of_parameter else UNKNOWN_ROWS


def moments_of(optimizer: Any) -> list[Any]:
    """A Paddle optimizer's moments and velocities, in an order that is the same on every rank.

    Adam's bias-correction powers are left out: they count steps and are equal everywhere.
    """
    tables = optimizer._accumulators
    kinds = sorted(kind for kind in tables if "pow_acc" not in kind)
    values = [tables[kind][name] for kind in kinds for name in sorted(tables[kind])]
    return [value for value in values if "float" in str(value.dtype)]
