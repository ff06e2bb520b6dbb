"""Serialization of functions and results between processes, by cloudpickle; errors name what cannot be pickled.

Two processes write to each other once, in a file in memory (`created`).
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleet_train.errors import ClusterError, FleetTrainError

_LONGEST_SHOWN = 80
# Source of notebook cells, for tracebacks; a notebook has more than a rank needs.
_MOST_SOURCE_LINES = 200_000


class NotSerializable(FleetTrainError):
    """A function, argument or result cannot be pickled; the message names the part."""


def ship(train: Callable[..., Any], args: tuple[Any, ...], extra: Any = None) -> bytes:
    """A call of ``train(*args)`` as bytes. Raises NotSerializable naming the variable that cannot be pickled."""
    try:
        return dumped((train, args, extra))
    except Exception as error:
        for what, value in _parts(train, args):
            if (why := _why_not(value)) is not None:
                raise NotSerializable(
                    f"{what} cannot be sent to the ranks: it is {shown(value)} ({why}); create it inside "
                    f"{name_of(train)}, or pass what it is made from as an argument"
                ) from None
        raise NotSerializable(f"{name_of(train)} cannot be sent to the ranks: {_reason(error)}") from None


def ship_result(result: Any, name: str) -> bytes:
    """A rank's result as bytes. Raises NotSerializable."""
    try:
        return dumped(result)
    except Exception as error:
        what, value = next(_broken_parts(result), ("", result))
        raise NotSerializable(
            f"{name} returned {shown(result)}, which cannot be sent back{what and f': {what}'} "
            f"({_why_not(value) or _reason(error)}); return numbers, NumPy arrays, or lists and dicts of them"
        ) from None


def unship(body: bytes) -> Any:
    """The reverse, for bytes from a process of this job."""
    import cloudpickle

    return cloudpickle.loads(body)


loading = ""
"""The function that this rank is about to call; empty once it is loaded."""


class CalledWhileImported(ClusterError):
    """``spawn`` is called at the top level of a module that the ranks import."""


def unship_call(body: bytes, train: str) -> Any:
    """The call of ``train`` from `ship`, in a rank that imports its modules for that."""
    global loading
    loading = train
    try:
        return unship(body)
    finally:
        loading = ""


def sources() -> dict[str, list[str]]:
    """Source lines that are in no file (a notebook's cells, a prompt), for tracebacks in other processes."""
    lines_of: dict[str, list[str]] = {}
    left = _MOST_SOURCE_LINES
    for name, entry in reversed(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(name) and len(entry[2]) <= left:
            lines_of[name] = list(entry[2])
            left -= len(entry[2])
    return lines_of


def take_sources(lines_of: dict[str, list[str]]) -> None:
    """Register the lines of `sources` in this process."""
    for name, lines in lines_of.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def name_of(train: Any) -> str:
    """``train``, ``a lambda``, ``Trainer.run``: a function's name in messages."""
    if isinstance(train, functools.partial):
        return name_of(train.func)
    name = getattr(train, "__qualname__", None) or type(train).__name__
    return "the lambda" if name.endswith("<lambda>") else str(name).rpartition("<locals>.")[2]


def shown(value: Any) -> str:
    """A short description of a value: its type, not its content."""
    kind = type(value)
    text = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"a value of type {text}"[:_LONGEST_SHOWN]


def dumped(value: Any) -> bytes:
    """For `unship`; of an object that can be pickled."""
    import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _why_not(value: Any) -> str | None:
    """Why a value cannot be pickled; None if it can."""
    try:
        dumped(value)
    except Exception as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _parts(train: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The values that are pickled with a call, under the names that its author knows."""
    for index, value in enumerate(args):
        yield f"args[{index}]", value
    yield from _captured(train, set())


def _captured(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The values that are pickled with a function, innermost first: a helper's own variable before the helper."""
    if isinstance(function, functools.partial):
        for index, value in enumerate((*function.args, *function.keywords.values())):
            yield f"argument {index} of the functools.partial", value
        function = function.func
    if inspect.ismethod(function):
        yield f"the object whose method {name_of(function)} is", function.__self__
        function = function.__func__
    if not inspect.isfunction(function) or id(function) in seen or not _goes_by_value(function):
        return
    seen.add(id(function))
    variables = inspect.getclosurevars(function)
    name = name_of(function)
    for kind, captured in (("captures", variables.nonlocals), ("uses as a global", variables.globals)):
        for variable, value in captured.items():
            yield from _captured(value, seen)
            yield f"{variable!r}, which {name} {kind},"[: 2 * _LONGEST_SHOWN], value
    for index, value in enumerate(function.__defaults__ or ()):
        yield f"default {index} of {name}", value


def _goes_by_value(function: Any) -> bool:
    """Whether cloudpickle includes its code: of an importable module only the name is sent."""
    module = sys.modules.get(function.__module__ or "")
    return function.__module__ == "__main__" or module is None or "<locals>" in function.__qualname__


def _broken_parts(result: Any) -> Iterator[tuple[str, Any]]:
    """The members of a list, tuple or dict that cannot be pickled."""
    if isinstance(result, dict):
        members = [(f"the value under {key!r}"[:_LONGEST_SHOWN], value) for key, value in result.items()]
    elif isinstance(result, (list, tuple)):
        members = [(f"item {index}", value) for index, value in enumerate(result)]
    else:
        members = []
    yield from ((f"{what} is {shown(value)}", value) for what, value in members if _why_not(value) is not None)


@contextmanager
def created() -> Iterator[int]:
    """The descriptor of a new, empty file without a name: it disappears with the last process that has it open."""
    descriptor = os.memfd_create("fleet_train spawn")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def path_of(descriptor: int) -> str:
    """The path under which another process of this user opens it, as long as this one has it open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@contextmanager
def opened(path: str) -> Iterator[int]:
    """The file that another process has created, under its `path_of`; what this process starts does not inherit it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(descriptor: int, content: Any) -> None:
    """Write it there, once."""
    with open(descriptor, "wb", closefd=False) as file:
        file.write(dumped(content))


def read(descriptor: int) -> Any:
    """What another process of this spawn has written; None if it has not, or not completely."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        try:
            return unship(file.read())
        except (EOFError, pickle.UnpicklingError):
            return None
