"""Paddle's dynamic mode for one thread.

``paddle.disable_static`` and ``dygraph.guard`` also replace process-wide state while they are active:
the generator of unique names, the default programs, the expected place, and the mode in which new threads start. A
script that builds another network meanwhile would get the names of the first one again. These functions change only the
calling thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle.base.dygraph.tracer import Tracer


@contextlib.contextmanager
def dynamic_mode(place: Any = None) -> Iterator[None]:
    """Dynamic mode for the body on this thread, in any mode. ``place``: the process's own if None."""
    before = paddle.base.framework.global_var._dygraph_tracer_
    tracer = Tracer()
    tracer._expected_place = paddle.base.framework._current_expected_place_() if place is None else place
    _switch(tracer)
    try:
        yield
    finally:
        _switch(before)


def ensured_dynamic_mode() -> contextlib.AbstractContextManager[None]:
    """``dynamic_mode`` where this thread is not in it: eager calls may come from a script in static mode."""
    return contextlib.nullcontext() if paddle.in_dynamic_mode() else dynamic_mode()


def _switch(tracer: Any) -> None:
    """Not by assigning the attribute: that also sets the mode in which the script's threads start."""
    paddle.base.framework.global_var.__dict__["_dygraph_tracer_"] = tracer
    paddle.base.core._switch_tracer(tracer)


@contextlib.contextmanager
def operators_in_dynamic_mode() -> Iterator[None]:
    """Host operators that are emitted in the body run under ``dynamic_mode``.

    ``register_op`` puts each under ``dygraph.guard``. Two that run at the same time, on two threads of the executor,
    would restore each other's name generator.
    """
    module: Any = sys.modules[paddle.static.register_op.__module__]
    original = module.run_in_dynamic_mode
    module.run_in_dynamic_mode = _in_dynamic_mode
    try:
        yield
    finally:
        module.run_in_dynamic_mode = original


class _OperatorsTracer(threading.local):
    """The tracer of a thread's host operators: one for all, because they run many times in every step."""

    def __init__(self) -> None:
        self.tracer = Tracer()


_operators = _OperatorsTracer()


def _in_dynamic_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """As ``dynamic_mode`` around ``function``, with the thread's cached tracer and without a generator."""

    def run(*values: Any) -> Any:
        before = paddle.base.framework.global_var._dygraph_tracer_
        tracer = _operators.tracer
        tracer._expected_place = paddle.base.framework._current_expected_place_()
        _switch(tracer)
        try:
            return function(*values)
        finally:
            _switch(before)

    return run
