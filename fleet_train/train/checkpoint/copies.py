"""Checkpoints on more than one node: which nodes keep copies, and where a run continues that has them.

The first rank of each node acts for it. All ranks make the communicating calls in the same order; only transfers run in
threads, which communicate only with one another (`transfer`). `newest` decides which run and checkpoint counts.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fleet_train import fleet, timeouts
from fleet_train.cluster.store.access import Callers, job_secret
from fleet_train.errors import CheckpointError
from fleet_train.train.agree import ask_first_worker, share, together
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.newest import (
    Held,
    check_whole,
    folders_apart,
    held_of,
    latest_run,
    report_of,
    run_to_continue,
    write_record,
)
from fleet_train.train.checkpoint.storage import Run
from fleet_train.train.checkpoint.transfer import Address, Receiver, send

_UNDER_WAY = "the wait for its transfer was over before it ended"


class Copies:
    """The copies of one run's checkpoints. Every method is called on all ranks, except ``offer``.

    Args:
        checkpoints: this node's folder of them.
        number: nodes that keep each checkpoint, including rank 0's.
        keep_best: also send the best one to rank 0 if it lacks it.
        report: gets messages to print once, on rank 0.
        timeout_seconds: how long one node may take to read, send or remove checkpoints before a training begins.
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
        """The first ranks of the nodes with a folder of their own: those that keep copies come first."""
        self._addresses: dict[int, Address] = {}
        self._receiver: Receiver | None = None
        self._host = ""
        """Of this node, as the others reach it."""
        self._secret: bytes | None = None
        self._copier = Copier(checkpoints, {}, "", None, report)
        self._unusable: dict[str, str] = {}
        """The nodes that can keep nothing in their folder, and why."""
        self.run: Run | None = None
        """The run that checkpoints belong to from now on; None if none was found or begun."""

    def holders(self) -> list[str]:
        """Nodes that have published checkpoints, by their first ranks."""
        holds = fleet.gather(self.is_member() and bool(storage.complete(self._checkpoints)))
        return [_describe(rank) for rank in self._members if holds[rank]]

    def start_new_run(self) -> None:
        """Begin another run. If a node has checkpoints, they stay until `remove_earlier`."""
        reports = self._reports()
        self.run = storage.run_from(share(Run.new(latest_run(reports)).as_json()))
        self._is_run_chosen = True
        if not any(report["held"] for report in reports if report is not None):
            self.remove_earlier()

    def remove_earlier(self) -> None:
        """Remove the checkpoints of earlier runs on all nodes; an absent node detects this later."""
        run = self.run
        assert run is not None
        self._run_on_members(lambda: storage.remove_others(self._checkpoints, run))
        self._run_on_members(lambda: write_record(self._checkpoints, run))
        if fleet.is_first_worker():
            self._copier.offer()

    def bring_newest(self) -> None:
        """Send rank 0 the newest whole checkpoint of the latest run, from any node; once per process.

        Checkpoints of other runs are moved aside, on all nodes. Raises CheckpointError on every rank when no checkpoint
        is whole, or when the newest one cannot be sent to rank 0.
        """
        if self._is_run_chosen:
            return
        self._is_run_chosen = True
        reports = self._reports()
        drawn = storage.run_from(share(Run.new().as_json()))
        self.run = run = run_to_continue(reports, drawn.id) or drawn

        def set_aside() -> str | None:
            folders = storage.set_aside(self._checkpoints, run)
            return f"checkpoints of another run were moved to {', '.join(map(str, folders))}" if folders else None

        self._run_on_members(set_aside)
        self._run_on_members(lambda: write_record(self._checkpoints, run))
        if held := held_of(reports, run):
            self._bring_first_whole(held)

    def is_member(self) -> bool:
        """Whether this rank acts for a node with a folder of its own."""
        self._join()
        return fleet.worker_index() in self._members

    def begin_saving(self) -> None:
        """Called before a save: from now on rank 0 sends, and only the nodes that keep copies listen."""
        self._join()
        if fleet.worker_index() not in self._receivers():
            self.close()

    def offer(self) -> None:
        """Called on rank 0, on any thread, when a checkpoint has been published."""
        self._copier.offer()

    def finish(self, seconds: float) -> str:
        """Wait until rank 0 has tried all copies, at most this long. Ranks synchronize at short intervals meanwhile.

        Returns, on every rank, which nodes lack the last checkpoint and why; empty if none does. What an earlier try
        has not brought, also one of an earlier job, is tried once more.
        """
        if not self._receivers() and not self._unusable:
            return ""
        deadline = time.monotonic() + seconds
        if fleet.is_first_worker() and self._copier.behind():
            self._copier.offer()
        while True:
            left = deadline - time.monotonic()
            is_done = fleet.is_first_worker() and self._copier.wait(min(timeouts.RANKS_SYNC_SECONDS, left))
            if share(is_done or left <= 0):
                return str(ask_first_worker(self._missing))

    def _missing(self) -> str:
        """On rank 0, as ``finish`` returns it."""
        try:
            published = storage.complete(self._checkpoints)
        except (OSError, CheckpointError):
            return ""  # rank 0's own disk, of which the save has a message
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
        if not self._receivers():
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

    def _receivers(self) -> list[int]:
        return self._members[1 : self._number]

    def _join(self) -> None:
        """Find out which nodes have their own folder, and where they listen; once per process."""
        if self._has_joined:
            return
        self._has_joined = True
        self._host, self._secret = _host(fleet.worker_index()), job_secret(os.environ)
        marker = f".fleet_train-{secrets.token_hex(16)}"
        try:
            nodes: list[Any] = fleet.gather(self._open(marker) if fleet.local_rank() == 0 else None)
            if "problem" in nodes[0]:
                raise CheckpointError(f"rank 0 cannot use its disk: {nodes[0]['problem']}")
            usable = [rank for rank, node in enumerate(nodes) if node and "problem" not in node]
            unusable = [rank for rank, node in enumerate(nodes) if node and "problem" in node]
            self._unusable = {_describe(rank): nodes[rank]["problem"] for rank in unusable}
            seen = [rank for rank in usable if os.path.exists(self._checkpoints / nodes[rank]["marker"])]
            self._members = folders_apart(usable, fleet.gather(seen))
        finally:
            with suppress(OSError):  # a folder that cannot be used has been reported
                (self._checkpoints / marker).unlink()
        self._addresses = {rank: Address(*nodes[rank]["address"]) for rank in self._members}
        if fleet.is_first_worker():
            for node, problem in self._unusable.items():
                self._report(f"no copies of checkpoints on {node}: {problem}")
            own = [_describe(rank) for rank in self._members]
            who = who_keeps(self._number, fleet.node_num() - len(self._unusable), own)
            self._report(f"--checkpoint_copies {self._number}: {who}")
            receivers = {_describe(rank): self._addresses[rank] for rank in self._receivers()}
            self._copier = Copier(self._checkpoints, receivers, _host(0), self._secret, self._report)

    def _open(self, marker: str) -> dict[str, Any]:
        try:
            storage.refuse_no_folder(self._checkpoints)
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            (self._checkpoints / marker).touch()
            callers = Callers(map(_host, range(len(fleet.worker_endpoints()))))
            self._receiver = Receiver(self._checkpoints, self._host, self._secret, callers)
        except (OSError, CheckpointError) as error:
            return {"problem": str(error)}
        return {"marker": marker, "address": self._receiver.address}

    def _reports(self) -> list[Any]:
        return fleet.gather(report_of(self._checkpoints) if self.is_member() else None)

    def _bring_first_whole(self, held: Sequence[Held]) -> None:
        """From the newest to the oldest; damaged ones are moved aside once a whole one is found."""
        damaged: list[tuple[Held, str]] = []
        unsent = ""
        for newest in held:
            if unsent and newest.progress < damaged[-1][0].progress:
                break
            folder = self._checkpoints / newest.name
            problem = self._run_on_rank(newest.rank, partial(check_whole, folder))
            if problem is None:
                if damaged:
                    self._move_damaged([each for each, _ in damaged])
                unsent = self._send_to_first(newest) or ""
                if not unsent:
                    self._send_best(newest.rank)
                    return
                problem = unsent
            damaged.append((newest, problem))
        raise CheckpointError(
            f"{_describe(damaged[0][0].rank)}: {damaged[0][1]}"
            + (f"; then {_describe(damaged[-1][0].rank)}: {unsent}" if unsent and len(damaged) > 1 else "")
        )

    def _move_damaged(self, damaged: Sequence[Held]) -> None:
        mine = [self._checkpoints / each.name for each in damaged if each.rank == fleet.worker_index()]

        def move() -> str | None:
            folders = [str(storage.move_aside(path, "damaged")) for path in mine]
            return f"a damaged checkpoint was moved to {folders[0]}" if folders else None

        self._run_on_members(move)

    def _send_to_first(self, newest: Held) -> str | None:
        """The problem, or None; rank 0's own checkpoint is not sent."""
        if newest.rank == 0:
            return None
        if fleet.is_first_worker():
            self._report(f"the newest checkpoint, {newest.name}, comes from {_describe(newest.rank)}")
        return self._run_on_rank(newest.rank, lambda: self._send(self._checkpoints / newest.name))

    def _send_best(self, holder: int) -> None:
        if not self._keep_best or holder == 0:
            return

        def bring() -> None:
            best = storage.best(self._checkpoints)
            if best is not None:
                check_whole(best)
                self._send(best)

        problem = self._run_on_rank(holder, bring)
        if problem is not None and fleet.is_first_worker():
            self._report(f"the best checkpoint did not come from {_describe(holder)}: {problem}")

    def _send(self, folder: Path) -> None:
        send(self._addresses[0], self._host, folder, secret=self._secret)

    def _run_on_rank(self, rank: int, work: Callable[[], None]) -> str | None:
        """Let one rank do it; its problem, on every rank."""
        outcomes = together(work if fleet.worker_index() == rank else None, self._timeout_seconds)
        problem: str | None = outcomes[rank]["problem"]
        return problem

    def _run_on_members(self, work: Callable[[], str | None]) -> None:
        """Let each node do it; rank 0 prints their messages and problems."""
        outcomes = together(work if self.is_member() else None, self._timeout_seconds)
        for rank, outcome in enumerate(outcomes):
            if fleet.is_first_worker() and (message := outcome["problem"] or outcome["value"]):
                self._report(f"{_describe(rank)}: {message}")


