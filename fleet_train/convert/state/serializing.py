"""Makes Paddle save a converted program as the program of one card, without our operators.

A host operator holds a pointer to its function, which Paddle cannot write (``Unknown Attr``), so ``paddle.static.save``
would fail after the training. Scripts call Paddle directly, and all of Paddle's functions that write a program end in
one function of its core; that one is replaced, and it changes only programs that could not be written before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import paddle

from fleet_train.convert.passes.plain_norm import make_norms_plain, makers_of, remove_unused
from fleet_train.convert.settings.apply_profile import say

_OURS = "fleet_train_"
_NAME = re.compile(r"fleet_train_([a-z]+)_(?:(\d+_\d+)_)?\d+_-?\d+$")

_original: Callable[..., Any] | None = None
_is_drifting: Callable[[Any], bool] = bool


def leave_out_host_operators(is_drifting: Callable[[Any], bool]) -> None:
    """From now on Paddle writes converted programs as programs of one card. ``is_drifting``: does it use LocalSGD?"""
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
    """A copy of a converted program in which each gradient goes directly to its update, with plain batch norms."""
    reference = program.clone()
    ours = [operator for operator in reference.global_block().ops if _is_ours(operator)]
    local: dict[str, list[Any]] = {}
    for operator in ours:
        _bypass(operator, local)
    forward, backward = ([one for one in ours if _kind(one)[0] == kind] for kind in ("gather", "total"))
    if forward:
        make_norms_plain(reference, forward, backward)
    for operator in reversed(ours):
        behind = makers_of(operator) if _kind(operator)[0] in ("gather", "total") else []
        reference.global_block().remove_op(operator)
        remove_unused(reference, behind)
    constants = [operator for operator in reference.global_block().ops if operator.name() == "pd_op.full"]
    remove_unused(reference, constants)  # among them are the first tokens of our chains
    return reference


def _bypass(operator: Any, local: dict[str, list[Any]]) -> None:
    """Replace a host operator's results by its inputs. ``local``: gradients of launched buckets."""
    kind, bucket = _kind(operator)
    given, gives = operator.operands_source(), operator.results()
    pairs: list[tuple[Any, Any]] = []
    match kind:
        case "launch":
            local[bucket] = given[1:]
        case "wait":
            pairs = list(zip(gives[1:], local[bucket], strict=False))
        case "broadcast":
            pairs = [(gives[1], given[1])]
        case "hold":
            pairs = list(zip(gives, given[:-1], strict=True))
    for old, new in pairs:
        old.replace_all_uses_with(new)


def _kind(operator: Any) -> tuple[str, str]:
    """``wait`` and ``1_0``, bucket 0 of conversion 1, for ``py_op.fleet_train_wait_1_0_12_-664...``."""
    found = _NAME.search(operator.name())
    return (found[1], found[2] or "") if found else ("", "")


def _is_ours(operator: Any) -> bool:
    return _OURS in operator.name()
