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
    exist. Raises ConversionError for targets that need other ranks.
    """
    program = targets[0].block.program
    _refuse_host_operators(targets)
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


def _refuse_host_operators(targets: Sequence[Any]) -> None:
    """Inference has one process and no fleet_train: the targets must not depend on an operator of ours."""
    seen: set[int] = set()
    ahead = [target.get_defining_op() for target in targets]
    while ahead:
        operator = ahead.pop()
        if operator is None or operator.id() in seen:
            continue
        seen.add(operator.id())
        if "fleet_train_" in operator.name():
            raise ConversionError(
                f"the targets depend on '{operator.name()}', which communicates (synchronised batch norm); "
                "build a second program with layer.eval() under paddle.utils.unique_name.guard() and export that one"
            )
        ahead += [source.get_defining_op() for source in operator.operands_source()]
