"""The messages that rank 0 prints once, and checks that need the installed Paddle."""

from __future__ import annotations

from collections.abc import Collection

from fleet_train.errors import ProfileError
from fleet_train.profile.knobs import AUTO, shown
from fleet_train.profile.profile import Profile
from fleet_train.profile.rules import suggestion
from fleet_train.profile.schema.settings import KNOBS


def applied_mappings(profile: Profile, node_num: int | None = None) -> list[str]:
    """What rank 0 prints once: a sentence for each mapped knob that was set, each old rule of Fleet that is no longer
    followed, and each valid setting without benefit.
    """
    sentences = list(profile.notes)
    sentences += [
        f"{name}: {shown(getattr(profile, name))} ({profile.origin(name)}) is mapped: {KNOBS[name].reason}"
        for name in Profile.model_fields
        if name in profile.explicit and KNOBS[name].fate == "mapped"
    ]
    if node_num == 1 and profile.nccl_comm_num not in (1, AUTO):
        sentences.append(
            f"nccl_comm_num: {profile.nccl_comm_num} ({profile.origin('nccl_comm_num')}) is carried out on this one "
            "node; Fleet 1.8 silently used 1 there."
        )
    if profile.use_local_sgd and profile.local_sgd_steps == 1 and _averages_every_step(profile):
        sentences.append(
            f"local_sgd_steps: 1 ({profile.origin('local_sgd_steps')}) averages the parameters after every step, which "
            "sends as much as averaging gradients in every step; 2 or more sends less."
        )
    if profile.barrier_every_steps > 1:
        sentences.append(_of_barriers(profile))
    return sentences


def _of_barriers(profile: Profile) -> str:
    every = profile.barrier_every_steps
    return (
        f"barrier_every_steps: {every} ({profile.origin('barrier_every_steps')}): between two barriers Gloo waits for "
        "a rank for 30 s, which cannot be set: one that pauses for longer fails the job. NCCL's ranks wait for "
        f"{profile.collective_timeout_seconds} s (collective_timeout_seconds). A stop request is known up to "
        f"{every - 1} step{'s' if every > 2 else ''} later."
    )


def _averages_every_step(profile: Profile) -> bool:
    return profile.local_sgd_schedule != "adaptive" and profile.outer_optimizer == "none"


def check_flags(profile: Profile, known_flags: Collection[str]) -> None:
    """Raise ProfileError if the environment section has a ``FLAGS_*`` name that is not among ``known_flags``.

    Paddle itself silently accepts any such name from the environment.
    """
    unknown = sorted(name for name in profile.environment if name.startswith("FLAGS_") and name not in known_flags)
    lines = [
        f"{profile.origin(f'environment.{name}')}: environment.{name}: the installed Paddle has no such flag"
        f"{suggestion(name, known_flags) or '; remove it'}"
        for name in unknown
    ]
    if lines:
        raise ProfileError("\n".join(lines))
