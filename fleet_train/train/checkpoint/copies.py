"""Checkpoints on more than one node: which ranks write them, and where a run continues that has them.

All ranks hold the same state, so one rank on each of several nodes writes the same checkpoint onto its own disk: while
a training runs, nothing is sent. The first rank of each node acts for it. All ranks call every method, in the same
order. `newest` decides which run and checkpoint counts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from fleet_train import fleet, timeouts
from fleet_train.convert import persistables
from fleet_train.convert.saving import piece_of
from fleet_train.errors import CheckpointError
from fleet_train.train.agree import share, together
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.newest import (
    HeldCheckpoint,
    check_whole,
    folders_apart,
    held_of,
    latest_run,
    report_of,
    run_to_continue,
    write_record,
)
from fleet_train.train.checkpoint.storage import TrainingRun

_PIECE_BYTES = 16 << 20
"""What is read of a checkpoint's file at a time, and sent to the nodes that lack it."""


class Copies:
    """The nodes that keep one run's checkpoints.

    Args:
        checkpoints: this node's folder of them.
        number: nodes that keep each checkpoint, including rank 0's.
        keep_best: also bring the best one to those that lack it.
        report: gets messages to print once, on rank 0.
        timeout_seconds: how long one node may take to read or remove checkpoints before a training begins.
    """

    def __init__(
        self,
        checkpoints: Path,
        number: int,
        keep_best: bool,
        report: Callable[[str], None],
        timeout_seconds: float = timeouts.CHECKPOINT_SECONDS,
    ) -> None:
        self._checkpoints, self._number, self._keep_best, self._report = checkpoints, number, keep_best, report
        self._timeout_seconds = timeout_seconds
        self._has_joined = self._is_run_chosen = False
        self._members: list[int] = []
        """The first ranks of the nodes with a folder of their own: those that keep checkpoints come first."""
        self._unusable: dict[int, str] = {}
        """The nodes that can keep nothing in their folder, by their first ranks, and why."""
        self._behind: dict[int, str] = {}
        """Other ranks that lack the last checkpoint, and why."""
        self.run: TrainingRun | None = None
        """The run that checkpoints belong to from now on; None if none was found or begun."""
        self.made = self.failed = 0
        """Checkpoints that other nodes have written since this process began, and attempts that failed."""

    def holders(self) -> list[str]:
        """Nodes that have published checkpoints, by their first ranks."""
        holds = fleet.gather(self.is_member() and bool(storage.complete(self._checkpoints)))
        return [describe(rank) for rank in self._members if holds[rank]]

    def is_member(self) -> bool:
        """Whether this rank acts for a node with a folder of its own."""
        self._join()
        return fleet.worker_index() in self._members

    def writers(self) -> list[int]:
        """The ranks that write each checkpoint, rank 0 first."""
        self._join()
        return self._members[: self._number]

    def start_new_run(self) -> None:
        """Begin another run. If a node has checkpoints, they stay until `remove_earlier`."""
        reports = self._reports()
        self._begin_run(reports)
        if not any(report["held"] for report in reports if report is not None):
            self.remove_earlier()

    def begin_saving(self) -> TrainingRun:
        """The run of a checkpoint that is saved now: another one begins if none was found or begun."""
        if self.run is None:
            self._begin_run(self._reports())
        assert self.run is not None
        return self.run

    def _begin_run(self, reports: Sequence[Any]) -> None:
        self.run = storage.run_from(share(TrainingRun.new(latest_run(reports)).as_json()))
        self._is_run_chosen = True

    def remove_earlier(self) -> None:
        """Remove the checkpoints of earlier runs on the nodes that write none: those that do have removed theirs, and
        an absent node learns of it later."""
        run, writes = self.run, fleet.worker_index() in self.writers()
        assert run is not None
        self._run_on_members(None if writes else lambda: storage.remove_others(self._checkpoints, run))
        self._run_on_members(lambda: write_record(self._checkpoints, run))

    def bring_newest(self) -> None:
        """Give every node that keeps checkpoints the newest whole one of the latest run, from whichever node has it;
        once per process.

        Checkpoints of other runs are moved aside, on all nodes, and so are damaged ones once a whole one is found.
        Raises CheckpointError on every rank when there are checkpoints and none is whole, or when the newest one does
        not get to rank 0.
        """
        if self._is_run_chosen:
            return
        reports = self._choose_run()
        damaged: list[tuple[HeldCheckpoint, str]] = []
        for _, group in groupby(held_of(reports, self.run), key=attrgetter("progress")):
            alike = list(group)
            broken = self._broken(alike)
            damaged += broken.items()
            if whole := [each for each in alike if each not in broken]:
                self._move_damaged([each for each, _ in damaged])
                self._bring(whole[0].rank, whole[0].name, [each.rank for each in whole])
                self._bring_best(whole[0].rank)
                return
        if damaged:
            raise CheckpointError(f"{describe(damaged[0][0].rank)}: {damaged[0][1]}")

    def _broken(self, held: Sequence[HeldCheckpoint]) -> dict[HeldCheckpoint, str]:
        """Find the checkpoints that have changed since they were written, and how. Each node reads its own."""
        mine = [each for each in held if each.rank == fleet.worker_index()]

        def check() -> dict[str, str]:
            return {each.name: problem for each in mine if (problem := _problem_of(self._checkpoints / each.name))}

        outcomes = together(check if mine else None, self._timeout_seconds)
        problems = {each: (outcomes[each.rank]["value"] or {}).get(each.name) for each in held}
        return {each: problem for each, problem in problems.items() if problem is not None}

    def _bring(self, holder: int, name: str, has_it: Sequence[int]) -> None:
        """Send a checkpoint of one node to those that keep checkpoints and are not in ``has_it``."""
        lacking = [rank for rank in self.writers() if rank not in has_it]
        if 0 in lacking and fleet.is_first_worker():
            self._report(f"the newest checkpoint, {name}, comes from {describe(holder)}")
        problems = self._send(holder, name, lacking) if lacking else {}
        if 0 in problems:
            raise CheckpointError(f"{describe(0)}: {name} did not come from {describe(holder)}: {problems[0]}")
        self._count({rank: problems.get(rank, "") for rank in lacking if rank != 0})

    def _bring_best(self, holder: int) -> None:
        if not self._keep_best:
            return
        paths = fleet.gather(self._best() if self.is_member() else None)
        if paths[holder] and (lacking := [rank for rank in self.writers() if paths[rank] != paths[holder]]):
            for rank, problem in self._send(holder, paths[holder], lacking).items():
                if fleet.is_first_worker():
                    self._report(f"{describe(rank)} did not get the best checkpoint of {describe(holder)}: {problem}")

    def _best(self) -> str | None:
        with suppress(OSError, CheckpointError):
            return None if (best := storage.best(self._checkpoints)) is None else storage.name_of(best)
        return None

    def _send(self, holder: int, name: str, receivers: Sequence[int]) -> dict[int, str]:
        """Send a checkpoint over the job's connections; returns who did not get it, and why. All ranks call it."""
        rank, folder, problem = fleet.worker_index(), self._checkpoints / name, ""
        draft = storage.copy_of(self._checkpoints, storage.name_of(folder))
        sizes: dict[str, int] = fleet.gather(_sizes_of(folder) if rank == holder else {})[holder]
        try:
            if rank in receivers:
                storage.begin_draft(draft)
        except OSError as error:
            problem = str(error)
        for file, size in sizes.items():
            for start in range(0, size, _PIECE_BYTES):
                piece = np.zeros(min(_PIECE_BYTES, size - start), np.uint8)
                if rank == holder:
                    _read_into(piece, folder / file, start)
                piece = piece_of(holder, piece, file)
                if rank in receivers and not problem:
                    problem = _append(piece, draft / file)

        def place() -> None:
            if problem:
                raise CheckpointError(problem)
            storage.sync_files(draft)
            check_whole(draft)
            storage.put_in_place(draft, folder.with_name(storage.name_of(folder)))

        placed = together(place if rank in receivers else None, self._timeout_seconds)
        return {rank: placed[rank]["problem"] for rank in receivers if placed[rank]["problem"] is not None}

    def wrote(self, outcomes: Sequence[str | None]) -> None:
        """Called with how the ranks' last writes went, by rank: the problem, empty for a checkpoint that was written,
        None for one that is still being written or was told before."""
        self._count({rank: outcome for rank in self.writers()[1:] if (outcome := outcomes[rank]) is not None})

    def is_late(self, ranks: Sequence[int]) -> None:
        """Called where the wait for the writes of these ranks is over."""
        self._behind |= dict.fromkeys(ranks, "it was still being written when the wait for it was over")

    def _count(self, outcomes: Mapping[int, str]) -> None:
        for rank, problem in outcomes.items():
            self._behind.pop(rank, None)
            self.made, self.failed = self.made + (not problem), self.failed + bool(problem)
            if problem:
                self._behind[rank] = problem
                if fleet.is_first_worker():
                    words = "training goes on, the next checkpoint tries again"
                    self._report(f"no copy on {describe(rank)}: {problem}; {words}")

    def lacking(self, name: str) -> str:
        """Name the nodes that lack the last checkpoint, ``name``, and say why; empty if none does."""
        unusable = self._unusable if len(self._members) < self._number else {}
        behind = {**self._behind, **unusable}
        if not behind:
            return ""
        words = "; ".join(f"on {describe(rank)}: {why}" for rank, why in behind.items())
        return (
            f"{name} is whole on {describe(0)}, but --checkpoint_copies {self._number} asks for more, and there is no "
            f"copy {words}. Mend that, and start the job again with --resume: it brings what is missing, also when "
            "nothing is left to train"
        )

    def scalars(self) -> dict[str, float]:
        """Counts of copies for the metrics, since this process started; empty if no other node writes."""
        if not self._members[1 : self._number]:
            return {}
        return {"checkpoint/copies": float(self.made), "checkpoint/copies_failed": float(self.failed)}

    def _join(self) -> None:
        """Find out which nodes have their own folder; once per process."""
        if self._has_joined:
            return
        self._has_joined = True
        marker = f".fleet_train-{secrets.token_hex(16)}"
        try:
            nodes: list[Any] = fleet.gather(self._open(marker) if fleet.local_rank() == 0 else None)
            if "problem" in nodes[0]:
                raise CheckpointError(f"rank 0 cannot use its disk: {nodes[0]['problem']}")
            usable = [rank for rank, node in enumerate(nodes) if node and "problem" not in node]
            self._unusable = {rank: node["problem"] for rank, node in enumerate(nodes) if node and "problem" in node}
            seen = [rank for rank in usable if os.path.exists(self._checkpoints / nodes[rank]["marker"])]
            self._members = folders_apart(usable, fleet.gather(seen))
        finally:
            with suppress(OSError):  # a folder that cannot be used has been reported
                (self._checkpoints / marker).unlink()
        if fleet.is_first_worker():
            for rank, problem in self._unusable.items():
                self._report(f"no copies of checkpoints on {describe(rank)}: {problem}")
            own = [describe(rank) for rank in self._members]
            who = who_keeps(self._number, fleet.node_num() - len(self._unusable), own)
            self._report(f"--checkpoint_copies {self._number}: {who}")

    def _open(self, marker: str) -> dict[str, Any]:
        try:
            storage.refuse_no_folder(self._checkpoints)
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            (self._checkpoints / marker).touch()
        except (OSError, CheckpointError) as error:
            return {"problem": str(error)}
        return {"marker": marker}

    def _reports(self) -> list[Any]:
        return fleet.gather(report_of(self._checkpoints) if self.is_member() else None)

    def _choose_run(self) -> list[Any]:
        """The latest run goes on, or a drawn one begins; returns what the nodes hold. Raises CheckpointError if it
        cannot be told which run is the latest."""
        self._is_run_chosen = True
        reports = self._reports()
        drawn = storage.run_from(share(TrainingRun.new().as_json()))
        self.run = run = run_to_continue(reports, drawn.id) or drawn

        def set_aside() -> str | None:
            folders = storage.set_aside(self._checkpoints, run)
            return f"checkpoints of another run were moved to {', '.join(map(str, folders))}" if folders else None

        self._run_on_members(set_aside)
        self._run_on_members(lambda: write_record(self._checkpoints, run))
        return reports

    def _move_damaged(self, damaged: Sequence[HeldCheckpoint]) -> None:
        if not damaged:
            return
        mine = [self._checkpoints / each.name for each in damaged if each.rank == fleet.worker_index()]

        def move() -> str | None:
            folders = [str(storage.move_aside(path, "damaged")) for path in mine]
            return f"a damaged checkpoint was moved to {folders[0]}" if folders else None

        self._run_on_members(move)

    def _run_on_members(self, work: Callable[[], str | None] | None) -> None:
        """Let each node do it; rank 0 prints their messages and problems."""
        outcomes = together(work if self.is_member() else None, self._timeout_seconds)
        for rank, outcome in enumerate(outcomes):
            if fleet.is_first_worker() and (message := outcome["problem"] or outcome["value"]):
                self._report(f"{describe(rank)}: {message}")


