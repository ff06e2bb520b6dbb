"""Everything that the package replaces in the process of a user, and how it is put back.

- ``sys.excepthook`` (`exits`): an error of ours is one line, and has its own exit code.
- ``sys.exit`` (`exits`): its code is this rank's failure, which the others learn before the process has ended.
- ``paddle.static.Executor.run`` (`session`, `compat.loading`, `compat.testing`, trials of `recommend`): scripts, and
  the libraries that they use, run programs with Paddle's executors.
- ``paddle.base.core.serialize_pir_program`` (`one_card`): scripts save converted programs with Paddle's functions.
- Paddle's flags: the profile's ``environment``; oneDNN's, whose layouts cannot be sent (`optimizer`).

All of these go through this module. ``fleet.shutdown`` puts them back, in one process and in several, unless it is
called while an error of ours may be ending the script, which is still to be printed. With them it unregisters an
``atexit`` function (`exits`). Five things cannot be undone: the audit hook that sees an uncaught exception although
another library has replaced ``sys.excepthook`` (it does nothing without a job); glibc's ``on_exit``, because
Paddle's threads outlive the job; what forked children do with what they inherit (here, and for the store's connections
and claims of folders); the allocator's thresholds; and variables of the environment that Paddle's C++ code reads
(`collectives.join`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Hook = Callable[[Any, Any, Any], tuple[Any, Any]]
_OF_RUN = ("program", "feed", "fetch_list")
"""The first arguments of ``Executor.run``."""


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    name: str
    original: Any
    replacement: Any


_replaced: list[_Replaced] = []
_hooks: list[Hook] = []
_flags: dict[str, Any] = {}  # as they were


def replace(owner: Any, name: str, replacement: Any) -> Any:
    """Set ``owner.name`` until ``put_back``; returns the original. Does nothing the second time."""
    for each in _replaced:
        if each.owner is owner and each.replacement is replacement:
            return each.original
    original = getattr(owner, name)
    _replaced.append(_Replaced(owner, name, original, replacement))
    setattr(owner, name, replacement)
    return original


def set_flags(flags: Mapping[str, Any]) -> None:
    """``paddle.set_flags`` until ``put_back``."""
    import paddle  # not before the installed one has been checked

    for name, value in paddle.get_flags(list(flags)).items():
        _flags.setdefault(name, value)
    paddle.set_flags(dict(flags))


def before_each_run(hook: Hook) -> None:
    """From now on ``hook(program, feed, fetch_list)`` is called before a static program runs in this process, with the
    arguments of ``Executor.run``; it returns the feed and the fetch list to use."""
    import paddle

    if not _hooks:
        run = paddle.static.Executor.run

        @functools.wraps(run)
        def run_with_hooks(self: Any, *args: Any, **named: Any) -> Any:
            # Passed on as the caller gave them, by place or by name: what ``run`` is may be another library's wrapper.
            given = dict(zip(_OF_RUN, args, strict=False)) | named
            program, feed, fetch_list = (given.get(name) for name in _OF_RUN)
            for each in tuple(_hooks):
                feed, fetch_list = each(program, feed, fetch_list)
            places = list(args)
            for place, (name, value) in enumerate(zip(_OF_RUN, (program, feed, fetch_list), strict=True)):
                if place < len(places):
                    places[place] = value
                elif value is not given.get(name):
                    named[name] = value
            return run(self, *places, **named)

        replace(paddle.static.Executor, "run", run_with_hooks)
    if hook not in _hooks:
        _hooks.append(hook)


def put_back() -> None:
    """Make everything in this process as it was. What somebody else has replaced since stays."""
    _hooks.clear()
    while _replaced:
        last = _replaced.pop()
        if getattr(last.owner, last.name) is last.replacement:
            setattr(last.owner, last.name, last.original)
    if _flags:
        import paddle

        paddle.set_flags(dict(_flags))
        _flags.clear()
