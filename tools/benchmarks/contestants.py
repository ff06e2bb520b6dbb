"""Who takes part in the benchmark of strategies: ours, stock Paddle, PyTorch, Horovod, and ranks that send nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.compression.powersgd.description import powersgd_settings
from fleet_train.errors import FleetTrainError
from fleet_train.profile import Profile, load_profile

OURS, PADDLE, TORCH, HOROVOD, ALONE = KINDS = ("ours", "paddle", "torch", "horovod", "alone")
DDP, BF16, POWERSGD, POST_LOCAL_SGD = "ddp", "bf16", "powersgd", "post_local_sgd"
# Stock Paddle: `paddle.DataParallel` in dynamic mode, and stock Fleet's static programs.
DATA_PARALLEL, FLEET = STOCK = ("data_parallel", "fleet")
# It trains on GPUs only (Paddle 3.3); it takes part so that records say so, and notice when it does.
REFUSED = f"{PADDLE}:{FLEET}"
# The baseline of all comparisons, in one of its bucket sizes.
REFERENCE = f"{TORCH}:{DDP}"
# Ranks that send nothing, judged each for itself; and judged by the mean of their parameters.
NOTHING, AVERAGE_ONCE = f"{ALONE}:{OURS}", "average once"
# The catalogue's strategies as they are shipped, without those that only name another one.
CATALOGUE = """
multi_node bf16_compression int8_compression int4_compression powersgd local_sgd diloco streaming_diloco
""".split()
# The lines of a picture, at most eight, chosen before any record was made.
PICTURED = (
    NOTHING, AVERAGE_ONCE, f"{PADDLE}:{DATA_PARALLEL}", REFERENCE, f"{OURS}:multi_node", f"{OURS}:int8_compression",
    f"{OURS}:local_sgd", f"{OURS}:streaming_diloco",
)  # fmt: skip
_FORM = re.compile(
    r"(?:(?P<plain>ddp|bf16)(?:_(?P<bucket>[1-9][0-9]*)(?P<unit>kb|mb))?"
    r"|(?P<starting>powersgd|post_local_sgd)_(?P<number>[1-9][0-9]*)_from_(?P<start>[0-9]+))"
)


@dataclass(frozen=True)
class Hook:
    """``ddp`` as it comes has buckets of 25 MiB after a first one of 1 MiB; ``number`` is PowerSGD's rank or the
    period of post-local SGD; ``start`` how many plain steps are before it.
    """

    kind: str
    bucket_mb: float | None = None
    number: int = 1
    start: int = 0

    @staticmethod
    def of(variant: str) -> Hook:
        """The hook of a contestant's variant. Raises ValueError with what is accepted."""
        found = _FORM.fullmatch(variant)
        if found is None:
            raise ValueError(
                f"torch:{variant}: PyTorch takes part as ddp, ddp_4mb, ddp_256kb, bf16, bf16_4mb, "
                "powersgd_1_from_100, post_local_sgd_8_from_100"
            )
        if found["plain"]:
            size = float(found["bucket"]) / (1024 if found["unit"] == "kb" else 1) if found["bucket"] else None
            return Hook(found["plain"], size)
        return Hook(found["starting"], None, int(found["number"]), int(found["start"]))

    @property
    def family(self) -> str:
        """The kind, regardless of buckets and start: ``ddp``, ``bf16``, ``powersgd_1``, ``post_local_sgd_8``."""
        return f"{self.kind}_{self.number}" if self.kind in (POWERSGD, POST_LOCAL_SGD) else self.kind

    def rhythm(self) -> dict[str, int]:
        """Warm-up steps, and the period with which steps repeat after them, as for our profiles."""
        return {"settles_after": self.start, "period_steps": self.number if self.kind == POST_LOCAL_SGD else 1}


@dataclass(frozen=True)
class Contestant:
    """``kind`` is the trainer; ``variant`` is a profile for ours, a way for stock Paddle, a hook for PyTorch, a
    framework for ``alone``, which computes without communicating."""

    kind: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.variant}"

    @property
    def baseline(self) -> str:
        """The compute-only contestant of the same framework."""
        return f"{ALONE}:{TORCH if self.kind == HOROVOD else self.variant if self.kind == ALONE else self.kind}"

    @property
    def needs_torch(self) -> bool:
        return self.baseline == f"{ALONE}:{TORCH}"

    @property
    def is_own_file(self) -> bool:
        """Whether a profile is a file outside the catalogue."""
        return self.kind == OURS and self.variant.endswith((".yaml", ".yml"))


