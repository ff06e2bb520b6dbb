"""Which versions a checkpoint or a result was made with."""

from __future__ import annotations

import platform
from importlib import metadata

from fleet_train import __version__

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
