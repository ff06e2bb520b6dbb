"""Finds profiles: in the catalogue ``strategies/``, or as a file anywhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fleet_train.errors import ProfileError
from fleet_train.profile.knobs import shown
from fleet_train.profile.loader import Layer, checked_layer, load_file, read_assignments, report_of, shown_path
from fleet_train.profile.profile import Profile
from fleet_train.profile.rules import suggestion, value_problems

NAME = re.compile(r"[A-Za-z0-9_-]+")
SUFFIXES = (".yaml", ".yml")
RENAMED = {"ethernet_1g": "streaming_diloco"}
"""Names that profiles had, and the names of the same settings today."""
MEASURED = "measured.json"
"""The file with measurements that `tools/bench.py quote` writes from records, which an installed package lacks."""


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


@cache
def measurements() -> dict[str, list[str]]:
    """What was measured with each profile of the catalogue, a line each: on what, the numbers, and their record."""
    lines: dict[str, list[str]] = json.loads((catalogue_folder() / MEASURED).read_text(encoding="utf-8"))
    return lines


def find_profile(name_or_path: str, folder: Path | None = None) -> Path:
    """The file of a catalogue name, or of a path relative to ``folder`` (default: the working directory).

    Raises ProfileError for a file that does not have a profile's name, without reading it.
    """
    if NAME.fullmatch(name_or_path):
        named = catalogue_folder() / f"{RENAMED.get(name_or_path, name_or_path)}.yaml"
        if named.is_file():
            return named
        raise ProfileError(f"{name_or_path!r} is not a profile of the catalogue{_describe_known(name_or_path)}")
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
    raise ProfileError(f"{shown_path(path)}: {what}{_describe_known(path.stem)}")


def load_profile(name_or_path: str) -> Profile:
    """The profile of a catalogue name or a file. Raises ProfileError with ``file:line`` for each problem in it."""
    path = find_profile(name_or_path)
    profile = load_file(path, find_profile)
    if name_or_path in RENAMED:
        profile = profile.with_notes([f"profile '{name_or_path}' is called '{path.stem}' now"])
    if path.parent.resolve() != catalogue_folder():
        return profile
    return profile.with_choices(MEASURED, measured=list(measurements().get(path.stem, ())))


def _describe_known(name: str) -> str:
    names = profile_names()
    example = f"give a file by its path, such as ./{name or 'my'}.yaml"
    there_are = f"there are {', '.join(names)}; {example}"
    hint = suggestion(name, names)
    end = "" if hint.endswith("?") else "."
    return f"{hint}{end} {there_are[0].upper()}{there_are[1:]}" if hint else f"; {there_are}"


# ``--set knob=value``: settings of the command line, read and checked as in a profile's file, and laid over it.


def check_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """The settings of these texts, each checked by itself: the profile that they are laid over is not known yet.

    Raises ProfileError with one line per problem: ``--set: nccl_com_num: unknown key; did you mean ...``.
    """
    source = read_assignments(texts)
    problems = source.problems + value_problems(source.settings)
    if problems:
        raise ProfileError(report_of(problems, source, Layer({}, {})))
    return source.settings


def with_assignments(profile: Profile, texts: Sequence[str]) -> Profile:
    """``profile`` with these settings laid over it, as those of a file over what it extends: a switch that they turn
    off takes the profile's knobs that tune it with it. Raises ProfileError as `check_assignments` does, and for
    contradictions.
    """
    if not texts:
        return profile
    layer = checked_layer(read_assignments(texts), Layer(profile.settings(), profile.origins))
    descriptive = profile.settings().keys() - profile.explicit
    kept = {name: getattr(profile, name) for name in descriptive}
    return Profile.assembled(kept | layer.settings, layer.origins).with_notes(profile.notes)


def laid_over(below: Profile, above: Profile) -> Profile:
    """The settings of ``above``, and those of ``below`` that they do not switch off. Raises ProfileError for
    contradictions."""
    layer = Layer(below.settings(), below.origins).under(Layer(above.settings(), above.origins))
    return Profile.assembled(layer.settings, layer.origins).with_notes(above.notes)


def shown_assignments(texts: Iterable[str]) -> str:
    """Assignments as messages and comparisons between nodes show them: ``nccl_comm_num=2``; digests for the values of
    environment variables, which may be secrets."""
    settings = read_assignments(texts).settings
    variables = settings.pop("environment", {})
    words = [f"{name}={shown(value)}" for name, value in settings.items()]
    for name, value in variables.items():
        digest = hashlib.sha256(f"{name}={value}".encode(errors="replace")).hexdigest()[:12]
        words.append(f"environment.{name}=(digest {digest})")
    return " ".join(sorted(words))
