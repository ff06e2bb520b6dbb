"""Which versions a checkpoint or a result was made with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from fleet_train import __version__
from fleet_train.errors import printable

_PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Name -> version of this package, Python, and those of the packages above that are installed."""
    found = {"fleet_train": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def other_versions(saved: Mapping[str, Any]) -> list[str]:
    """The line about packages with another version than when a checkpoint was saved; empty if there is none."""
    now = versions()
    names = [name for name in ("fleet_train", *_PACKAGES) if saved and saved.get(name) != now.get(name)]
    was = [f"{name} {saved.get(name, 'none')!s:.40}, now {now.get(name, 'none')}" for name in names]
    return [printable(f"note: saved with other versions: {'; '.join(was)}")] if was else []
