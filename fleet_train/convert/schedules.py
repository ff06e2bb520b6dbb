"""The learning-rate schedule of a program (``paddle.optimizer.lr``), which the host steps and no variable holds: saved
and restored with the program's state, and compared with the updates that it is stepped for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle.optimizer.lr import LRScheduler

from fleet_train.convert import process
from fleet_train.errors import CheckpointError, FleetTrainError, ProfileError
from fleet_train.log import log_once

Saved = dict[str, Any]
"""A schedule as it is saved. ``kind``: its class; ``state``: of `_state`, in JSON."""
_BESIDE = ("T_cur", "T_i")
"""What Paddle 3.3.1's CosineAnnealingWarmRestarts counts and leaves out of its state_dict."""


def schedule_of(program: Any) -> Any:
    """The schedule with which the executor sets this program's learning rate; None without one."""
    return getattr(program, "lr_scheduler", None)


def state_to_save(program: Any, trained: Any = None) -> Saved | None:
    """The state of the program's schedule; of ``trained``'s if it has none and shares a parameter with it.

    None without a schedule, and for a state that is no JSON, which is said.
    """
    schedule = schedule_of(program)
    if schedule is None and trained is not None and _names(program) & _names(trained):
        schedule = schedule_of(trained)
    if schedule is None:
        return None
    try:
        return {"kind": _kind(schedule), "state": _as_json(_state(schedule))}
    except ValueError as error:
        log_once(
            [
                f"the state of {_kind(schedule)} is not saved: {error}; save what it needs yourself, and set it after "
                "fleet.load_persistables"
            ],
            rank=0,
        )
        return None


def _names(program: Any) -> set[str]:
    return {each.name for each in program.global_block().all_parameters()}


def _kind(schedule: Any) -> str:
    return type(schedule).__name__


def _state(schedule: Any) -> dict[str, Any]:
    """The state of a schedule, with that of the schedule inside a LinearWarmup."""
    inner = getattr(schedule, "learning_rate", None)
    return {
        **deepcopy(schedule.state_dict()),
        "beside": {name: vars(schedule)[name] for name in _BESIDE if name in vars(schedule)},
        "inner": _state(inner)["beside"] if isinstance(inner, LRScheduler) else {},
    }


def _set_state(schedule: Any, state: Mapping[str, Any]) -> None:
    own = deepcopy(dict(state))
    beside, inner = own.pop("beside"), own.pop("inner")
    schedule.set_state_dict(own)
    for name, value in beside.items():
        setattr(schedule, name, value)
    for name, value in inner.items():
        setattr(schedule.learning_rate, name, value)


