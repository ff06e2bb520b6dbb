"""Jobs whose collectives end late (`fleet_train.selftest.late`), and a tripwire for reads of a device's values.

Run as a program: the script that the first argument names, in such jobs.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from functools import wraps
from typing import Any

import paddle

from fleet_train.collectives import job as job_module
from fleet_train.collectives.engines import OWN, StreamEngine, Watchdog
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.selftest.late import LateCalls, LateDevice


def install_late_engine(seed: int = 0, stream: str = OWN) -> None:
    """From now on every job of this process has such an engine, from its joining on; ``stream``: where profiles leave
    it open."""

    def make_engine(place: Any, attribute_failure: Any, is_hopeless: Any, on_stuck: Any) -> StreamEngine:
        calls = LateCalls(place, seed)
        return StreamEngine(LateDevice(), attribute_failure, Watchdog(on_stuck, is_hopeless), calls)

    job_module.make_engine = make_engine  # type: ignore[assignment]
    real = StreamEngine.use
    StreamEngine.use = lambda engine, _: real(engine, stream)  # type: ignore


_reads = threading.local()
_READERS = (
    "numpy",
    "item",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
    "__dlpack__",
    "__len__",
)


class HostRead(AssertionError):
    """The host has read a device's value in a step."""


def install_tripwire() -> None:
    """From now on whatever reads a tensor's value while an exchange's operator runs raises HostRead.

    So does ``paddle.to_tensor``: it copies an array from pageable memory, for which a device's queue must be empty.
    """
    paddle.to_tensor = _guarded("to_tensor", paddle.to_tensor)
    for name in _READERS:
        real = getattr(paddle.Tensor, name, None)
        if real is not None:
            setattr(paddle.Tensor, name, _guarded(name, real))
    for name in ("arrive", "begin", "launch", "wait", "finish"):
        setattr(GradientExchange, name, _armed(getattr(GradientExchange, name)))


def _guarded(name: str, real: Any) -> Any:
    @wraps(real)
    def read(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(_reads, "is_armed", False):
            what = f"a tensor {list(tensor.shape)}" if isinstance(tensor, paddle.Tensor) else "an array"
            raise HostRead(f"{name} of {what} in a step")
        return real(tensor, *arguments, **options)

    return read


def _armed(operator: Any) -> Any:
    @wraps(operator)
    def run(exchange: Any, *arguments: Any, **options: Any) -> Any:
        _reads.is_armed = not exchange._job.engine.reads_values
        try:
            return operator(exchange, *arguments, **options)
        finally:
            _reads.is_armed = False

    return run


def run_script(arguments: list[str]) -> None:
    """The script that the first argument names, in jobs whose collectives end late."""
    install_tripwire()
    install_late_engine(seed=int(os.environ.get("PADDLE_TRAINER_ID", "0")))  # no two ranks are late alike
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    from tests.support import late  # the module that the script imports as well

    late.run_script(sys.argv[1:])
