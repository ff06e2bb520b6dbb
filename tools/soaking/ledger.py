"""What the ranks of a soak wrote down (``program.py``), and the line of history that has survived in it.

An attempt goes on from a checkpoint; what was trained behind that checkpoint is rolled back. From the last checkpoint
backwards, each attempt came from a checkpoint that another one wrote: these stretches are what the model has seen.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

Place = tuple[int, int]
"""(finished epochs, samples of the epoch under way that are done): the same for every number of ranks."""
Line = dict[str, Any]
Key = tuple[Place, int]
"""(place before the step, rank)."""


@dataclass(frozen=True)
class Stretch:
    """Steps of one attempt that have survived: from ``start`` to ``end``, on so many ranks."""

    attempt: int
    world_size: int
    start: Place
    end: Place

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """Reads what is new each time; a line that is being written is read the next time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = defaultdict(int)
        self._lines: list[Line] = []

    def lines(self) -> list[Line]:
        """All so far, in no particular order."""
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read[path])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read[path] += len(whole) + 1
                self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines

    def newest_attempt(self) -> int:
        """The newest attempt that has trained a step; -1: none."""
        return max((line["attempt"] for line in self.lines() if line["event"] == "step"), default=-1)

    def first_step_after(self, moment: float, attempt: int, world_size: int = 0) -> float | None:
        """When a later attempt made its first step after ``moment`` (Unix seconds), on so many ranks at least."""
        times = (
            line["time"]
            for line in self.lines()
            if line["event"] == "step" and line["attempt"] > attempt and line["world"] >= world_size
        )
        return min((each for each in times if each > moment), default=None)


def attempts_of(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Every attempt that came to training: world size, where it began, the last place that all its ranks reached."""
    begins: dict[int, Line] = {}
    reached: dict[int, dict[int, Place]] = defaultdict(dict)
    for line in lines:
        if line["event"] == "begin":
            begins.setdefault(line["attempt"], line)
        if line["event"] == "step":
            ranks = reached[line["attempt"]]
            ranks[line["rank"]] = max(ranks.get(line["rank"], (0, 0)), place(line["after"]))
    return [
        {
            "attempt": number,
            "world_size": line["world"],
            "begun_at": list(line["place"]),
            "ended_at": list(min(reached[number].values(), default=place(line["place"]))),
        }
        for number, line in sorted(begins.items())
    ]


def surviving(lines: Sequence[Line], last_digest: str) -> list[Stretch]:
    """The stretches that led to the checkpoint with that digest, oldest first. Raises ValueError where one is missing.

    Of two attempts that have written the very same checkpoint (they trained the same) the later one counts. One that
    was killed between its last checkpoint and the line for it is known by its steps.
    """
    saves = sorted((line for line in lines if line["event"] == "save"), key=lambda line: line["time"])
    written = {line["digest"]: line for line in saves}
    begins = {line["attempt"]: line for line in lines if line["event"] == "begin" and line["rank"] == 0}
    stretches: list[Stretch] = []
    digest: str | None = last_digest
    begin: Line | None = None
    while digest is not None:
        save = written.get(digest) or (begin and _killed_before_its_line(lines, begin))
        if save is None or save["attempt"] not in begins:
            raise ValueError(f"no attempt has written the checkpoint {digest[:12]} that another one came from")
        begin = begins[save["attempt"]]
        stretches.append(Stretch(save["attempt"], save["world"], place(begin["place"]), place(save["place"])))
        digest = begin["came_from"]
    return [each for each in reversed(stretches) if each.start < each.end]


def _killed_before_its_line(lines: Sequence[Line], successor: Line) -> Line | None:
    """As its line would be: of the last attempt before that came to the very place and has no line of a save there."""
    there = place(successor["place"])
    noted = {line["attempt"] for line in lines if line["event"] == "save" and place(line["place"]) == there}
    same = {there} if there[1] else {there, (there[0] - 1, successor["samples"])}
    came = [
        line
        for line in lines
        if line["event"] == "step" and line["rank"] == 0 and place(line["after"]) in same
        if line["attempt"] < successor["attempt"] and line["attempt"] not in noted
    ]
    last = max(came, key=lambda line: int(line["attempt"]), default=None)
    return None if last is None else {**last, "place": there}


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Neighbours on the same number of ranks as one: a resume must not be seen in the result."""
    found: list[Stretch] = []
    for each in stretches:
        if found and found[-1].world_size == each.world_size:
            found[-1] = replace(found[-1], end=each.end)
        else:
            found.append(each)
    return found


def steps_of(lines: Iterable[Line], stretches: Iterable[Stretch]) -> dict[Key, Line]:
    """The steps of every rank in these stretches."""
    spans = {each.attempt: each for each in stretches}
    found: dict[Key, Line] = {}
    for line in lines:
        span = spans.get(line["attempt"])
        if (
            line["event"] == "step"
            and span
            and span.start <= place(line["before"])
            and place(line["after"]) <= span.end
        ):
            found[(place(line["before"]), line["rank"])] = line
    return found


def all_steps(lines: Iterable[Line]) -> dict[Key, Line]:
    return {(place(line["before"]), line["rank"]): line for line in lines if line["event"] == "step"}


def samples_wrong(steps: Mapping[Key, Line], num_samples: int, epochs: int, orders: Mapping[int, Sequence[int]]) -> Any:
    """Per epoch in which a sample was lost or seen too often: how many of each.

    The sampler promises each sample once, and behind the last one as many of the first of the epoch's order again as
    make the ranks' shares equal: fewer than there are ranks.
    """
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    most: dict[int, int] = defaultdict(int)
    for (at, _), line in steps.items():
        seen[at[0]].update(line["indices"])
        most[at[0]] = max(most[at[0]], line["world"] - 1)
    wrong: dict[int, dict[str, int]] = {}
    for epoch in range(epochs):
        counts = seen[epoch]
        extra = counts.total() - num_samples
        padding = Counter(orders[epoch][: max(0, extra)])
        expected = Counter(range(num_samples)) + padding
        if counts != expected or extra > most[epoch]:
            wrong[epoch] = {
                "lost": (expected - counts).total(),
                "too_often": (counts - expected).total(),
                "more": extra,
            }
    return wrong


def place(told: Sequence[int]) -> Place:
    epoch, samples = told
    return int(epoch), int(samples)
