"""`DistributedStrategy`: settings under Fleet's attribute names, checked on assignment.

It is a way to write a `Profile` in Python; the other layers use ``to_profile``. Paddle is not imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fleet_train.errors import ConversionError, ProfileError
from fleet_train.profile import Profile, load_profile
from fleet_train.profile.fleet_fields import STOCK_FIELDS, outcome_of
from fleet_train.profile.fleet_objects import asked_of_stock
from fleet_train.profile.fleet_sections import DEFAULTS
from fleet_train.profile.knobs import hidden, shown
from fleet_train.profile.rules import describe, suggestion, value_problems
from fleet_train.profile.schema import DESCRIPTIVE, KNOBS

_PARTS = {"build_strategy": "build_strategy", "exec_strategy": "exec_strategy", "execution_strategy": "exec_strategy"}
"""Names of the strategy's parts; Fleet 1.8 called the last one ``exec_strategy``, 2.x ``execution_strategy``."""
_INHERITED = {path.partition(".")[2] for path in STOCK_FIELDS if path.startswith("build_strategy.")}
_EXECUTION = {path.partition(".")[2] for path in STOCK_FIELDS if path.startswith("exec_strategy.")}
_EXECUTION_KNOBS = frozenset({"num_threads", "num_iteration_per_drop_scope"})
_TOP = {path.partition(".")[0] for path in STOCK_FIELDS} | DESCRIPTIVE


class UnknownAttribute(ProfileError, AttributeError):
    """A name that neither Fleet's strategies nor ours have. Also an AttributeError, so that ``hasattr`` works."""


