"""When tasks end that share links and processors: each queue runs its own in turn, and queues share what they use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING = 1e-15


@dataclass(frozen=True)
class TaskPhase:
    """``seconds`` of work when alone on ``resource``; an empty name is waiting, which uses no resource."""

    resource: str
    seconds: float


@dataclass(frozen=True)
class PricedTask:
    """Sequential phases in a queue, starting at ``ready`` (seconds) or later."""

    queue: int
    phases: tuple[TaskPhase, ...]
    ready: float


@dataclass(frozen=True)
class QueuedBucket:
    """A bucket on its communicator: what it sends, and how many bytes of values it has."""

    communicator: int
    phases: tuple[TaskPhase, ...]
    nbytes: float


def finish_times(tasks: Sequence[PricedTask]) -> list[float]:
    """Seconds at which each task ends. A queue runs its tasks in list order."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        waiting[task.queue].append(index)
    left = [[phase for phase in task.phases if phase.seconds > 0] for task in tasks]
    ends = [0.0] * len(tasks)
    now = 0.0
    while True:
        for queue in waiting.values():  # tasks that have ended, or that are ready and empty, leave their queues
            while queue and not left[queue[0]] and tasks[queue[0]].ready <= now + _NOTHING:
                ends[queue.pop(0)] = now
        first = [queue[0] for queue in waiting.values() if queue]
        running = [index for index in first if tasks[index].ready <= now + _NOTHING]
        users = Counter(left[index][0].resource for index in running)
        speeds = [1.0 / users[resource] if (resource := left[index][0].resource) else 1.0 for index in running]
        arrivals = [tasks[index].ready - now for index in first if tasks[index].ready > now + _NOTHING]
        ending = [left[index][0].seconds / speed for index, speed in zip(running, speeds, strict=True)]
        if not (arrivals or ending):
            return ends
        passed = min(arrivals + ending)
        now += passed
        for index, speed in zip(running, speeds, strict=True):
            phase = left[index][0]
            rest = phase.seconds - passed * speed
            left[index][:1] = [TaskPhase(phase.resource, rest)] if rest > _NOTHING else []
