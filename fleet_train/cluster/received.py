"""What another process has sent as JSON: read as a dataclass, and made harmless to show."""

from __future__ import annotations

from typing import Any, TypeVar

from fleet_train.errors import printable_line

T = TypeVar("T")
_MOST_NUMBER = 1 << 63
_readers: dict[type[Any], Any] = {}


def from_json(kind: type[T], data: Any) -> T:
    """A dataclass from the JSON of another process. Raises ValueError for anything else."""
    value: T = _reader(kind).validate_python(data)
    return value


def harmless(data: Any) -> Any:
    """The JSON of another process with control characters and line ends as escapes, for a table or a line. Raises
    ValueError for NaN, infinite and huge numbers.
    """
    if isinstance(data, str):
        return printable_line(data)
    if isinstance(data, dict):
        return {name: harmless(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [harmless(value) for value in data]
    if isinstance(data, (int, float)) and not abs(data) < _MOST_NUMBER:
        raise ValueError("a number is too large, or is none")
    return data


def _reader(kind: type[Any]) -> Any:
    """Created once per kind: that takes longer than parsing."""
    from pydantic import TypeAdapter  # heavy: not for --help

    if kind not in _readers:
        _readers[kind] = TypeAdapter(kind)
    return _readers[kind]
