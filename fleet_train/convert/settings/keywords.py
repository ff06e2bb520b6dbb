"""Arguments that have two names: ours, and the one that Fleet gave them."""

from __future__ import annotations

from typing import Any

from fleet_train.errors import ConversionError


class ArgumentError(ConversionError, TypeError):
    """Arguments that do not fit a call. Also a TypeError, which is what Python raises for them."""


def one_of(function: str, **given: Any) -> Any:
    """The value of an argument with several names, the last of them ours; None if none was given.

    Raises ArgumentError when it was given under two names.
    """
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise ArgumentError(
            f"fleet.{function} was given {' and '.join(f'{name}=' for name in used)}, which name one argument; "
            "keep one of them"
        )
    return given[used[0]] if used else None


def needed(function: str, **given: Any) -> Any:
    """Like ``one_of``, for a required argument."""
    value = one_of(function, **given)
    if value is None:
        raise ArgumentError(f"fleet.{function} needs {' or '.join(f'{name}=' for name in reversed(given))}")
    return value


def refuse(function: str, name: str, value: Any, reason: str) -> None:
    """Raise ArgumentError for an argument of Fleet's that cannot be carried out, if it was given."""
    if value is not None:
        raise ArgumentError(f"fleet.{function}: {name}={value!r}: {reason}")
