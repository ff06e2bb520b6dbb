"""Applies a profile's settings other than communication: its environment section and the mapped knobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import paddle

from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, check_flags

_said: set[str] = set()


def say(messages: Iterable[str], rank: int) -> None:
    """Print each message once, a line each, on rank 0's stderr; the other ranks print nothing."""
    for message in messages:
        if rank == 0 and message not in _said:
            _said.add(message)
            print(f"fleet_train: {message}", file=sys.stderr, flush=True)


def apply_environment(profile: Profile) -> list[str]:
    """Set what can still be set; returns notes to the user.

    Paddle's flags take effect at run time; other variables are read at process start, which has passed. A variable that
    is already set in the environment is left unchanged. Raises ProfileError for unknown ``FLAGS_*``.
    """
    check_flags(profile, paddle.base.core.globals().keys())
    wanted = profile.worker_environment()
    kept = sorted(name for name, value in wanted.items() if os.environ.get(name, value) != value)
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    flags = {name: _typed(name, value) for name, value in missing.items() if name.startswith("FLAGS_")}
    late = sorted(missing.keys() - flags.keys())
    os.environ.update({name: missing[name] for name in late})
    if flags:
        paddle.set_flags(flags)
    notices = []
    if kept:
        notices.append(f"the environment's own {', '.join(kept)} overrides profile '{profile.name}'")
    if late:
        notices.append(
            f"profile '{profile.name}' sets {', '.join(late)} after this process started, too late for variables "
            "read at start: start with python -m fleet_train launch --strategy"
        )
    return notices


def _typed(name: str, text: str) -> Any:
    """``text`` converted to the type of this flag in Paddle; ``set_flags`` takes no other."""
    kind = type(paddle.get_flags(name)[name])
    try:
        return text.strip().lower() in ("1", "true") if kind is bool else kind(text)
    except ValueError:
        raise ProfileError(f"environment.{name}: its value is not of Paddle's type {kind.__name__}") from None
