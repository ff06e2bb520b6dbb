"""Paddle's dynamic mode for one thread.

``paddle.disable_static`` and ``dygraph.guard`` also replace process-wide state while they are active:
the generator of unique names, the default programs, the expected place, and the mode in which new threads start. A
script that builds another network meanwhile would get the names of the first one again. These functions change only the
calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata, util
from typing import Any

import numpy as np
import paddle
from paddle.base.dygraph.tracer import Tracer

from fleet_train.errors import ConversionError, PaddleUnusable


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
    """Switch one thread's mode: assigning Paddle's attribute would change it for the script's threads, too."""
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
    """Run a function as in ``dynamic_mode``, with the thread's cached tracer and without a generator."""

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


NEEDED = "3.3.1"
_INSTALL = f"python -m pip install paddlepaddle=={NEEDED} (CPU), or see requirements-gpu.txt"


def require_paddle(environ: Mapping[str, str] = os.environ) -> None:
    """Raise PaddleUnusable, with what was found, what is needed and the fix, unless Paddle can be used.

    What the code relies on in this version, and how to check another one: docs/paddle.md.
    Host operators inside PIR programs (``paddle.static.register_op``) are public since Paddle 3.3.
    """
    if util.find_spec("paddle") is None:
        raise PaddleUnusable(f"Paddle is not installed; fleet_train needs {NEEDED} or newer: {_INSTALL}")
    switched = environ.get("FLAGS_enable_pir_api", "1").strip().lower()
    if switched in ("0", "false"):
        raise PaddleUnusable(
            f"FLAGS_enable_pir_api={switched} selects Paddle's old IR; fleet_train needs PIR (the default): "
            "unset FLAGS_enable_pir_api"
        )
    import paddle

    if not hasattr(paddle.static, "register_op"):
        raise PaddleUnusable(
            f"Paddle {installed_version()} has no paddle.static.register_op; fleet_train needs {NEEDED} or newer: "
            f"{_INSTALL}"
        )
    if not paddle.framework.use_pir_api():
        raise PaddleUnusable("Paddle runs its old IR; fleet_train needs PIR: unset FLAGS_enable_pir_api")


def installed_version() -> str:
    """The version of the imported Paddle, from its package."""
    import paddle

    version = str(getattr(paddle, "__version__", "") or "")
    if version:
        return version
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def backend_name(environ: Mapping[str, str] = os.environ) -> str:
    """``nccl`` on a GPU build, ``gloo`` on a CPU build or when PADDLE_DISTRI_BACKEND asks for it."""
    import paddle

    asked = environ.get("PADDLE_DISTRI_BACKEND", "").lower()
    if asked == "gloo" or not paddle.is_compiled_with_cuda():
        return "gloo"
    return "nccl"


def as_dtype(tensor: Any, dtype: str) -> Any:
    """``tensor`` in ``dtype`` (by name); itself if it has that dtype already, in which case Paddle's own ``cast``
    copies."""
    return tensor if tensor.dtype == getattr(paddle, dtype) else tensor.cast(dtype)


def scaled(value: Any, factor: float) -> Any:
    """A program's value times ``factor``: Paddle 3.3.1's operator ``scale`` keeps its factor in float32."""
    if value.dtype != paddle.float64:
        return paddle.scale(value, factor)
    return value * paddle.full([], factor, value.dtype)


Array = np.ndarray[Any, Any]

_TYPES = {paddle.float32: "<f4", paddle.float64: "<f8", paddle.uint8: "|u1", paddle.bfloat16: "<u2"}


class _Memory:
    """A tensor's memory for numpy, which gets the address; the array keeps this object, and with it the tensor."""

    def __init__(self, tensor: Any, elements: int, kind: str) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": (elements,),
            "typestr": kind,
        }


def host_view(tensor: Any) -> Array:
    """``tensor`` ([...], float32, float64, uint8 or bfloat16, contiguous, on the CPU) as an array [elements] over its
    memory; bfloat16 as its bits in uint16. A few times faster than DLPack.

    A write to one is read from the other. The array keeps the tensor alive; it must not be used after the tensor got
    other memory (``set_value`` with another shape). Raises ConversionError for other tensors.
    """
    kind = _TYPES.get(tensor.dtype)
    if kind is None or not tensor.is_contiguous() or not tensor.place.is_cpu_place():
        raise ConversionError(
            f"host_view was given a tensor of {tensor.dtype} on {tensor.place}, strides {tensor.strides}; it takes "
            "contiguous float32, float64, uint8 or bfloat16 on the CPU: cast it, or use its contiguous()"
        )
    elements = math.prod(tensor.shape)
    return np.asarray(_Memory(tensor, elements, kind)) if elements else np.empty(0, kind)


def add_in_place(total: Any, tensors: Sequence[Any]) -> Any:
    """``total`` ([elements], float32) plus ``tensors`` (of any float dtype), concatenated from its start."""
    buffer, start = host_view(total), 0
    for tensor in tensors:
        values = host_view(as_dtype(tensor, "float32").contiguous())
        part = buffer[start : start + values.size]
        np.add(part, values, out=part)
        start += values.size
    return total


# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 1 << 30, 32 << 20
_USERS_WORD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Keep the memory of freed tensors in the process: raise glibc's thresholds; False if the user has set them or
    there is no glibc.

    glibc returns large blocks to the kernel at once and faults their pages in again in the next step: copying 13 MB of
    gradients took 7.6 ms that way and 0.9 ms with these settings (one thread, CPU).
    """
    if any(name in environ for name in _USERS_WORD):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
