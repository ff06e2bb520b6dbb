"""The facade's calls that save, load and export a program's state. They accept Fleet's argument names as well as ours.

All ranks call them: state that differs between ranks is averaged or gathered, rank 0 reads and writes files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fleet_train.collectives.job import Job
from fleet_train.collectives.methods import registry as method_state
from fleet_train.collectives.transfer import broadcast_arrays, broadcast_each, gather_arrays, scatter_arrays
from fleet_train.convert import persistables
from fleet_train.convert.exporting import as_list, export, refuse_other_program
from fleet_train.convert.owned_state import OwnedState
from fleet_train.convert.passes.program import parameters_behind
from fleet_train.convert.program_state import (
    PREFIX,
    Arrays,
    ProgramState,
    SavedState,
    borrowed,
    fit,
    fitting_parameters,
    kind_of,
    mean_of_ranks,
    position_of,
    refuse_damaged_position,
    restore_position,
    statistics_of,
    to_merged,
    what_is_not_finite,
)
from fleet_train.convert.replicas import compare_replicas, make_equal
from fleet_train.convert.schedules import Saved, read_saved, state_to_save
from fleet_train.convert.session import Converted, current, exchange_of, exchanges_of, program_or_last
from fleet_train.convert.sharding import ROWS
from fleet_train.convert.strategy import ArgumentError, needed, one_of, refuse
from fleet_train.errors import CheckpointError, FleetTrainError, NotFinite
from fleet_train.log import log_once

Folder = str | os.PathLike[str]

_FILES = (
    "the files' names are fixed (persistables.safetensors, complete.json); leave filename out, and give each state "
    "a dirname of its own"
)
_TABLES = "modes are for parameter servers' tables, which are not supported; leave mode out"


def synchronize_parameters(main_program: Any = None) -> None:
    """Make parameters and batch-norm statistics equal on all ranks now, as means over the ranks.

    LocalSGD lets parameters drift between averagings; a batch norm that is not synchronised computes its statistics
    from each rank's own batches. Call it on all ranks before an evaluation. Every save does it automatically. Without
    ``main_program``: those of all converted programs of the scope; else those that it has, also if it is a copy or a
    program for evaluation.
    """
    found = exchanges_of(main_program)
    if found:
        with current().job.inside("fleet.synchronize_parameters()"):
            make_equal(current().job, found)


def first_not_finite(main_program: Any = None) -> str | None:
    """The name of the first parameter or batch-norm statistic of this rank that holds NaN or infinity."""
    program = program_or_last(main_program)
    return ProgramState(program).first_not_finite(_changed_by(exchanges_of(program)))


def capture_persistables(
    main_program: Any = None, memory: Captured | None = None, ranks: Sequence[int] = (0,)
) -> Captured:
    """The state that ``save_persistables`` would save, copied into rank 0's memory; its ``write(folder)`` may run on a
    thread.

    All ranks call it after the same step. ``memory``: an earlier capture that has been written; its memory is reused.
    ``ranks``: those that get it, rank 0 among them: what each of them writes has the same bytes.
    """
    program = program_or_last(main_program)
    with current().job.inside("fleet.capture_persistables()"):
        return capture(current().job, program, memory, ranks)


def save_persistables(
    exe: Any = None,
    dirname: Folder | None = None,
    main_program: Any = None,
    filename: str | None = None,
    mode: int = 0,
    *,
    executor: Any = None,
) -> None:
    """Save everything that a resumed run needs of the program: rank 0 writes, and all ranks return when it is done.

    Parameters, statistics, optimizer state, where the learning-rate schedule stands, and the state of the profile's
    passes, LocalSGD and compression, including state that differs between ranks. With LocalSGD, parameters and
    optimizer state are averaged first. Writes ``persistables.safetensors``, ``complete.json`` and, for state that
    differs between ranks, ``ranks.safetensors``
    into ``dirname``. Raises CheckpointError on every rank when rank 0 could not write, ScheduleMismatch when the ranks'
    values have diverged: they are compared before, unless divergence_check_steps is 0, and NotFinite instead of saving
    NaN or infinity.

    All ranks call it, without ``if rank == 0``. ``exe``, Fleet's ``executor``, is not needed: the state is read from
    the scope. ``filename`` and ``mode`` of Fleet are refused.
    """
    one_of("save_persistables", executor=executor, exe=exe)
    folder = Path(needed("save_persistables", dirname=dirname))
    refuse("save_persistables", "filename", filename, _FILES)
    refuse("save_persistables", "mode", mode or None, _TABLES)
    program, job = program_or_last(main_program), current().job
    with job.inside(f"fleet.save_persistables({str(folder)!r})"):
        captured = capture(job, program)
        on_first_worker(job, f"save to {folder}", lambda: captured.write(folder))


def load_persistables(
    exe: Any = None,
    dirname: Folder | None = None,
    main_program: Any = None,
    filename: str | None = None,
    *,
    executor: Any = None,
    partial: bool = False,
) -> list[str]:
    """Load state written by ``save_persistables``. Rank 0 reads it and sends the values to the others. Returns the
    names of the program's variables that it has set.

    A learning-rate schedule goes on where it was saved; what the script sets after the load wins.

    ``partial``: for another model with the same layers below, a pre-trained backbone with a new head: the parameters
    and batch-norm statistics whose name, shape and dtype are those of the program are loaded, nothing of the optimizer
    or the schedule, before the first step; rank 0 lists what is left as it is. CheckpointError if nothing fits, or
    after a step.

    The startup program must have run, and all ranks call it. Raises CheckpointError on every rank, naming the first
    offending tensor, for state that is missing, cut off, altered, of another model, or holds NaN or infinity. The
    number of ranks may differ.
    """
    one_of("load_persistables", executor=executor, exe=exe)
    folder = Path(needed("load_persistables", dirname=dirname))
    refuse("load_persistables", "filename", filename, _FILES)
    program, job = program_or_last(main_program), current().job
    with job.inside(f"fleet.load_persistables({str(folder)!r})"):
        return (_load_part if partial else _load)(job, program, folder)


def save_inference_model(
    exe: Any = None,
    dirname: Folder | None = None,
    feeds: list[Any] | None = None,
    targets: list[Any] | None = None,
    main_program: Any = None,
    export_for_deployment: bool = True,
    mode: int = 0,
    *,
    executor: Any = None,
    feeded_var_names: list[Any] | None = None,
    target_vars: list[Any] | None = None,
) -> None:
    """Export the forward program, pruned to ``feeds`` -> ``targets``, with its parameters, for Paddle's inference.

    ``targets`` (Fleet's ``target_vars``): values of the training program or, better, of one built with
    ``layer.eval()`` that has the same parameters. ``feeds`` (``feeded_var_names``): values or names of its inputs.
    LocalSGD's parameters are averaged first; then the ranks' values are compared as in ``save_persistables``. Rank 0
    writes ``model.json`` and ``model.pdiparams`` into ``dirname``; all ranks call it, and return once they are on disk.
    Raises NotFinite for parameters that hold NaN or infinity.
    """
    name = "save_inference_model"
    executor = needed(name, executor=executor, exe=exe)
    folder = Path(needed(name, dirname=dirname))
    wanted = as_list(needed(name, target_vars=target_vars, targets=targets))
    inputs = as_list(needed(name, feeded_var_names=feeded_var_names, feeds=feeds))
    refuse(name, "mode", mode or None, _TABLES)
    if not export_for_deployment:
        raise ArgumentError(
            f"fleet.{name}: export_for_deployment=False asks for a program to train on; use fleet.save_persistables, "
            "and build the network again"
        )
    refuse_other_program(wanted, main_program)
    program, job = wanted[0].block.program, current().job
    with job.inside(f"fleet.{name}({str(folder)!r})"):
        found = exchanges_of(program)
        make_equal(job, found)
        for each in found:
            compare_replicas(ProgramState(each.main), each.exchange, with_optimizer=False)

        def write() -> None:
            exported = {name for target in wanted for name in parameters_behind(target)}
            state = ProgramState(program) if exported else None
            if state is not None and (broken := state.first_not_finite(_changed_by(found), exported)) is not None:
                raise NotFinite(f"'{broken}' holds NaN or infinity: a network that computes nothing is not exported")
            export(executor, folder, inputs, wanted)

        on_first_worker(job, f"export to {folder}", write)


@dataclass(frozen=True)
class Captured:
    """A program's state at one step, in the memory of rank 0, or of several ranks. Training may continue while it is
    written."""

    state: SavedState
    """Copies of the program's values; empty on the other ranks."""
    constant: frozenset[str] = frozenset()
    """Parameters that are not trained."""
    schedule: Saved | None = None
    """The state of the program's learning-rate schedule; None if it has none."""

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, synced to the disk; on any thread. Raises OSError, and NotFinite
        instead of writing NaN or infinity.
        """
        schedule = {} if self.schedule is None else {"schedule": self.schedule}
        persistables.publish(folder, self.write_tensors(folder) | schedule)

    def write_tensors(self, folder: Path, when: str = "") -> dict[str, Any]:
        """The first part of ``write``: what is returned is for `persistables.publish`, which completes it.

        ``when``, such as ``after step 4``, is for NotFinite's message.
        """
        problem = what_is_not_finite(self.state, self.constant, when)
        if problem is not None:
            raise NotFinite(
                f"{problem}; this is not saved, and what was saved before is unchanged. Try a lower learning rate, a "
                "clip of the gradients (--clip_norm), or --on_nan skip"
            )
        return persistables.write_tensors(folder, self.state)


def capture(job: Job, program: Any, memory: Captured | None = None, ranks: Sequence[int] = (0,)) -> Captured:
    """Copy the current state; all ranks call it.

    State that drifts under LocalSGD is averaged first; each rank's own state is sent to rank 0, and on to ``ranks``.
    Raises ScheduleMismatch on every rank when the replicas have diverged (divergence_check_steps): nothing is saved.
    ``memory``: an earlier capture that is no longer needed; its arrays are overwritten, which saves allocating them.
    """
    state, found = ProgramState(program), exchanges_of(program)
    gets_it, continued = job.cluster.rank in ranks, _continued(state, found)
    make_equal(job, found, continued)
    sums = state.sums_under_way if found else []
    arrays: Arrays = {}
    shared = [(owned, owned.names(state)) for owned in map(partial(owned_state, job), found) if owned is not None]
    own_names = {whole: name for _, names in shared for whole, name in names.items()}
    if gets_it:
        left = {*sums, *own_names.values()}
        names = [name for name in state.variables if name not in left and not name.endswith(ROWS)]
        arrays = state.read(names, into=memory.state.arrays if memory else None)
    for each in found:
        compare_replicas(state, each.exchange, with_optimizer=True, copies=arrays)
    own = state.read(sums)
    for each in continued:
        alike, differing = method_state.read_state(each.exchange.memories)
        arrays |= position_of(each.exchange, _distinct(each, continued)) | _with_prefix(alike)
        own = _with_prefix(differing) | own
    of_ranks = gather_arrays(job, own) if own else []
    if own and len(ranks) > 1:
        of_ranks = [_sent_on(job, part, gets_it) for part in of_ranks or [{}] * job.world_size]
    kinds = state.kinds
    for owned, names_here in shared:
        gathered = owned.gather({name: borrowed(state.variables[name]) for name in names_here.values()})
        gathered = _sent_on(job, gathered, gets_it) if len(ranks) > 1 else gathered
        arrays |= gathered
        kinds = {name: kind for name, kind in kinds.items() if name in arrays or name in sums}
        kinds |= {name: kind_of(name, False) for name in gathered}
    if not gets_it:
        return Captured(SavedState({}))
    trained = current().schedules.copied_by(program) or current().main_program
    return Captured(SavedState(arrays, kinds, of_ranks), state.constant, state_to_save(program, trained))


def piece_of(rank: int, piece: Any, name: str) -> Any:
    """One rank's piece of a file (uint8, of equal size everywhere) on every rank; all ranks call it."""
    return broadcast_arrays(current().job, {name: piece}, rank)[name]


def _sent_on(job: Job, arrays: Arrays, keeps: bool) -> Arrays:
    """Rank 0's arrays on the ranks that keep them; all ranks take part."""
    return {name: array for name, array in broadcast_each(job, arrays) if keeps}


def _continued(state: ProgramState, found: Sequence[Converted]) -> list[Converted]:
    """The conversions whose training a program with this state can continue: it has their optimizers' state."""
    return [each for each in found if each.is_own or state.kept_of(each.exchange)]


def _distinct(each: Converted, continued: Sequence[Converted]) -> str:
    """What tells a conversion from the first of ``continued`` in the names of its position."""
    return "" if each is continued[0] else each.exchange.trained[0]


def _changed_by(found: Sequence[Converted]) -> set[str]:
    return {name for each in found for name in (*each.exchange.trained, *statistics_of(each.main))}


def owned_state(job: Job, each: Converted) -> OwnedState | None:
    """The state that is shared among owners; None if every rank has all of it."""
    return OwnedState(job, each.exchange) if each.exchange.owners else None


def whole_on_every_rank(arrays: Arrays, program: Any) -> Arrays:
    """``arrays`` by the names of the parameters of ``program`` that this rank updates -> those of all parameters; all
    ranks call it. Without a sharded optimizer every rank updates all of them."""
    exchange, job = exchange_of(program), current().job
    if exchange is None:
        return arrays
    if exchange.owners:
        return OwnedState(job, exchange).everywhere(arrays)
    if exchange.averager is not None:
        return {name: job.reduce(each, "sum") / each.dtype.type(job.world_size) for name, each in arrays.items()}
    return arrays


def _with_prefix(arrays: Arrays) -> Arrays:
    return {PREFIX + name: array for name, array in arrays.items()}


def _load(job: Job, program: Any, folder: Path) -> list[str]:
    """Put saved state into the scope of every rank: the names of its variables. CheckpointError changes nothing."""
    state, found = ProgramState(program), exchanges_of(program)
    continued = _continued(state, found)
    saved, ours = SavedState({}), state.describe()
    shared = [owned for owned in map(partial(owned_state, job), found) if owned is not None]
    for owned in shared:
        ours = owned.describe(state, ours)
    methods = [pair for each in continued for pair in each.exchange.methods]
    tables = {gradient.name for bucket, method in methods if method.kind == "rows" for gradient in bucket.gradients}

    def read() -> dict[str, Any]:
        nonlocal saved
        on_disk = persistables.read_folder(folder)
        refuse_damaged_position(on_disk.arrays, str(folder))
        saved = to_merged(on_disk, ours, tables)
        names, notes = fit(saved.describe(), ours, str(folder))
        loaded = {name: array for name, array in saved.arrays.items() if name in ours or name.startswith(PREFIX)}
        if (problem := what_is_not_finite(replace(saved, arrays=loaded), state.constant)) is not None:
            raise CheckpointError(
                f"{folder}: {problem}: it was saved after the training had gone wrong; load an earlier one"
            )
        log_once(notes, rank=0)
        schedule = read_saved(persistables.read_entries(folder).get("schedule"), str(folder))
        return {"names": names, "ranks": len(saved.ranks), "schedule": schedule}

    answer = on_first_worker(job, f"load from {folder}", read)
    owners = {whole: (owned, name) for owned in shared for whole, name in owned.names(state).items()}
    arrays: Arrays = {}
    for name, array in broadcast_each(job, saved.arrays):
        if name in owners:
            owned, own = owners[name]
            arrays[own] = owned.own_part(own, array).copy()
        elif not shared or name in state.variables or name.startswith(PREFIX):
            arrays[name] = array
    arrays |= _own_part(job, saved.ranks, answer["ranks"])
    rate = arrays.get(getattr(program, "lr_name", ""))
    current().schedules.restore(program, answer["schedule"], None if rate is None else float(rate.item()))
    local = [owners[name][1] if name in owners else name for name in answer["names"]]
    values = {name: arrays[name] for name in local if name in state.variables}
    moved = _moved(job, state, values, [each for each in found if each not in continued])
    state.write(values, job.place)
    for each in moved:
        restore_position(each.exchange, {}, job.place)
    memories = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
    for each in continued:
        restore_position(each.exchange, arrays, job.place, _distinct(each, continued))
        method_state.write_state(each.exchange.memories, memories, job.place)
    return sorted(values)


def _load_part(job: Job, program: Any, folder: Path) -> list[str]:
    """Put the saved parameters that fit into the scope of every rank: the variables' names."""
    state, found = ProgramState(program), exchanges_of(program)
    saved = SavedState({})

    def read() -> None:
        nonlocal saved
        saved, notes = fitting_parameters(persistables.read_folder(folder), state.describe(), str(folder))
        if (problem := what_is_not_finite(saved, state.constant)) is not None:
            raise CheckpointError(f"{folder}: {problem}: it was saved after the training had gone wrong")
        log_once(notes, rank=0)

    on_first_worker(job, f"load from {folder}", read)
    values = dict(broadcast_each(job, saved.arrays))
    moved = _moved(job, state, values, found)
    if any(each.exchange.step for each in moved) or (moved and state.sums_under_way):
        raise CheckpointError(
            "partial=True is for the start of a training, and this one has made steps: what the optimizer keeps is of "
            "the old parameters. Load before the first step, or run the startup program again first"
        )
    state.write(values, job.place)
    return sorted(values)


def _moved(job: Job, state: ProgramState, values: Arrays, others: Sequence[Converted]) -> list[Converted]:
    """Choose the programs of ``others`` whose parameters ``values`` change on some rank: what they have under way is of
    the old ones. The program that is loaded shares parameters with them, but does not continue their training."""
    if not others:
        return []
    changes = [
        any(
            borrowed(state.variables[name]).tobytes() != values[name].tobytes()
            for name in each.exchange.trained
            if name in values
        )
        for each in others
    ]
    answers = job.all_gather(f"moved {job.count('moved')}", changes).values()
    return [each for number, each in enumerate(others) if any(answer[number] for answer in answers)]


def _own_part(job: Job, saved: Sequence[Arrays], number_saved: int) -> Arrays:
    """This rank's own part of the state that rank 0 has read (``number_saved`` ranks; every rank knows that number).

    On the same number of ranks, each restores its own. On another number each takes the mean: the total that is still
    to be added to the average of gradients stays the same.
    """
    if number_saved == 0:
        return {}
    if number_saved == job.world_size:
        return scatter_arrays(job, saved)
    return broadcast_arrays(job, mean_of_ranks(saved) if job.cluster.rank == 0 else {})


_MOST_WORDS = 2000


def on_first_worker(job: Job, what: str, action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0; its result (a JSON value) on every rank, or rank 0's NotFinite, or CheckpointError with
    the words of whatever it has raised, Paddle's errors as well.

    ``what``: for the message; its first word names the broadcast, since each rank may pass a different folder.
    """
    answer: dict[str, Any] = {}
    cause: Exception | None = None
    if job.cluster.rank == 0:
        try:
            answer = {"value": action()}
        except Exception as error:
            cause = error
            answer = {"problem": f"{what}: {_words_of(error)}", "not_finite": isinstance(error, NotFinite)}
    name = what.partition(" ")[0]
    answer = job.broadcast(f"{name} {job.count(name)}", answer)
    if "problem" in answer:
        raise (NotFinite if answer["not_finite"] else CheckpointError)(answer["problem"]) from cause
    return answer["value"]


def _words_of(error: Exception) -> str:
    """The message of an error; with its kind, where that is neither ours nor the system's."""
    if isinstance(error, (OSError, FleetTrainError)):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *(["; ".join(lines)[:_MOST_WORDS]] if lines else [])])
