"""The ledger that the ranks of a soak write (``program.py``), and the steps in it that contributed to the result.

An attempt resumes from a checkpoint; steps after that checkpoint are rolled back. Followed backwards from the last
checkpoint, each attempt resumed from one that another attempt wrote: these stretches are what the model was trained on.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LEDGER, STEP_SECONDS, STOP_AT = (f"FLEET_TRAIN_SOAK_{name}" for name in ("LEDGER", "STEP_SECONDS", "STOP_AT"))
HURRY = "hurry"
Place = tuple[int, int]
"""(finished epochs, samples done in the current epoch): independent of the number of ranks."""
Line = dict[str, Any]
Key = tuple[Place, int]
"""(place before the step, rank)."""


@dataclass(frozen=True)
class Stretch:
    """Steps of one attempt that were not rolled back: from ``start`` to ``end``, on ``world_size`` ranks."""

    attempt: int
    world_size: int
    start: Place
    end: Place


class Ledger:
    """Reads new lines at each call; an incomplete last line is read at the next one."""

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

    def hurry(self) -> None:
        """Ask the ranks to train without pauses from now on."""
        (self.folder / HURRY).touch()

    def newest_attempt(self) -> int:
        """The newest attempt that has trained a step; -1: none."""
        return max((line["attempt"] for line in self.lines() if line["event"] == "step"), default=-1)

    def newest_attempt_has_saved(self) -> bool:
        newest = self.newest_attempt()
        return any(line["event"] == "save" and line["attempt"] == newest for line in self.lines())

    def first_step_after(self, moment: float, attempt: int, world_size: int = 0) -> float | None:
        """When an attempt with at least so many ranks made its first step after ``moment`` (Unix seconds)."""
        steps = (line for line in self.lines() if line["event"] == "step" and line["time"] > moment)
        fitting = (line["time"] for line in steps if line["attempt"] > attempt and line["world"] >= world_size)
        return min(fitting, default=None)


def surviving(lines: Sequence[Line], last_digest: str) -> list[Stretch]:
    """The stretches that led to the checkpoint with that digest, oldest first. Raises ValueError where one is missing.

    Of two attempts that wrote the same checkpoint (they trained the same) the later one counts. One that
    was killed between its last checkpoint and the line for it is recognised by its steps.
    """
    saves = sorted((line for line in lines if line["event"] == "save"), key=lambda line: line["time"])
    written = {line["digest"]: line for line in saves}
    begins = {line["attempt"]: line for line in lines if line["event"] == "begin" and line["rank"] == 0}
    stretches, digest, begin = list[Stretch](), last_digest, None
    while digest is not None:
        save = written.get(digest) or (begin and _killed_before_its_line(lines, begin))
        if save is None or save["attempt"] not in begins:
            raise ValueError(f"no attempt wrote the checkpoint {digest[:12]} that another one resumed from")
        begin = begins[save["attempt"]]
        stretches.append(Stretch(save["attempt"], save["world"], place(begin["place"]), place(save["place"])))
        digest = begin["came_from"]
    return [each for each in reversed(stretches) if each.start < each.end]


def _killed_before_its_line(lines: Sequence[Line], successor: Line) -> Line | None:
    """The missing line: of the last earlier attempt that reached this position and has no line of a save there."""
    there = place(successor["place"])
    noted = {line["attempt"] for line in lines if line["event"] == "save" and place(line["place"]) == there}
    same = {there} if there[1] else {there, (there[0] - 1, successor["samples"])}
    steps = [line for line in lines if line["event"] == "step" and line["rank"] == 0 and place(line["after"]) in same]
    came = [line for line in steps if line["attempt"] < successor["attempt"] and line["attempt"] not in noted]
    last = max(came, key=lambda line: int(line["attempt"]), default=None)
    return None if last is None else {**last, "place": there}


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Merge neighbours with the same number of ranks: a resume must not change the result."""
    found: list[Stretch] = []
    for each in stretches:
        if found and found[-1].world_size == each.world_size:
            found[-1] = replace(found[-1], end=each.end)
        else:
            found.append(each)
    return found


def steps_of(lines: Iterable[Line], stretches: Iterable[Stretch] | None = None) -> dict[Key, Line]:
    """The steps of every rank in these stretches; without any, all."""
    spans = {each.attempt: each for each in stretches or ()}
    found: dict[Key, Line] = {}
    for line in (line for line in lines if line["event"] == "step"):
        before, after, span = place(line["before"]), place(line["after"]), spans.get(line["attempt"])
        if stretches is None or (span and span.start <= before and after <= span.end):
            found[before, line["rank"]] = line
    return found


def samples_wrong(steps: Mapping[Key, Line], num_samples: int, epochs: int, orders: Mapping[int, Sequence[int]]) -> Any:
    """Per epoch in which a sample was lost or seen too often: how many of each.

    The sampler yields each sample once, then repeats as many from the start of the epoch's order as make the ranks'
    shares equal: fewer than there are ranks.
    """
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    most: dict[int, int] = defaultdict(int)
    for (at, _), line in steps.items():
        seen[at[0]].update(line["indices"])
        most[at[0]] = max(most[at[0]], line["world"] - 1)
    wrong: dict[int, dict[str, int]] = {}
    for epoch in range(epochs):
        extra = seen[epoch].total() - num_samples
        expected = Counter(range(num_samples)) + Counter(orders[epoch][: max(0, extra)])
        lost, too_often = (expected - seen[epoch]).total(), (seen[epoch] - expected).total()
        if lost or too_often or extra > most[epoch]:
            wrong[epoch] = {"lost": lost, "too_often": too_often, "more": extra}
    return wrong


def place(told: Sequence[int]) -> Place:
    epoch, samples = told
    return int(epoch), int(samples)
