"""Programs that train on each rank alone: an update without communication is found when its program first runs.

A script that calls ``minimize`` before it wraps the optimizer, on the old variable, or on an optimizer that it never
wraps, trains a separate model on each rank, and nothing fails. ``paddle.static.Executor.run`` runs every static
program; while this process is in a job of several ranks, it is replaced by a function that looks at each program once.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import paddle

import fleet_train
from fleet_train.collectives.host_ops import is_link
from fleet_train.convert.passes.walk import nested_operators

_FRAME = re.compile(r'File "(.+)", line (\d+)')
_LIBRARIES = (paddle.__file__, fleet_train.__file__, os.__file__)
_NOT_THE_SCRIPT = (*(os.path.dirname(str(file)) + os.sep for file in _LIBRARIES), "<frozen", "<decorator")

_original: Callable[..., Any] | None = None


def watch(first_run: Callable[[Any], None] | None) -> None:
    """From now on ``first_run`` is called with each program before it first runs; None puts Paddle's method back."""
    global _original
    if _original is not None:
        paddle.static.Executor.run, _original = _original, None
    if first_run is None:
        return
    run = _original = paddle.static.Executor.run
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(run)
    def watched(self: Any, program: Any = None, *arguments: Any, **options: Any) -> Any:
        about = paddle.static.default_main_program() if program is None else program
        if isinstance(about, paddle.static.Program) and about not in seen:
            seen.add(about)
            first_run(about)
        return run(self, program, *arguments, **options)

    paddle.static.Executor.run = watched


def updates_alone(program: Any, converted: set[str]) -> str:
    """Where a program updates parameters without the other ranks, as words for a message; empty if nowhere.

    ``converted``: the parameters that this process's converted programs update.
    """
    block = program.global_block().ops
    together = {*converted, ""} if any(map(is_link, block)) else set()
    for operator in chain(block, *map(nested_operators, block)):
        if _updates(operator) and (name := _parameter(operator)) not in together:
            return _line_of(operator) or f"the program with parameter '{name}'"
    return ""


def _updates(operator: Any) -> bool:
    """Whether it changes a parameter in place by a gradient; only Paddle's own operators can name their operands."""
    name = operator.name()
    return name.startswith("pd_op.") and name.endswith("_") and set(operator.get_input_names()) >= {"param", "grad"}


def _parameter(update: Any) -> str:
    value = update.operand_source(update.get_input_names().index("param"))
    return str(value.get_defining_op().attrs().get("parameter_name", ""))


def _line_of(operator: Any) -> str:
    """The script's line that made an operator, such as ``train.py, line 12 (optimizer.minimize(loss))``."""
    stack = [str(line).strip() for line in operator.attrs().get("op_callstack") or ()]
    found = ""
    for index, line in enumerate(stack):
        frame = _FRAME.match(line)
        if frame is not None and not frame[1].startswith(_NOT_THE_SCRIPT):
            code = "".join(f" ({text[:80]})" for text in stack[index + 1 : index + 2] if not _FRAME.match(text))
            found = f"{os.path.basename(frame[1])}, line {frame[2]}{code}"
    return found
