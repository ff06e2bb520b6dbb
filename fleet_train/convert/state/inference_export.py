"""Exporting a trained network for Paddle's inference."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paddle

from fleet_train.errors import ConversionError

_FILES = ("model.json", "model.pdiparams")


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
    for name in _FILES:
        with (beside / name).open("rb") as file:
            os.fsync(file.fileno())
    for name in _FILES:
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
