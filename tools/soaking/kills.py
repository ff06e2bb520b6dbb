"""Which rank is killed or frozen when: planned ahead from a seed, then carried out on the running job."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tools.soaking.job import Running, freeze, kill

KINDS = ("step", "save", "start", "freeze")
_LONGEST_START_SECONDS = 6.0
_LONGEST_STEP_SECONDS = 0.05
_LONGEST_SAVE_SECONDS = 0.01
_LONGEST_FREEZE_SECONDS = 5.0
_ATTEMPT_SECONDS = 180.0


class SoakFailed(Exception):
    """The job misbehaved, or the soak could not carry out its plan."""


@dataclass(frozen=True)
class PlannedKill:
    """``step``: in a step or between two. ``save``: while a checkpoint is written. ``start``: before the first step.
    ``freeze``: at any of these moments, stopped by SIGSTOP and continued.
    """

    kind: str
    step: int
    """Wait until the job reaches this step; 0 for ``start``."""
    delay_seconds: float
    rank: int
    frozen_seconds: float = 0.0


def plan_kills(count: int, total_steps: int, ranks: int, seed: int, freezes: int = 0) -> list[PlannedKill]:
    """Kills at steps spread over the whole run: two fifths in steps, two fifths in saves, the rest while starting;
    between them the freezes.
    """
    chance = random.Random(seed)
    kinds = [("step", "save", "step", "save", "start")[index % 5] for index in range(count)] + ["freeze"] * freezes
    count += freezes
    chance.shuffle(kinds)
    # The last tenth is left out: a job that has ended cannot be killed.
    steps = sorted(chance.sample(range(1, max(count + 1, int(total_steps * 0.9))), count))
    longest = {
        "step": _LONGEST_STEP_SECONDS, "save": _LONGEST_SAVE_SECONDS, "start": _LONGEST_START_SECONDS,
        "freeze": _LONGEST_STEP_SECONDS,
    }  # fmt: skip
    plans = []
    for kind, step in zip(kinds, steps, strict=True):
        # Rank 0 is the one that writes.
        rank = 0 if kind == "save" and chance.random() < 0.5 else chance.randrange(ranks)
        delay = round(chance.uniform(0.0, longest[kind]), 4)
        frozen = round(chance.uniform(0.1, _LONGEST_FREEZE_SECONDS), 2) if kind == "freeze" else 0.0
        plans.append(PlannedKill(kind, 0 if kind == "start" else step, delay, rank, frozen))
    return plans


def carry_out(running: Running, plans: list[PlannedKill], world_size: int, say: Callable[[str], None]) -> list[Any]:
    """Kill or freeze as planned; returns a record. Raises SoakFailed if the job does not recover."""
    done: list[dict[str, Any]] = []
    attempt = 0
    for number, plan in enumerate(plans, start=1):
        _await_moment(running, attempt, plan, world_size, done[-1]["time"] if done else running.began)
        draft, pid = running.draft(), running.rank_pids().get(plan.rank)
        if pid is None:
            raise SoakFailed(f"rank {plan.rank} of attempt {attempt} had ended before it could be killed")
        if done:
            _note_recovery(running, done[-1])
        done.append({**asdict(plan), "attempt": attempt, "checkpoint_under_way": draft, "time": time.time()})
        say(f"{number} of {len(plans)}: rank {plan.rank}, {plan.kind} {plan.step or ''}".rstrip())
        if plan.kind == "freeze":
            freeze(pid, plan.frozen_seconds)
        else:
            kill(pid)
            attempt += 1
    return done


def _await_moment(running: Running, attempt: int, plan: PlannedKill, world_size: int, last_kill: float) -> None:
    def all_ranks_run() -> bool:
        return running.attempt() >= attempt and len(running.rank_pids()) == world_size

    def has_come_so_far() -> bool:
        return running.step_since(last_kill) >= plan.step

    _await(running, all_ranks_run, "its start")
    if plan.kind != "start":
        _await(running, has_come_so_far, f"step {plan.step}")
    if plan.kind == "save":
        _await(running, lambda: running.draft() is not None, "a checkpoint", pause_seconds=0.0005)
    time.sleep(plan.delay_seconds)


def _await(running: Running, condition: Callable[[], bool], what: str, pause_seconds: float = 0.02) -> None:
    if not running.wait_until(condition, _ATTEMPT_SECONDS, pause_seconds):
        raise SoakFailed(
            f"attempt {running.attempt()} did not reach {what} within {_ATTEMPT_SECONDS:g} s; exit codes "
            f"{running.exit_codes()}, see the logs in {running.job.folder}"
        )


def note_last_recovery(running: Running, done: list[Any]) -> None:
    """To be called once the job has ended."""
    if done:
        _note_recovery(running, done[-1])


def _note_recovery(running: Running, last: dict[str, Any]) -> None:
    """Seconds from a kill to the next attempt's first reported step; None if that attempt was killed before it."""
    report = running.first_report_after(last["time"])
    last["seconds_to_next_step"] = None if report is None else round(report - last["time"], 1)
