"""Whether a startup program belongs to a main program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.convert.program.start_state import begun_tensor, names_stored_by
from fleet_train.errors import ConversionError


def refuse_foreign_startup(main: Any, startups: Sequence[Any]) -> None:
    """Raise ConversionError if ``startups``, that of minimize and the default one, initialize no parameter of ``main``,
    and nothing else has.

    This happens with ``minimize(loss)`` outside the ``program_guard`` in which the network was built: learning rate and
    accumulators would go into a program that the script never runs, and start values would not be made equal.
    """
    names = {parameter.name for parameter in main.global_block().all_parameters()}
    scope = paddle.static.global_scope()
    if not names or any(names & names_stored_by(startup) for startup in startups):
        return
    if any(begun_tensor(scope, name) is not None for name in names):
        return
    raise ConversionError(
        f"the startup program of minimize initializes no parameter of the loss (such as '{min(names)}'): "
        "call minimize inside `with paddle.static.program_guard(main, startup)`, or pass startup_program=startup"
    )
