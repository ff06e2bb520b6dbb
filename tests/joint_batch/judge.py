"""Launches jobs, in one process and on ranks, and says what is wrong with each."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.joint_batch import Case, cases
from tests.joint_batch.profiles import WAYS, Job
from tests.programs.alone import read_records
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

# What is said of losses.
_ACCUSES = ("the loss depends on the batch", "the loss is no sum over samples", "the constant is taken as")
_IN_ONE_LAUNCH = 60
"""Paddle keeps the threads of every program that a process has run."""
CHILD = ROOT / "tests/joint_batch/child.py"
Record = dict[str, Any]


@dataclass
class Verdict:
    """``wrong``: sentences; empty where all is as it has to be. ``off``: how far parameters are from one process's, in
    parts of their way."""

    job: Job
    wrong: list[str] = field(default_factory=list)
    off: float = 0.0
    refused: str = ""
    digest: str = ""
    said: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    """What is wrong with the losses that were fetched."""

    @property
    def kind(self) -> str:
        return "WRONG" if self.wrong else "refused" if self.refused else "equal"

    def __str__(self) -> str:
        told = "\n    ".join([*self.wrong, *([self.refused] if self.refused else [])])
        return f"{self.job.label}, {self.job.ranks} ranks\n    {told}"


def judge(jobs: Sequence[Job], folder: Path, tell: Callable[[Verdict], None] = lambda _: None) -> list[Verdict]:
    """All jobs: one process, and one launch for each number of ranks and engine; one more after each that fails.

    ``tell`` gets each verdict as it is known, from a thread of its own.
    """
    known, alone = cases(), folder / "alone"
    reference = _trained_alone(jobs, alone)
    groups: dict[tuple[int, bool], list[Job]] = {}
    verdicts: dict[Job, Verdict] = {}
    for job in jobs:
        found = reference.get(job.reference(known[job.case].static), {})
        if not found.get("ended"):
            verdicts[job] = Verdict(job, [f"plain Paddle: {found.get('error', 'its process ended')[-700:]}"])
            tell(verdicts[job])
        else:
            groups.setdefault((job.ranks, WAYS[job.way].late), []).append(job)
    for (ranks, late), left in groups.items():
        attempts = 0
        while left:
            attempts += 1
            own = folder / f"{ranks} {'late' if late else ''} {attempts}"

            def look(output: str | None, left: list[Job] = left, own: Path = own, ranks: int = ranks) -> None:
                """Judge what has ended, and at the end of a launch what was begun."""
                records = [read_records(own / f"rank{rank}.jsonl") for rank in range(ranks)]
                for job in left:
                    found = [one.get(job.label, {}) for one in records]
                    has_ended = all(record.get("ended") for record in found)
                    if job not in verdicts and (has_ended or (output is not None and any(found))):
                        expected = reference[job.reference(known[job.case].static)]
                        verdicts[job] = _verdict(known[job.case], job, found, expected, output or "")
                        tell(verdicts[job])

            output = _launch("ranks", left[:_IN_ONE_LAUNCH], own, alone, look)
            if not any(job in verdicts for job in left):
                verdicts[left[0]] = Verdict(left[0], [f"the ranks did not begin\n{output}"], math.inf)
                tell(verdicts[left[0]])
            left = [job for job in left if job not in verdicts]
    return [verdicts[job] for job in jobs]


def _trained_alone(jobs: Sequence[Job], folder: Path) -> dict[str, Record]:
    """Plain Paddle's records; a job that ends its process is left out of the next one."""
    static = {name: one.static for name, one in cases().items()}
    left = list({job.reference(static[job.case]): job for job in jobs}.items())
    found: dict[str, Record] = {}
    while left:
        _launch("alone", [job for _, job in left[:_IN_ONE_LAUNCH]], folder, folder)
        before, found = len(found), read_records(folder / "alone.jsonl")
        if len(found) == before:
            break
        left = [(name, job) for name, job in left if name not in found]
    return found


