"""Packages whose names are loaded on first use: unused names cost no import, and a part that is not there harms nobody
else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def load_on_use(
    package: str, homes: Mapping[str, str], beforehand: Callable[[], None] = lambda: None
) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package`` (PEP 562) that finds its public names by the module of each.

    A home ``"a.b"`` is the module ``<package>.a.b`` of which the name is an attribute; ``"=a.b"`` is a name for the
    module itself, given in full, and so is ``"fleet_train.a.b"``, the home of a name in another package.
    ``beforehand`` is called before the first import. Raises AttributeError, with the existing names, for any other.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        beforehand()
        home = homes[name]
        if home.startswith("="):
            value = import_module(home[1:])
        else:
            value = getattr(import_module(home if home.startswith("fleet_train.") else f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def is_a_part(error: ModuleNotFoundError) -> bool:
    """Whether what was not found is of this package: a copy may be without one of its parts."""
    return (error.name or "").startswith("fleet_train.")


def part_if_there(module: str) -> ModuleType | None:
    """A module of a part of this package; None in a copy that is without that part."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if not is_a_part(error):
            raise
        return None
