"""Loads files into a `Profile`: follows ``extends``, reports every problem of a file with its line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fleet_train.errors import UNPRINTABLE, ProfileError
from fleet_train.files import NotThatFile, read_regular
from fleet_train.profile.fleet_objects import fold_flags
from fleet_train.profile.knobs import AUTO, Knob, cut
from fleet_train.profile.profile import Profile
from fleet_train.profile.rules import FALSE_WORDS, TRUE_WORDS, Problem, problems_in, unknown_key
from fleet_train.profile.schema import DESCRIPTIVE, KNOBS

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


# Reads one YAML file into settings with line numbers, without guessing or dropping anything.
#
# PyYAML's own loader reads ``1e-3`` as text, ``no`` as False, ``010`` as 8, ``1:30`` as 90, and keeps the last of two
# equal keys. So PyYAML only composes the file into nodes, and each scalar is read according to its knob.


MAX_BYTES = 64 * 1024
MAX_KEYS = 500
MAX_DEPTH = 20
MAX_DIGITS = 40
KEY = re.compile(r"[A-Za-z_][\w.-]{0,79}")
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_WORDS_OF_THE_FILE = re.compile(r"(?<=alias|nchor|andle) .*", re.DOTALL)
"""A part of PyYAML's messages that shows more than one character of the file."""
_NO_KEY = "is not a key of a profile; to build on another profile, use extends"
_NO_VARIABLE = "is not a variable name; write NAME: value"
READ_AS = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing", "timestamp": "a date"}


@dataclass
class Source:
    """The content of one file: ``settings`` and ``extends``, the line of each key, and what could not be read."""

    path: str
    settings: dict[str, Any] = field(default_factory=dict)
    extends: str = ""
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, key: str) -> str:
        """``strategies/a.yaml:7`` for a key, or only the file for a key from elsewhere."""
        line = self.lines.get(key) or self.lines.get(key.partition(".")[0])
        return f"{self.path}:{line}" if line else self.path


def read_source(path: Path, shown: str) -> Source:
    """Read one profile file. Raises ProfileError if there is no mapping in it at all; other problems are collected.

    The file may not be a profile: messages show only names and values of knobs from its text.
    """
    root = _compose(_read_text(path, shown), shown)
    source = Source(shown)
    for key, node in _items(root, source, prefix=""):
        if key == "environment" and isinstance(node, yaml.MappingNode):
            source.settings[key] = _environment(node, source)
        elif key == "extends":
            source.extends = str(_setting(key, node, str, source) or "")
        elif key in KNOBS and KNOBS[key].kind is list and isinstance(node, yaml.SequenceNode):
            source.settings[key] = _names(key, node, source)
        elif key in KNOBS:
            value = _setting(key, node, KNOBS[key].kind, source)
            if value is not None:
                source.settings[key] = value
        else:
            source.problems.append(Problem(key, unknown_key(key)))
    return source


def _read_text(path: Path, shown: str) -> str:
    try:
        raw = read_regular(path, MAX_BYTES)
    except NotThatFile as error:
        raise ProfileError(f"{shown}: {error}. Is this the right file?") from None
    except OSError as error:
        raise ProfileError(f"{shown}: cannot be read: {error.strerror or error}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{shown}:{raw[: error.start].count(10) + 1}: is not UTF-8 text; save it as UTF-8"
        ) from error


