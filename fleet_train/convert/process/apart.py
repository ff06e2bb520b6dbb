"""Programs that train on each rank alone: an update without communication is found when its program first runs.

A script that calls ``minimize`` before it wraps the optimizer, on the old variable, or on an optimizer that it never
wraps, trains a separate model on each rank, and nothing fails. ``paddle.static.Executor.run`` runs every static
program; while this process is in a job of several ranks, it is replaced by a function that looks at each program at its
first run, and again when it has got operators since.
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

_paddles_run: Callable[..., Any] | None = None  # while it is replaced
_first_run: Callable[[Any], None] | None = None
_seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Programs that have run, with their number of operators then: a program may be evaluated before ``minimize``."""


def watch(first_run: Callable[[Any], None] | None) -> None:
    """From now on ``first_run`` is called with each program before it runs as it is now for the first time; None puts
    Paddle's method back, unless somebody else has replaced it meanwhile."""
    global _paddles_run, _first_run
    _first_run = first_run
    _seen.clear()
    if first_run is not None and _paddles_run is None:
        _paddles_run = paddle.static.Executor.run
        paddle.static.Executor.run = functools.update_wrapper(_run, _paddles_run)
    elif first_run is None and paddle.static.Executor.run is _run:
        paddle.static.Executor.run, _paddles_run = _paddles_run, None


def _run(self: Any, program: Any = None, *arguments: Any, **options: Any) -> Any:
    assert _paddles_run is not None
    about = paddle.static.default_main_program() if program is None else program
    if _first_run is not None and isinstance(about, paddle.static.Program):
        operators = about.num_ops()
        if _seen.get(about) != operators:
            _seen[about] = operators
            _first_run(about)
    return _paddles_run(self, program, *arguments, **options)


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
