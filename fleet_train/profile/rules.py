"""Checks a set of profile settings: unknown names, types, ranges, refusals, contradictions."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from fleet_train.profile.compatibility import clashes
from fleet_train.profile.knobs import AUTO, GONE, Knob, Problem, shown
from fleet_train.profile.schema import FLAG_KNOBS, KNOBS, Settings

OWNED_BY_LAUNCHER = re.compile(r"(PADDLE|FLEET_TRAIN|POD|TRAINER)_.*|TRAINER_PORTS_NUM|FLAGS_START_PORT")
CHOOSES_DEVICES = re.compile(r"(CUDA|HIP|XPU|ASCEND_RT|CUSTOM)_VISIBLE_DEVICES|FLAGS_selected_\w+")
VARIABLE_NAME = re.compile(r"FLAGS_\w+|[A-Z][A-Z0-9_]*")
MEMORY_FRACTION = "FLAGS_fraction_of_gpu_memory_to_use"
_KINDS: dict[type, str] = {bool: "a boolean", int: "a whole number", float: "a number with decimals", str: "text"}
TRUE_WORDS, FALSE_WORDS = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def suggestion(name: str, known: Collection[str]) -> str:
    """``; did you mean 'x'?``, what to use instead of a name that was here before, or nothing. Case and dashes count as
    typing errors."""
    if name in GONE:
        return f"; {GONE[name]}"
    by_form = {form.lower(): form for form in known}
    close = get_close_matches(name.lower().replace("-", "_"), by_form, n=1, cutoff=0.6)
    return f"; did you mean {by_form[close[0]]!r}?" if close else ""


def describe(value: object) -> str:
    """A value with its kind, for messages: ``'2' (text)``."""
    if type(value) not in _KINDS:
        return kind_in_words(value)
    return f"{repr(value) if isinstance(value, float) else shown(value)} ({kind_in_words(value)})"


def kind_in_words(value: object) -> str:
    """The kind of a value, without the value: ``text``."""
    return "no value" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")


def unknown_key(name: str) -> str:
    if VARIABLE_NAME.fullmatch(name):
        return "unknown key; an environment variable goes below 'environment:'"
    return f"unknown key{suggestion(name, [*KNOBS, 'extends'])}"


def problems_in(settings: Mapping[str, Any]) -> list[Problem]:
    """All problems of each setting by itself and of all of them together."""
    problems = value_problems(settings)
    bad = {problem.key.partition(".")[0] for problem in problems}
    good = {name: value for name, value in settings.items() if name not in bad}
    return problems + contradictions(good, ignoring=bad)


def value_problems(settings: Mapping[str, Any]) -> list[Problem]:
    """The problems of values: wrong names, types, ranges, and what is refused; nothing about combinations."""
    problems = _schema_problems(settings)
    bad = {problem.key for problem in problems}
    for name, value in settings.items():
        if name in bad or name not in KNOBS:
            continue
        if name == "environment":
            texts = [item for item in value.items() if isinstance(item[0], str) and isinstance(item[1], str)]
            problems += [problem for item in texts if (problem := variable_problem(*item))]
        elif (
            KNOBS[name].fate == "refused" and value != KNOBS[name].default and not _switched_off(KNOBS[name], settings)
        ):
            problems.append(Problem(name, f"given {shown(value)}: {KNOBS[name].reason}"))
    return problems


def contradictions(settings: Mapping[str, Any], ignoring: Collection[str] = ()) -> list[Problem]:
    """The problems of settings that are valid by themselves but would have no effect, or the opposite one."""
    problems = []
    for name in settings:
        row = KNOBS.get(name)
        if row and row.needs and row.needs not in ignoring and _switched_off(row, settings):
            stated = f"{row.needs} is {shown(settings.get(row.needs, KNOBS[row.needs].default))}"
            problems.append(Problem(name, f"has no effect while {stated}; set {row.needs}: true, or remove {name}"))
        elif row and (idle := _idle_with(row, settings, ignoring)):
            problems.append(Problem(name, idle))
    return (
        problems
        + clashes(settings)
        + _size_contradictions(settings)
        + _overlap_contradictions(settings)
        + _loss_scale_contradictions(settings)
        + _skipping_contradictions(settings)
        + _recompute_contradictions(settings)
        + _executor_contradictions(settings)
        + _share_contradictions(settings)
        + _block_contradictions(settings)
        + _fragment_contradictions(settings)
    )


def _idle_with(row: Knob, settings: Mapping[str, Any], ignoring: Collection[str]) -> str:
    """Why a knob has no effect with the given choice, or nothing."""
    rule = row.only_with
    if rule is None or any(name in ignoring for name in rule.choices):
        return ""
    chosen = {name: settings.get(name, KNOBS[name].default) for name in rule.choices}
    if any(chosen[name] in values for name, values in rule.choices.items()):
        return ""
    if rule.default_fits and settings[row.name] == row.default:
        return ""
    stated = " and ".join(f"{name} is {value}" for name, value in chosen.items())
    ways = " or ".join(f"{name}: {' or '.join(values)}" for name, values in rule.choices.items())
    return f"has no effect while {stated}; set {ways}, or remove {row.name}"


def _size_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    first, every = settings.get("last_comm_group_size_MB"), settings.get("fuse_grad_size_in_MB")
    if first in (None, AUTO) or every in (None, AUTO) or first <= every:
        return []
    rule = (
        f"{shown(first)} is more than fuse_grad_size_in_MB, {shown(every)}, which limits every bucket; use that or less"
    )
    return [Problem("last_comm_group_size_MB", rule)]


def _overlap_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    """Overlapped averaging: settings with which its end would be undefined, or the optimizer's state partly
    averaged."""
    name = "local_sgd_overlap_steps"
    steps = settings.get(name, 0)
    if not steps:
        return []
    period = settings.get("local_sgd_steps", KNOBS["local_sgd_steps"].default)
    fragments = settings.get("local_sgd_fragments", 1)
    between = period // fragments
    shared = f" / local_sgd_fragments, {between}" if fragments > 1 else f", {period}"
    schedule, momentum = settings.get("local_sgd_schedule", "constant"), settings.get("local_sgd_momentum", "keep")
    rules = {
        f"{steps} is not below local_sgd_steps{shared}: an averaging ends before the next one starts; use "
        f"{max(between - 1, 0)} or less": steps >= between,
        f"does not go with local_sgd_schedule: {schedule}, whose next period depends on the averaging, or can be "
        "shorter than the overlap; use constant": schedule != "constant",
        f"does not go with local_sgd_momentum: {momentum}, which changes the optimizer's state at an averaging while "
        "local steps use it; use keep": momentum != "keep",
    }
    return [Problem(name, rule) for rule, broken in rules.items() if broken]


def _block_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    size = settings.get("quantised_block_size", 32)
    if size % 32 == 0:
        return []
    return [Problem("quantised_block_size", f"{size} is not a multiple of 32; use {max(32, round(size / 32) * 32)}")]


def _fragment_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    """Fragments: at most one a step, at fixed steps, and nothing that belongs to all parameters at once."""
    name = "local_sgd_fragments"
    fragments = settings.get(name, 1)
    if fragments == 1:
        if "local_sgd_fragment_pattern" not in settings:
            return []
        rule = f"has no effect while {name} is 1; set more, or remove it"
        return [Problem("local_sgd_fragment_pattern", rule)]
    period = settings.get("local_sgd_steps", KNOBS["local_sgd_steps"].default)
    schedule, momentum = settings.get("local_sgd_schedule", "constant"), settings.get("local_sgd_momentum", "keep")
    rules = {
        f"{fragments} is more than local_sgd_steps, {period}: each fragment has its step of a period; use {period} or "
        "less, or a longer period": fragments > period,
        f"does not go with local_sgd_schedule: {schedule}: a fragment has a fixed step of each period; use constant": (
            schedule != "constant"
        ),
        f"does not go with local_sgd_momentum: {momentum}, which changes the whole state of the optimizer at an "
        "averaging; use keep": momentum != "keep",
    }
    return [Problem(name, rule) for rule, broken in rules.items() if broken]


def _loss_scale_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    """Contradictions of float16's loss scale; not in the table of pairs, as mixed precision goes with both knobs."""
    if settings.get("amp_level", "O0") == "O0" or settings.get("amp_dtype") != "float16":
        return []
    clash, problems = "does not go with amp_dtype: float16", []
    if settings.get("accumulate_steps", 1) > 1:
        rule = (
            f"{settings['accumulate_steps']} {clash}: skipping by the loss scale and the merged update are not "
            "tested together; use amp_dtype: bfloat16"
        )
        problems.append(Problem("accumulate_steps", rule))
    if settings.get("use_local_sgd", False):
        rule = f"{clash}: ranks that average no gradients would skip different updates; use amp_dtype: bfloat16"
        problems.append(Problem("use_local_sgd", rule))
    return problems


