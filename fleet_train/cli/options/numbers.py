"""Numbers in flags: decimal, finite, and written with the digits 0 to 9.

Python's own int() and float() also read ``nan``, ``1e400`` (infinity), ``1_000`` and the digits of every script.
"""

from __future__ import annotations

import math
import re
from typing import Any

import click

from fleet_train.cluster.defaults import MOST_SECONDS

_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class WholeNumber(click.types.IntParamType):
    """A whole number of up to 18 digits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_whole(value, param, ctx), param, ctx)


class WholeNumberRange(click.IntRange):
    """A whole number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_whole(value, param, ctx), param, ctx)


class Number(click.types.FloatParamType):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_finite(value, param, ctx), param, ctx)


class NumberRange(click.FloatRange):
    """A finite number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_finite(value, param, ctx), param, ctx)


def _whole(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if isinstance(value, str) and not _WHOLE.fullmatch(value):
        raise click.BadParameter(f"{shown(value)} is not a whole number of up to 18 digits.", ctx, param)
    return value


def _finite(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if isinstance(value, str) and not (_DECIMAL.fullmatch(value) and math.isfinite(float(value))):
        raise click.BadParameter(f"{shown(value)} is not a finite decimal number.", ctx, param)
    return value


def seconds(*, min: float = 0, min_open: bool = False) -> NumberRange:
    """A number of seconds that every clock and socket accepts."""
    return NumberRange(min=min, max=MOST_SECONDS, min_open=min_open)


def shown(value: str) -> str:
    """A given text for a message: its beginning, without control characters."""
    return repr(value if len(value) <= 60 else f"{value[:60]}...")