def _as_json(value: Any) -> Any:
    """A schedule's state as JSON has it. Raises ValueError for what JSON has no value for."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _as_json(value.item() if value.size == 1 else value.tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"it holds a {type(value).__name__}")


def read_saved(entry: Any, source: str) -> Saved | None:
    """What ``state_to_save`` returned. Raises CheckpointError for anything else, before it is used."""
    if entry is None:
        return None
    try:
        if isinstance(entry["kind"], str) and isinstance(_from_json(entry["state"]), dict):
            return {"kind": entry["kind"], "state": entry["state"]}
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{source}: its learning-rate schedule is damaged; load another saved state")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["float"]) if value.keys() == {"float"} else {name: _from_json(value[name]) for name in value}
    return [_from_json(each) for each in value] if isinstance(value, list) else value


def _fits(saved: Any, own: Any) -> bool:
    """Whether the state is of a schedule that is built alike: the same names, at all depths."""
    if isinstance(own, Mapping) != isinstance(saved, Mapping):
        return False
    return not isinstance(own, Mapping) or (
        own.keys() == saved.keys() and all(_fits(saved[name], own[name]) for name in own)
    )


@dataclass
class _Restored:
    """A schedule between the load of its program and the next run; ``steps`` of the script meanwhile."""

    schedule: Any
    before: dict[str, Any]
    step: Callable[..., None]
    steps: int = 0

    @classmethod
    def begin(cls, schedule: Any, state: dict[str, Any]) -> _Restored:
        restored = cls(schedule, _state(schedule), schedule.step)
        _set_state(schedule, state)

        def counted(*given: Any, **named: Any) -> None:
            restored.steps += not given and not named
            restored.step(*given, **named)

        schedule.step = counted
        return restored

    def end(self) -> None:
        """More than one step before the first run is a script that goes through all past steps itself: they begin where
        the schedule was before the load."""
        vars(self.schedule).pop("step", None)
        if self.steps > 1:
            _set_state(self.schedule, self.before)
            for _ in range(self.steps):
                self.schedule.step()


@dataclass
class _Watched:
    """A schedule that is followed. ``updates_every``: runs of an update. ``moves``: whether the last runs moved it."""

    schedule: Any
    updates_every: int
    moves: deque[bool]
    at: int | None = None
    has_said: bool = False
    restored: _Restored | None = None
    saved_rate: float | None = None
    """The learning rate of the last step before the save, where a load has restored no schedule."""


@dataclass
class Schedules:
    """The schedules of a job's programs, looked at before each run."""

    rank: int
    advise: Callable[[FleetTrainError], None]
    _programs: weakref.WeakKeyDictionary[Any, _Watched] = field(default_factory=weakref.WeakKeyDictionary)

    def watch(self, program: Any, accumulate_steps: int) -> None:
        """Follow the learning-rate schedule of a program from now on, if it has one."""
        schedule = schedule_of(program)
        if isinstance(schedule, LRScheduler):
            self._programs[program] = _Watched(schedule, accumulate_steps, deque(maxlen=accumulate_steps))
            process.before_each_run(self.before_run)

    def copied_by(self, program: Any) -> Any:
        """The watched program that ``program`` is, or a copy of: it has all its parameters and state. None for none."""
        names = _names(program)
        own = [program] if program in self._programs else [each for each in self._programs if _names(each) <= names]
        return own[-1] if own else None

    def restore(self, program: Any, saved: Saved | None, saved_rate: float | None) -> None:
        """Continue the program's schedule where it was saved; every rank calls it, with the same values."""
        if (watching := self.copied_by(program)) is None:
            return
        watched = self._programs[watching]
        for each in self._programs.values():  # programs may share a schedule
            if each.restored is not None and each.schedule is watched.schedule:
                each.restored.end()
                each.restored = None
        watched.restored, watched.at, watched.saved_rate = None, None, None
        watched.moves.clear()
        schedule, state = watched.schedule, _from_json(saved["state"]) if saved else {}
        if saved is None or saved["kind"] != _kind(schedule) or not _fits(state, _state(schedule)):
            watched.saved_rate = saved_rate
            return
        was = schedule.last_epoch
        watched.restored = _Restored.begin(schedule, state)
        if schedule.last_epoch != was:
            text = (
                f"{_kind(schedule)} continues at step {schedule.last_epoch}, with the learning rate {schedule():g}, as "
                "it was saved; what the script sets after the load wins (step(0) begins anew)"
            )
            log_once([text], self.rank)

    def before_run(self, program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        """A hook before each run of a program: look at how far its schedule was moved."""
        watched = self._programs.get(paddle.static.default_main_program() if program is None else program)
        if watched is not None:
            if watched.restored is not None:
                watched.restored.end()
                watched.restored = None
            if watched.saved_rate is not None:
                self._compare(watched, watched.saved_rate)
                watched.saved_rate = None
            if watched.updates_every > 1:
                self._count(watched)
        return feed, fetch_list

    def _compare(self, watched: _Watched, saved_rate: float) -> None:
        """A schedule that stands at its start after a load, with another rate than the saved one, was forgotten."""
        schedule = watched.schedule
        if schedule.last_epoch == 0 and not np.isclose(schedule(), saved_rate, rtol=1e-5, atol=0.0):
            self.advise(
                CheckpointError(
                    f"the loaded state was saved with the learning rate {saved_rate:g}, and {_kind(schedule)} begins "
                    f"anew with {schedule():g}, because no state of such a schedule was saved: call its step(epoch) or "
                    "set_state_dict(...) after fleet.load_persistables"
                )
            )

    def _count(self, watched: _Watched) -> None:
        """Moved twice within the runs of one update, it is stepped after every run."""
        before, watched.at = watched.at, watched.schedule.last_epoch
        if before is None or watched.has_said:
            return
        watched.moves.append(before != watched.at)
        if sum(watched.moves) > 1:
            watched.has_said, n = True, watched.updates_every
            self.advise(
                ProfileError(
                    f"accumulate_steps: {n}: {_kind(watched.schedule)} is stepped after every run, so the learning "
                    f"rate moves {n} times in each update, which takes {n} runs: step it once in {n} runs, after the "
                    f"last one of an update (if (step + 1) % {n} == 0: scheduler.step()), or leave accumulate_steps out"
                )
            )
