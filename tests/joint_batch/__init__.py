"""Losses and networks as users write them, trained on ranks with unlike batches, masks and labels, and in one process
with the joint batch: ``python -m tests.joint_batch``.

To add a loss, add one function with ``@case`` to ``losses.py`` or its neighbours. Imports neither Paddle nor
fleet_train.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, overload

SUBJECTS = ("losses", "masks", "nonlinear", "counts", "sequences", "networks", "more")
OPTIMIZERS = ("momentum", "adam")

Build = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """``build(g)`` is a user's program from its inputs to the loss (``tests.joint_batch.builder``)."""

    name: str
    subject: str
    build: Build
    grows: bool = False
    """The loss, or a term of it, grows with the batch: with ``average_over: ranks`` its numbers are others."""
    said: Mapping[str, str] = field(default_factory=dict)
    """Profile -> part of what has to be said there, because it is not exact. ``default``: in every profile. Where
    nothing has to be said, nothing may be."""
    without: tuple[str, ...] = ()
    """Profiles that this case says nothing about."""
    reason: str = ""
    """Why ``without`` is given."""
    ends_empty: bool = False
    """One more step, in which nothing is valid anywhere; one process goes on as before, or has NaN."""
    static: bool = False
    """Its batch has a size that is known when the program is built."""

    @property
    def sentence(self) -> str:
        return inspect.cleandoc(self.build.__doc__ or "")


_REGISTERED: dict[str, Case] = {}


def cases() -> dict[str, Case]:
    """Every case by its name, in the order of ``SUBJECTS``. Imports Paddle."""
    for subject in SUBJECTS:
        import_module(f"tests.joint_batch.{subject}")
    return dict(_REGISTERED)


@overload
def case(build: Build) -> Build: ...


@overload
def case(**options: Any) -> Callable[[Build], Build]: ...


def case(build: Build | None = None, **options: Any) -> Any:
    """Register the decorated function, with or without options of ``Case``."""

    def register(build: Build) -> Build:
        name, subject = build.__name__, build.__module__.rpartition(".")[2]
        assert name not in _REGISTERED, f"two cases are called {name}"
        _REGISTERED[name] = Case(name, subject, build, **options)
        return build

    return register if build is None else register(build)