class Copier:
    """Makes the receivers' folders equal to rank 0's: newest first, one transfer at a time, in its own thread.

    Args:
        checkpoints: the folder of published checkpoints.
        receivers: by name, for messages.
        source: this node's own address, used for sending.
        report: gets a message when a copy failed, from the thread.
    """

    def __init__(
        self,
        checkpoints: Path,
        receivers: Mapping[str, Address],
        source: str,
        secret: bytes | None,
        report: Callable[[str], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._receivers = receivers
        self._source, self._secret = source, secret
        self._report = report
        self._changed = threading.Condition()
        self._is_wanted = self._is_at_work = False
        self._behind = dict.fromkeys(receivers, "nothing was sent")
        self.made = 0
        """Checkpoints newly stored by receivers, summed over all receivers."""
        self.failed = 0
        """Failed attempts."""

    def offer(self) -> None:
        """Called when the folder has changed. Returns at once; the next round begins after a transfer under way."""
        with self._changed:
            self._is_wanted = bool(self._receivers)
            if self._is_at_work or not self._is_wanted:
                return
            self._is_at_work = True
        threading.Thread(target=self._work, name="fleet_train copies of checkpoints", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether everything offered has been tried; waits at most this long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_at_work, max(0.0, seconds))

    def behind(self) -> dict[str, str]:
        """The receivers that lack the newest checkpoint as far as is known, and why."""
        with self._changed:
            return dict.fromkeys(self._receivers, _UNDER_WAY) if self._is_wanted else dict(self._behind)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._is_wanted:
                    self._is_at_work = False
                    self._changed.notify_all()
                    return
                self._is_wanted = False
                self._behind = dict.fromkeys(self._receivers, _UNDER_WAY)
            for name, address in self._receivers.items():
                try:
                    self._send_missing(name, address)
                except Exception as error:  # any error: training goes on
                    self.failed += 1
                    if name in self._behind:
                        self._behind[name] = str(error)
                    self._report(f"no copy on {name}: {error}; training goes on, the next checkpoint tries again")

    def _send_missing(self, name: str, address: Address) -> None:
        published = storage.complete(self._checkpoints)
        kept = [storage.name_of(path) for path in published]
        for folder in reversed(published):
            try:
                self.made += send(address, self._source, folder, kept, self._secret)
                self._behind.pop(name, None)  # the first one is the newest
            except CheckpointError:
                if folder.is_dir():  # else the retention rule has removed it meanwhile
                    raise


def who_keeps(number: int, nodes: int, own: Sequence[str]) -> str:
    """Which nodes keep checkpoints, if ``number`` are requested: ``nodes`` could, ``own`` have their own folder."""
    if len(own) >= number:
        return f"checkpoints are kept on {', '.join(own[:number])}"
    if len(own) > 1:
        return f"checkpoints are kept on {', '.join(own)}, as many as there are"
    if nodes > 1:
        return "all nodes see rank 0's checkpoints in one shared folder; nothing is sent"
    return f"there is no second node to keep them; checkpoints are kept on {own[0]} alone"


def _host(rank: int) -> str:
    return str(fleet.worker_endpoints()[rank]).rpartition(":")[0]


def _describe(rank: int) -> str:
    return f"rank {rank} ({fleet.worker_endpoints()[rank]})"
