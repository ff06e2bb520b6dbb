"""Who takes part: the words of the command line, and what is compared with what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

OURS, BEFORE, TORCH, PADDLE, ALONE = "ours", "before", "torch", "paddle", "alone"

_TORCH_VARIANTS = {
    r"ddp": "DistributedDataParallel as it comes (Gloo, buckets of 25 MiB after a first one of 1 MiB)",
    r"ddp_[1-9][0-9]*mb": "DistributedDataParallel with smaller buckets",
    r"bf16": "DDP with bf16_compress_hook",
    r"powersgd_[1-9][0-9]*": "DDP with powerSGD_hook of that rank",
    r"post_local_sgd_[1-9][0-9]*": "DDP with post_localSGD_hook and PeriodicModelAverager of that period",
}
# In the order of the issue: what everything is compared with first.
DEFAULT = """
ours:multi_node ours:one_communicator ours:two_communicators ours:unfused
torch:ddp torch:ddp_4mb torch:bf16 torch:powersgd_1 torch:powersgd_4 torch:post_local_sgd_8 paddle:data_parallel
""".split()
REFERENCE = "torch:ddp"


@dataclass(frozen=True)
class Contestant:
    """``kind`` is who trains; ``variant`` is a profile for ours and for ``before`` (ours in another checkout), a hook
    for PyTorch, a framework for ``alone``."""

    kind: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.variant}"

    @property
    def framework(self) -> str:
        return self.variant if self.kind == ALONE else OURS if self.kind == BEFORE else self.kind

    @property
    def baseline(self) -> str:
        """The contestant that computes the same with the same framework and sends nothing."""
        return f"{ALONE}:{self.framework}"


def parse(text: str) -> Contestant:
    """``kind:variant``; raises ValueError with what would be right."""
    kind, separator, variant = text.partition(":")
    if not separator or not variant:
        raise ValueError(f"contestant {text!r} is not kind:variant, such as ours:multi_node or torch:ddp")
    if kind not in (OURS, BEFORE, TORCH, PADDLE, ALONE):
        raise ValueError(f"contestant {text!r}: unknown kind {kind!r}; known: ours, before, torch, paddle, alone")
    if kind == TORCH and not any(re.fullmatch(pattern, variant) for pattern in _TORCH_VARIANTS):
        raise ValueError(f"contestant {text!r}: PyTorch takes part as ddp, ddp_4mb, bf16, powersgd_1, post_local_sgd_8")
    if kind == PADDLE and variant != "data_parallel":
        raise ValueError(f"contestant {text!r}: stock Paddle takes part as data_parallel")
    if kind == ALONE and variant not in (OURS, TORCH, PADDLE):
        raise ValueError(f"contestant {text!r}: what runs alone is ours, torch or paddle")
    return Contestant(kind, variant)


def with_baselines(chosen: Sequence[Contestant]) -> list[Contestant]:
    """The chosen in their order, without repetition, after the compute-only runs that they are compared with."""
    names = dict.fromkeys([*(each.baseline for each in chosen), *(each.name for each in chosen)])
    return [parse(name) for name in names]


def beside_before(words: Sequence[str]) -> list[str]:
    """Each of ours followed by the same profile in the other checkout."""
    pairs = ((word, word.replace(f"{OURS}:", f"{BEFORE}:", 1)) for word in words)
    return [name for word, twin in pairs for name in dict.fromkeys((word, twin))]


def number_in(variant: str) -> int:
    """8 for ``post_local_sgd_8``, 4 for ``ddp_4mb``."""
    found = re.findall(r"[0-9]+", variant)
    if not found:
        raise ValueError(f"{variant!r} has no number in it")
    return int(found[-1])
