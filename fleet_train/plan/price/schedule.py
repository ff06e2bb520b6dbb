"""When queued work ends: parallel queues, with resources shared evenly among their users. Pure arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING = 1e-15


@dataclass(frozen=True)
class Phase:
    """``seconds`` of work when alone on ``resource``; an empty name is waiting, which uses no resource."""

    resource: str
    seconds: float


@dataclass(frozen=True)
class Task:
    """Sequential phases in a queue, starting at ``ready`` (seconds) or later."""

    queue: int
    phases: tuple[Phase, ...]
    ready: float


def finish_times(tasks: Sequence[Task]) -> list[float]:
    """Seconds at which each task ends. A queue runs its tasks in list order."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        waiting[task.queue].append(index)
    left = [[phase for phase in task.phases if phase.seconds > 0] for task in tasks]
    ends = [0.0] * len(tasks)
    now = 0.0
    while waiting:
        for queue in list(waiting):
            _leave(waiting, queue, tasks, left, ends, now)
        running = [queue[0] for queue in waiting.values() if tasks[queue[0]].ready <= now + _NOTHING]
        speeds = _speeds([left[index][0] for index in running])
        arrivals = [tasks[queue[0]].ready - now for queue in waiting.values() if tasks[queue[0]].ready > now + _NOTHING]
        ending = [left[index][0].seconds / speed for index, speed in zip(running, speeds, strict=True)]
        if not (arrivals or ending):
            break
        passed = min(arrivals + ending)
        now += passed
        for index, speed in zip(running, speeds, strict=True):
            phase = left[index][0]
            rest = phase.seconds - passed * speed
            left[index][:1] = [Phase(phase.resource, rest)] if rest > _NOTHING else []
    return ends


def _leave(
    waiting: dict[int, list[int]],
    queue: int,
    tasks: Sequence[Task],
    left: list[list[Phase]],
    ends: list[float],
    now: float,
) -> None:
    """Remove tasks that have ended, or that are ready and empty, from the front of a queue."""
    while waiting[queue] and not left[waiting[queue][0]] and tasks[waiting[queue][0]].ready <= now + _NOTHING:
        ends[waiting[queue].pop(0)] = now
    if not waiting[queue]:
        del waiting[queue]


def _speeds(phases: Sequence[Phase]) -> list[float]:
    """The speed of each phase: users of a resource get equal shares."""
    users: dict[str, int] = defaultdict(int)
    for phase in phases:
        users[phase.resource] += 1
    return [1.0 if not phase.resource else 1.0 / users[phase.resource] for phase in phases]
