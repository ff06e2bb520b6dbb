"""Makes Paddle save a converted program as the program of one card: without our operators, with plain batch norms.

A host operator holds a pointer to its function, which Paddle cannot write (``Unknown Attr``), so
``paddle.static.save`` would fail after the training. Scripts call Paddle directly, and all of Paddle's functions that
write a program end in one function of its core; that one is replaced, and it changes only programs that could not be
written before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.collectives.methods.rows import Lookups
from fleet_train.convert import process
from fleet_train.convert.passes.program import inputs_of
from fleet_train.convert.passes.sync_norm import BACKWARD_MARK, FORWARD_MARK
from fleet_train.errors import ConversionError
from fleet_train.log import log_once

_OURS = "fleet_train_"
_NAME = re.compile(r"fleet_train_([a-z]+)_(?:(\d+_\d+)_)?\d+_-?\d+$")
# Of a synchronised batch norm: its values, their mean and variance, the running mean and variance, scale and bias.
_OPERANDS = 7
_KEPT = ("builtin.parameter", "pd_op.data", "pd_op.feed", "py_op.")

_original: Callable[..., Any] = paddle.base.core.serialize_pir_program
_what_drifts: Callable[[Any], str] = lambda _: ""  # noqa: E731


def leave_out_host_operators(what_drifts: Callable[[Any], str]) -> None:
    """Let Paddle write converted programs as programs of one card from now on. ``what_drifts``: which values of a
    program are one rank's own, in words."""
    global _original, _what_drifts
    _what_drifts = what_drifts
    _original = process.replace(paddle.base.core, "serialize_pir_program", _serialize)


def _serialize(program: Any, *arguments: Any, **options: Any) -> Any:
    kinds = {_kind(operator)[0] for operator in program.global_block().ops if _is_ours(operator)}
    if "share" in kinds:
        raise ConversionError(
            "a program with a sharded optimizer updates this rank's share of the parameters only, so Paddle cannot "
            "write it for one card: call fleet.save_persistables on all ranks, or fleet.save_inference_model"
        )
    if drifting := _what_drifts(program):
        notice = (
            f"Paddle writes this rank's own values of a program, and {drifting}: call "
            "fleet.synchronize_parameters() on all ranks before it, or use fleet.save_persistables or "
            "fleet.save_inference_model"
        )
        log_once([notice], rank=0)
    return _original(for_one_card(program) if kinds else program, *arguments, **options)


def for_one_card(program: Any) -> Any:
    """A copy of a converted program in which each gradient goes directly to its update, with plain batch norms."""
    reference = program.clone()
    ours = [operator for operator in reference.global_block().ops if _is_ours(operator)]
    local: dict[str, list[Any]] = {}
    for operator in ours:
        _bypass(operator, local)
    forward, backward = ([operator for operator in ours if _kind(operator)[0] == kind] for kind in ("gather", "total"))
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
            local[bucket] = _looked_up(operator) if operator.name() in _lookups else given[1:]
        case "wait":
            results = iter(gives[1:])
            for gradient in local[bucket]:
                if isinstance(gradient, RowsUpdate):
                    gradient.replace(ids=next(results), values=next(results))
                else:
                    pairs.append((next(results), gradient))
        case "broadcast":
            pairs = [(gives[1], given[1])]
        case "joint":
            pairs = list(zip(gives[1:], given[1:], strict=True))
        case "hold":
            pairs = list(zip(gives, given[:-1], strict=True))
    for old, new in pairs:
        old.replace_all_uses_with(new)


def exchanges_values(operator: Any) -> bool:
    """Whether an operator exchanges values inside a program's passes, which a rank alone has its own of."""
    return _kind(operator)[0] in ("counts", "joint")


def read_own_values(operator: Any) -> None:
    """Let what reads the results of an operator that exchanges values read its inputs. Does nothing with others."""
    if exchanges_values(operator):
        given = operator.operands_source()
        for old, new in zip(operator.results(), given, strict=False):  # a token; ``counts`` gives nothing else
            old.replace_all_uses_with(new)


_lookups: dict[str, Sequence[Lookups]] = {}
"""The lookups by the unique name of a launch operator: Paddle cannot read such an operator's attributes."""


def mark_lookups(launch: Any, tables: Sequence[Lookups]) -> None:
    """Note how the operands of a launch operator stand for embeddings' tables."""
    _lookups[launch.name()] = tables


def _looked_up(launch: Any) -> list[Any]:
    """Insert the operators that make the gradients of a launched bucket of tables; returns those, or `RowsUpdate`."""
    given, gradients = launch.operands_source()[1:], []
    paddle.pir.set_insertion_point(launch)
    for lookups in _lookups[launch.name()]:
        table, *own = given[: lookups.operands]
        parts = [
            paddle._C_ops.embedding_grad(ids, table, gradient, padding, False)
            for ids, gradient, padding in zip(own[::2], own[1::2], lookups.paddings, strict=True)
        ]
        gradient = paddle.add_n(parts) if len(parts) > 1 else parts[0]
        gradients.append(RowsUpdate(gradient) if lookups.rows_only else gradient)
        given = given[lookups.operands :]
    paddle.pir.reset_insertion_point_to_end()
    return gradients


