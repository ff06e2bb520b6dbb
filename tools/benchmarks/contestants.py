"""The contestants: how the command line names them, and which are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.benchmarks.hooks import Hook

OURS, BEFORE, TORCH, PADDLE, ALONE = "ours", "before", "torch", "paddle", "alone"

# The baseline of all comparisons.
REFERENCE = "torch:ddp"


@dataclass(frozen=True)
class Contestant:
    """``kind`` is the trainer; ``variant`` is a profile for ours and for ``before`` (ours in another checkout), a hook
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
        """The compute-only contestant of the same framework."""
        return f"{ALONE}:{self.framework}"


def parse(text: str) -> Contestant:
    """Parse ``kind:variant``; raises ValueError with what is accepted."""
    kind, separator, variant = text.partition(":")
    if not separator or not variant:
        raise ValueError(f"contestant {text!r} is not kind:variant, such as ours:multi_node or torch:ddp")
    if kind not in (OURS, BEFORE, TORCH, PADDLE, ALONE):
        raise ValueError(f"contestant {text!r}: unknown kind {kind!r}; known: ours, before, torch, paddle, alone")
    if kind == TORCH:
        try:
            Hook.of(variant, 0)
        except ValueError as error:
            raise ValueError(f"contestant {text!r}: {error}") from None
    if kind == PADDLE and variant != "data_parallel":
        raise ValueError(f"contestant {text!r}: stock Paddle takes part as data_parallel")
    if kind == ALONE and variant not in (OURS, TORCH, PADDLE):
        raise ValueError(f"contestant {text!r}: alone takes ours, torch or paddle")
    return Contestant(kind, variant)


def with_baselines(chosen: Sequence[Contestant]) -> list[Contestant]:
    """The chosen contestants in order, without duplicates, after the compute-only runs that they are compared with."""
    names = dict.fromkeys([*(each.baseline for each in chosen), *(each.name for each in chosen)])
    return [parse(name) for name in names]


def beside_before(words: Sequence[str]) -> list[str]:
    """Each of ours followed by the same profile in the other checkout."""
    pairs = ((word, word.replace(f"{OURS}:", f"{BEFORE}:", 1)) for word in words)
    return [name for word, twin in pairs for name in dict.fromkeys((word, twin))]


def is_tuned(contestant: Contestant) -> bool:
    """Whether a profile is a file outside the catalogue, with knobs chosen for the benchmark."""
    return contestant.kind in (OURS, BEFORE) and contestant.variant.endswith((".yaml", ".yml"))
