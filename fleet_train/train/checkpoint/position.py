"""Where a run is: its position, the losses of the epoch, its place in the training data, and the versions that made it.

A resume continues there, with any number of ranks. Data that is not the checkpoint's is refused, or accepted.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_train import __version__, fleet
from fleet_train.cluster.installed import version_of
from fleet_train.data import DataIdentity, OwnDataSampler
from fleet_train.errors import CheckpointError, DataError, printable
from fleet_train.plan import CommPlan
from fleet_train.train.checkpoint.manager import StoredCheckpoint, TrainState

_MOST_SHOWN = 3
_PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "numpy", "safetensors")


@dataclass
class Position:
    """The position of a run, counted from its beginning, the same on every rank."""

    epoch: int = 0
    """Finished epochs."""
    step: int = 0
    """Finished steps (optimizer updates)."""
    consumed_samples: int = 0
    """Samples of the current epoch that all ranks together have done."""
    batches: int = 0
    """Batches that each rank has done: with gradient merge micro-batches, several to a step."""
    pending: int = 0
    """The batches whose gradients wait for an update."""
    updates: int = 0
    """Updates that led here: the step of metrics. Unlike ``step`` it is never renumbered."""


@dataclass
class EpochLoss:
    """This rank's fetched losses of one epoch: sum and count."""

    total: float = 0.0
    count: int = 0

    def add(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self.total += loss
            self.count += 1

    def mean(self) -> float:
        """The mean over all ranks, NaN without a loss. All ranks call it."""
        total, count = fleet.all_reduce(np.array([self.total, self.count], dtype=np.float64), op="sum")
        return float(total / count) if count else math.nan


def resumed(state: TrainState, batches_per_epoch: int) -> tuple[Position, EpochLoss]:
    """The position at which this call, which may have another number of ranks, continues, and the epoch's loss so far.

    With a different number of batches per epoch (other ranks, another batch size), the run continues at the same share
    of the epoch. The current epoch's losses go to their rank, or all to rank 0 if the number of ranks differs.
    """
    done, pending = _batches(state)
    inside = max(0, done - state.epoch * state.steps_per_epoch)
    batches = state.epoch * batches_per_epoch + inside * batches_per_epoch // max(1, state.steps_per_epoch)
    losses = [EpochLoss(float(total), int(count)) for total, count in state.epoch_losses]
    rank = fleet.worker_index()
    if len(losses) == fleet.worker_num():
        mine = losses[rank]
    elif rank == 0:
        mine = EpochLoss(sum(each.total for each in losses), sum(each.count for each in losses))
    else:
        mine = EpochLoss()
    step = steps_of(batches, pending, fleet.profile().accumulate_steps)
    return Position(state.epoch, step, state.consumed_samples, batches, pending, state.recorded_step), mine


def steps_of(batches: int, pending: int, accumulate_steps: int) -> int:
    """The updates in this many batches, of which `pending` wait for an update."""
    return max(0, batches - pending) // accumulate_steps


def _batches(state: TrainState) -> tuple[int, int]:
    """The finished batches of each rank, and those of them that wait for an update."""
    size = fleet.profile().accumulate_steps
    if state.pending_batches and state.accumulate_steps != size:
        raise CheckpointError(
            f"this checkpoint has {state.pending_batches} of the {state.accumulate_steps} micro-batches of an update, "
            f"and accumulate_steps is now {size}; resume with accumulate_steps: {state.accumulate_steps}"
        )
    batches = state.step * state.accumulate_steps + state.pending_batches if state.batches is None else state.batches
    return batches, state.pending_batches


class RunData:
    """What the ranks of one `Trainer` read. All ranks make it, and call `resume`.

    A *list* is the samples that a rank divides with others, or has alone. With one list for all ranks, the position in
    it is the checkpoint's `consumed_samples`. With a list on each machine (`OwnDataSampler`) the record says for each
    how many of its samples are done in the current epoch, also for a machine that was lost in this epoch.
    """

    def __init__(self, loader: Any) -> None:
        describe = getattr(loader, "data_identity", None)
        mine: DataIdentity | None = None if describe is None else describe()
        self._samples = 0 if mine is None else mine.samples
        self._classes = [] if mine is None else [printable(name) for name in mine.classes]
        sampler = getattr(loader, "sampler", None)
        self._own = sampler if isinstance(sampler, OwnDataSampler) else None
        lists = fleet.gather(None if mine is None else [mine.digest or f"{mine.samples} samples", mine.samples])
        self._lists: list[tuple[str, int]] | None = None if None in lists else [(each[0], each[1]) for each in lists]
        """Each rank's list: key, number of samples."""
        self._absent: tuple[int, dict[str, Any]] = (0, {})
        """An epoch, and the lists of machines that were lost in it."""

    def done(self, at: Position) -> int | None:
        """Samples of this machine's own list that are done in the epoch; None without one."""
        if self._own is None:
            return None
        return self._own.done_after(at.consumed_samples) if at.consumed_samples else 0

    def record(self, at: Position, done: list[int | None]) -> dict[str, Any] | None:
        """The entry of `TrainState.data`; ``done``: of all ranks. None if a loader does not describe its data."""
        if self._lists is None:
            return None
        epoch, absent = self._absent
        lists = {key: dict(entry) for key, entry in absent.items()} if at.consumed_samples and epoch == at.epoch else {}
        for (key, samples), here in zip(self._lists, done, strict=True):
            entry = lists.setdefault(key, {"samples": samples, "ranks": 0, "done": here})
            entry["ranks"] += 1
            entry["done"] = here if here is None else max(here, entry["done"] or 0)
        return {"classes": self._classes, "lists": lists}

    def resume(self, checkpoint: StoredCheckpoint, at: Position, accepts_changes: bool) -> list[str]:
        """Continue at that position of the data; returns what is to be said about it.

        DataError on every rank for data that is not the checkpoint's, unless it is accepted, and for a place in an
        epoch that the present lists cannot continue.
        """
        saved = checkpoint.state.data
        if self._lists is None:
            notes = ["note: the loader has no data_identity(): whether its data has changed is not known"]
        elif saved is None:
            notes = ["note: the checkpoint does not say what it was trained on: whether that has changed is not known"]
        else:
            notes = self._compare(checkpoint, saved, at, accepts_changes)
        if at.consumed_samples:
            self._continue(checkpoint, {} if saved is None else saved["lists"], at)
        if accepts_changes and self._own is None and self._lists is not None:
            at.consumed_samples = min(at.consumed_samples, self._samples)
        return notes

    def _compare(
        self, checkpoint: StoredCheckpoint, saved: dict[str, Any], at: Position, accepts_changes: bool
    ) -> list[str]:
        differences = fleet.gather(self._difference(checkpoint.state.world_size, saved))
        different = [rank for rank, text in enumerate(differences) if text]
        if not different:
            return self._other_machines(saved["lists"])
        first = different[0]
        where = "" if len(different) == len(differences) else f" on rank {first} ({fleet.worker_endpoints()[first]})"
        text = f"the training data{where} is not that of the checkpoint: {differences[first]}"
        then = "training goes on with the new data"
        if at.consumed_samples and self._own is not None:
            then = f"machines with other data begin it anew in epoch {at.epoch + 1}, the others continue theirs"
        elif at.consumed_samples:
            then = (
                f"the rest of epoch {at.epoch + 1} then follows the new order after its first {at.consumed_samples} "
                "samples, so that some come twice in it and others not at all"
            )
        if accepts_changes:
            return [f"note: {text}; accepted: {then}"]
        raise DataError(
            f"{checkpoint.folder}: {text}. Resume with the former data, start again in another --output_dir, or accept "
            f"it with --accept_changed_data (TrainerSettings: accept_changed_data=True): {then}"
        )

    def _difference(self, ranks: int, saved: dict[str, Any]) -> str:
        """What is not as it was, on this rank; "" if nothing, or if other lists may be those of other machines."""
        assert self._lists is not None
        was, now = saved["classes"], self._classes
        parts = []
        if was and now and was != now:
            if len(was) != len(now):
                parts.append(f"{len(was)} classes then, {len(now)} now")
            renamed = [
                (label, *names) for label, names in enumerate(zip(was, now, strict=False)) if names[0] != names[1]
            ]
            parts += [f"class {label} was {old!r:.60}, is {new!r:.60}" for label, old, new in renamed[:_MOST_SHOWN]]
            parts += [f"and {len(renamed) - _MOST_SHOWN} more"] if len(renamed) > _MOST_SHOWN else []
        lists = saved["lists"]
        key, samples = self._lists[fleet.worker_index()]
        present = dict(self._lists)
        # On another number of ranks, a list may be a new machine's, but not one beside the list that all shared.
        is_shared = len(lists) == 1 and (
            len(present) == 1 or (self._own is None and not present.keys().isdisjoint(lists))
        )
        if key not in lists and (is_shared or ranks == len(self._lists)):
            former = sorted({entry["samples"] for entry in lists.values()})
            if former == [samples]:
                parts.append(f"{samples} samples as before, with other names, labels or contents")
            else:
                parts.append(f"{_some(former)} samples then, {samples} now")
        return "; ".join(parts)

    def _other_machines(self, lists: dict[str, Any]) -> list[str]:
        assert self._lists is not None
        present = dict(self._lists)
        gone = [entry["samples"] for key, entry in lists.items() if key not in present and entry["ranks"]]
        new = [samples for key, samples in present.items() if key not in lists]
        changes = [f"lists of {_some(gone)} samples, of the checkpoint's data, are not read now"] if gone else []
        changes += [f"lists of {_some(new)} samples are read that the checkpoint's data did not have"] if new else []
        return [f"note: {'; '.join(changes)}"] if changes else []

    def _continue(self, checkpoint: StoredCheckpoint, lists: dict[str, Any], at: Position) -> None:
        """Let each machine continue at its own place of its own list, in the middle of an epoch."""
        state = checkpoint.state
        was_own = any(entry["done"] is not None for entry in lists.values())
        if lists and was_own != (self._own is not None):
            former, given = ("folder", "sample") if was_own else ("sample", "folder")
            raise DataError(
                f"{checkpoint.folder} is in the middle of an epoch with --shard_by {former}, now --shard_by {given} is "
                f"given, which reads other samples; resume with --shard_by {former}, or from the end of an epoch"
            )
        if self._own is None:
            return
        if not lists or self._lists is None:
            if state.world_size != fleet.worker_num():
                raise DataError(
                    f"{checkpoint.folder} is in the middle of an epoch of {state.world_size} ranks with data of their "
                    f"own, and does not say how much of each is done; resume on {state.world_size} ranks, or from the "
                    "end of an epoch"
                )
            return
        key = self._lists[fleet.worker_index()][0]
        done = lists[key]["done"] or 0 if key in lists else 0
        counts = fleet.gather(self._own.steps_after(done))
        self._own.continue_at(at.epoch, at.consumed_samples, done, counts)
        present = dict(self._lists)
        self._absent = at.epoch, {name: {**each, "ranks": 0} for name, each in lists.items() if name not in present}


def _some(numbers: list[int]) -> str:
    more = ", ..." if len(numbers) > _MOST_SHOWN else ""
    return f"{', '.join(map(str, numbers[:_MOST_SHOWN]))}{more}"


def versions() -> dict[str, str]:
    """Name -> version of this package, Python, and those of the packages above that are installed."""
    known = {"fleet_train": __version__, "python": platform.python_version()}
    return known | {name: version for name in _PACKAGES if (version := version_of(name))}


def changes_since(state: TrainState) -> list[str]:
    """The lines about versions, profile and buckets that are not those with which a state was saved."""
    profile, notes = fleet.profile(), other_versions(state.versions)
    if state.profile.get("digest") != profile.digest():
        return [*notes, f"note: profile was {state.profile.get('name')}, now {profile.name} with other values"]
    note = other_choice(state.profile.get("chosen", ""), fleet.plan(), state.world_size)
    return [*notes, note] if note else notes


def profile_used() -> dict[str, str]:
    """What a checkpoint says of the profile and the buckets."""
    profile, plan = fleet.profile(), fleet.plan()
    return {"name": profile.name, "digest": profile.digest(), "chosen": plan.chosen if plan else ""}


def other_versions(saved: Mapping[str, Any]) -> list[str]:
    """The line about packages with another version than when a checkpoint was saved; empty if there is none."""
    now = versions()
    names = [name for name in ("fleet_train", *_PACKAGES) if saved and saved.get(name) != now.get(name)]
    was = [f"{name} {saved.get(name, 'none')!s:.40}, now {now.get(name, 'none')}" for name in names]
    return [printable(f"note: saved with other versions: {'; '.join(was)}")] if was else []


def other_choice(saved: str, plan: CommPlan | None, ranks: int) -> str:
    """The note for a run that continues with differently chosen buckets; empty if sums keep the same bits.

    The sum of two ranks' values does not depend on the buckets; the sum of more is computed in an order that does, and
    so are the scales of quantised values.
    """
    if plan is None or plan.world_size != ranks or not saved or saved == plan.chosen:
        return ""
    if ranks < 3 and not any(bucket.compression in ("int8", "int4") for bucket in plan.buckets):
        return ""
    return (
        f"note: buckets were set by {saved} and now by {plan.chosen or 'the profile'}, so that sums over "
        f"{ranks} ranks may differ in their last bit from an uninterrupted run; write the former into the profile to "
        "continue bit by bit"
    )
