"""Who takes part in the benchmark of strategies: ours, stock Paddle, PyTorch, torchft, Horovod, and ranks that send
nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.compression.powersgd.description import powersgd_settings
from fleet_train.errors import FleetTrainError
from fleet_train.profile import Profile, load_profile

OURS, PADDLE, TORCH, TORCHFT, HOROVOD, ALONE = KINDS = ("ours", "paddle", "torch", "torchft", "horovod", "alone")
DDP, BF16, POWERSGD, POST_LOCAL_SGD = "ddp", "bf16", "powersgd", "post_local_sgd"
# DDP whose embeddings have sparse gradients, with the optimizer for them.
SPARSE = "sparse"
DILOCO = "diloco"
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
# The best rivals of a kind, found in each record: of those that compress, and of those that train locally, the first at
# the middle target.
COMPRESSED, LOCAL = "the best compressed rival", "the best local rival"
# The lines of a picture and of README's table, chosen before any record was made.
PICTURED = (
    NOTHING, AVERAGE_ONCE, f"{PADDLE}:{DATA_PARALLEL}", REFERENCE, f"{OURS}:multi_node", COMPRESSED,
    f"{OURS}:int8_compression", LOCAL, f"{OURS}:streaming_diloco",
)  # fmt: skip
_FORM = re.compile(
    r"(?:(?P<plain>ddp|bf16|sparse)(?:_(?P<bucket>[1-9][0-9]*)(?P<unit>kb|mb))?"
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
                f"torch:{variant}: PyTorch takes part as ddp, ddp_4mb, ddp_256kb, bf16, bf16_4mb, sparse, "
                "powersgd_1_from_100, post_local_sgd_8_from_100"
            )
        if found["plain"]:
            size = float(found["bucket"]) / (1024 if found["unit"] == "kb" else 1) if found["bucket"] else None
            return Hook(found["plain"], size)
        return Hook(found["starting"], None, int(found["number"]), int(found["start"]))

    @property
    def family(self) -> str:
        """The kind, regardless of buckets and start: ``ddp``, ``bf16``, ``powersgd_1``, ``post_local_sgd_8``."""
        if self.kind == SPARSE:
            return DDP
        return f"{self.kind}_{self.number}" if self.kind in (POWERSGD, POST_LOCAL_SGD) else self.kind

    def rhythm(self) -> dict[str, int]:
        """Warm-up steps, and the period with which steps repeat after them, as for our profiles."""
        return {"settles_after": self.start, "period_steps": self.number if self.kind == POST_LOCAL_SGD else 1}


@dataclass(frozen=True)
class DiLoCo:
    """torchft's (Streaming) DiLoCo: a fragment is averaged every ``steps / fragments`` steps, and ``delay`` steps are
    computed meanwhile; SGD with Nesterov momentum outside."""

    steps: int
    fragments: int
    delay: int
    outer_lr: float
    outer_momentum: float

    @staticmethod
    def of(variant: str) -> DiLoCo:
        """Parse ``diloco_30_3_5_0.7_0.5``. Raises ValueError with what is accepted."""
        name, *words = variant.split("_")
        if name != DILOCO or len(words) != 5:
            raise ValueError(f"torchft:{variant}: torchft takes part as diloco_STEPS_FRAGMENTS_DELAY_LR_MOMENTUM")
        return DiLoCo(*map(int, words[:3]), *map(float, words[3:]))

    @property
    def variant(self) -> str:
        return f"{DILOCO}_{self.steps}_{self.fragments}_{self.delay}_{self.outer_lr:g}_{self.outer_momentum:g}"

    def rhythm(self) -> dict[str, int]:
        """As `Hook.rhythm`."""
        return {"settles_after": 0, "period_steps": self.steps}


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
        kind = TORCH if self.kind in (HOROVOD, TORCHFT) else self.kind
        return f"{ALONE}:{self.variant if kind == ALONE else kind}"

    @property
    def needs_torch(self) -> bool:
        return self.baseline == f"{ALONE}:{TORCH}"

    @property
    def rival_kind(self) -> str | None:
        """`COMPRESSED` or `LOCAL` for rivals that are of that kind."""
        if self.kind == TORCHFT:
            return LOCAL
        hook = Hook.of(self.variant).kind if self.kind == TORCH else ""
        return {BF16: COMPRESSED, POWERSGD: COMPRESSED, POST_LOCAL_SGD: LOCAL}.get(hook)

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
    if kind in (TORCH, TORCHFT):
        (Hook if kind == TORCH else DiLoCo).of(variant)
    return Contestant(kind, variant)


def with_baselines(words: Sequence[str]) -> list[Contestant]:
    """The named contestants in order, without duplicates, after the compute-only runs that they are compared with;
    ranks that send nothing come first."""
    chosen = [parse(word) for word in words]
    names = dict.fromkeys([NOTHING, *(each.baseline for each in chosen), *(each.name for each in chosen)])
    return [parse(name) for name in names]


def rivals_of(profiles: Sequence[Profile], bucket: str, has_tables: bool = False) -> list[str]:
    """Stock Paddle's two ways; PyTorch's DDP and its bfloat16 hook, each in two bucket sizes, and PowerSGD and
    post-local SGD of our rank or period that begin where ours begin; torchft's DiLoCo with our periods, fragments and
    outer steps, and with the momentum of its paper; Horovod. ``has_tables``: also DDP with sparse gradients."""
    twins = [f"{TORCH}:{SPARSE}"] if has_tables else []
    for each in profiles:
        if each.use_local_sgd and each.outer_optimizer == "none":
            twins.append(f"{TORCH}:post_local_sgd_{each.local_sgd_steps}_from_{each.local_sgd_is_warm_steps}")
        elif each.use_local_sgd and each.outer_optimizer == DILOCO:
            period = (each.local_sgd_steps, each.local_sgd_fragments, each.local_sgd_overlap_steps, each.outer_lr)
            momenta = dict.fromkeys((each.outer_momentum, 0.9))
            twins += [f"{TORCHFT}:{DiLoCo(*period, momentum).variant}" for momentum in momenta]
        elif each.compression == "powersgd" and not each.use_local_sgd:
            settings = powersgd_settings(each)
            twins.append(f"{TORCH}:powersgd_{settings.rank}_from_{settings.start_step}")
    plain = [f"{TORCH}:{kind}{size}" for kind in (DDP, BF16) for size in ("", f"_{bucket}")]
    return list(dict.fromkeys([*(f"{PADDLE}:{way}" for way in STOCK), *plain, *twins, f"{HOROVOD}:{DDP}"]))


def chosen_contestants(ours: Sequence[str], rivals: str, bucket: str, has_tables: bool = False) -> list[Contestant]:
    """The contestants that the words name, after compute-only runs. Raises ValueError for an unknown name.

    ``rivals``: default, none, or names separated by commas; ``bucket``: of DDP's second size; ``has_tables``: whether
    the network has embeddings whose gradients may be sparse."""
    try:
        profiles = [load_profile(name) for name in ours]
    except FleetTrainError as error:
        raise ValueError(str(error)) from None
    listed = {"default": rivals_of(profiles, bucket, has_tables), "none": []}.get(rivals, rivals.split(","))
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
