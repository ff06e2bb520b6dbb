"""The software that this machine would run: versions, the package's files, the profile, the script."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import fleet_train
from fleet_train.doctor.facts import Software
from fleet_train.errors import FleetTrainError
from fleet_train.launch.spec.machine import installed_paddle

_DIGITS = 16


def software(strategy: str | None, script: str | None) -> Software:
    distribution, paddle = installed_paddle()
    errors: list[str] = []
    profile = _profile(strategy, errors) if strategy else ""
    return Software(
        python=platform.python_version(),
        paddle=f"{paddle} ({distribution})" if distribution else "",
        fleet_train=fleet_train.__version__,
        numpy=metadata.version("numpy"),
        package_digest=package_digest(Path(fleet_train.__file__).parent),
        profile=profile,
        script=_script(Path(script), errors) if script else "",
        errors=tuple(errors),
    )


def package_digest(package: Path) -> str:
    """Of every Python file of the package, with its name."""
    return digest_of((str(path.relative_to(package)), path) for path in sorted(package.rglob("*.py")))


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]


def _profile(strategy: str, errors: list[str]) -> str:
    from fleet_train.profile import load_profile

    try:
        return load_profile(strategy).digest()[:_DIGITS]
    except FleetTrainError as error:
        errors.append(f"--strategy: {str(error).splitlines()[0][:200]}")
        return ""


def _script(script: Path, errors: list[str]) -> str:
    try:
        return digest_of([("", script)])
    except OSError as error:
        errors.append(f"--script {script.name}: {error.strerror or 'cannot be read'}")
        return ""
