"""Checkpoints on more than one node: which nodes keep copies, which run and checkpoint is the newest of all nodes.

The first rank of each node acts for it. All ranks make the communicating calls in the same order; only transfers run in
threads, which communicate only with one another (`sending`, `receiving`).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fleet_train import fleet
from fleet_train.cluster.store.access import Callers, job_secret
from fleet_train.convert import persistables
from fleet_train.errors import CheckpointError
from fleet_train.files import parse_json, publish, read_regular
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.copy_receiver import Receiver
from fleet_train.train.checkpoint.copy_sender import Address, Copier, send
from fleet_train.train.checkpoint.storage import RECORD, Place, Run
from fleet_train.train.evaluation import ask_first_worker, share, together
from fleet_train.train.settings import DEFAULT_CHECKPOINT_TIMEOUT_SECONDS

FINISH_SECONDS = 300.0
"""Wait for copies under way at the end of a training."""
STOP_SECONDS = 20.0
"""The same at a graceful shutdown, below the launcher's grace period of 30 s."""
_POLL_SECONDS = 1.0


class Copies:
    """The copies of one run's checkpoints. Every method is called on all ranks, except ``offer``.

    Args:
        checkpoints: this node's folder of them.
        number: nodes that keep each checkpoint, including rank 0's.
        keep_best: also send the best one to rank 0 if it lacks it.
        say: gets messages to print once, on rank 0.
        timeout_seconds: how long one node may take to read, send or remove checkpoints before a training begins.
    """

    def __init__(
        self,
        checkpoints: Path,
        number: int,
        keep_best: bool,
        say: Callable[[str], None],
        timeout_seconds: float = DEFAULT_CHECKPOINT_TIMEOUT_SECONDS,
    ) -> None:
        self._checkpoints, self._number, self._keep_best, self._say = checkpoints, number, keep_best, say
        self._timeout_seconds = timeout_seconds
        self._has_joined = self._has_looked = False
        self._rank = 0
        self._members: list[int] = []
        self._addresses: dict[int, Address] = {}
        self._receiver: Receiver | None = None
        self._secret: bytes | None = None
        self._copier = Copier(checkpoints, {}, "", None, say)
        self._unusable: dict[str, str] = {}
        """The nodes that can keep nothing in their folder, and why."""
        self.run: Run | None = None
        """The run that checkpoints belong to from now on; None if none was found or begun."""

    def holders(self) -> list[str]:
        """Nodes that have published checkpoints, by their first ranks."""
        self._join()
        told = fleet.gather(self._is_member and bool(storage.complete(self._checkpoints)))
        return [_describe(rank) for rank in self._members if told[rank]]

    def start_new_run(self) -> None:
        """Begin another run. If a node has checkpoints, they stay until `remove_earlier`."""
        told = self._look_everywhere()
        self.run = storage.run_from(share(Run.new(latest_run(told)).as_json()))
        self._has_looked = True
        if not any(each["held"] for each in told if each is not None):
            self.remove_earlier()

    def remove_earlier(self) -> None:
        """Remove the checkpoints of earlier runs on all nodes; an absent node detects this later."""
        run = self.run
        assert run is not None
        self._on_members(lambda: storage.remove_others(self._checkpoints, run))
        self._on_members(lambda: write_record(self._checkpoints, run))
        if self._rank == 0:
            self._copier.offer()

    def bring_newest(self) -> None:
        """Send rank 0 the newest whole checkpoint of the latest run, from any node; once per process.

        Checkpoints of other runs are moved aside, on all nodes. Raises CheckpointError on every rank when no checkpoint
        is whole, or when the newest one cannot be sent to rank 0.
        """
        if self._has_looked:
            return
        self._has_looked = True
        told = self._look_everywhere()
        drawn = storage.run_from(share(Run.new().as_json()))
        self.run = run = run_to_continue(told, drawn.id) or drawn

        def set_aside() -> str | None:
            folders = storage.set_aside(self._checkpoints, run)
            return f"checkpoints of another run were moved to {', '.join(map(str, folders))}" if folders else None

        self._on_members(set_aside)
        self._on_members(lambda: write_record(self._checkpoints, run))
        held = held_of(told, run)
        if held:
            self._bring_first_whole(held)

    def is_member(self) -> bool:
        """Whether this rank acts for a node with a folder of its own."""
        self._join()
        return self._is_member

    def begin_saving(self) -> None:
        """Called before a save: from now on rank 0 sends, and only the nodes that keep copies listen."""
        self._join()
        if self._rank not in self._receivers:
            self.close()

    def offer(self) -> None:
        """Called on rank 0, on any thread, when a checkpoint has been published."""
        self._copier.offer()

    def finish(self, seconds: float) -> str:
        """Wait until rank 0 has tried all copies, at most this long. Ranks synchronize at short intervals meanwhile.

        Returns, on every rank, which nodes lack the last checkpoint and why; empty if none does. What an earlier try
        has not brought, also one of an earlier job, is tried once more.
        """
        if not self._receivers and not self._unusable:
            return ""
        deadline = time.monotonic() + seconds
        if fleet.is_first_worker() and self._copier.behind():
            self._copier.offer()
        while True:
            left = deadline - time.monotonic()
            is_done = fleet.is_first_worker() and self._copier.wait(max(0.0, min(_POLL_SECONDS, left)))
            if share([is_done, left <= 0]) != [False, False]:
                break
        return str(ask_first_worker(self._missing))

    def _missing(self) -> str:
        """On rank 0, as ``finish`` returns it."""
        try:
            published = storage.complete(self._checkpoints)
        except (OSError, CheckpointError):
            return ""  # rank 0's own disk, which the save has told of
        behind = {**self._copier.behind(), **(self._unusable if len(self._members) < self._number else {})}
        if not published or not behind:
            return ""
        lacking = "; ".join(f"on {node}: {why}" for node, why in behind.items())
        return (
            f"{storage.name_of(published[-1])} is whole on {_describe(0)}, but --checkpoint_copies {self._number} asks "
            f"for more, and there is no copy {lacking}. Mend that, and start the job again with --resume: it sends "
            "what is missing, also when nothing is left to train"
        )

    def scalars(self) -> dict[str, float]:
        """For the metrics, on rank 0: counted since this process started; empty if nothing is sent."""
        if not self._receivers:
            return {}
        return {
            "checkpoint/copies": float(self._copier.made),
            "checkpoint/copies_failed": float(self._copier.failed),
        }

    def close(self) -> None:
        """Receive no more copies. Does not communicate."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    # which nodes keep copies

    @property
    def _receivers(self) -> list[int]:
        return self._members[1 : self._number]

    @property
    def _is_member(self) -> bool:
        return self._rank in self._members

    def _join(self) -> None:
        """Find out which nodes have their own folder, and where they listen; once per process."""
        if self._has_joined:
            return
        self._has_joined = True
        self._rank = fleet.worker_index()
        self._secret = job_secret(os.environ)
        marker = f".fleet_train-{secrets.token_hex(16)}"
        try:
            told = fleet.gather(self._open(marker) if fleet.local_rank() == 0 else None)
            if "problem" in told[0]:
                raise CheckpointError(f"rank 0 cannot use its disk: {told[0]['problem']}")
            open_ = [rank for rank, each in enumerate(told) if each is not None and "problem" not in each]
            self._unusable = {
                _describe(rank): each["problem"] for rank, each in enumerate(told) if each and "problem" in each
            }
            seen = [rank for rank in open_ if os.path.exists(self._checkpoints / told[rank]["marker"])]
            self._members = folders_apart(open_, fleet.gather(seen))
        finally:
            with suppress(OSError):  # a folder that cannot be used has been reported
                (self._checkpoints / marker).unlink()
        self._addresses = {rank: Address(**told[rank]["address"]) for rank in self._members}
        if self._rank == 0:
            for line in self._words():
                self._say(line)
            receivers = {_describe(rank): self._addresses[rank] for rank in self._receivers}
            self._copier = Copier(self._checkpoints, receivers, _host(0), self._secret, self._say)

    def _open(self, marker: str) -> dict[str, Any]:
        try:
            storage.refuse_no_folder(self._checkpoints)
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            (self._checkpoints / marker).touch()
            callers = Callers(map(_host, range(len(fleet.worker_endpoints()))))
            self._receiver = Receiver(self._checkpoints, _host(self._rank), self._secret, callers)
        except (OSError, CheckpointError) as error:
            return {"problem": str(error)}
        return {"marker": marker, "address": self._receiver.address.as_json()}

    def _words(self) -> Iterator[str]:
        for node, problem in self._unusable.items():
            yield f"no copies of checkpoints on {node}: {problem}"
        own = [_describe(rank) for rank in self._members]
        words = words_for(self._number, fleet.node_num() - len(self._unusable), own)
        yield f"--checkpoint_copies {self._number}: {words}"

    # which run, which checkpoint

    def _look_everywhere(self) -> list[Any]:
        self._join()
        return fleet.gather(tell(self._checkpoints) if self._is_member else None)

    def _bring_first_whole(self, held: Sequence[Held]) -> None:
        """From the newest to the oldest; damaged ones are moved aside once a whole one is found."""
        damaged: list[tuple[Held, str]] = []
        unsent = ""
        for one in held:
            if unsent and one.place < damaged[-1][0].place:
                break
            problem = self._at(one.rank, partial(check_whole, self._checkpoints / one.name))
            if problem is None:
                if damaged:
                    self._move_damaged([each for each, _ in damaged])
                unsent = self._send_to_first(one) or ""
                if not unsent:
                    self._send_best(one.rank)
                    return
                problem = unsent
            damaged.append((one, problem))
        raise CheckpointError(
            f"{_describe(damaged[0][0].rank)}: {damaged[0][1]}"
            + (f"; then {_describe(damaged[-1][0].rank)}: {unsent}" if unsent and len(damaged) > 1 else "")
        )

    def _move_damaged(self, damaged: Iterable[Held]) -> None:
        mine = [self._checkpoints / one.name for one in damaged if one.rank == self._rank]

        def move() -> str | None:
            folders = [str(storage.move_aside(path, "damaged")) for path in mine]
            return f"a damaged checkpoint was moved to {folders[0]}" if folders else None

        self._on_members(move)

    def _send_to_first(self, one: Held) -> str | None:
        """The problem, or None; rank 0's own checkpoint is not sent."""
        if one.rank == 0:
            return None
        if self._rank == 0:
            self._say(f"the newest checkpoint, {one.name}, comes from {_describe(one.rank)}")
        return self._at(one.rank, lambda: self._send(self._checkpoints / one.name))

    def _send_best(self, holder: int) -> None:
        if not self._keep_best or holder == 0:
            return

        def bring() -> None:
            best = storage.best(self._checkpoints)
            if best is not None:
                check_whole(best)
                self._send(best)

        problem = self._at(holder, bring)
        if problem is not None and self._rank == 0:
            self._say(f"the best checkpoint did not come from {_describe(holder)}: {problem}")

    def _send(self, folder: Path) -> None:
        send(self._addresses[0], _host(self._rank), folder, secret=self._secret)

    # collective calls

    def _at(self, rank: int, work: Callable[[], None]) -> str | None:
        """Let one rank do it; its problem, on every rank."""
        problem = together(work if self._rank == rank else None, self._timeout_seconds)[rank]["problem"]
        return None if problem is None else str(problem)

    def _on_members(self, work: Callable[[], str | None]) -> None:
        """Let each node do it; rank 0 prints their messages and problems."""
        told = together(work if self._is_member else None, self._timeout_seconds)
        for rank, each in enumerate(told):
            if self._rank == 0 and (each["problem"] or each["value"]):
                self._say(f"{_describe(rank)}: {each['problem'] or each['value']}")


