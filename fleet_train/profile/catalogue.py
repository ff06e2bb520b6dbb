"""Finds profiles: in the catalogue ``strategies/``, or as a file anywhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from fleet_train.errors import ProfileError
from fleet_train.profile.loader import load_file, shown_path
from fleet_train.profile.profile import Profile
from fleet_train.profile.rules import suggestion

NAME = re.compile(r"[A-Za-z0-9_-]+")
SUFFIXES = (".yaml", ".yml")


@cache
def catalogue_folder() -> Path:
    """``fleet_train/strategies`` in an installed package, ``strategies`` beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "strategies", package.parent / "strategies"):
        if (folder / "schema.json").is_file():
            return folder
    raise ProfileError(
        f"no catalogue of profiles beside {package}; the installation is incomplete, install fleet_train again"
    )


def profile_names() -> list[str]:
    """Names of the catalogue, sorted."""
    return sorted(path.stem for path in catalogue_folder().glob("*.yaml"))


def find_profile(name_or_path: str, folder: Path | None = None) -> Path:
    """The file of a catalogue name, or of a path relative to ``folder`` (default: the working directory).

    Raises ProfileError for a file that does not have a profile's name, without reading it.
    """
    if NAME.fullmatch(name_or_path):
        named = catalogue_folder() / f"{name_or_path}.yaml"
        if named.is_file():
            return named
        raise ProfileError(f"{name_or_path!r} is not a profile of the catalogue{_what_there_is(name_or_path)}")
    try:
        path = (folder or Path()) / Path(name_or_path).expanduser()
        is_file, is_folder, is_there = path.is_file(), path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that cannot be entered, ~nobody
        raise ProfileError(
            f"{name_or_path[:100]}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if is_file and path.suffix.lower() not in SUFFIXES:
        raise ProfileError(f"{shown_path(path)}: is not a profile: its name must end in .yaml or .yml; rename it")
    if is_file:
        return path
    what = "is a folder, not a file" if is_folder else "is not a regular file" if is_there else "no such file"
    raise ProfileError(f"{shown_path(path)}: {what}{_what_there_is(path.stem)}")


def load_profile(name_or_path: str) -> Profile:
    """The profile of a catalogue name or a file. Raises ProfileError with ``file:line`` for each problem in it."""
    return load_file(find_profile(name_or_path), find_profile)


def _what_there_is(name: str) -> str:
    names = profile_names()
    example = f"give a file by its path, such as ./{name or 'my'}.yaml"
    there_are = f"there are {', '.join(names)}; {example}"
    hint = suggestion(name, names)
    return f"{hint} {there_are[0].upper()}{there_are[1:]}" if hint else f"; {there_are}"
