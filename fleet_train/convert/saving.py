"""The facade's calls that save, load and export. They accept Fleet's argument names as well as ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paddle

from fleet_train.convert import save_load
from fleet_train.convert.program_state import ProgramState
from fleet_train.convert.save_load import Captured, compare_replicas, make_equal
from fleet_train.convert.session import current, exchange_of, program_or_last
from fleet_train.convert.strategy import ArgumentError, needed, one_of, refuse
from fleet_train.errors import ConversionError, NotFinite

Folder = str | os.PathLike[str]

_FILES = (
    "the files' names are fixed (persistables.safetensors, complete.json); leave filename out, and give each state "
    "a dirname of its own"
)
_TABLES = "modes are for parameter servers' tables, which are not supported; leave mode out"


def synchronize_parameters(main_program: Any = None) -> None:
    """Make parameters and batch-norm statistics equal on all ranks now, as means over the ranks.

    LocalSGD lets parameters drift between averagings; a batch norm that is not synchronised computes its statistics
    from each rank's own batches. Call it on all ranks before an evaluation. Every save does it automatically.
    """
    program = program_or_last(main_program)
    exchange = exchange_of(program)
    if exchange is not None:
        state = ProgramState(program, paddle.static.global_scope())
        with current().job.inside("fleet.synchronize_parameters()"):
            make_equal(current().job, state, exchange, with_optimizer=False)


def first_not_finite(main_program: Any = None) -> str | None:
    """The name of the first parameter or batch-norm statistic of this rank that holds NaN or infinity."""
    return ProgramState(program_or_last(main_program), paddle.static.global_scope()).first_not_finite()


def capture_persistables(main_program: Any = None, memory: Captured | None = None) -> Captured:
    """The state that ``save_persistables`` would save, copied into rank 0's memory; its ``write(folder)`` may run on a
    thread.

    All ranks call it after the same step. ``memory``: an earlier capture that has been written; its memory is reused.
    """
    program, scope = program_or_last(main_program), paddle.static.global_scope()
    with current().job.inside("fleet.capture_persistables()"):
        return save_load.capture(current().job, program, scope, exchange_of(program), memory)


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

    Parameters, statistics, optimizer state, and the state of the profile's passes, LocalSGD and compression, including
    state that differs between ranks. With LocalSGD, parameters and optimizer state are averaged first. Writes
    ``persistables.safetensors``, ``complete.json`` and, for state that differs between ranks, ``ranks.safetensors``
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
    program, scope = program_or_last(main_program), paddle.static.global_scope()
    with current().job.inside(f"fleet.save_persistables({str(folder)!r})"):
        save_load.save(current().job, program, scope, exchange_of(program), folder)


def load_persistables(
    exe: Any = None,
    dirname: Folder | None = None,
    main_program: Any = None,
    filename: str | None = None,
    *,
    executor: Any = None,
) -> None:
    """Load state written by ``save_persistables``. Rank 0 reads it and sends the values to the others.

    The startup program must have run, and all ranks call it. Raises CheckpointError on every rank, naming the first
    offending tensor, for state that is missing, cut off, altered, of another model, or holds NaN or infinity. The
    number of ranks may differ.
    """
    one_of("load_persistables", executor=executor, exe=exe)
    folder = Path(needed("load_persistables", dirname=dirname))
    refuse("load_persistables", "filename", filename, _FILES)
    program, scope = program_or_last(main_program), paddle.static.global_scope()
    with current().job.inside(f"fleet.load_persistables({str(folder)!r})"):
        save_load.load(current().job, program, scope, exchange_of(program), folder)


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
    wanted = _as_list(needed(name, target_vars=target_vars, targets=targets))
    inputs = _as_list(needed(name, feeded_var_names=feeded_var_names, feeds=feeds))
    refuse(name, "mode", mode or None, _TABLES)
    if not export_for_deployment:
        raise ArgumentError(
            f"fleet.{name}: export_for_deployment=False asks for a program to train on; use fleet.save_persistables, "
            "and build the network again"
        )
    _refuse_other_program(wanted, main_program)
    scope, trained = paddle.static.global_scope(), program_or_last(None)
    with current().job.inside(f"fleet.{name}({str(folder)!r})"):
        synchronize_parameters()
        if (exchange := exchange_of(trained)) is not None:
            compare_replicas(ProgramState(trained, scope), exchange, with_optimizer=False)

        def export() -> None:
            if (broken := first_not_finite()) is not None:
                raise NotFinite(f"'{broken}' holds NaN or infinity: a network that computes nothing is not exported")
            export_inference_model(executor, folder, inputs, wanted, scope)

        save_load.on_first_worker(current().job, f"export to {folder}", export)


def _as_list(values: Any) -> list[Any]:
    """Paddle accepts a single value instead of a list, and so do we."""
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _refuse_other_program(targets: list[Any], main_program: Any) -> None:
    names = [target for target in targets if isinstance(target, str)]
    if names or not targets:
        raise ConversionError(
            f"fleet.save_inference_model: targets={targets!r}: values of PIR programs have no names; pass the "
            "values themselves, such as the network's output"
        )
    # A program is compared by its operators: each access to it makes a new Python object.
    if main_program is not None and main_program.global_block() != targets[0].block.program.global_block():
        raise ConversionError(
            "fleet.save_inference_model: main_program is not the program of the targets; leave it out, the targets "
            "name their program"
        )


_INFERENCE_EXPORT_FILES = ("model.json", "model.pdiparams")


def export_inference_model(exe: Any, dirname: Path, feeds: Sequence[Any], targets: Sequence[Any], scope: Any) -> None:
    """Write the program of ``targets``, pruned to what they need, and its parameters; old files are kept until both
    exist.
    """
    program = targets[0].block.program
    beside = dirname / ".exporting"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    with paddle.static.scope_guard(scope):
        paddle.static.save_inference_model(
            str(beside / "model"), [_value(program, feed) for feed in feeds], list(targets), exe, program=program
        )
    for name in _INFERENCE_EXPORT_FILES:
        with (beside / name).open("rb") as file:
            os.fsync(file.fileno())
    for name in _INFERENCE_EXPORT_FILES:
        os.replace(beside / name, dirname / name)
    beside.rmdir()


def _value(program: Any, feed: Any) -> Any:
    """The program's input of a name; values are returned unchanged."""
    if not isinstance(feed, str):
        return feed
    inputs = {
        str(operator.attrs()["name"]): operator.result(0)
        for operator in program.global_block().ops
        if operator.name() == "pd_op.data"
    }
    if feed not in inputs:
        raise ConversionError(f"the program has no input '{feed}'; it has {', '.join(sorted(inputs))}")
    return inputs[feed]