def _host(rank: int) -> str:
    return str(fleet.worker_endpoints()[rank]).rpartition(":")[0]


def _describe(rank: int) -> str:
    return f"rank {rank} ({fleet.worker_endpoints()[rank]})"


# Which run and which checkpoint is the newest of all nodes, and which nodes have their own folder.


_MOST_RECORD_BYTES = 64 << 10

Told = Sequence["dict[str, Any] | None"]
"""The results of ``tell``, by rank; None for ranks that do not act for a folder."""


@dataclass(frozen=True)
class Held:
    """A published checkpoint reported by a node. ``place``: how far it has trained, as read by its node."""

    place: Place
    rank: int
    run: Run | None
    """None if its marker cannot be read."""
    name: str


def tell(checkpoints: Path) -> dict[str, Any]:
    """This node's checkpoints, newest first."""
    held = [
        [path.name, None if saved is None else saved.run.as_json(), None if saved is None else saved.place]
        for path, saved in reversed(storage.published(checkpoints).items())
    ]
    return {"record": read_record(checkpoints).as_json(), "held": held}


def folders_apart(first_ranks: Sequence[int], seen: Sequence[Sequence[int]]) -> list[int]:
    """The first of those ranks for each folder; ``seen[rank]``: whose markers are in the folder of ``rank``."""
    apart: list[int] = []
    for rank in first_ranks:
        if not set(seen[rank]) & set(apart):
            apart.append(rank)
    return apart


