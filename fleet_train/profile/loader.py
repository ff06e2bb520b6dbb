"""Loads files into a `Profile`: follows ``extends``, reports every problem of a file with its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_train.errors import ProfileError
from fleet_train.profile.flags import fold_flags
from fleet_train.profile.knobs import Knob
from fleet_train.profile.profile import Profile
from fleet_train.profile.rules import Problem, problems_in
from fleet_train.profile.schema.settings import DESCRIPTIVE, KNOBS
from fleet_train.profile.source import Source, read_source

MAX_EXTENDS = 16
MAX_TOLD = 50
Finder = Callable[[str, Path], Path]


@dataclass(frozen=True)
class _Layer:
    """A file together with everything that it extends."""

    settings: dict[str, Any]
    origins: dict[str, str]


def load_file(path: Path, find: Finder) -> Profile:
    """The profile in a file. ``find(name, folder)`` resolves ``extends`` relative to a folder.

    Raises ProfileError with one line per problem: ``strategies/a.yaml:7: nccl_com_num: unknown key; did you mean ...``.
    """
    layer = _load_layer(path, find, chain=())
    return Profile.assembled({"name": path.stem} | layer.settings, layer.origins)


def _load_layer(path: Path, find: Finder, chain: tuple[Path, ...]) -> _Layer:
    source = read_source(path, shown_path(path))
    parent = _parent(source, path, find, (*chain, path.resolve())) if source.extends else _Layer({}, {})
    own, came_from, problems = fold_flags(source.settings)
    problems = source.problems + problems
    origins = {name: source.place(came_from.get(name, name)) for name in own}
    origins |= {key: source.place(key) for key in source.lines if key.startswith("environment.")}
    layer = _merged(parent, _Layer(own, origins))
    unread = {problem.key for problem in problems}
    problems += [problem for problem in problems_in(layer.settings) if not _moot(problem, unread)]
    if problems:
        raise ProfileError(_report(problems, source, layer))
    return layer


def _parent(source: Source, path: Path, find: Finder, chain: tuple[Path, ...]) -> _Layer:
    place = source.place("extends")
    try:
        wanted = find(source.extends, path.parent)
    except ProfileError as error:
        raise ProfileError(f"{place}: extends: {error}") from error
    if wanted.resolve() in chain:
        cycle = " -> ".join(shown_path(step) for step in (*chain[chain.index(wanted.resolve()) :], wanted))
        raise ProfileError(f"{place}: extends: is circular: {cycle}; remove one of these lines")
    if len(chain) >= MAX_EXTENDS:
        raise ProfileError(f"{place}: extends: more than {MAX_EXTENDS} files deep")
    return _load_layer(wanted, find, chain)


def _merged(parent: _Layer, own: _Layer) -> _Layer:
    """The file's settings over those that it extends; environments are merged by name, the description is not
    inherited.

    A knob that only the parent sets and that the file switches off (``fuse_all_reduce_ops: false`` over a parent's
    ``fuse_grad_size_in_MB: 16``, ``outer_optimizer: none`` over its ``outer_lr: 0.7``) is dropped with it:
    contradictions exist only between lines written to apply together.
    """
    kept = {name: value for name, value in parent.settings.items() if name not in DESCRIPTIVE}
    chosen = dict(own.settings)
    # The knobs that tune a dropped knob are dropped too: amp_level drops amp_dtype, which drops its loss scale.
    while gone := [name for name in kept if _taken_away(KNOBS[name], chosen)]:
        for name in gone:
            del kept[name]
            chosen.setdefault(name, KNOBS[name].default)
    settings = kept | own.settings
    if "environment" in kept and "environment" in own.settings:
        settings["environment"] = kept["environment"] | own.settings["environment"]
    return _Layer(settings, parent.origins | own.origins)


def _taken_away(row: Knob, own: Mapping[str, Any]) -> bool:
    """Whether a file switches off what a knob of its parent tunes."""
    if row.needs and own.get(row.needs) is False:
        return True
    rule = row.only_with
    if rule is None or not any(name in own for name in rule.choices):
        return False
    return not any(own.get(name, KNOBS[name].default) in values for name, values in rule.choices.items())


def _moot(problem: Problem, unread: set[str]) -> bool:
    """A contradiction with a switch that could not be read is no new information."""
    row = KNOBS.get(problem.key)
    if row is None:
        return False
    return row.needs in unread or (row.only_with is not None and any(name in unread for name in row.only_with.choices))


def _report(problems: list[Problem], source: Source, layer: _Layer) -> str:
    def place(problem: Problem) -> str:
        return source.place(problem.key) if problem.key in source.lines else layer.origins.get(problem.key, source.path)

    def line(problem: Problem) -> int:
        return source.lines.get(problem.key, 0)

    lines = [f"{place(problem)}: {problem}" for problem in sorted(problems, key=line)]
    more = [f"{source.path}: and {len(lines) - MAX_TOLD} more problems"] if len(lines) > MAX_TOLD else []
    return "\n".join(lines[:MAX_TOLD] + more)


def shown_path(path: Path) -> str:
    """Relative to the working directory if that is shorter, else unchanged."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError, RuntimeError):  # elsewhere; a NUL in it; a symlink loop
        return str(path)