def _skipping_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    """An adaptive period follows from the loss, which is NaN in a step that is skipped."""
    if settings.get("nonfinite") != "skip" or settings.get("local_sgd_schedule") != "adaptive":
        return []
    rule = (
        "'skip' does not go with local_sgd_schedule: adaptive, whose next period is computed from the loss, which "
        "would be NaN; use nonfinite: error, or a constant or doubling schedule"
    )
    return [Problem("nonfinite", rule)]


_WAYS_TO_CUT: dict[str, Any] = {"recompute_segments": 1, "recompute_every_blocks": 0, "recompute_checkpoints": []}
"""The three knobs for where recompute splits, and up to which value each is off."""


def _recompute_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    used = [name for name, off in _WAYS_TO_CUT.items() if settings.get(name, off) > off]
    if len(used) < 2:
        return []
    return [Problem(used[-1], f"sets where recompute splits, as {used[0]} does; keep one of the two")]


def _executor_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    serial = settings.get("environment", {}).get("FLAGS_new_executor_serial_run")
    threads = settings.get("num_threads")
    if serial is None or threads is None or (serial.lower() in TRUE_WORDS) == (threads == 1):
        return []
    rule = f"num_threads: {threads} means the opposite (1 is the serial mode, more is not); remove one of the two"
    return [Problem("environment.FLAGS_new_executor_serial_run", rule)]


