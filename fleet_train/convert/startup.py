"""Whether a startup program belongs to a main program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.errors import ConversionError


def refuse_foreign_startup(main: Any, startups: Sequence[Any]) -> None:
    """Raise ConversionError where ``startups``, that of minimize and the default one, give no parameter of ``main`` its
    start value, and nothing else has.

    That is ``minimize(loss)`` outside of the ``program_guard`` that the network was built in: learning rate and
    accumulators would go to a program that the script never runs, and start values would not be made equal.
    """
    names = {parameter.name for parameter in main.global_block().all_parameters()}
    started = {
        str(operator.attrs()["parameter_name"])
        for startup in startups
        for operator in startup.global_block().ops
        if operator.name() == "builtin.set_parameter"
    }
    if not names or names & started or any(_is_in_scope(name) for name in names):
        return
    raise ConversionError(
        f"the startup program of minimize gives no parameter of the loss its start value (such as '{min(names)}'): "
        "call minimize inside `with paddle.static.program_guard(main, startup)`, or pass startup_program=startup"
    )


def _is_in_scope(name: str) -> bool:
    variable = paddle.static.global_scope().find_var(name)
    return variable is not None and bool(variable.get_tensor()._is_initialized())