def parse(text: str) -> Contestant:
    """Parse ``kind:variant``; raises ValueError with what is accepted."""
    kind, _, variant = text.partition(":")
    if kind not in KINDS or not variant:
        raise ValueError(f"contestant {text!r} is not one of {', '.join(KINDS)} with a variant, such as torch:ddp")
    accepted: Mapping[str, Sequence[str]] = {ALONE: (OURS, PADDLE, TORCH), PADDLE: STOCK, HOROVOD: (DDP,)}
    if kind in accepted and variant not in accepted[kind]:
        raise ValueError(f"contestant {text!r}: {kind} takes {' or '.join(accepted[kind])}")
    if kind == TORCH:
        Hook.of(variant)
    return Contestant(kind, variant)


def with_baselines(words: Sequence[str]) -> list[Contestant]:
    """The named contestants in order, without duplicates, after the compute-only runs that they are compared with;
    ranks that send nothing come first."""
    chosen = [parse(word) for word in words]
    names = dict.fromkeys([NOTHING, *(each.baseline for each in chosen), *(each.name for each in chosen)])
    return [parse(name) for name in names]


def rivals_of(profiles: Sequence[Profile], bucket: str) -> list[str]:
    """Stock Paddle's two ways; PyTorch's DDP and its bfloat16 hook, each in two bucket sizes, and PowerSGD and
    post-local SGD of our rank or period that begin where ours begin; Horovod."""
    twins = []
    for each in profiles:
        if each.use_local_sgd and each.outer_optimizer == "none":
            twins.append(f"torch:post_local_sgd_{each.local_sgd_steps}_from_{each.local_sgd_is_warm_steps}")
        elif each.compression == "powersgd" and not each.use_local_sgd:
            settings = powersgd_settings(each)
            twins.append(f"torch:powersgd_{settings.rank}_from_{settings.start_step}")
    plain = [f"torch:{kind}{size}" for kind in (DDP, BF16) for size in ("", f"_{bucket}")]
    return list(dict.fromkeys([*(f"{PADDLE}:{way}" for way in STOCK), *plain, *twins, f"{HOROVOD}:{DDP}"]))


def chosen_contestants(ours: Sequence[str], rivals: str, bucket: str) -> list[Contestant]:
    """The contestants that the words name, after compute-only runs. Raises ValueError for an unknown name.

    ``rivals``: default, none, or names separated by commas; ``bucket``: of DDP's second size."""
    try:
        profiles = [load_profile(name) for name in ours]
    except FleetTrainError as error:
        raise ValueError(str(error)) from None
    listed = {"default": rivals_of(profiles, bucket), "none": []}.get(rivals, rivals.split(","))
    return with_baselines([*(f"{OURS}:{name}" for name in ours), *listed])


def rhythm(profile: Mapping[str, Any]) -> dict[str, int]:
    """Warm-up steps of a profile, and the period with which its steps repeat after them."""
    if profile["use_local_sgd"]:
        is_constant = profile["local_sgd_schedule"] == "constant"
        return {
            "settles_after": profile["local_sgd_is_warm_steps"],
            "period_steps": profile["local_sgd_steps"] if is_constant else profile["local_sgd_max_steps"],
        }
    settles_after = profile["powersgd_start_step"] if profile["compression"] == "powersgd" else 0
    return {"settles_after": settles_after, "period_steps": profile["accumulate_steps"]}


def family_of(profile: Mapping[str, Any] | None) -> str | None:
    """The family of PyTorch's hooks that corresponds to a profile's explicit knobs, or None."""
    if profile is None or profile.get("accumulate_steps", 1) > 1:
        return None
    compression = profile.get("compression", "none")
    if profile.get("use_local_sgd", False):
        is_plain = compression == "none" and profile.get("outer_optimizer", "none") == "none"
        return f"{POST_LOCAL_SGD}_{profile.get('local_sgd_steps')}" if is_plain else None
    return {"none": DDP, "bf16": BF16, "powersgd": f"{POWERSGD}_{profile.get('powersgd_rank', 1)}"}.get(compression)
