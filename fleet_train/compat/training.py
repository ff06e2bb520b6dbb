"""How programs of Paddle 1.x were trained and run: ``minimize`` by names and anywhere; the shape of fetched scalars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import paddle
from paddle.base.libpaddle import pir

from fleet_train.convert.foreign import refuse_unreached, trained_of, untrained_of
from fleet_train.errors import ConversionError


def minimize(
    optimizer: Any,
    loss: Any,
    startup_program: Any = None,
    parameter_list: Iterable[Any] | None = None,
    no_grad_set: Iterable[Any] | None = None,
) -> tuple[Any, list[tuple[Any, Any]]]:
    """``optimizer.minimize(loss, ...)`` in the program of ``loss``, whichever program is the current one.

    Parameters are named, or known by the name that they have in any program, such as a clone. Raises ConversionError
    for one that the program of the loss does not have.
    """
    if paddle.in_dynamic_mode():
        result: tuple[Any, list[tuple[Any, Any]]] = optimizer.minimize(
            loss, startup_program, parameter_list, no_grad_set
        )
        return result
    main, startup = loss.block.program, startup_program or paddle.static.default_startup_program()
    trained, untrained = _lists(main, parameter_list, no_grad_set)
    with paddle.static.program_guard(main, startup):
        operators, pairs = optimizer.minimize(loss, startup, trained, untrained)
    refuse_unreached(trained, pairs, lambda _: None)
    return operators, pairs


def backward(
    optimizer: Any,
    loss: Any,
    startup_program: Any = None,
    parameter_list: Iterable[Any] | None = None,
    no_grad_set: Iterable[Any] | None = None,
    callbacks: Any = None,
) -> list[tuple[Any, Any]]:
    """``optimizer.backward(loss, ...)``, which finds parameters as ``minimize`` does."""
    main, startup = loss.block.program, startup_program or paddle.static.default_startup_program()
    trained, untrained = _lists(main, parameter_list, no_grad_set)
    with paddle.static.program_guard(main, startup):
        pairs: list[tuple[Any, Any]] = optimizer.backward(loss, startup, trained, untrained, callbacks)
    refuse_unreached(trained, pairs, lambda _: None)
    return pairs


def append_backward(
    loss: Any,
    parameter_list: Iterable[Any] | None = None,
    no_grad_set: Iterable[Any] | None = None,
    callbacks: Any = None,
    checkpoints: Any = None,
) -> list[tuple[Any, Any]]:
    """``fluid.backward.append_backward``, which finds parameters as ``minimize`` does."""
    main = loss.block.program
    trained, untrained = _lists(main, parameter_list, no_grad_set)
    with paddle.static.program_guard(main, paddle.static.default_startup_program()):
        pairs: list[tuple[Any, Any]] = paddle.static.append_backward(loss, trained, untrained, callbacks, checkpoints)
    refuse_unreached(trained, pairs, lambda _: None)
    return pairs


def _lists(program: Any, parameter_list: Any, no_grad_set: Any) -> tuple[list[Any] | None, list[Any] | None]:
    trained = trained_of(program, _named(parameter_list)) if parameter_list else None
    return trained, untrained_of(program, _named(no_grad_set))


def _named(listed: Iterable[Any] | None) -> list[Any] | None:
    """Each entry once; a parameter by its name."""
    if listed is None:
        return None
    entries = [
        value.name if isinstance(value, pir.Value) and value.get_defining_op().name() == "builtin.parameter" else value
        for value in listed
    ]
    names = dict.fromkeys(entry for entry in entries if isinstance(entry, str))
    return [*names, *(entry for entry in entries if not isinstance(entry, str))]


class Fetched(np.ndarray[Any, Any]):
    """A fetched scalar: an array of one dimension, which is also a number, as arrays of one element were."""

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self) -> str:
        return repr(np.asarray(self))

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and self.size == 1 else np.asarray(self), spec)


class Executor(paddle.static.Executor):  # type: ignore[misc]
    """Paddle's executor, which fetches scalars with the shape ``[1]``, and parameters by name, as in Paddle 1.8."""

    def __init__(self, place: Any = None) -> None:
        super().__init__(place)

    def run(self, program: Any = None, feed: Any = None, fetch_list: Any = None, *args: Any, **named: Any) -> Any:
        """Run a program like ``paddle.static.Executor``. Raises ConversionError for a name that is no parameter's."""
        results = super().run(program, feed, _without_names(program, fetch_list), *args, **named)
        return [_with_a_dimension(value) for value in results] if isinstance(results, list) else results


def _without_names(program: Any, fetch_list: Any) -> Any:
    listed = [fetch_list] if isinstance(fetch_list, str) else fetch_list
    if not isinstance(listed, (list, tuple)) or not any(isinstance(value, str) for value in listed):
        return fetch_list
    main = program or paddle.static.default_main_program()
    known = {parameter.name: parameter for parameter in main.global_block().all_parameters()}
    for index, value in enumerate(listed):
        if isinstance(value, str) and value not in known:
            raise ConversionError(
                f"fetch_list[{index}]: {value!r} is no parameter of the program, and other values have no names today: "
                "fetch the Python variable"
            )
    return [known[value] if isinstance(value, str) else value for value in listed]


def _with_a_dimension(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.shape:
        return value.reshape([1]).view(Fetched)
    if isinstance(value, paddle.base.core.DenseTensor) and not value.shape():
        value._set_dims([1])
    return value