def _problem_of(folder: Path) -> str:
    try:
        check_whole(folder)
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _sizes_of(folder: Path) -> dict[str, int]:
    """The files of a checkpoint with their bytes, the marker last; empty if they cannot be read."""
    try:
        names = [*persistables.read_entries(folder)["files"], storage.MARKER]
        return {name: (folder / name).stat().st_size for name in names}
    except (OSError, CheckpointError):
        return {}


def _read_into(piece: Any, path: Path, start: int) -> None:
    """Read a piece of a file. What cannot be read stays zero, and is found to be damaged where it arrives."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(start)
        file.readinto(memoryview(piece))


def _append(piece: Any, path: Path) -> str:
    """Append a piece to a file; returns the problem, or nothing."""
    try:
        with path.open("ab") as file:
            file.write(memoryview(piece))
    except OSError as error:
        return str(error)
    return ""


def who_keeps(number: int, nodes: int, own: Sequence[str]) -> str:
    """Say which nodes keep checkpoints, if ``number`` are requested: ``nodes`` could, ``own`` have their own folder."""
    if len(own) >= number:
        return f"checkpoints are kept on {', '.join(own[:number])}"
    if len(own) > 1:
        return f"checkpoints are kept on {', '.join(own)}, as many as there are"
    if nodes > 1:
        return "all nodes see rank 0's checkpoints in one shared folder, which has each of them once"
    return f"there is no second node to keep them; checkpoints are kept on {own[0]} alone"


def describe(rank: int) -> str:
    """A rank as messages name it: ``rank 1 (10.0.0.2:6170)``."""
    return f"rank {rank} ({fleet.worker_endpoints()[rank]})"
