"""Loads files into a `Profile`: follows ``extends``, reports every problem of a file with its line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fleet_train.errors import UNPRINTABLE, ProfileError
from fleet_train.files import NotThatFile, read_regular
from fleet_train.profile.fleet_objects import fold_flags
from fleet_train.profile.knobs import Knob, Problem, cut
from fleet_train.profile.profile import Profile
from fleet_train.profile.rules import FALSE_WORDS, TRUE_WORDS, problems_in, unknown_key
from fleet_train.profile.schema import DESCRIPTIVE, KNOBS

MAX_EXTENDS = 16
MAX_TOLD = 50
Finder = Callable[[str, Path], Path]


@dataclass(frozen=True)
class Layer:
    """A file together with everything that it extends."""

    settings: dict[str, Any]
    origins: Mapping[str, str]

    def under(self, own: Layer) -> Layer:
        """A file's settings over these, which it extends; environments are merged by name, the description is not
        inherited.

        A knob that only these set and that the file switches off (``fuse_all_reduce_ops: false`` over
        ``fuse_grad_size_in_MB: 16``, ``outer_optimizer: none`` over ``outer_lr: 0.7``) is dropped with it:
        contradictions exist only between lines written to apply together.
        """
        kept = {name: value for name, value in self.settings.items() if name not in DESCRIPTIVE}
        chosen = dict(own.settings)
        # The knobs that tune a dropped knob are dropped too: amp_level drops amp_dtype, which drops its loss scale.
        while gone := [name for name in kept if _has_lost_its_switch(KNOBS[name], chosen)]:
            for name in gone:
                del kept[name]
                chosen.setdefault(name, KNOBS[name].default)
        settings = kept | own.settings
        if "environment" in kept and "environment" in own.settings:
            settings["environment"] = kept["environment"] | own.settings["environment"]
        return Layer(settings, {**self.origins, **own.origins})


def load_file(path: Path, find: Finder) -> Profile:
    """The profile in a file. ``find(name, folder)`` resolves ``extends`` relative to a folder.

    Raises ProfileError with one line per problem: ``strategies/a.yaml:7: nccl_com_num: unknown key; did you mean ...``.
    """
    layer = _load_layer(path, find, chain=())
    return Profile.assembled({"name": path.stem} | layer.settings, layer.origins)


def _load_layer(path: Path, find: Finder, chain: tuple[Path, ...]) -> Layer:
    source = read_source(path, shown_path(path))
    parent = _parent(source, path, find, (*chain, path.resolve())) if source.extends else Layer({}, {})
    return checked_layer(source, parent)


def checked_layer(source: Source, parent: Layer) -> Layer:
    """What was read, over ``parent``. Raises ProfileError with one line per problem."""
    own, came_from, problems = fold_flags(source.settings)
    problems = source.problems + problems
    flags = {name: f", {key.rpartition('.')[2]}" for name, key in came_from.items()}
    origins = {name: source.place(came_from.get(name, name)) + flags.get(name, "") for name in own}
    origins |= {key: source.place(key) for key in source.lines if key.startswith("environment.")}
    layer = parent.under(Layer(own, origins))
    unread = {problem.key for problem in problems}
    problems += [problem for problem in problems_in(layer.settings) if not _is_redundant(problem, unread)]
    if problems:
        raise ProfileError(report_of(problems, source, layer))
    return layer


def _parent(source: Source, path: Path, find: Finder, chain: tuple[Path, ...]) -> Layer:
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


def _has_lost_its_switch(row: Knob, own: Mapping[str, Any]) -> bool:
    """Whether a file switches off what a knob of its parent tunes."""
    if row.needs and own.get(row.needs) is False:
        return True
    rule = row.only_with
    if rule is None or not any(name in own for name in rule.choices):
        return False
    return not any(own.get(name, KNOBS[name].default) in values for name, values in rule.choices.items())


def _is_redundant(problem: Problem, unread: set[str]) -> bool:
    """Whether a problem contradicts a switch that could not be read: it is no new information."""
    row = KNOBS.get(problem.key)
    if row is None:
        return False
    return row.needs in unread or (row.only_with is not None and any(name in unread for name in row.only_with.choices))


def report_of(problems: list[Problem], source: Source, layer: Layer) -> str:
    """One line per problem, in the order of the file, each with its place."""

    def place(problem: Problem) -> str:
        return source.place(problem.key) if problem.key in source.lines else layer.origins.get(problem.key, source.path)

    def line(problem: Problem) -> int:
        return source.lines.get(problem.key, 0)

    lines = [f"{place(problem)}: {problem}" for problem in sorted(problems, key=line)]
    more = [f"{source.path}: and {len(lines) - MAX_TOLD} more problems"] if len(lines) > MAX_TOLD else []
    return "\n".join(lines[:MAX_TOLD] + more)


def shown_path(path: Path) -> str:
    """A path relative to the working directory if that is shorter, else unchanged."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError, RuntimeError):  # elsewhere; a NUL in it; a symlink loop
        return str(path)


