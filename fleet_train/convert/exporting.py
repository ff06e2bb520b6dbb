"""A program that is written for Paddle's inference: pruned to its targets, with its parameters, as two files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paddle

from fleet_train.errors import ConversionError
from fleet_train.files import sync_folder


def as_list(values: Any) -> list[Any]:
    """The values as a list: Paddle accepts a single value instead of one, and so do we."""
    return list(values) if isinstance(values, (list, tuple)) else [values]


def refuse_other_program(targets: list[Any], main_program: Any) -> None:
    """Raise ConversionError for names instead of values, and for a program that is not theirs."""
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


_EXPORTED_FILES = ("model.json", "model.pdiparams")


def export(exe: Any, folder: Path, feeds: Sequence[Any], targets: Sequence[Any]) -> None:
    """Write the program of ``targets``, pruned to what they need, and its parameters; old files are kept until both
    exist.

    Parameters are never beside the program of others: the same program keeps its file, another one's is removed before
    and gets its name last.
    """
    program, draft = targets[0].block.program, folder / ".exporting"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    inputs = [_value(program, feed) for feed in feeds]
    paddle.static.save_inference_model(str(draft / "model"), inputs, list(targets), exe, program=program)
    for name in _EXPORTED_FILES:
        with (draft / name).open("rb") as file:
            os.fsync(file.fileno())
    described, parameters = _EXPORTED_FILES
    if _content(folder / described) != _content(draft / described):
        (folder / described).unlink(missing_ok=True)
        sync_folder(folder)
    os.replace(draft / parameters, folder / parameters)
    os.replace(draft / described, folder / described)
    draft.rmdir()


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


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
