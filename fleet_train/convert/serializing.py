"""What Paddle writes of a converted program: the program of one card, without our operators.

A host operator holds a pointer to its function, which Paddle cannot write (``Unknown Attr``), so ``paddle.static.save``
would die after the training. Scripts call it on Paddle itself, and all of Paddle's ways to write a program end in one
function of its core; that one is replaced, and changes only what could not be written before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import paddle

from fleet_train.convert.apply_profile import say
from fleet_train.errors import ConversionError

_OURS = "fleet_train_"
_BUCKET = re.compile(r"fleet_train_(launch|wait)_(\d+)_\d+")

_original: Callable[..., Any] | None = None
_is_drifting: Callable[[Any], bool] = bool


def leave_out_host_operators(is_drifting: Callable[[Any], bool]) -> None:
    """From now on Paddle writes converted programs as one card has them. ``is_drifting``: is it one of LocalSGD's?"""
    global _original, _is_drifting
    _is_drifting = is_drifting
    if _original is None:
        _original = paddle.base.core.serialize_pir_program
        paddle.base.core.serialize_pir_program = _serialize


def _serialize(program: Any, *arguments: Any, **options: Any) -> Any:
    assert _original is not None
    if not any(_is_ours(operator) for operator in program.global_block().ops):
        return _original(program, *arguments, **options)
    if _is_drifting(program):
        notice = (
            "paddle.static.save writes this rank's own parameters, and LocalSGD's ranks differ between averagings: "
            "call fleet.synchronize_parameters() on all ranks before it, or use fleet.save_persistables"
        )
        say([notice], rank=0)
    return _original(for_one_card(program), *arguments, **options)


def for_one_card(program: Any) -> Any:
    """A copy of a converted program in which each gradient goes to its update directly.

    Raises ConversionError for programs that need other ranks inside the forward pass.
    """
    twin = program.clone()
    ours = [operator for operator in twin.global_block().ops if _is_ours(operator)]
    local: dict[str, list[Any]] = {}
    for operator in ours:
        found = _BUCKET.search(operator.name())
        if found and found[1] == "launch":
            local[found[2]] = operator.operands_source()[1:]
        elif found:
            for averaged, gradient in zip(operator.results()[1:], local[found[2]], strict=False):
                averaged.replace_all_uses_with(gradient)
    start = ours[0].operand_source(0).get_defining_op()
    for operator in reversed(ours):
        _remove(twin, operator)
    _remove(twin, start)
    return twin


def _remove(program: Any, operator: Any) -> None:
    if any(not result.use_empty() for result in operator.results()):
        raise ConversionError(
            f"the program cannot be written without '{operator.name()}', which talks to other ranks; use "
            "fleet.save_persistables to resume, and fleet.save_inference_model with a program built with layer.eval()"
        )
    program.global_block().remove_op(operator)


def _is_ours(operator: Any) -> bool:
    return _OURS in operator.name()