def _compose(text: str, shown: str) -> yaml.MappingNode:
    try:
        root = yaml.compose(text, Loader=_FlatLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (f":{mark.line + 1}", f" (column {mark.column + 1})") if mark else ("", "")
        words = _WORDS_OF_THE_FILE.sub("", str(error.problem or error.context))
        raise ProfileError(f"{shown}{line}: is not YAML: {words}{column}") from None
    except yaml.reader.ReaderError as error:
        line_number = text[: error.position].count("\n") + 1
        raise ProfileError(
            f"{shown}:{line_number}: is not YAML: the character U+{ord(text[error.position]):04X}"
        ) from None
    except RecursionError:
        raise ProfileError(f"{shown}: is nested too deeply; a profile is a list of 'knob: value' lines") from None
    except (ValueError, OverflowError):  # "\UFFFFFFFF", %YAML 1.999...9: PyYAML leaves these to chr() and int()
        raise ProfileError(f"{shown}: is not YAML: a number in an escape or directive is too large") from None
    if root is None:
        raise ProfileError(f"{shown}: is empty; write at least 'description: ...', or give another file")
    if not isinstance(root, yaml.MappingNode):
        line_number = root.start_mark.line + 1
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ProfileError(f"{shown}:{line_number}: is {kind}; a profile is a list of 'knob: value' lines")
    return root


class _FlatLoader(yaml.SafeLoader):
    """Stops at a depth that no profile has: PyYAML's time grows with its square."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            raise RecursionError
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _items(mapping: yaml.MappingNode, source: Source, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
    """Keys as they are written (so ``no:`` stays ``no``) with their values; repeated ones become problems."""
    if len(mapping.value) > MAX_KEYS:
        line = mapping.start_mark.line + 1
        raise ProfileError(
            f"{source.path}:{line}: has {len(mapping.value)} keys, {MAX_KEYS} are allowed. Is this the right file?"
        )
    for key_node, node in mapping.value:
        # Keys of a file that is not a profile may be anything: "TOKEN=abc" has a value in it.
        is_name = isinstance(key_node, yaml.ScalarNode) and KEY.fullmatch(key_node.value)
        key = key_node.value if is_name else "<<" if key_node.value == "<<" else "?"
        path, line = prefix + key, key_node.start_mark.line + 1
        if not is_name:
            source.lines.setdefault(path, line)
            source.problems.append(Problem(path, _NO_VARIABLE if prefix else _NO_KEY))
        elif path in source.lines:
            source.problems.append(Problem(path, f"is set again on line {line}; keep one of the two"))
        else:
            source.lines[path] = line
            yield key, node


def _environment(section: yaml.MappingNode, source: Source) -> dict[str, str]:
    """Variables as the written text; only text that YAML would convert to something else needs quotes."""
    variables = {}
    for name, node in _items(section, source, prefix="environment."):
        key = f"environment.{name}"
        if not isinstance(node, yaml.ScalarNode):
            source.problems.append(Problem(key, f"is {_kind_of(node)}; allowed: one line of text"))
            continue
        if unprintable := _unprintable(node):
            source.problems.append(Problem(key, unprintable))
            continue
        tag = _tag(node)
        if tag == "null":
            source.problems.append(Problem(key, 'has no value; for an empty one write ""'))
        elif tag == "bool" and node.value.lower() not in ("true", "false"):
            rule = "is read as a boolean by YAML; write it in quotes for the text, or 1 or 0"
            source.problems.append(Problem(key, rule))
        else:
            variables[name] = str(int(node.value.lower() == "true")) if tag == "bool" else node.value
    return variables


def _names(key: str, sequence: yaml.SequenceNode, source: Source) -> list[str]:
    """The entries of a list as the written text."""
    names = []
    for node in sequence.value:
        text = _setting(key, node, str, source)
        if text is not None:
            names.append(str(text))
    return names


def _setting(key: str, node: yaml.Node, kind: type, source: Source) -> Any:
    """The value of a knob, or None with a problem that says how to write it."""
    if not isinstance(node, yaml.ScalarNode):
        allowed = KNOBS[key].allowed if key in KNOBS else "text"
        source.problems.append(Problem(key, f"given {_kind_of(node)}; allowed: {allowed}"))
        return None
    if unprintable := _unprintable(node):
        source.problems.append(Problem(key, unprintable))
        return None
    choices = KNOBS[key].choices if key in KNOBS else ()
    if choices and _tag(node) not in ("str", "null"):
        read = READ_AS.get(_tag(node), _tag(node))
        quoted = cut(node.value)
        source.problems.append(Problem(key, f"{quoted} is read as {read} by YAML; allowed: {KNOBS[key].allowed}"))
        return None
    if key in KNOBS and KNOBS[key].auto and _tag(node) == "str" and node.value == AUTO:
        return AUTO
    value, advice = _read_scalar(node, kind)
    if advice:
        source.problems.append(Problem(key, advice.replace("ALLOWED", KNOBS[key].allowed if key in KNOBS else "text")))
    return value


def _read_scalar(node: yaml.ScalarNode, kind: type) -> tuple[Any, str]:
    tag, text = _tag(node), node.value
    if tag == "null" and kind is not dict:
        return None, "has no value; allowed: ALLOWED"
    if kind is str:
        if tag == "str":
            return text, ""
        quoted = cut(text)
        return None, f'{quoted} is read as {READ_AS.get(tag, tag)} by YAML; write "{quoted}"'
    if kind is bool:
        return _read_boolean(tag, text)
    if kind in (int, float):
        return _read_number(tag, text, kind)
    # The environment section's text may be a variable with its value.
    return None, f"given {'text' if kind is dict else _kind_of(node)}; allowed: ALLOWED"


def _read_boolean(tag: str, text: str) -> tuple[Any, str]:
    if tag == "bool" and text.lower() in TRUE_WORDS | FALSE_WORDS:
        return text.lower() in TRUE_WORDS, ""
    if text.lower() in TRUE_WORDS | FALSE_WORDS:
        right = "true" if text.lower() in TRUE_WORDS else "false"
        return None, f"given {_as_read(tag, text)}; allowed: true or false; write {right} without quotes"
    return None, f"given {_as_read(tag, text)}; allowed: ALLOWED"


def _read_number(tag: str, text: str, kind: type) -> tuple[Any, str]:
    if len(text) > MAX_DIGITS:
        return None, f"given {len(text)} characters; allowed: ALLOWED"
    if tag == "int" and INTEGER.fullmatch(text):
        return int(text), ""
    if tag in ("int", "float") and (number := _number_in_yaml(tag, text)) is None:
        return None, f"{text} is not a number; allowed: ALLOWED"
    if tag == "int":
        return None, f"{text} is read as {number} by YAML; write a plain decimal number"
    if tag == "float":
        if kind is float:
            return number, ""
        whole = f"; write {int(number)}" if number.is_integer() else ""
        return None, f"given {text} (a number with decimals); allowed: ALLOWED{whole}"
    if tag == "bool":
        return None, f"{text} is read as a boolean by YAML; allowed: ALLOWED"
    return None, f"given {_as_read(tag, text)}; allowed: ALLOWED{_number_advice(text, kind)}"


def _number_in_yaml(tag: str, text: str) -> Any:
    """The value that YAML 1.1 reads: ``010`` as 8, ``1:30`` as 90. None if only its tag (``!!int x``) makes it a
    number."""
    constructor: Any = yaml.constructor.SafeConstructor()
    node = yaml.ScalarNode(f"tag:yaml.org,2002:{tag}", text)
    try:
        return constructor.construct_yaml_int(node) if tag == "int" else constructor.construct_yaml_float(node)
    except (ValueError, IndexError, OverflowError):
        return None


def _number_advice(text: str, kind: type) -> str:
    """What to write instead of text that looks like a number (``1e-3`` is text in YAML 1.1, and so is ``"2"``)."""
    if INTEGER.fullmatch(text):
        return f"; write {text} without quotes"
    try:
        number = float(text)
    except ValueError:
        return ""
    if kind is int:
        return f"; write {int(number)}" if number.is_integer() else ""
    mantissa, _, exponent = text.lower().partition("e")
    dotted = mantissa if "." in mantissa else f"{mantissa}.0"
    signed = exponent if exponent[:1] in ("+", "-") else f"+{exponent}"
    return f"; write {dotted}e{signed}" if exponent else f"; write {text} without quotes"


def _as_read(tag: str, text: str) -> str:
    quoted = cut(text)
    return f"{quoted!r} (text)" if tag == "str" else f"{quoted} ({READ_AS.get(tag, tag)})"


def _unprintable(node: yaml.ScalarNode) -> str:
    """The problem with a text that contains terminal control characters, or nothing."""
    found = UNPRINTABLE.search(node.value)
    return f"has the control character U+{ord(found[0]):04X}; remove it" if found else ""


def _tag(node: yaml.ScalarNode) -> str:
    return str(node.tag).rpartition(":")[2]


def _kind_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a section"
    return f"the single value {cut(node.value)!r}" if node.value else "nothing"
