"""The knobs that divide gradients into buckets, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_train.errors import ProfileError
from fleet_train.profile.knobs import AUTO, shown
from fleet_train.profile.profile import Profile

CHOSEN = "chosen"
"""The beginning of the origin of a number that was chosen, not given."""
DECLINED = "declined"
"""The beginning of the origin of a compression that replaces one that does not pay off."""
COMMUNICATORS, SIZE, EDGE = BUCKET_KNOBS = ("nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB")


@dataclass(frozen=True)
class Buckets:
    """How many communicators take the buckets in turn; the largest size of a bucket, and of the first and last one, in
    MB (2**20 bytes)."""

    communicators: int
    megabytes: float
    edge_megabytes: float


def open_knobs(profile: Profile) -> tuple[str, ...]:
    """The open knobs that have an effect."""
    return tuple(knob for knob in BUCKET_KNOBS if getattr(profile, knob) == AUTO and profile.heeds(knob))


def chosen_in_words(profile: Profile) -> str:
    """The numbers chosen for a profile, as in a profile file: ``nccl_comm_num: 2, fuse_grad_size_in_MB: 4``."""
    chosen = [knob for knob in BUCKET_KNOBS if profile.origin(knob).startswith(CHOSEN)]
    return ", ".join(f"{knob}: {shown(getattr(profile, knob))}" for knob in chosen)


def buckets_of(profile: Profile) -> Buckets:
    """The numbers of a profile; 0 for knobs without effect. Raises ProfileError if one is still open."""
    if left := open_knobs(profile):
        raise ProfileError(
            f"{left[0]}: is auto, and no number was chosen for it; fleet_train.plan.price.choose chooses one"
        )
    numbers = [getattr(profile, knob) if profile.heeds(knob) else 0 for knob in BUCKET_KNOBS]
    return Buckets(int(numbers[0]), float(numbers[1]), float(numbers[2]))