def _share_contradictions(settings: Mapping[str, Any]) -> list[Problem]:
    """Problems of shares that are valid by themselves: of their numbers, and of averages that do not weight ranks."""
    problems, shares = [], settings.get("batch_shares", "equal")
    for name, most in (("batch_shares", math.inf), ("max_share", 1.0)):
        given = settings.get(name)
        numbers = given if isinstance(given, list) else [given] if isinstance(given, float | int) else [1.0]
        if not numbers or not all(0 < number <= most for number in numbers):
            rule = "numbers above 0" if name == "batch_shares" else "numbers above 0 and up to 1"
            problems.append(Problem(name, f"given {given}; allowed: {rule}, one for each rank"))
    if shares == "equal":
        return problems
    if settings.get("average_over") == "ranks":
        rule = "unlike batches would count alike with average_over: ranks; use average_over: samples"
        problems.append(Problem("batch_shares", rule))
    if settings.get("use_local_sgd"):
        rule = (
            "LocalSGD averages parameters of ranks alike, whatever number of samples they have seen; use batch_shares: "
            "equal, or a profile without use_local_sgd"
        )
        problems.append(Problem("batch_shares", rule))
    return problems


def _switched_off(row: Knob, settings: Mapping[str, Any]) -> bool:
    return bool(row.needs) and settings.get(row.needs, KNOBS[row.needs].default) is False


def _schema_problems(settings: Mapping[str, Any]) -> list[Problem]:
    try:
        Settings(**settings)
    except ValidationError as error:
        found = [_in_our_words(details) for details in error.errors(include_url=False) if not _is_about_auto(details)]
        return list(dict.fromkeys(found))  # of two types that a knob takes each complains
    return []


def _is_about_auto(details: Any) -> bool:
    """Whether pydantic's error only says that a value is not ``auto``: another error has the real problem."""
    knob = KNOBS.get(str(details["loc"][0]))
    return knob is not None and knob.auto and details["type"] == "literal_error"


def _in_our_words(details: Any) -> Problem:
    """One of pydantic's errors as: what was given, what is allowed."""
    name = str(details["loc"][0])
    if details["type"] == "extra_forbidden":
        return Problem(name, unknown_key(name))
    if name == "environment":  # values are not repeated
        allowed = "text" if len(details["loc"]) > 1 else KNOBS[name].allowed
        key = ".".join(map(str, details["loc"][:2]))
        return Problem(key, f"given {kind_in_words(details['input'])}; allowed: {allowed}")
    if len(details["loc"]) > 1 and not KNOBS[name].auto and KNOBS[name].entries is str:
        return Problem(".".join(map(str, details["loc"][:2])), f"given {describe(details['input'])}; allowed: text")
    given, row = details["input"], KNOBS[name]
    for value, reason in row.refused:
        if given == value:
            return Problem(name, f"given {shown(given)}: {reason}")
    in_range_kind = type(given) is row.kind or (row.kind is float and type(given) is int)
    hint = suggestion(given, row.choices) if isinstance(given, str) else ""
    return Problem(name, f"given {shown(given) if in_range_kind else describe(given)}; allowed: {row.allowed}{hint}")


def variable_problem(name: str, value: str) -> Problem | None:
    """Why a line of the environment section is refused. Values are not shown: they may be secrets."""
    key = f"environment.{name}"
    if name in FLAG_KNOBS:
        return Problem(key, f"is the knob {FLAG_KNOBS[name].becomes}; set that instead")
    if OWNED_BY_LAUNCHER.fullmatch(name):
        return Problem(
            key, "the launcher sets this from its own flags and from the cluster; remove it from the profile"
        )
    if CHOOSES_DEVICES.fullmatch(name):
        return Problem(
            key, "chooses devices, which differ from rank to rank; give --selected_gpus to the launcher instead"
        )
    if not VARIABLE_NAME.fullmatch(name):
        return Problem(
            key, "is not a variable name; allowed: capital letters, digits and _, or FLAGS_ and a flag's name"
        )
    if name == "FLAGS_enable_pir_api" and value.strip().lower() not in TRUE_WORDS:
        return Problem(key, "the old IR has no host operators, which carry the communication; remove it")
    if name == MEMORY_FRACTION and not _is_fraction(value):
        return Problem(
            key, "given a value that is not allowed; allowed: a number, 0 to 1, the part of a GPU's free memory"
        )
    if "\0" in value or "\n" in value:
        return Problem(key, "the value has a line break or a NUL character; allowed: one line of text")
    return None


def _is_fraction(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
