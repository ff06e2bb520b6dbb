"""`Profile`: checked, frozen settings with the origin of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import PrivateAttr

from fleet_train.errors import ProfileError
from fleet_train.profile.fleet_objects import fold_flags, read_flag
from fleet_train.profile.knobs import AUTO, Problem, hidden, shown
from fleet_train.profile.rules import MEMORY_FRACTION, problems_in, suggestion, variable_problem
from fleet_train.profile.schema import DESCRIPTIVE, FLAG_KNOBS, KNOBS, Settings

BY_CALLER, BY_ENVIRONMENT = "set by the caller", "the environment"


class Profile(Settings):
    """One field per knob under Fleet's name (see `Settings`). ``Profile()`` is the default.

    Raises ProfileError, with every problem on its own line, for settings that are unknown, of a wrong type, out of
    range, contradictory, or refused.
    """

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    def __init__(self, /, **settings: Any) -> None:
        folded, came_from, problems = fold_flags(settings)
        problems += problems_in(folded)
        if problems:
            raise ProfileError("\n".join(str(problem) for problem in problems))
        super().__init__(**folded)
        written = [*folded, *(f"environment.{name}" for name in folded.get("environment", ()))]
        self._origins = dict.fromkeys(written, BY_CALLER) | came_from

    @classmethod
    def assembled(cls, settings: Mapping[str, Any], origins: Mapping[str, str]) -> Profile:
        """A profile with the place where each setting was written (``strategies/a.yaml:7``)."""
        profile = cls(**settings)
        profile._origins.update({name: place for name, place in origins.items() if name in profile._origins})
        return profile

    @property
    def explicit(self) -> frozenset[str]:
        """Knobs that the file (or one it extends) or the caller set, even to the default."""
        return frozenset(self.model_fields_set - DESCRIPTIVE)

    def origin(self, knob: str) -> str:
        """The place where a knob was set: ``strategies/a.yaml:7``, or ``default``."""
        return self._origins.get(knob, "default")

    @property
    def origins(self) -> Mapping[str, str]:
        """The place where each setting, and each variable (``environment.NAME``), was written."""
        return self._origins

    def settings(self) -> dict[str, Any]:
        """The knobs that were set, with name and description: enough to rebuild this profile."""
        return {name: value for name, value in self if name in self.model_fields_set}

    def shown_settings(self) -> dict[str, Any]:
        """The settings for display: only the names of the environment section, because values may be secrets."""
        settings = self.settings()
        return settings | ({"environment": hidden(self.environment)} if "environment" in settings else {})

    def heeds(self, knob: str) -> bool:
        """Whether a knob has an effect with the others: LocalSGD's period has none if ``use_local_sgd`` is false."""
        row = KNOBS[knob]
        on = not row.needs or bool(getattr(self, row.needs))
        return on and (
            row.only_with is None
            or any(getattr(self, name) in values for name, values in row.only_with.choices.items())
        )

    def digest(self) -> str:
        """Hex of everything that changes training; equal profiles under different names have equal digests."""
        values = {name: value for name, value in self if name not in DESCRIPTIVE}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def with_settings(self, origin: str = BY_CALLER, **settings: Any) -> Profile:
        """A copy with some settings replaced, checked as a whole."""
        changed = self.assembled(self.settings() | settings, self._origins | dict.fromkeys(settings, origin))
        changed._notes = self._notes
        return changed

    def with_choices(self, origin: str, **settings: Any) -> Profile:
        """A copy with these values, which must be valid: unlike `with_settings` it is not checked again."""
        changed = self.model_copy(update=settings)
        changed._origins = self._origins | dict.fromkeys(settings, origin)
        return changed

    def with_notes(self, sentences: Iterable[str]) -> Profile:
        """A copy that also has these sentences to print once on rank 0 (see `applied_mappings`)."""
        noted = self.with_settings()
        noted._notes = (*self._notes, *sentences)
        return noted

    @property
    def notes(self) -> tuple[str, ...]:
        """What was mapped before the profile was made: fields of a stock strategy, Fleet 1.8's names."""
        return self._notes

    def overridden_by(self, environ: Mapping[str, str]) -> tuple[Profile, list[str]]:
        """Apply the three old communication flags of a process environment if the profile does not set their knob.
        Returns the profile and one sentence per flag found, to be printed once, with what the flag means today. Raises
        ProfileError for a value that the knob does not allow, and for a part of a GPU's memory that is none.
        """
        wanted: dict[str, Any] = {}
        notices: list[str] = []
        problems: list[Problem] = []
        for flag in FLAG_KNOBS.values():
            if flag.name not in environ:
                continue
            value, problem = read_flag(flag, environ[flag.name])
            if problem:
                problems.append(Problem(flag.name, f"{problem} (from the environment; unset it there)"))
                continue
            blocked = self._why_not_used(flag.becomes, value)
            used = f"is used as {flag.becomes}: {shown(value)}" + (f": {flag.today}" if value is not False else "")
            notices.append(f"{flag.name}={environ[flag.name]} {blocked or used}")
            if not blocked:
                wanted[flag.becomes] = value
        if MEMORY_FRACTION in environ and (wrong := variable_problem(MEMORY_FRACTION, environ[MEMORY_FRACTION])):
            problems.append(Problem(MEMORY_FRACTION, f"{wrong.message} (from the environment; unset it there)"))
        if problems:
            raise ProfileError("\n".join(str(problem) for problem in problems))
        notices += self._about_memory(environ)
        return self.with_settings(BY_ENVIRONMENT, **wanted) if wanted else self, notices

    def _about_memory(self, environ: Mapping[str, str]) -> list[str]:
        """What Paddle's allocator makes of a part of a GPU's memory, where one is set: a sentence, or nothing."""
        variables = {**self.environment, **environ}
        if MEMORY_FRACTION not in variables:
            return []
        is_own = self.environment.get(MEMORY_FRACTION) == variables[MEMORY_FRACTION]
        where = self.origin(f"environment.{MEMORY_FRACTION}") if is_own else BY_ENVIRONMENT
        if variables.get("FLAGS_allocator_strategy", "auto_growth") == "auto_growth":
            return [
                f"{MEMORY_FRACTION} ({where}) has no effect: Paddle's allocator auto_growth, the default, takes GPU "
                "memory when it is needed and keeps it; leave it out. FLAGS_gpu_memory_limit_mb bounds a rank, "
                "FLAGS_allocator_strategy: naive_best_fit takes the part at the start"
            ]
        if float(variables[MEMORY_FRACTION]) == 0:
            return [
                f"{MEMORY_FRACTION} ({where}) is 0: nothing is taken at the start, and each tensor waits for a "
                "cudaMalloc of its own, which is slow; use auto_growth, or a part above 0"
            ]
        return []

    def _why_not_used(self, knob: str, value: Any) -> str:
        """Why a knob is not taken from the environment, or nothing."""
        if knob in self.explicit and getattr(self, knob) not in (AUTO, value):
            return f"is not used: the profile sets {knob}: {shown(getattr(self, knob))} ({self.origin(knob)})"
        needs = KNOBS[knob].needs
        if needs and not getattr(self, needs):
            return f"is not used: {needs} is off ({self.origin(needs)})"
        return ""

    def worker_environment(self) -> dict[str, str]:
        """Variables to set before Paddle starts: the environment section, and those of mapped knobs."""
        serial = "1" if self.num_threads == 1 else "0"
        # Sequential as well: serial alone runs the launch operators only near the end of the backward pass.
        executor = {"FLAGS_new_executor_serial_run": serial, "FLAGS_new_executor_sequential_run": serial}
        return executor | self.environment

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [(name, hidden(value) if name == "environment" else value) for name, value in self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash((self.name, self.digest()))


def applied_mappings(profile: Profile, node_num: int | None = None) -> list[str]:
    """What rank 0 prints once: a sentence for each mapped knob that was set, each old rule of Fleet that is no longer
    followed, and each valid setting without benefit.
    """
    sentences = list(profile.notes)
    sentences += [
        f"{name}: {shown(getattr(profile, name))} ({profile.origin(name)}) is mapped: {KNOBS[name].reason}"
        for name in Profile.model_fields
        if name in profile.explicit and KNOBS[name].fate == "mapped"
    ]
    sentences += [
        f"{flag.becomes}: {shown(value)} ({origin}): {flag.today}"
        for flag in FLAG_KNOBS.values()
        if (value := getattr(profile, flag.becomes)) is not False
        and (origin := profile.origin(flag.becomes)) != BY_ENVIRONMENT
        and (value is True or flag.name in origin)
    ]
    if node_num == 1 and profile.nccl_comm_num not in (1, AUTO):
        sentences.append(
            f"nccl_comm_num: {profile.nccl_comm_num} ({profile.origin('nccl_comm_num')}) is carried out on this one "
            "node; Fleet 1.8 used 1 there."
        )
    if profile.use_local_sgd and profile.local_sgd_steps == 1 and _averages_every_step(profile):
        sentences.append(
            f"local_sgd_steps: 1 ({profile.origin('local_sgd_steps')}) averages the parameters after every step, which "
            "sends as much as averaging gradients in every step; 2 or more sends less."
        )
    if (every := profile.barrier_every_steps) > 1:
        sentences.append(
            f"barrier_every_steps: {every} ({profile.origin('barrier_every_steps')}): between two barriers Gloo waits "
            "for a rank for 30 s, which cannot be set: one that pauses for longer fails the job. NCCL's ranks wait for "
            f"{profile.collective_timeout_seconds} s (collective_timeout_seconds). A stop request is known up to "
            f"{every - 1} step{'s' if every > 2 else ''} later."
        )
    return sentences


def _averages_every_step(profile: Profile) -> bool:
    return profile.local_sgd_schedule != "adaptive" and profile.outer_optimizer == "none"


def check_flags(profile: Profile, known_flags: Collection[str]) -> None:
    """Raise ProfileError if the environment section has a ``FLAGS_*`` name that is not among ``known_flags``.

    Paddle itself silently accepts any such name from the environment.
    """
    unknown = sorted(name for name in profile.environment if name.startswith("FLAGS_") and name not in known_flags)
    lines = [
        f"{profile.origin(f'environment.{name}')}: environment.{name}: the installed Paddle has no such flag"
        f"{suggestion(name, known_flags) or '; remove it'}"
        for name in unknown
    ]
    if lines:
        raise ProfileError("\n".join(lines))


# The knobs that divide gradients into buckets, as numbers.


CHOSEN = "chosen"
"""The beginning of the origin of a number that was chosen, not given."""
COMMUNICATORS, SIZE, EDGE = BUCKET_KNOBS = ("nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB")


@dataclass(frozen=True)
class Buckets:
    """How many communicators take the buckets in turn; the largest size of a bucket, and of the first and last one, in
    MB (2**20 bytes)."""

    communicators: int
    megabytes: float
    edge_megabytes: float


def open_knobs(profile: Profile) -> tuple[str, ...]:
    """The open knobs that have an effect."""
    return tuple(knob for knob in BUCKET_KNOBS if getattr(profile, knob) == AUTO and profile.heeds(knob))


def chosen_in_words(profile: Profile) -> str:
    """The numbers chosen for a profile, as in a profile file: ``nccl_comm_num: 2, fuse_grad_size_in_MB: 4``."""
    chosen = [knob for knob in BUCKET_KNOBS if profile.origin(knob).startswith(CHOSEN)]
    return ", ".join(f"{knob}: {shown(getattr(profile, knob))}" for knob in chosen)


def buckets_of(profile: Profile) -> Buckets:
    """The numbers of a profile; 0 for knobs without effect. Raises ProfileError if one is still open."""
    if left := open_knobs(profile):
        raise ProfileError(f"{left[0]}: is auto, and no number was chosen for it; fleet_train.plan.choose chooses one")
    numbers = [getattr(profile, knob) if profile.heeds(knob) else 0 for knob in BUCKET_KNOBS]
    return Buckets(int(numbers[0]), float(numbers[1]), float(numbers[2]))


# The first difference between two ranks' profiles, in words; values of variables are never shown, they may be
# secrets.


def comparable(profile: Profile) -> dict[str, dict[str, Any]]:
    """What ranks send one another: knobs with their values, variables with digests of their values. JSON."""
    knobs = {name: value for name, value in profile if name not in DESCRIPTIVE and name != "environment"}
    digests = {name: _digest(name, value) for name, value in profile.environment.items()}
    return {"knobs": knobs, "environment": digests}


def _digest(name: str, value: str) -> str:
    """A digest of a variable's value, different for each variable, so that equal values do not show as equal."""
    return hashlib.sha256(json.dumps([name, value]).encode()).hexdigest()


def first_differing_knob(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> str | None:
    """The first difference of two results of `comparable`; None if they are equal."""
    for name, value in ours["knobs"].items():
        other = theirs["knobs"].get(name)
        if value != other:
            return f"{name} is {shown(value)} here, {shown(other)} there"
    for name in sorted(ours["environment"].keys() | theirs["environment"].keys()):
        here, there = ours["environment"].get(name), theirs["environment"].get(name)
        if here != there:
            where = "another value there" if here and there else f"no value {'there' if here else 'here'}"
            return f"environment.{name} has {where} (values are not shown)"
    return None
