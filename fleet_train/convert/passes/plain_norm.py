"""Undoes ``sync_norm.py`` in a copy of a program: plain batch norms, for one card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from fleet_train.convert.passes.walk import inputs_of

_FORWARD, _BACKWARD = "fleet_train_norm", "fleet_train_norm_gradient"
_ATTRIBUTES = ("momentum", "epsilon", "data_format", "use_global_stats", "trainable_statistics")
_KEPT = ("builtin.parameter", "pd_op.data", "pd_op.feed", "py_op.")
# Of each layer: its values, their mean and variance, the running mean and variance, scale and bias.
_OPERANDS = 7


def mark_forward(normalised: Any, variance: Any, statistics: Any, number: int, attributes: Mapping[str, Any]) -> None:
    """Note that ``normalised`` is layer ``number`` of the exchange behind ``statistics``, and the layer's attributes.

    Paddle sets ``is_test`` in the copy of a program that is for inference. It is found at the operator of ``variance``,
    that of this rank: Paddle cannot read attributes of host operators.
    """
    noted = {name: attributes[name] for name in _ATTRIBUTES}
    mark = json.dumps([statistics.count.get_defining_op().name(), number, noted])
    normalised.get_defining_op().set_str_attr(_FORWARD, mark)
    if not variance.get_defining_op().has_attr("is_test"):
        variance.get_defining_op().set_bool_attr("is_test", False)


def mark_backward(gradient: Any, mean: Any, number: int) -> None:
    """Note that ``gradient``, of the values, is layer ``number`` of the exchange behind ``mean``."""
    mark = json.dumps([mean.get_defining_op().name(), number])
    gradient.get_defining_op().set_str_attr(_BACKWARD, mark)


def make_norms_plain(program: Any, forward: Sequence[Any], backward: Sequence[Any]) -> None:
    """Replace synchronised batch norms in ``program``, whose exchanges are ``forward`` and ``backward``; these are left
    to be removed, and then what has computed their operands (``remove_unused``)."""
    operators = list(program.global_block().ops)
    by_name = {operator.name(): operator for operator in forward}
    made: dict[tuple[str, int], tuple[dict[str, Any], Any, Any]] = {}
    gradients: dict[tuple[str, int], Any] = {}
    replaced = [user for one in forward for result in one.results() for user in result.all_used_ops()]
    replaced = [user for user in replaced if user.name() == "pd_op.lerp_"]  # the running statistics
    with paddle.static.program_guard(program, paddle.static.Program()):
        for operator in operators:
            if operator.has_attr(_FORWARD):
                name, number, attributes = json.loads(operator.attrs()[_FORWARD])
                if (name, number) not in made:
                    made[name, number] = _forward(operator, by_name[name], number, attributes)
                operator.result(0).replace_all_uses_with(made[name, number][2][0])
                replaced.append(operator)
        for exchange in backward:
            replaced += makers_of(exchange)  # of the sums, which are replaced, too
            for number in range(exchange.num_results() // 2):
                gradients[exchange.name(), number] = _backward(exchange, number, made)
        for operator in operators:
            if operator.has_attr(_BACKWARD):
                name, number = json.loads(operator.attrs()[_BACKWARD])
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
        waiting += [(one.id(), one) for one in makers_of(operator)]
        removed.add(name)
        program.global_block().remove_op(operator)


def makers_of(operator: Any) -> list[Any]:
    """The operators that compute the operands of ``operator``."""
    return [source.get_defining_op() for source in inputs_of(operator)]


def is_unused(operator: Any) -> bool:
    """Whether nothing reads a result of ``operator``."""
    return all(result.use_empty() for result in operator.results() if result.initialized())