def _launch(
    how: str, jobs: Sequence[Job], folder: Path, alone: Path, look: Callable[[str | None], None] = lambda _: None
) -> str:
    """The output, where a process failed. ``look`` is called now and then, and with the output at the end."""
    folder.mkdir(exist_ok=True, parents=True)
    listed = folder / "jobs.jsonl"
    listed.write_text("\n".join(json.dumps(job.to_json()) for job in jobs))
    ranks = 1 if how == "alone" else jobs[0].ranks
    with _looking(look):
        result = run_ranks(
            CHILD,
            ranks,
            nodes=0 if how == "alone" else 1,
            folder=folder,
            args=[how, str(listed), str(alone), str(os.getpid())],
            env={"FLEET_TRAIN_JOIN_TIMEOUT": "120"},
            timeout_seconds=120 + 20 * len(jobs),
            check=False,
            late_streams=how == "ranks" and WAYS[jobs[0].way].late,
        )
    output = result.report()[-6000:] if any(result.exit_codes) else ""
    look(output)
    return output


@contextmanager
def _looking(look: Callable[[str | None], None]) -> Iterator[None]:
    """Calls ``look`` every second while the body runs."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(1.0):
            look(None)

    thread = threading.Thread(target=repeat, name="looks at records")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _verdict(case: Case, job: Job, records: Sequence[Record], expected: Record, output: str) -> Verdict:
    way = WAYS[job.way]
    expected_words = _words(case, job)
    if any("refused" in record for record in records):
        told = [record.get("refused", "") for record in records]
        as_expected = way.strict and expected_words and all(expected_words in each for each in told)
        return Verdict(job, [] if as_expected else ["it was refused"], refused=told[0])
    for rank, record in enumerate(records):
        if not record.get("ended"):
            told = record.get("traceback", f"did not end\n{output}")
            return Verdict(job, [f"rank {rank}: {record.get('error', '')}\n{told}"], math.inf)
    off = max(record["apart"]["difference"] for record in records)
    verdict = Verdict(job, off=off, digest=records[0]["replica"], said=records[0]["said"])
    if len({record["replica"] for record in records}) > 1:
        verdict.wrong.append("the replicas differ")
    if any(record["start"] for record in records):
        verdict.wrong.append("the start values differ")
    told = [message for message in verdict.said if any(mark in message for mark in _ACCUSES)]
    if way.plain:
        pass
    elif expected_words:
        if not any(expected_words in message for message in told):
            verdict.wrong.append(f"it is not said that {expected_words}: {told}")
        if "shares" not in expected_words:
            return verdict
    elif told:
        verdict.wrong.append(f"accused: {told[0]}")
    if not off <= way.tolerance:
        verdict.wrong.append(f"{records[0]['apart']['worst']}: off by {off:.1e} of its way")
    if way.micro_batches == 1:
        verdict.losses = _unequal_losses(way, records, expected["fetched"])
    return verdict


def _words(case: Case, job: Job) -> str:
    """Part of what has to be said of a case."""
    return next((words for name, words in case.said.items() if name in ("default", *job.way.split(", "))), "")


def _unequal_losses(way: Any, records: Sequence[Record], expected: Sequence[float]) -> list[str]:
    """The mean of what the ranks fetched is what one process fetched."""
    wrong = []
    steps = list(zip(*(record["fetched"] for record in records), strict=True))
    tolerance = max(way.tolerance, 1e-9)
    for step, (found, one) in enumerate(zip(steps, expected, strict=True)):
        if not _equal(sum(found) / len(found), one, tolerance):
            wrong.append(f"the loss fetched in step {step} is {list(found)}, of one process {one}")
    return wrong[:1]


def _equal(value: float, one: float, tolerance: float) -> bool:
    if math.isnan(one):
        return math.isnan(value)
    return value == one or abs(value - one) <= tolerance * max(abs(one), 1e-3)