@dataclass(frozen=True)
class RowsUpdate:
    """The gradient of a table whose rows alone are updated."""

    gradient: Any

    def replace(self, ids: Any, values: Any) -> None:
        """Update the whole table instead of the rows ``ids``; other readers of ``values`` get the gradient."""
        values.replace_all_uses_with(self.gradient)
        scatter = next(user for user in ids.all_used_ops() if user.name() == "pd_op.scatter_")
        update = scatter.operand_source(2).get_defining_op()
        paddle.pir.set_insertion_point(update)
        table, rate = scatter.operand_source(0), update.operand_source(1)
        paddle._C_ops.sgd_(table, rate, self.gradient, None, False)
        paddle.pir.reset_insertion_point_to_end()
        for operator in (scatter, update, update.operand_source(0).get_defining_op()):
            operator.erase()


def _kind(operator: Any) -> tuple[str, str]:
    """The kind and the number of a host operator: ``wait`` and ``1_0``, bucket 0 of conversion 1, for
    ``py_op.fleet_train_wait_1_0_12_-664...``."""
    match = _NAME.search(operator.name())
    return (match[1], match[2] or "") if match else ("", "")


def _is_ours(operator: Any) -> bool:
    return _OURS in operator.name()


def make_norms_plain(program: Any, forward: Sequence[Any], backward: Sequence[Any]) -> None:
    """Replace synchronised batch norms in ``program``, whose exchanges are ``forward`` and ``backward``; these are left
    to be removed, and then what has computed their operands (``remove_unused``)."""
    operators = list(program.global_block().ops)
    by_name = {operator.name(): operator for operator in forward}
    made: dict[tuple[str, int], tuple[dict[str, Any], Any, Any]] = {}
    gradients: dict[tuple[str, int], Any] = {}
    replaced = [user for exchange in forward for result in exchange.results() for user in result.all_used_ops()]
    replaced = [user for user in replaced if user.name() == "pd_op.lerp_"]  # the running statistics
    with paddle.static.program_guard(program, paddle.static.Program()):
        for operator in operators:
            if operator.has_attr(FORWARD_MARK):
                name, number, attributes = json.loads(operator.attrs()[FORWARD_MARK])
                if (name, number) not in made:
                    made[name, number] = _forward(operator, by_name[name], number, attributes)
                operator.result(0).replace_all_uses_with(made[name, number][2][0])
                replaced.append(operator)
        for exchange in backward:
            replaced += makers_of(exchange)  # of the sums, which are replaced, too
            for number in range(exchange.num_results() // 2):
                gradients[exchange.name(), number] = _backward(exchange, number, made)
        for operator in operators:
            if operator.has_attr(BACKWARD_MARK):
                name, number = json.loads(operator.attrs()[BACKWARD_MARK])
                operator.result(0).replace_all_uses_with(gradients[name, number])
                replaced.append(operator)
        paddle.pir.reset_insertion_point_to_end()
    remove_unused(program, replaced)


def _forward(
    normalised: Any, exchange: Any, number: int, attributes: dict[str, Any]
) -> tuple[dict[str, Any], Any, Any]:
    """Insert the batch norm before ``normalised``; returns its attributes, its inputs and its results."""
    given = exchange.operands_source()[1:]
    layers = len(given) // _OPERANDS
    first = 3 * layers + 4 * number
    x, (running_mean, running_variance, scale, bias) = given[number], given[first : first + 4]
    is_test = given[2 * layers + number].get_defining_op().attrs()["is_test"]
    paddle.pir.set_insertion_point(normalised)
    results = paddle._C_ops.batch_norm_(
        x, running_mean, running_variance, scale, bias, is_test, attributes["momentum"], attributes["epsilon"],
        attributes["data_format"], attributes["use_global_stats"], attributes["trainable_statistics"],
    )  # fmt: skip
    return attributes, (x, scale, bias), results


def _backward(exchange: Any, number: int, made: dict[tuple[str, int], tuple[dict[str, Any], Any, Any]]) -> Any:
    """Insert the gradient of a batch norm where its ``exchange`` got the sums from; returns that of the values."""
    given, layers = exchange.operands_source()[1:], exchange.num_results() // 2
    bias_sum, scale_sum, count = given[2 * number], given[2 * number + 1], given[2 * layers + number]
    owner = count.get_defining_op()
    index = [result.id for result in owner.results()].index(count.id)
    attributes, (x, scale, bias), (_, mean, variance, saved_mean, saved_variance, reserve) = made[
        owner.name(), index // 3
    ]
    paddle.pir.set_insertion_point(bias_sum.get_defining_op())  # their readers may be before the exchange
    x_gradient, scale_gradient, bias_gradient = paddle._C_ops.batch_norm_grad(
        x, scale, bias, mean, variance, saved_mean, saved_variance, reserve, given[3 * layers + number],
        attributes["momentum"], attributes["epsilon"], attributes["data_format"], False,
        attributes["use_global_stats"], attributes["trainable_statistics"],
    )  # fmt: skip
    bias_sum.replace_all_uses_with(bias_gradient)
    scale_sum.replace_all_uses_with(scale_gradient)
    return x_gradient


def remove_unused(program: Any, operators: Sequence[Any]) -> None:
    """Remove those of ``operators`` whose results nothing reads, and what has computed for them alone."""
    waiting, removed = [(operator.id(), operator) for operator in operators], set()
    while waiting:
        name, operator = waiting.pop()
        if name in removed or operator.name().startswith(_KEPT) or not is_unused(operator):
            continue
        waiting += [(maker.id(), maker) for maker in makers_of(operator)]
        removed.add(name)
        program.global_block().remove_op(operator)


def makers_of(operator: Any) -> list[Any]:
    """The operators that compute the operands of ``operator``."""
    return [source.get_defining_op() for source in inputs_of(operator)]


def is_unused(operator: Any) -> bool:
    """Whether nothing reads a result of ``operator``."""
    return all(result.use_empty() for result in operator.results() if result.initialized())