def latest_run(told: Told) -> Run | None:
    """The run that was begun last, of all known to any node; None if no node has a checkpoint."""
    return max((run for _, run in _known_runs(told)), default=None)


def run_to_continue(told: Told, job: str) -> Run | None:
    """The latest run; ``job``: the id of a run of this launched job, which continues its own.

    Raises CheckpointError if that cannot be told: two runs have one generation, because each began where the other was
    not known, and so neither is the later one. (Runs of versions without generations have their time.)
    """
    latest = latest_run(told)
    if latest is None or latest.generation == 0:
        return latest
    known = sorted(_known_runs(told), key=lambda one: one[1])
    rivals = {run.id: (rank, run) for rank, run in known if run.generation == latest.generation}
    if job in rivals:
        return rivals[job][1]
    if len(rivals) > 1:
        where = " and ".join(f"'{run}' on rank {rank}" for run, (rank, _) in sorted(rivals.items())[:2])
        raise CheckpointError(
            f"there are checkpoints of two runs, {where}, each of which began where the other was not known: which one "
            f"is the later cannot be told ({RECORD} beside the checkpoints has the time of day at which it began). "
            "Move the folder checkpoints of the run that is not to be continued away from its nodes"
        )
    return latest


def _known_runs(told: Told) -> list[tuple[int, Run]]:
    """(rank, run) of each checkpoint with a marker, and of each record."""
    found = []
    for rank, each in enumerate(told):
        if each is not None:
            found += [(rank, storage.run_from(run)) for _, run, _ in each["held"]]
            found += [(rank, run) for run in [storage.run_from(each["record"])] if run != Run()]
    return found


