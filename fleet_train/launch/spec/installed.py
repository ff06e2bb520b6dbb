"""What is installed here: this package and its commit, Python, Paddle and its build. Nothing here imports Paddle."""

from __future__ import annotations

import ast
import platform
import subprocess
from importlib import metadata, util
from pathlib import Path
from typing import Any

import fleet_train
from fleet_train.launch.spec.machine import installed_paddle

# Packages that results and errors depend on, besides Paddle; also optional ones, whose absence is reported.
_PACKAGES = ("numpy", "visualdl", "numba", "pillow", "safetensors", "protobuf", "scikit-learn", "click", "psutil")
_DALI = ("nvidia-dali-cuda120", "nvidia-dali-cuda110")


def package_versions() -> dict[str, str]:
    """Package -> version, ``absent`` if it is not installed; DALI only if it is installed."""
    found = {name: version_of(name) or "absent" for name in _PACKAGES}
    return found | {name: version for name in _DALI if (version := version_of(name))}


def version_of(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def own_version() -> dict[str, Any]:
    """Of this package: version, whether it is a checkout or installed, and a checkout's commit."""
    return {"version": fleet_train.__version__, "from": "a checkout" if _checkout() else "installed", **commit()}


def commit() -> dict[str, Any]:
    """Of the checkout that contains this package; nothing if it is installed, or without git."""
    root = _checkout()
    found = "" if root is None else git(root, "rev-parse", "HEAD")
    if root is None or not found:
        return {}
    changes = git(root, "status", "--porcelain", "--", "fleet_train", "strategies")
    return {"commit": found, "uncommitted_changes": bool(changes)}


def _checkout() -> Path | None:
    root = Path(fleet_train.__file__).resolve().parents[1]
    return root if (root / ".git").exists() else None


def git(root: Path, *arguments: str) -> str:
    """The output of git in a checkout; empty if there is none."""
    try:
        found = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def paddle_build() -> dict[str, str]:
    """Paddle's distribution, version, kind of build and commit, from its own file; empty if it is not installed."""
    distribution, version = installed_paddle()
    facts = _facts_of_paddle()
    if not distribution and not facts:
        return {}
    cuda = str(facts.get("cuda_version", "unknown"))
    known = {
        "distribution": distribution or "unknown",
        "version": version or str(facts.get("full_version", "unknown")),
        "build": "CPU" if cuda == "False" else "unknown" if cuda == "unknown" else "GPU",
        "commit": str(facts.get("commit", "unknown")),
    }
    if known["build"] != "GPU":
        return known
    return known | {name: str(facts.get(f"{name}_version", "unknown")) for name in ("cuda", "cudnn", "nccl")}


def _facts_of_paddle() -> dict[str, Any]:
    """The constants of ``paddle/version/__init__.py``, read as text: importing it would import Paddle."""
    spec = util.find_spec("paddle")
    places = None if spec is None else spec.submodule_search_locations
    try:
        text = (Path(next(iter(places or ()))) / "version" / "__init__.py").read_text()
        body = ast.parse(text).body
    except (OSError, StopIteration, SyntaxError):
        return {}
    return {
        line.targets[0].id: line.value.value
        for line in body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }


def one_line() -> str:
    """For ``--version``: ``fleet_train 0.1.0 (commit 04a8bfa63d), Python 3.11.2, paddlepaddle 3.3.1``."""
    own, (distribution, version) = own_version(), installed_paddle()
    of = f" (commit {own['commit'][:10]})" if "commit" in own else ""
    paddle = f"{distribution} {version}" if distribution else "no Paddle"
    return f"fleet_train {own['version']}{of}, Python {platform.python_version()}, {paddle}"
