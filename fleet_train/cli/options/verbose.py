"""``--verbose`` of commands that import Paddle into this process: without it, Paddle's start-up lines are hidden."""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])
# A process that sets these shows or keeps its ranks' output: a log must be complete.
_LAUNCHERS = ("FLEET_TRAIN_STORE", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_LOCAL_RANK")


def verbose_option(command: _Command) -> _Command:
    """Add the flag to a command."""
    return click.option(
        "--verbose",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_heed,
        help="Also show Paddle's start-up messages. (Under launch: launch --verbose.)",
    )(command)


def _heed(context: click.Context, _: click.Parameter, verbose: bool) -> None:
    environ = context.find_root().obj  # given by `main`: this process is the command's own
    if environ is not None and not verbose and not context.resilient_parsing:
        quieten(environ)


def quieten(environ: MutableMapping[str, str]) -> None:
    """Call before Paddle is imported. The user's GLOG_minloglevel and ``python -W`` have precedence."""
    if any(name in environ for name in _LAUNCHERS):
        return
    from fleet_train.launch.workers.startup_lines import WARNINGS

    environ.setdefault("GLOG_minloglevel", "2")  # errors only
    for message, module in WARNINGS.items():
        warnings.filterwarnings("ignore", message, UserWarning, module.replace(".", r"\."), append=True)
