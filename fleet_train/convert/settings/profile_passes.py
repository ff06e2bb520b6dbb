"""Translates a profile into the settings of the passes and of the optimizer."""

from __future__ import annotations

from typing import Any

import paddle

from fleet_train.collectives.engines.engine import Engine
from fleet_train.convert.passes.gradient_merge import GradientMerge
from fleet_train.convert.passes.loss_scale import LossScaling
from fleet_train.convert.passes.pipeline import PassSettings
from fleet_train.convert.passes.precision_rules import MixedPrecision
from fleet_train.convert.passes.recompute import Recompute
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan.compression_settings import DgcSettings, dgc_settings
from fleet_train.profile import KNOBS, Profile
from fleet_train.profile.knobs import AUTO, shown


def pass_settings(profile: Profile) -> PassSettings:
    """The settings of the passes that this profile asks for."""
    return PassSettings(
        precision=MixedPrecision(profile.amp_level, profile.amp_dtype, profile.amp_keep_batch_norm_fp32),
        loss_scaling=LossScaling(
            profile.amp_init_loss_scaling,
            profile.amp_dynamic_loss_scaling,
            profile.amp_incr_every_n_steps,
            profile.amp_decr_every_n_nan_or_inf,
            profile.amp_incr_ratio,
            profile.amp_decr_ratio,
        ),
        merge=GradientMerge(profile.accumulate_steps),
        recompute=_recompute(profile),
        sync_batch_norm=profile.sync_batch_norm,
    )


def _recompute(profile: Profile) -> Recompute:
    return Recompute(profile.recompute_segments, tuple(profile.recompute_checkpoints), profile.recompute_every_blocks)


def leaves_one_process_alone(profile: Profile) -> bool:
    """Whether a job of one process is to run the program that Paddle's own optimizer makes, operator by operator."""
    return profile.amp_level == "O0" and profile.accumulate_steps == 1 and not _recompute(profile).is_on


def refuse_on_this_device(profile: Profile, place: Any) -> None:
    """Raise ProfileError for settings that the backend of ``place`` cannot carry out."""
    if profile.compression == "fp16" and isinstance(place, paddle.CPUPlace):
        raise ProfileError(
            "compression: fp16 is refused on Gloo: Paddle 3.3.1's Gloo returns inf for every sum of float16; use "
            "compression: bf16 (the same bytes, float32's range), or NCCL"
        )


def fitted_to(engine: Engine, profile: Profile) -> tuple[Profile, list[str]]:
    """The profile as ``engine`` carries it out, and rank 0's notes on the difference."""
    if engine.side_by_side or profile.nccl_comm_num in (1, AUTO):
        return profile, []
    said = (
        f"nccl_comm_num: {profile.nccl_comm_num} ({profile.origin('nccl_comm_num')}) is mapped to 1 on NCCL: "
        "kernels of several communicators over the same ranks may run in a different order on each device, which can "
        "deadlock; one communicator has several channels (NCCL_MIN_NCHANNELS)"
    )
    return profile.with_settings(profile.origin("nccl_comm_num"), nccl_comm_num=1), [said]


_FOR_ONE_OPTIMIZER = (
    "use_local_sgd",
    "compression",
    "accumulate_steps",
    "amp_level",
    "sync_batch_norm",
    "recompute_segments",
    "recompute_checkpoints",
    "recompute_every_blocks",
)


def refuse_beside_another_optimizer(profile: Profile, world_size: int) -> None:
    """Raise ConversionError for settings that a program with two optimizers cannot have. They rewrite the forward
    program once, or keep one state per program.
    """
    if world_size == 1 and leaves_one_process_alone(profile):
        return
    for knob in _FOR_ONE_OPTIMIZER:
        value = getattr(profile, knob)
        if value != KNOBS[knob].default and value not in ("bf16", "fp16"):
            raise ConversionError(
                f"this is the second optimizer in one program, and {knob}: {shown(value)} works with one optimizer per "
                f"program; leave {knob} out, or minimize the second loss in its own program "
                "(paddle.static.program_guard), which may share parameters by name"
            )


def take_over_momentum(optimizer: Any, profile: Profile, world_size: int) -> tuple[Any, DgcSettings | None]:
    """The optimizer that follows DGC, and DGC's settings; without DGC or peers, the optimizer itself and None.

    DGC accumulates momentum on each rank before it selects, so SGD must follow it. Weight decay then acts outside
    the momentum. Raises ProfileError for optimizers other than SGD and Momentum, and for a gradient clip.
    """
    if profile.compression != "dgc":
        return optimizer, None
    kind = type(optimizer).__name__
    if kind not in ("SGD", "Momentum"):
        raise ProfileError(f"compression: dgc applies momentum itself and works with SGD and Momentum, not with {kind}")
    refuse_clip_of_sums(profile, optimizer)
    if world_size == 1:
        return optimizer, None
    momentum = float(getattr(optimizer, "_momentum", 0.0))
    settings = dgc_settings(profile, momentum, bool(getattr(optimizer, "_use_nesterov", False)))
    if kind == "SGD":
        return optimizer, settings
    behind = paddle.optimizer.SGD(
        optimizer._learning_rate, parameters=optimizer._parameter_list, weight_decay=_decay_of(optimizer)
    )
    return behind, settings


def refuse_clip_of_sums(profile: Profile, optimizer: Any) -> None:
    """Raise ProfileError for a gradient clip beside DGC. A script may set one on a wrapped optimizer, too."""
    if profile.compression == "dgc" and optimizer._grad_clip is not None:
        raise ProfileError("compression: dgc sends sums of several steps, which a gradient clip would cut; remove it")


def _decay_of(momentum: Any) -> Any:
    """The weight decay of a Momentum, which passes L2 decay to its own operator instead of a regulariser."""
    if momentum._regularization_method == "l2_decay":
        return paddle.regularizer.L2Decay(momentum._regularization_coeff)
    return momentum.regularization