# Reads YAML into settings with line numbers, without guessing or dropping anything.
#
# PyYAML's own loader reads ``1e-3`` as text, ``no`` as False, ``010`` as 8, ``1:30`` as 90, and keeps the last of two
# equal keys. So PyYAML only composes the text into nodes, and each scalar is read according to its knob.


MAX_BYTES = 64 * 1024
MAX_KEYS = 500
MAX_DEPTH = 20
MAX_DIGITS = 40
SET = "--set"
KEY = re.compile(r"[A-Za-z_][\w.-]{0,79}")
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_WORDS_OF_THE_FILE = re.compile(r"(?<=alias|nchor|andle) .*", re.DOTALL)
"""A part of PyYAML's messages that shows more than one character of the file."""
_NO_KEY = "is not a key of a profile; to build on another profile, use extends"
_NO_VARIABLE = "is not a variable name; write NAME: value"
_SET_TWICE = "is set again{where}; keep one of the two"
_VARIABLES = "environment."
READ_AS = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing", "timestamp": "a date"}
_EXTENDS = Knob("extends", "carried out", "", "", "", "", kind=str)


class _Unreadable(ValueError):
    """Why a value cannot be read, and how to write it."""


@dataclass
class Source:
    """The content of one file, or of the command line: ``settings`` and ``extends``, the line of each key, and what
    could not be read."""

    path: str
    settings: dict[str, Any] = field(default_factory=dict)
    extends: str = ""
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, key: str) -> str:
        """``strategies/a.yaml:7`` for a key, or only the file for a key from elsewhere."""
        line = self.lines.get(key) or self.lines.get(key.partition(".")[0])
        return f"{self.path}:{line}" if line else self.path

    def read(self, key: str, node: yaml.Node) -> None:
        """Take over one key of a profile."""
        row = KNOBS.get(key)
        if row is None:
            self.problems.append(Problem(key, unknown_key(key)))
        elif key == "environment" and isinstance(node, yaml.MappingNode):
            self.settings[key] = {}
            for name, value in _items(node, self, _VARIABLES):
                self.read_variable(name, value)
        elif row.kind is list and isinstance(node, yaml.SequenceNode):
            self.settings[key] = []
            for item in node.value:
                with self.problem_of(key):
                    self.settings[key].append(_read(item, replace(row, kind=row.entries, words=())))
        else:
            with self.problem_of(key):
                self.settings[key] = _read(node, row)

    def read_variable(self, name: str, node: yaml.Node) -> None:
        """Take over one line of the environment section."""
        variables = self.settings.setdefault("environment", {})
        with self.problem_of(_VARIABLES + name):
            variables[name] = _read_variable(node)

    @contextmanager
    def problem_of(self, key: str) -> Iterator[None]:
        """A value that cannot be read becomes a problem of this key."""
        try:
            yield
        except _Unreadable as unreadable:
            self.problems.append(Problem(key, str(unreadable)))


def read_source(path: Path, shown: str) -> Source:
    """Read one profile file. Raises ProfileError if there is no mapping in it at all; other problems are collected.

    The file may not be a profile: messages show only names and values of knobs from its text.
    """
    root = _compose(_read_text(path, shown), shown)
    if root is None:
        raise ProfileError(f"{shown}: is empty; write at least 'description: ...', or give another file")
    if not isinstance(root, yaml.MappingNode):
        line_number = root.start_mark.line + 1
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ProfileError(f"{shown}:{line_number}: is {kind}; a profile is a list of 'knob: value' lines")
    source = Source(shown)
    for key, node in _items(root, source):
        if key == "extends":
            with source.problem_of(key):
                source.extends = _read(node, _EXTENDS)
        else:
            source.read(key, node)
    return source


def read_assignments(texts: Iterable[str]) -> Source:
    """The texts ``knob=value`` of ``--set``, each value as in a profile's YAML; ``environment.NAME=value`` is one
    variable. Raises ProfileError for a text that is not an assignment, or not YAML; other problems are collected.
    """
    source = Source(SET)
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not KEY.fullmatch(key):
            raise ProfileError(f"{SET}: {cut(key)!r} is not KNOB=VALUE; write for example {SET} nccl_comm_num=2")
        node = _compose(value, f"{SET}: {key}") or yaml.ScalarNode("tag:yaml.org,2002:null", "")
        if key in source.lines:
            source.problems.append(Problem(key, _SET_TWICE.format(where="")))
            continue
        source.lines[key] = 0
        if key == "extends":
            source.problems.append(Problem(key, "is a line of a file; give --strategy"))
        elif key.startswith(_VARIABLES):
            source.read_variable(key.removeprefix(_VARIABLES), node)
        else:
            source.read(key, node)
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


