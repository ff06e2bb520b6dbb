"""Unwraps optimizers that Paddle wraps around another one and turns their settings into knobs of the profile.

On PIR programs most of them fail inside Paddle, even on one card. The profile's own pass carries out what a profile
also offers; the rest is refused with the knob to use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paddle

from fleet_train.errors import ConversionError, ProfileError
from fleet_train.profile import Profile
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

    def added_to(self, profile: Profile) -> Profile:
        """The profile with the wrappers' settings. Raises ProfileError if the profile sets something else."""
        for knob, (value, wrapper) in self.settings.items():
            own = getattr(profile, knob)
            if knob in profile.explicit and own != value:
                raise ProfileError(
                    f"{wrapper}: asks for {knob}: {shown(value)}, but the profile sets {knob}: {shown(own)} "
                    f"({profile.origin(knob)}); keep one of the two"
                )
        wanted = {knob: value for knob, (value, _) in self.settings.items()}
        profile = profile.with_settings("the optimizer's wrapper", **wanted) if wanted else profile
        if self.around is not None and (profile.use_local_sgd or profile.accumulate_steps > 1):
            raise ProfileError(
                "paddle.incubate.LookAhead: counts updates in the program, but use_local_sgd and accumulate_steps "
                "have steps without an update of all ranks; wrap the inner optimizer alone, or choose another profile"
            )
        return profile.with_notes(self.sentences) if self.sentences else profile


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
    found = optimizer
    while found is not None and name not in vars(found) and not hasattr(type(found), name):
        found = next((vars(found)[one] for one in _INNER_NAMES if one in vars(found)), None)
    return optimizer if found is None else found


def _kind(optimizer: Any) -> str:
    """The class of an optimizer of Paddle or ours; empty for a user's own class, which is used unchanged."""
    kind = type(optimizer)
    return kind.__name__ if kind.__module__.partition(".")[0] in ("paddle", "fleet_train") else ""


def _take_off_amp(result: Unwrapped) -> None:
    """``paddle.static.amp.decorate`` and its bfloat16 reference."""
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
    given = [name.strip("_") for name in names if getattr(lists, name, None)]
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
    if not checkpoints or not all(isinstance(one, str) for one in checkpoints):
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
    "DistributedFusedLamb": "it communicates by itself, on GPUs only; wrap paddle.optimizer.Lamb",
    "LBFGS": "it evaluates the loss several times per step, which a static program cannot; wrap another optimizer",
}