def held_of(told: Told, run: Run | None) -> list[Held]:
    """The checkpoints of that run, and those whose marker names no run: newest first; of equal ones, the lowest rank's.
    The newest has trained most.
    """
    entries = [(rank, *entry) for rank, each in enumerate(told) if each is not None for entry in each["held"]]
    known: list[tuple[str, Place]] = [(name, tuple(place)) for _, name, _, place in entries if place is not None]
    held = [
        Held(
            storage.behind(name, known) if place is None else tuple(place),
            rank,
            None if of is None else storage.run_from(of),
            name,
        )
        for rank, name, of, place in entries
    ]
    return sorted(
        (one for one in held if one.run in (run, None)), key=lambda one: (*(-part for part in one.place), one.rank)
    )


def check_whole(folder: Path) -> None:
    """Read all of a checkpoint. CheckpointError names the first file or tensor that has changed since it was
    written."""
    storage.read(folder)
    persistables.read_folder(folder)


def read_record(checkpoints: Path) -> Run:
    """The last run known to this node; ``Run()`` if it knows none."""
    try:
        return storage.run_from(parse_json(read_regular(checkpoints / RECORD, _MOST_RECORD_BYTES)))
    except (OSError, ValueError):
        return Run()


def write_record(checkpoints: Path, run: Run) -> None:
    """Write it atomically, synced to the disk."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    publish(checkpoints / RECORD, json.dumps(run.as_json()).encode(), f".{RECORD}", synced=True)


def words_for(number: int, nodes: int, own: Sequence[str]) -> str:
    """Which nodes keep checkpoints, if ``number`` are requested: ``nodes`` could, ``own`` have their own folder."""
    if len(own) >= number:
        return f"checkpoints are kept on {', '.join(own[:number])}"
    if len(own) > 1:
        return f"checkpoints are kept on {', '.join(own)}, as many as there are"
    if nodes > 1:
        return "all nodes see rank 0's checkpoints in one shared folder; nothing is sent"
    return f"there is no second node to keep them; checkpoints are kept on {own[0]} alone"