class _Part:
    """``strategy.exec_strategy`` and ``strategy.build_strategy``: views that write into the strategy they belong to."""

    _strategy: DistributedStrategy
    _name: str

    def __init__(self, strategy: DistributedStrategy, name: str) -> None:
        object.__setattr__(self, "_strategy", strategy)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        return self._strategy._read(self._path(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._strategy._assign(self._path(name), value)

    def _path(self, name: str) -> str:
        if self._name not in _PARTS:
            return f"{self._name}.{name}"
        if self._name == "exec_strategy" and name in _EXECUTION_KNOBS:
            return name
        known = _EXECUTION | _EXECUTION_KNOBS if self._name == "exec_strategy" else _INHERITED | _SHARED
        if name not in known or name.startswith("_"):
            raise UnknownAttribute(f"{self._name}.{name}: unknown attribute{suggestion(name, known)}")
        return name if name in _SHARED else f"{self._name}.{name}"


_SHARED = frozenset(
    {
        "nccl_comm_num",
        "fuse_all_reduce_ops",
        "use_hierarchical_allreduce",
        "hierarchical_allreduce_inter_nranks",
    }
)
"""Fields that BuildStrategy and the strategy both have."""


class DistributedStrategy:
    """Fleet's strategy object. ``DistributedStrategy()`` has the defaults of `Profile`.

    Raises ProfileError at the assignment for an unknown name, a wrong type, a value out of range or a refused one;
    ``to_profile`` checks the settings together.
    """

    _base: Profile
    _settings: dict[str, Any]
    _fallbacks: dict[str, dict[str, Any]]
    _accepted: dict[str, Any]
    _sentences: dict[str, str]
    _written: dict[str, str]

    def __init__(self, **settings: Any) -> None:
        start: dict[str, Any] = {"_base": Profile(name="strategy"), "_settings": {}, "_fallbacks": {}}
        for name, value in (start | {"_accepted": {}, "_sentences": {}, "_written": {}}).items():
            object.__setattr__(self, name, value)
        for name, value in settings.items():
            setattr(self, name, value)

    @classmethod
    def from_profile(cls, profile: str | Profile) -> DistributedStrategy:
        """The strategy of a profile, a catalogue name, or a profile file; attributes may then be changed."""
        strategy = cls()
        object.__setattr__(strategy, "_base", profile if isinstance(profile, Profile) else load_profile(profile))
        return strategy

    @classmethod
    def from_stock(cls, stock: Any) -> DistributedStrategy:
        """The settings of a ``paddle.distributed.fleet.DistributedStrategy``, field by field.

        Raises ProfileError with a line for each field that differs from its default and cannot be carried out.
        """
        strategy, problems, asked = cls(), list[str](), asked_of_stock(stock)
        if asked.get("localsgd") and asked.get("adaptive_localsgd"):
            problems.append(
                "DistributedStrategy.localsgd: given true beside adaptive_localsgd: true; keep one of the two"
            )
        for path, value in asked.items():
            before, written = dict(strategy._settings), dict(strategy._written)
            try:
                strategy._assign(path, value)
            except ProfileError as error:
                problems.append(str(error))
            problems += [
                f"DistributedStrategy.{path}: asks for {knob}: {shown(new)}, but {written[knob]} asks for "
                f"{shown(before[knob])}; keep one of the two"
                for knob, new in strategy._settings.items()
                if knob in before and new != before[knob]
            ]
        if problems:
            raise ProfileError("\n".join(problems))
        return strategy

    def is_empty(self) -> bool:
        """Whether nothing was set in it, not even to a default."""
        return not self._accepted and not self._settings and self._base == Profile(name="strategy")

    def to_profile(self) -> Profile:
        """The settings as one checked profile. Raises ProfileError for contradictory settings."""
        if problems := [*self._without_switch(), *self._overruled(), *self._guarded()]:
            raise ProfileError("\n".join(problems))
        asked = self._asked()
        if not asked and not self._sentences:
            return self._base
        settings = {name: value for name, value in asked.items() if not name.startswith("environment.")}
        variables = {name[12:]: value for name, value in asked.items() if name.startswith("environment.")}
        if variables:
            settings["environment"] = self._base.environment | settings.get("environment", {}) | variables
        try:
            profile = self._base.with_settings("DistributedStrategy", **settings)
        except ProfileError as error:
            raise ProfileError("\n".join(map(self._as_written, str(error).split("\n")))) from None
        return profile.with_notes(f"DistributedStrategy.{sentence}" for sentence in self._sentences.values())

    def _asked(self) -> dict[str, Any]:
        """The settings, with what switches such as amp imply for knobs that nothing else sets."""
        brought: dict[str, Any] = {}
        for settings in self._fallbacks.values():
            if all(getattr(self._base, knob) == KNOBS[knob].default for knob in settings):
                brought |= settings
        return brought | self._settings

    def _without_switch(self) -> list[str]:
        """Fields that would enable a feature whose own switch is off: amp_configs.level without amp."""
        return [
            f"DistributedStrategy.{path}: has no effect while {needed} is false; set {needed} to True, or remove it"
            for path in self._accepted
            if path in self._written.values() and (needed := _needs(path)) and not self._is_on(needed)
        ]

    def _guarded(self) -> list[str]:
        """Regions under fp16_guard, which Fleet looks at with use_pure_fp16 only."""
        configs = "amp_configs"
        if all(self._accepted.get(f"{configs}.{name}") is True for name in ("use_fp16_guard", "use_pure_fp16")):
            return [
                f"DistributedStrategy.{configs}.use_fp16_guard: given true with use_pure_fp16: regions under "
                "fp16_guard are not supported; set it to False"
            ]
        return []

    def _is_on(self, switch: str) -> bool:
        """Whether Fleet's switch was set, under either of its names, or the base profile has the feature."""
        if any(self._accepted.get(name) is True for name in (switch, f"use_{switch}")):
            return True
        row = STOCK_FIELDS[switch]
        knobs = [knob for knob, _ in row.switch.settings] if row.switch else []
        return switch not in self._accepted and any(getattr(self._base, knob) != KNOBS[knob].default for knob in knobs)

    def _overruled(self) -> list[str]:
        """Switches whose settings a later field has overridden: fp16_allreduce with localsgd's."""
        asked, problems = self._asked(), []
        for path, value in self._accepted.items():
            row = STOCK_FIELDS.get(path)
            if row is None or row.switch is None or row.switch.yields or value != row.switch.value:
                continue
            for knob, wanted in row.switch.settings:
                now = asked.get(knob, getattr(self._base, knob))
                if now != wanted:
                    other = self._written.get(knob, knob)
                    problems.append(
                        f"DistributedStrategy.{path}: asks for {knob}: {shown(wanted)}, but {other} asks for "
                        f"{shown(now)}; keep one of the two"
                    )
        return problems

    def _as_written(self, problem: str) -> str:
        """A problem of a knob, under the assigned name: ``localsgd_configs.k_steps`` for local_sgd_steps."""
        knob, _, message = problem.partition(": ")
        brought = next((path for path, settings in self._fallbacks.items() if knob in settings), knob)
        path = self._written.get(knob, brought)
        return f"DistributedStrategy.{path}{'' if path == knob else f' (read as {knob})'}: {message}"

    def __getattr__(self, name: str) -> Any:
        if name in _PARTS:
            return _Part(self, _PARTS[name])
        if name.startswith("__") or name not in _TOP | _INHERITED:
            raise UnknownAttribute(
                f"DistributedStrategy.{name}: unknown attribute{suggestion(name, _TOP | _INHERITED)}"
            )
        return self._read(name if name in _TOP else f"build_strategy.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PARTS or (name.endswith("_configs") and name in _TOP):
            for leaf, given in _members(_PARTS.get(name, name), value):
                self._assign(leaf, given)
        elif name in _TOP:
            self._assign(name, value)
        elif name in _INHERITED:
            # Fleet 1.8's strategy was a BuildStrategy itself.
            self._assign(f"build_strategy.{name}", value)
        else:
            raise UnknownAttribute(
                f"DistributedStrategy.{name}: unknown attribute{suggestion(name, _TOP | _INHERITED)}"
            )

    def _assign(self, path: str, value: Any) -> None:
        """Carry out, map or refuse one value of one field."""
        if path in DESCRIPTIVE:
            self._set(path, path, value)
            return
        try:
            outcome = outcome_of(path, value)
        except ProfileError as refused:
            raise ProfileError(f"DistributedStrategy.{path}: {refused}") from None
        for knob, setting in outcome.settings:
            self._set(path, knob, setting)
        self._forget_older(path, {knob for knob, _ in outcome.settings})
        self._fallbacks.pop(path, None)
        if outcome.fallback:
            self._fallbacks[path] = dict(outcome.fallback)
        self._accepted[path] = value
        self._sentences.pop(path, None)
        if outcome.sentence:
            self._sentences[path] = outcome.sentence

    def _set(self, path: str, knob: str, value: Any) -> None:
        section, _, variable = knob.partition(".")
        problems = value_problems({section: {variable: value}} if variable else {knob: value})
        if problems:
            mapped = "" if path == knob else f" (read as {knob})"
            raise ProfileError("\n".join(f"DistributedStrategy.{path}{mapped}: {item.message}" for item in problems))
        if knob not in self._settings or self._settings[knob] != value:
            self._settings[knob] = value
            self._written[knob] = path

    def _forget_older(self, path: str, kept: set[str]) -> None:
        """Undo what an earlier value of this field set: adaptive_localsgd was True and is now False."""
        for knob in [knob for knob, writer in self._written.items() if writer == path and knob not in kept]:
            del self._settings[knob], self._written[knob]

    def _read(self, path: str) -> Any:
        if path in self._accepted:
            return self._accepted[path]
        row = STOCK_FIELDS.get(path)
        knob = row.knob if row else path
        if knob in Profile.model_fields:
            return self._asked().get(knob, getattr(self._base, knob))
        if row and row.switch and row.switch.yields:
            switched = row.switch.settings[0][0]
            return self._read(switched) != KNOBS[switched].default
        if row and row.switch and row.switch.value is True:
            return all(self._read(name) == value for name, value in row.switch.settings)
        if path.endswith("_configs"):
            return MappingProxyType(
                {leaf.partition(".")[2]: self._read(leaf) for leaf in STOCK_FIELDS if leaf.startswith(f"{path}.")}
            )
        return row.silent[0] if row and row.silent else DEFAULTS.get(path)

    def __repr__(self) -> str:
        asked = self._base.shown_settings() | self._asked()
        settings = {name: _without_values(name, value) for name, value in asked.items()}
        return f"DistributedStrategy({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _without_values(name: str, value: Any) -> Any:
    """A setting for messages: the values of environment variables are not shown."""
    if name == "environment" and isinstance(value, Mapping):
        return hidden(value)
    return "(set)" if name.startswith("environment.") else value


def _members(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """What an assigned ``*_configs`` mapping, BuildStrategy or execution strategy sets, with paths. For other objects:
    each attribute that differs from a new instance of its class.
    """
    part = _Part(DistributedStrategy(), name)
    if isinstance(value, Mapping):
        return [(part._path(str(key)), given) for key, given in value.items()]
    if isinstance(value, _Part):
        return list(value._strategy._accepted.items())
    if name.endswith("_configs") or isinstance(value, (bool, int, float, str, list, type(None))):
        raise ProfileError(f"DistributedStrategy.{name}: given {describe(value)}; allowed: a mapping of field to value")
    own, default = _public(value), _public(_fresh(value))
    changed = {key: given for key, given in own.items() if key not in default or given != default[key]}
    return [(part._path(key), given) for key, given in changed.items()]


def _needs(path: str) -> str:
    return STOCK_FIELDS[path].needs if path in STOCK_FIELDS else ""


def _public(thing: Any) -> dict[str, Any]:
    names = [name for name in dir(thing) if not name.startswith("_")] if thing is not None else []
    values = {name: getattr(thing, name) for name in names}
    return {name: value for name, value in values.items() if not callable(value)}


def _fresh(value: Any) -> Any:
    try:
        return type(value)()
    except TypeError:
        return None


class ArgumentError(ConversionError, TypeError):
    """Arguments that do not fit a call. Also a TypeError, which is what Python raises for them."""


def one_of(function: str, **given: Any) -> Any:
    """The value of an argument with several names, the last of them ours; None if none was given.

    Raises ArgumentError when it was given under two names.
    """
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise ArgumentError(
            f"fleet.{function} was given {' and '.join(f'{name}=' for name in used)}, which name one argument; "
            "keep one of them"
        )
    return given[used[0]] if used else None


def needed(function: str, **given: Any) -> Any:
    """Like ``one_of``, for a required argument."""
    value = one_of(function, **given)
    if value is None:
        raise ArgumentError(f"fleet.{function} needs {' or '.join(f'{name}=' for name in reversed(given))}")
    return value


def refuse(function: str, name: str, value: Any, reason: str) -> None:
    """Raise ArgumentError for an argument of Fleet's that cannot be carried out, if it was given."""
    if value is not None:
        raise ArgumentError(f"fleet.{function}: {name}={value!r}: {reason}")
