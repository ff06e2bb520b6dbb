"""Synchronised batch norm: statistics over the batches of all ranks, forward and backward.

Works on a program that has its gradient operators: Paddle's ``batch_norm_`` and ``batch_norm_grad`` are both replaced
by local sums, an exchange, and arithmetic. So nothing has to derive the gradient of an exchange, all exchanges stand in
the main block, and one chain of tokens gives them the same order on every rank. Paddle's own ``sync_batch_norm_``
exists on GPUs only, and talks on a communicator of its own from the calculation stream: in what order beside the
gradients', every device would decide for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import paddle

from fleet_train.convert.passes.norm_arithmetic import Arithmetic, Norm, Statistics
from fleet_train.convert.passes.walk import nested_operators
from fleet_train.errors import ConversionError

_BATCH_NORMS = ("pd_op.batch_norm_", "pd_op.batch_norm")
_GRADIENT = "pd_op.batch_norm_grad"


class StatisticsExchange(Protocol):
    """Emits the operators that talk to the other ranks, on a communicator of their own."""

    def start(self) -> Any:
        """The first token of the chain, at which the ranks of a step have met."""
        ...

    def gather(self, what: str, values: Any, chain: Any) -> tuple[Any, Any]:
        """``values`` ([n]) of every rank, in rank order, as [world_size, n]; and the next token."""
        ...

    def total(self, what: str, values: Any, chain: Any) -> tuple[Any, Any]:
        """The sum of ``values`` ([n]) over the ranks; and the next token."""
        ...


def synchronize_batch_norms(
    params_grads: Sequence[tuple[Any, Any]], exchange: StatisticsExchange, arithmetic: Arithmetic
) -> list[tuple[Any, Any]]:
    """Replace every training-mode batch norm of the current program, and its gradient; returns the new pairs.

    Call it between the backward pass and everything that reads gradients. Ranks may bring batches of different size:
    each value counts once. Running statistics become the same on every rank.
    """
    operators = list(paddle.static.default_main_program().global_block().ops)
    _refuse_hidden(operators)
    forward = [operator for operator in operators if _is_training(operator)]
    if not forward:
        return list(params_grads)
    paddle.pir.set_insertion_point(forward[0])
    chain = exchange.start()
    statistics: dict[int, Statistics] = {}
    for operator in forward:
        found, chain = _replace_forward(operator, exchange, arithmetic, chain)
        statistics |= {user.id(): found for user in _gradients_of(operator)}
    replaced: dict[int, Any] = {}
    backward = [operator for operator in operators if operator.id() in statistics]
    for operator in backward:
        results, chain = _replace_backward(operator, statistics[operator.id()], exchange, arithmetic, chain)
        replaced |= results
    for operator in [*reversed(backward), *reversed(forward)]:
        operator.erase()
    paddle.pir.reset_insertion_point_to_end()
    return [(parameter, _current(gradient, replaced)) for parameter, gradient in params_grads]


def _is_training(operator: Any) -> bool:
    if operator.name() not in _BATCH_NORMS:
        return False
    attributes = operator.attrs()
    return bool(
        not attributes["use_global_stats"] and (not attributes["is_test"] or attributes["trainable_statistics"])
    )


def _refuse_hidden(operators: Sequence[Any]) -> None:
    for operator in operators:
        if any(_is_training(inner) for inner in nested_operators(operator)):
            raise ConversionError(
                "sync_batch_norm: a batch norm stands inside a control-flow block, where communication has no order "
                "that is the same on every rank; move it out, or use_global_stats=True for it"
            )


def _gradients_of(operator: Any) -> list[Any]:
    saved_mean = operator.result(3)
    return [user for user in saved_mean.all_used_ops() if user.name() == _GRADIENT]


def _norm_of(operator: Any, x: Any, scale: Any, bias: Any) -> Norm:
    attributes = operator.attrs()
    return Norm(x, scale, bias, attributes["epsilon"], attributes["data_format"])


def _replace_forward(
    operator: Any, exchange: StatisticsExchange, arithmetic: Arithmetic, chain: Any
) -> tuple[Statistics, Any]:
    x, running_mean, running_variance, scale, bias = operator.operands_source()
    momentum = operator.attrs()["momentum"]
    norm = _norm_of(operator, x, scale, bias)
    paddle.pir.set_insertion_point(operator)
    local = arithmetic.local(norm)
    sent = paddle.concat([local.count, local.mean, local.variance])
    rows, chain = exchange.gather(f"statistics of '{_name_of(scale)}'", sent, chain)
    found = _combine(rows, norm.channels)
    operator.result(0).replace_all_uses_with(arithmetic.normalised(norm, found))
    _move_average(running_mean, found.mean, momentum)
    _move_average(running_variance, found.variance, momentum)
    return found, chain


def _combine(rows: Any, channels: int) -> Statistics:
    """Of all values, from each rank's count, mean and variance ([ranks, 1 + 2 * channels]).

    Chan, Golub and LeVeque's formula: unlike mean(x * x) - mean * mean, it does not cancel.
    """
    counts, means, variances = paddle.split(rows, [1, channels, channels], axis=1)
    total = counts.sum([0])
    shares = counts / total
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return Statistics(total, mean, variance)


def _move_average(running: Any, new: Any, momentum: float) -> None:
    paddle.assign(running * momentum + new * (1.0 - momentum), running)


def _replace_backward(
    operator: Any, found: Statistics, exchange: StatisticsExchange, arithmetic: Arithmetic, chain: Any
) -> tuple[dict[int, Any], Any]:
    """Returns {old result: new value} and the next token. The gradients of scale and bias stay this rank's own."""
    sources = operator.operands_source()
    norm = _norm_of(operator, *sources[:3])
    paddle.pir.set_insertion_point(operator)
    bias_gradient, scale_gradient, begun = arithmetic.gradients(norm, found, sources[-1])
    sent = paddle.concat([bias_gradient, scale_gradient])
    sums, chain = exchange.total(f"gradient of '{_name_of(norm.scale)}'", sent, chain)
    means = paddle.split(sums / found.count, 2)
    new = (arithmetic.x_gradient(norm, found, begun, tuple(means)), scale_gradient, bias_gradient)
    results = {old.id: value for old, value in zip(operator.results(), new, strict=True) if old.initialized()}
    for old, value in zip(operator.results(), new, strict=True):
        if old.initialized():
            old.replace_all_uses_with(value)
    return results, chain


def _name_of(value: Any) -> str:
    return str(value.name) if value.has_name else "batch norm"


def _current(gradient: Any, replaced: dict[int, Any]) -> Any:
    return gradient if gradient is None else replaced.get(gradient.id, gradient)
