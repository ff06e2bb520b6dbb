"""Values of another program, where a script means the program at hand: what ``minimize`` is to train, what a run is to
fetch.

Paddle 3.3.1 updates nothing, or fetches nothing, and says nothing, where it is given values of a copy that
``program.clone()`` made; and it updates twice what is listed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from fleet_train.errors import ConversionError

_SHOWN = 5


def trained_of(program: Any, given: Any) -> list[Any] | None:
    """The parameters of ``program`` that ``minimize(parameters=given)`` lists by value or name; None without a list.

    A parameter that the program uses by name in several places has a value for each, all of which are returned. Raises
    ConversionError for what is no parameter of the program, or listed twice, and for an empty list.
    """
    if given is None:
        return None
    argument = "minimize(parameters=...)"
    found = _found(program, given, argument)
    if not found:
        raise ConversionError(
            f"{argument} was given an empty list, with which Paddle trains all parameters; leave it out to have that"
        )
    others = [value for value in found if value.get_defining_op().name() != "builtin.parameter"]
    if others:
        raise ConversionError(
            f"{argument} lists {_names([_shown(value) for value in others])}, which are no parameters"
        )
    return found


def untrained_of(program: Any, given: Any) -> list[Any] | None:
    """The values of ``program`` that ``minimize(no_grad_set=given)`` lists; of parameters also names."""
    return None if given is None else _found(program, given, "minimize(no_grad_set=...)")


def _found(program: Any, given: Any, argument: str) -> list[Any]:
    uses: dict[str, list[Any]] = {}
    for parameter in program.global_block().all_parameters():
        uses.setdefault(parameter.name, []).append(parameter)
    found: dict[str, Any] = {}
    seen = set[str]()
    for entry in _listed(given, argument):
        found |= {value.id: value for value in _values_of(entry, program, uses, argument)}
        key = entry if isinstance(entry, str) else entry.id
        if key in seen:
            raise ConversionError(
                f"{argument} lists {_shown(entry)} twice, and Paddle would update it twice in a step; list it once"
            )
        seen.add(key)
    return list(found.values())


def refuse_foreign(program: Any, listed: Any) -> None:
    """Raise ConversionError where the list that an optimizer was made with cannot train ``program``: it has values of
    another program that bear names of this one, lists a value twice, or has nothing of it."""
    values = [value for value in listed or () if isinstance(value, pir.Value)]
    own = [value for value in values if _program_of(value) == program]
    foreign = [value for value in values if _program_of(value) != program]
    if values:
        names = {parameter.name for parameter in program.global_block().all_parameters()}
        argument = "parameters= of the optimizer"
        copies = [value for value in foreign if _name_of(value) in names]
        if copies or not own:
            raise ConversionError(_of_another_program(copies or foreign, argument))
        _found(program, own, argument)


def refuse_unreached(
    listed: Sequence[Any] | None, params_grads: Iterable[tuple[Any, Any]], advise: Callable[[ConversionError], None]
) -> None:
    """Advise about listed parameters on which the loss does not depend. Raises ConversionError if it depends on none.

    Frozen ones are no reason for either.
    """
    reached = {parameter.name for parameter, gradient in params_grads if gradient is not None}
    wanted = [value for value in listed or () if not value.stop_gradient]
    missed = sorted({_shown(value) for value in wanted if _name_of(value) not in reached})
    if missed:
        none = len(missed) == len({_shown(value) for value in wanted})
        error = ConversionError(
            f"minimize(parameters=...) lists {_names(missed)}, on which the loss does not depend, so that "
            f"{'nothing would be' if none else 'they are not'} trained; list parameters that the loss is computed with"
        )
        if none:
            raise error
        advise(error)


def _listed(given: Any, argument: str) -> list[Any]:
    if isinstance(given, (str, pir.Value)):
        raise ConversionError(f"{argument} was given {_shown(given)} alone; give a list: [{_shown(given)}]")
    return list(given)


def _values_of(entry: Any, program: Any, uses: dict[str, list[Any]], argument: str) -> list[Any]:
    if isinstance(entry, str):
        if entry not in uses:
            raise ConversionError(
                f"{argument} lists '{entry}', and the loss's program has no parameter of this name; it has "
                f"{_names(sorted(uses))}"
            )
        return uses[entry]
    if not isinstance(entry, pir.Value):
        raise ConversionError(
            f"{argument} lists {type(entry).__name__} {_shown(entry)}; give parameters of the loss's program, or names"
        )
    if _program_of(entry) != program:
        raise ConversionError(_of_another_program([entry], argument))
    return uses.get(_name_of(entry), [entry])


def _of_another_program(values: Sequence[Any], argument: str) -> str:
    names = _names([_shown(value) for value in values])
    return (
        f"{argument} has {names} of another program than the loss's (program.clone() makes such copies), so that "
        "nothing of the loss would be trained; give their names ([p.name for p in ...]), or the loss's own: "
        "[p for p in program.global_block().all_parameters() if p.name in names]"
    )


def _program_of(value: Any) -> Any:
    return value.get_defining_op().get_parent_block().program


def _name_of(value: Any) -> str:
    return str(value.name) if value.get_defining_op().name() in ("builtin.parameter", "pd_op.data") else ""


def _shown(entry: Any) -> str:
    if isinstance(entry, pir.Value):
        return f"'{_name_of(entry)}'" if _name_of(entry) else f"a value of {entry.get_defining_op().name()}"
    return repr(entry)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) or "none"
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def refuse_foreign_fetches(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    """A hook before each run that raises ConversionError for values that the program of the run does not have."""
    running = paddle.static.default_main_program() if program is None else program
    fetched = fetch_list if isinstance(fetch_list, (list, tuple)) else [fetch_list]
    if isinstance(running, paddle.static.Program):
        for index, value in enumerate(fetched):
            if isinstance(value, pir.Value) and _program_of(value) != running:
                raise ConversionError(
                    f"fetch_list[{index}] is {_shown(value)} of another program than the one that runs, so that Paddle "
                    "would fetch nothing; run the program that has it, or fetch the value of this one (of a copy: "
                    "compat.clone(program) and compat.clone_for_test(program) take the values of the original)"
                )
    return feed, fetch_list
