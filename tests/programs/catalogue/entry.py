"""The catalogue's entry for a program. To add a program, add one function with ``@program``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.programs.strategies import EXACT

if TYPE_CHECKING:
    from tests.programs.script import Script

TOLERANCE = 1e-5
DGC_AND_DECAY = {"dgc, late": "DGC applies the momentum itself, so weight decay does not pass through it"}


@dataclass(frozen=True)
class Program:
    """``run(script)`` builds a network, wraps an optimizer and trains: a user's script from top to bottom."""

    name: str
    subject: str
    sentence: str
    run: Callable[[Script], None]
    without: Mapping[str, str] = field(default_factory=dict)
    """Strategy -> why this program is not run with it."""
    only: tuple[str, ...] = ()
    """The strategies that it is run with; empty = all exact ones."""
    reason: str = ""
    """Why ``only`` or ``tolerance`` is given."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Strategy -> part of the error with which it refuses this program."""
    several_optimizers: bool = False
    """One program has two optimizers, which strategies that keep state per program refuse."""
    simulated: bool = False
    """Whether the lossy strategies are compared with the simulation."""
    random: bool = False
    """Draws random numbers in each step, other ones on each rank: compared with the simulation alone."""
    tolerance: float = TOLERANCE
    rewritten: bool = False
    """A job of one process rewrites it, too, and comes to other bits than plain Paddle."""
    sums: bool = False
    """Parameters are used by name in several places, by an optimizer that remembers. Paddle alone then makes an update
    per use; it is given the sum of their gradients by hand."""
    noise: str = ""
    """Names (a regular expression) of parameters whose gradient is zero but for rounding, such as the bias of keys,
    which a softmax takes out again: they are compared absolutely."""

    def refusal(self, name: str) -> str:
        """Part of the error with which this exact strategy refuses it; empty where it is to be trained."""
        if self.several_optimizers and EXACT[name].for_one_optimizer:
            return "this is the second optimizer in one program"
        return self.refused.get(name, "")


REGISTERED: dict[str, Program] = {}


def program(
    sentence: str,
    *,
    name: str = "",
    without: Mapping[str, str] | None = None,
    only: tuple[str, ...] = (),
    reason: str = "",
    refused: Mapping[str, str] | None = None,
    several_optimizers: bool = False,
    simulated: bool = False,
    random: bool = False,
    tolerance: float = TOLERANCE,
    rewritten: bool = False,
    sums: bool = False,
    noise: str = "",
) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    """Register the decorated function as a program; ``sentence`` says what is special about it."""

    def register(run: Callable[[Script], None]) -> Callable[[Script], None]:
        own = name or run.__name__
        assert own not in REGISTERED, f"two programs are called {own}"
        subject = run.__module__.rpartition(".")[2]
        REGISTERED[own] = Program(
            name=own,
            subject=subject,
            sentence=sentence,
            run=run,
            without=without or {},
            only=only,
            reason=reason,
            refused=refused or {},
            several_optimizers=several_optimizers,
            simulated=simulated,
            random=random,
            tolerance=tolerance,
            rewritten=rewritten or sums,
            sums=sums,
            noise=noise,
        )
        return run

    return register
