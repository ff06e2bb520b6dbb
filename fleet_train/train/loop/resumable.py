"""`resumable`: what a training loop of one's own needs to continue after any end, in three lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paddle

from fleet_train import fleet
from fleet_train.convert import process
from fleet_train.convert.rewrite import names_stored_by
from fleet_train.convert.session import current_shares
from fleet_train.errors import CheckpointError, DataError
from fleet_train.log import log_once
from fleet_train.train.agree import share
from fleet_train.train.checkpoint.manager import Checkpoints, StoredCheckpoint, TrainState
from fleet_train.train.checkpoint.position import Position, changes_since, profile_used, versions
from fleet_train.train.loop.batches import Batches, batches_of
from fleet_train.train.loop.random_states import RandomStates
from fleet_train.train.numerics import stream_seed
from fleet_train.train.stopping import listening, preempted

_LOOP = "own loop"
"""The entry of `TrainState.config` that tells a checkpoint of such a loop."""
_ENTRIES = {"planned", "description", "batches_in_epoch", "seed", "ranks"}


def resumable(
    folder: str | os.PathLike[str] | Checkpoints,
    exe: Any,
    *,
    loader: Any = None,
    random: Sequence[Any] = (),
    keep: int = 2,
    description: Mapping[str, Any] | None = None,
) -> Resumable:
    """Let a training loop of one's own continue from its newest checkpoint in ``folder``; all ranks call it, after the
    startup program has run.

    ``run = fleet.resumable("ck", exe)`` loads it, if there is one, and the loop runs over the steps that are left::

        run = fleet.resumable("ck", exe)
        for step in run.steps(1000, save_every=50):  # instead of range(1000)
            exe.run(fleet.main_program, feed=batch_of(step), fetch_list=[loss])

    or over the batches of the epochs that are left::

        run = fleet.resumable("ck", exe, loader=loader)
        for epoch in run.epochs(10):
            for batch in run.batches(save_every=50):
                exe.run(fleet.main_program, feed=batch, fetch_list=[loss])

    A checkpoint has all that ``fleet.save_persistables`` saves (parameters, the state of the optimizer and of the
    profile's methods, the program's learning-rate schedule), the step, the epoch, the place in ``loader``, and of each
    rank the states of Python's ``random``, of ``np.random``, and of the generators in ``random``. Before each step
    Paddle's generators are seeded from (Paddle's seed at the first start, rank, step). So the run gives the same bits
    as one that saves after the same steps and is never stopped.

    At SIGTERM, SIGUSR1 and Ctrl-C all ranks save after the same step and raise Preempted (exit code 12). The last
    step is always saved; a start after that trains nothing.

    ``loader``: a `fleet_train.data.Loader` continues at its sample, also with another number of ranks. Anything else
    that can be gone through once for each epoch (a ``paddle.io.DataLoader``, a list, a function that returns an
    iterator) is drawn again up to its place, on the same number of ranks. ``keep``: checkpoints that are kept.
    ``folder``: or `Checkpoints`, which can write in the background or on several nodes. ``description``: JSON values
    that tell this run from others; a checkpoint of a run with others is refused.

    Raises CheckpointError for a folder that another process uses, or of another run or program, DataError for a loader
    whose data has changed.
    """
    checkpoints = folder if isinstance(folder, Checkpoints) else Checkpoints(Path(folder), keep)
    return Resumable(checkpoints, exe, loader, RandomStates(random), json.loads(json.dumps(dict(description or {}))))


class Resumable:
    """A loop that continues from its newest checkpoint: see `resumable`. All ranks make the same calls."""

    def __init__(
        self, checkpoints: Checkpoints, exe: Any, loader: Any, states: RandomStates, description: dict[str, Any]
    ) -> None:
        self._checkpoints, self._exe, self._states = checkpoints, exe, states
        self._description, self._planned = description, dict[str, int]()
        self._batches: Batches | None = None if loader is None else batches_of(loader)
        self._at = Position()
        self._merged = fleet.profile().accumulate_steps
        self._is_due = False
        self._is_saved = False
        """Whether the newest checkpoint is of the present place."""
        self._runs = 0
        """Runs of programs since the step began."""
        self._is_inside = False
        """Whether the loop's body is at a step."""
        self._loaded: set[str] = set()
        """The parameters that were loaded, until the first step."""
        self._is_overwritten = False
        """Whether a startup program has run after the load."""
        self._began: list[Any] | None = None
        self._restored: list[Any] | None = None
        """The random states with which the epoch under way began, and those to go on with, until they are used."""
        self._seed = int(share(paddle.base.core.default_cpu_generator().initial_seed()))
        self.batch: Any = None
        """The batch of the step under way, with a loader."""
        process.on_each_run(self._count_run)
        checkpoints.claim()
        if (found := checkpoints.newest()) is not None:
            self._resume(found)

    @property
    def step(self) -> int:
        """Steps done since the beginning of the run: in the loop's body the number of the present one, from 0 on."""
        return self._at.step

    @property
    def epoch(self) -> int:
        """Epochs done since the beginning of the run: in the loop's body the number of the present one, from 0 on."""
        return self._at.epoch

    def steps(self, total: int, save_every: int = 0) -> Iterator[int]:
        """The numbers of the steps that are left of ``total``: the body is one step, one run of the training program.

        With a loader ``run.batch`` is the step's batch; the epochs follow one another. ``save_every``: steps between
        two checkpoints, 0 = only at the end and at a stop; with gradient merge each waits for the end of its update.
        """
        yield from self._until("steps", total, save_every, self._all_steps(total, save_every))

    def epochs(self, total: int, save_every: int = 1) -> Iterator[int]:
        """The numbers of the epochs that are left of ``total``; the body goes through ``run.batches()`` once.

        ``save_every``: epochs between two checkpoints, 0 = only at the end and at a stop. In the middle of an epoch,
        what the body does before ``run.batches()`` is done again.
        """
        yield from self._until("epochs", total, save_every, self._all_epochs(total, save_every))

    def batches(self, save_every: int = 0) -> Iterator[Any]:
        """The batches that are left of the present epoch: the body is one step, one run of the training program.

        ``save_every``: steps between two checkpoints within epochs, 0 = none; counted from the beginning of the run.
        """
        for batch in self._opened():
            self.batch = batch
            yield from self._one_step(batch, save_every)

    def save(self) -> None:
        """Save a checkpoint of the steps that are done: before a step's first run of a program, between two epochs, or
        after a ``break``. All ranks call it.

        Raises NotFinite instead of saving NaN, CheckpointError as `Checkpoints.save` does, and within a step that has
        run a program.
        """
        if self._is_inside and self._runs:
            raise CheckpointError(
                f"run.save() within step {self._at.step}, which has run a program: whether the step is done is not "
                "known; call it at the beginning of the body, or let save_every= save"
            )
        self._checkpoints.save(self._exe, self._state())
        self._is_due, self._is_saved = False, True

    def _until(self, unit: str, total: int, save_every: int, left: Iterator[int]) -> Iterator[int]:
        fleet.agree("the numbers given to fleet.resumable's loop", {unit: total, "save_every": save_every})
        if self._is_overwritten:
            raise CheckpointError(
                f"a startup program has run after fleet.resumable had loaded {self._checkpoints.folder}: the training "
                "would begin anew with the steps that are left; call fleet.resumable after the startup program"
            )
        done = self._at.step if unit == "steps" else self._at.epoch
        before, self._planned = self._planned.get(unit, total), {unit: total}
        if done >= total:
            self._say(f"nothing left to train: {done} of {total} {unit} are done ({self._checkpoints.folder})")
            self._continue_random()
            self._seed_paddle()
            return
        if before != total:
            self._say(f"note: {before} {unit} were planned, now it is {total}")
        if self._at.batches:
            self._back_to_begin()
        else:
            self._continue_random()
        with listening(fleet.request_stop):
            yield from left
            if not self._is_saved:
                self.save()
            self._checkpoints.finish()
            self._seed_paddle()

    def _all_steps(self, total: int, save_every: int) -> Iterator[int]:
        while self._at.step < total:
            if self._batches is None:
                yield from self._one_step(self._at.step, save_every)
                continue
            self._note_begin()
            for batch in self._opened():
                self.batch = batch
                yield from self._one_step(self._at.step, save_every)
                if self._at.step == total:
                    return
            if not self._at.batches:
                raise DataError("the loader has no batch in an epoch: a smaller batch size, or more data, is needed")
            self._end_epoch()

    def _all_epochs(self, total: int, save_every: int) -> Iterator[int]:
        while self._at.epoch < total:
            paddle.seed(stream_seed(self._seed + 1, fleet.worker_index(), self._at.epoch))
            self._note_begin()
            yield self._at.epoch
            self._end_epoch()
            if save_every > 0 and self._at.epoch % save_every == 0:
                self.save()
            self._stop_if_asked()

    def _one_step(self, value: Any, save_every: int) -> Iterator[Any]:
        """One step of the body: it gets ``value``. A step that is broken off counts if a program has run in it."""
        self._seed_paddle()
        self._loaded = set()
        self._runs, self._is_inside, is_whole = 0, True, False
        try:
            yield value
            is_whole = True
        except GeneratorExit:
            is_whole = self._runs > 0
            raise
        finally:
            self._is_inside = False
            if is_whole:
                self._count_step(save_every)
        if self._at.step % self._merged == 0:
            if self._is_due:
                self.save()
            self._stop_if_asked()

    def _seed_paddle(self) -> None:
        paddle.seed(stream_seed(self._seed, fleet.worker_index(), self._at.step))

    def _count_step(self, save_every: int) -> None:
        at = self._at
        at.step, self._is_saved = at.step + 1, False
        self._is_due |= save_every > 0 and at.step % save_every == 0
        if self._batches is not None:
            at.batches, at.consumed_samples = at.batches + 1, self._batches.consumed_samples

    def _end_epoch(self) -> None:
        at = self._at
        at.epoch, at.batches, at.consumed_samples, self._is_saved = at.epoch + 1, 0, 0, False
        if self._batches is not None and (said := self._batches.after_epoch()):
            self._say(f"from epoch {at.epoch + 1} on, {said}")

    def _opened(self) -> Iterator[Any]:
        if self._batches is None:
            raise DataError("run.batches() has no loader; give one: fleet.resumable(folder, exe, loader=...)")
        if self._at.batches and self._restored is None:
            self._back_to_begin()
        batches = self._batches.open(self._at)
        self._continue_random()
        return batches

    def _count_run(self, program: Any, scope: Any) -> None:
        del scope
        self._runs += 1
        is_plain = bool(self._loaded) and isinstance(program, paddle.static.Program)
        if is_plain and not self._loaded.isdisjoint(names_stored_by(program)):
            self._is_overwritten, self._loaded = True, set()

    def _stop_if_asked(self) -> None:
        """Every rank gets the same answer after the same step."""
        why = fleet.stop_requested()
        if why is not None:
            if not self._is_saved:
                self.save()
            raise preempted(self._checkpoints, self._at.step, why)

    def _say(self, message: str) -> None:
        log_once([message], fleet.worker_index())

    def _state(self) -> TrainState:
        at = self._at
        loop = {
            "planned": self._planned,
            "description": self._description,
            "batches_in_epoch": at.batches,
            "seed": self._seed,
            "ranks": fleet.gather([self._states.read(), self._began if at.batches else None]),
        }
        return TrainState(
            epoch=at.epoch,
            step=at.step,
            steps_per_epoch=0,
            world_size=fleet.worker_num(),
            scheduler={},
            config={_LOOP: loop},
            profile=profile_used(),
            versions=versions(),
            batches=at.step,
            pending_batches=at.step % self._merged,
            accumulate_steps=self._merged,
            shares=current_shares().record(),
            **({} if self._batches is None else self._batches.record(at)),
        )

    def _resume(self, found: StoredCheckpoint) -> None:
        state = found.state
        loop = _loop_of(found)
        for name in sorted(loop["description"].keys() | self._description.keys()):
            was, now = loop["description"].get(name), self._description.get(name)
            if was != now:
                raise CheckpointError(
                    f"{found.folder} is of another run: its {name} is {was!r:.60}, now {now!r:.60}; give another "
                    "folder, or remove that one to begin anew"
                )
        at = self._at = Position(state.epoch, state.step, state.consumed_samples, loop["batches_in_epoch"])
        notes = current_shares().resume(state.shares)
        notes += [] if self._batches is None else self._batches.resume(found, at)
        self._checkpoints.load(self._exe, found)
        self._loaded = {each.name for each in fleet.main_program.global_block().all_parameters()}
        self._seed, self._planned, self._is_saved = loop["seed"], loop["planned"], True
        if len(loop["ranks"]) == fleet.worker_num():
            self._restored, self._began = loop["ranks"][fleet.worker_index()]
        else:
            self._states.seed(stream_seed(self._seed, fleet.worker_index(), at.step))
            self._restored = self._states.read()
            notes.append(f"random states begin anew: the checkpoint has those of {state.world_size} ranks")
        inside = f", {at.batches} batches into epoch {at.epoch + 1}" if at.batches and self._batches else ""
        self._say(f"resumed from {found.folder} (step {at.step}{inside})")
        for note in (*notes, *changes_since(state)):
            self._say(note)

    def _note_begin(self) -> None:
        """Keep the random states with which an epoch begins: to continue within it, it is begun once more."""
        if not self._at.batches:
            self._began = self._states.read()

    def _back_to_begin(self) -> None:
        """Restore the random states with which the epoch under way began; those to go on with are restored later."""
        self._restored = self._restored or self._states.read()
        if self._began is not None:
            self._states.write(self._began)

    def _continue_random(self) -> None:
        """Go on with the random states of the checkpoint: only now, as the script draws while it sets up."""
        if self._restored is not None:
            self._states.write(self._restored)
            self._restored = None


def _loop_of(found: StoredCheckpoint) -> dict[str, Any]:
    """What a checkpoint has of such a loop. CheckpointError if it is another's, or damaged."""
    loop = found.state.config.get(_LOOP)
    if not isinstance(loop, dict) or loop.keys() != _ENTRIES:
        raise CheckpointError(
            f"{found.folder} was not saved by fleet.resumable; give another folder, or remove that one to begin anew"
        )
    return loop