def _compose(text: str, shown: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=_FlatLoader)
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


def _items(mapping: yaml.MappingNode, source: Source, prefix: str = "") -> Iterator[tuple[str, yaml.Node]]:
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
            source.problems.append(Problem(path, _SET_TWICE.format(where=f" on line {line}")))
        else:
            source.lines[path] = line
            yield key, node


def _read_variable(node: yaml.Node) -> str:
    """A variable's written text; only text that YAML would convert to something else needs quotes."""
    if not isinstance(node, yaml.ScalarNode):
        raise _Unreadable(f"is {_kind_of(node)}; allowed: one line of text")
    tag, text = _tag_of(node), str(node.value)
    if tag == "null":
        raise _Unreadable('has no value; for an empty one write ""')
    if tag != "bool":
        return text
    if text.lower() not in ("true", "false"):
        raise _Unreadable("is read as a boolean by YAML; write it in quotes for the text, or 1 or 0")
    return str(int(text.lower() == "true"))


def _read(node: yaml.Node, row: Knob) -> Any:
    """The value of a knob."""
    if not isinstance(node, yaml.ScalarNode):
        raise _Unreadable(f"given {_kind_of(node)}; allowed: {row.allowed}")
    tag, text = _tag_of(node), node.value
    quoted, kind = cut(text), READ_AS.get(tag, tag)
    if tag == "null" and row.kind is not dict:
        raise _Unreadable(f"has no value; allowed: {row.allowed}")
    if row.choices and tag != "str":
        raise _Unreadable(f"{quoted} is read as {kind} by YAML; allowed: {row.allowed}")
    if tag == "str" and text in row.words:
        return text
    if row.kind is str:
        if tag != "str":
            raise _Unreadable(f'{quoted} is read as {kind} by YAML; write "{quoted}"')
        return text
    given = f"given {quoted!r} (text)" if tag == "str" else f"given {quoted} ({kind})"
    if row.kind is bool:
        return _read_boolean(tag, text, f"{given}; allowed: {row.allowed}")
    if row.kind in (int, float) or (row.entries is float and tag in ("int", "float")):
        return _read_number(tag, text, row, given)
    # The environment section's text may be a variable with its value.
    raise _Unreadable(f"given {'text' if row.kind is dict else _kind_of(node)}; allowed: {row.allowed}")


def _read_boolean(tag: str, text: str, refusal: str) -> bool:
    is_true = text.lower() in TRUE_WORDS
    if not is_true and text.lower() not in FALSE_WORDS:
        raise _Unreadable(refusal)
    if tag != "bool":
        raise _Unreadable(f"{refusal}; write {'true' if is_true else 'false'} without quotes")
    return is_true


def _read_number(tag: str, text: str, row: Knob, given: str) -> int | float:
    allowed = f"allowed: {row.allowed}"
    if len(text) > MAX_DIGITS:
        raise _Unreadable(f"given {len(text)} characters; {allowed}")
    if tag == "int" and INTEGER.fullmatch(text):
        return int(text)
    if tag == "bool":
        raise _Unreadable(f"{text} is read as a boolean by YAML; {allowed}")
    if tag not in ("int", "float"):
        raise _Unreadable(f"{given}; {allowed}{_number_advice(text, row.kind)}")
    number = _number_in_yaml(tag, text)
    if number is None:
        raise _Unreadable(f"{text} is not a number; {allowed}")
    if tag == "int":
        raise _Unreadable(f"{text} is read as {number} by YAML; write a plain decimal number")
    if row.kind is int:
        whole = f"; write {int(number)}" if float(number).is_integer() else ""
        raise _Unreadable(f"given {text} (a number with decimals); {allowed}{whole}")
    return number


def _number_in_yaml(tag: str, text: str) -> int | float | None:
    """The value that YAML 1.1 reads: ``010`` as 8, ``1:30`` as 90. None if only its tag (``!!int x``) makes it a
    number."""
    constructor: Any = yaml.constructor.SafeConstructor()
    node = yaml.ScalarNode(f"tag:yaml.org,2002:{tag}", text)
    try:
        number: int | float = getattr(constructor, f"construct_yaml_{tag}")(node)
        return number
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


def _tag_of(node: yaml.ScalarNode) -> str:
    """``int``, ``str``, ... Refuses text that contains terminal control characters."""
    if match := UNPRINTABLE.search(node.value):
        raise _Unreadable(f"has the control character U+{ord(match[0]):04X}; remove it")
    return str(node.tag).rpartition(":")[2]


def _kind_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a section"
    return f"the single value {cut(node.value)!r}" if node.value else "nothing"
