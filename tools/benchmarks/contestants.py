"""The contestants: how the command line names them, which are compared, and PyTorch's hooks by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

OURS, BEFORE, TORCH, ALONE = KINDS = ("ours", "before", "torch", "alone")
DDP, BF16, POWERSGD, POST_LOCAL_SGD = "ddp", "bf16", "powersgd", "post_local_sgd"
# The baseline of all comparisons.
REFERENCE = "torch:ddp"
_FORM = re.compile(
    r"(?:(?P<plain>ddp|bf16)(?:_(?P<bucket>[1-9][0-9]*)mb)?"
    r"|(?P<starting>powersgd|post_local_sgd)_(?P<number>[1-9][0-9]*)(?:_from_(?P<start>[0-9]+))?)"
)


@dataclass(frozen=True)
class Hook:
    """``ddp`` as it comes has buckets of 25 MiB after a first one of 1 MiB; ``number`` is PowerSGD's rank or the
    period of post-local SGD; ``start`` how many plain steps are before it.
    """

    kind: str
    bucket_mb: int | None = None
    number: int = 1
    start: int = 0

    @staticmethod
    def of(variant: str, start: int) -> Hook:
        """The hook of a contestant's variant; ``start`` if it names none. Raises ValueError with what is accepted."""
        found = _FORM.fullmatch(variant)
        if found is None:
            raise ValueError(
                f"torch:{variant}: PyTorch takes part as ddp, ddp_4mb, bf16, bf16_4mb, powersgd_1, post_local_sgd_8, "
                "the last two also with their first step, such as post_local_sgd_8_from_100"
            )
        if found["plain"]:
            return Hook(found["plain"], int(found["bucket"]) if found["bucket"] else None)
        return Hook(found["starting"], None, int(found["number"]), int(found["start"]) if found["start"] else start)

    @property
    def family(self) -> str:
        """The kind, regardless of buckets and start: ``ddp``, ``bf16``, ``powersgd_1``, ``post_local_sgd_8``."""
        return f"{self.kind}_{self.number}" if self.kind in (POWERSGD, POST_LOCAL_SGD) else self.kind

    def rhythm(self) -> dict[str, int]:
        """Warm-up steps, and the period with which steps repeat after them, as for our profiles."""
        return {"settles_after": self.start, "period_steps": self.number if self.kind == POST_LOCAL_SGD else 1}


@dataclass(frozen=True)
class Contestant:
    """``kind`` is the trainer; ``variant`` is a profile for ours and for ``before`` (ours in another checkout), a hook
    for PyTorch, a framework for ``alone``, which computes without communicating."""

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
        """The compute-only contestant of the same framework."""
        return f"{ALONE}:{self.framework}"

    @property
    def is_tuned(self) -> bool:
        """Whether a profile is a file outside the catalogue, with knobs chosen for the benchmark."""
        return self.kind in (OURS, BEFORE) and self.variant.endswith((".yaml", ".yml"))


def parse(text: str) -> Contestant:
    """Parse ``kind:variant``; raises ValueError with what is accepted."""
    kind, _, variant = text.partition(":")
    if kind not in KINDS or not variant:
        raise ValueError(f"contestant {text!r} is not one of ours, before, torch, alone with a variant: torch:ddp")
    if kind == TORCH:
        Hook.of(variant, 0)
    if kind == ALONE and variant not in (OURS, TORCH):
        raise ValueError(f"contestant {text!r}: alone takes ours or torch")
    return Contestant(kind, variant)


def with_baselines(words: Sequence[str]) -> list[Contestant]:
    """The named contestants in order, without duplicates, after the compute-only runs that they are compared with."""
    chosen = [parse(word) for word in words]
    names = dict.fromkeys([*(each.baseline for each in chosen), *(each.name for each in chosen)])
    return [parse(name) for name in names]
