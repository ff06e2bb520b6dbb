"""The options of a recommendation; the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NONE, ROUNDING, LOSSY, LOCAL_STEPS = RISKS = ("none", "rounding", "lossy", "local_steps")
"""A profile's risk to accuracy: none, gradients rounded to 16 bits, approximated ones, replicas that diverge."""
ALLOWABLE = (ROUNDING, LOSSY, LOCAL_STEPS)
DEFAULT_FOLDER = Path("runs/recommend")
DEFAULT_OUTPUT = Path("recommended.yaml")


@dataclass(frozen=True)
class RecommendOptions:
    """``allow``: risks that the pick may take. ``seconds``: about how long everything may take. ``trials``: how many
    profiles are tried at most."""

    script: str
    arguments: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    seconds: float = 90.0
    trials: int = 4
    join_timeout_seconds: float = 60.0
    settings: tuple[str, ...] = ()
    """Of ``--set``: ``knob=value`` each, for every profile."""

    def allows(self, risk: str) -> bool:
        """Allowing lossy gradients allows rounded ones."""
        return risk == NONE or risk in self.allow or (risk == ROUNDING and LOSSY in self.allow)
