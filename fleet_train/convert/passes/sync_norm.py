"""Synchronised batch norm: statistics over the batches of all ranks, forward and backward.

Works on a program that has its gradient operators: Paddle's ``batch_norm_`` and ``batch_norm_grad`` are both replaced
by local sums, an exchange, and arithmetic. So nothing has to derive the gradient of an exchange, all exchanges stand in
the main block, and one chain of tokens gives them the same order on every rank. Paddle's own ``sync_batch_norm_``
exists on GPUs only, and talks on a communicator of its own from the calculation stream: in what order beside the
gradients', every device would decide for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import paddle

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


@dataclass(frozen=True)
class _Statistics:
    """Over all ranks: number of values per channel [], mean and 1 / standard deviation [channels], all float32."""

    count: Any
    mean: Any
    inverse_deviation: Any


def synchronize_batch_norms(
    params_grads: Sequence[tuple[Any, Any]], exchange: StatisticsExchange
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
    statistics: dict[int, _Statistics] = {}
    for operator in forward:
        found, chain = _replace_forward(operator, exchange, chain)
        statistics |= {user.id(): found for user in _gradients_of(operator)}
    replaced: dict[int, Any] = {}
    backward = [operator for operator in operators if operator.id() in statistics]
    for operator in backward:
        results, chain = _replace_backward(operator, statistics[operator.id()], exchange, chain)
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


def _replace_forward(operator: Any, exchange: StatisticsExchange, chain: Any) -> tuple[_Statistics, Any]:
    x, running_mean, running_variance, scale, bias = operator.operands_source()
    attributes = operator.attrs()
    paddle.pir.set_insertion_point(operator)
    values = x.cast("float32")
    axes, shape = _axes_and_shape(x, attributes["data_format"])
    channels = int(scale.shape[0])
    local_mean = values.mean(axes)
    deviations = (values - local_mean.reshape(shape)).square().sum(axes)
    count = (paddle.numel(x) // channels).cast("float32").reshape([1])
    what = f"statistics of '{_name_of(scale)}'"
    rows, chain = exchange.gather(what, paddle.concat([count, local_mean, deviations]), chain)
    total, mean, variance = _combine(rows, channels)
    found = _Statistics(total, mean, paddle.rsqrt(variance + attributes["epsilon"]))
    normalised = (values - mean.reshape(shape)) * (found.inverse_deviation * scale).reshape(shape) + bias.reshape(shape)
    operator.result(0).replace_all_uses_with(normalised.cast(x.dtype))
    _move_average(running_mean, mean, attributes["momentum"])
    _move_average(running_variance, variance, attributes["momentum"])
    return found, chain


def _combine(rows: Any, channels: int) -> tuple[Any, Any, Any]:
    """Count, mean and variance of all values from each rank's count, mean and sum of squared deviations.

    Chan, Golub and LeVeque's formula: unlike sum(x * x) - mean * mean, it does not cancel.
    """
    counts, means, deviations = paddle.split(rows, [1, channels, channels], axis=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (deviations.sum(0) + (counts * (means - mean).square()).sum(0)) / total
    return total, mean, variance


def _move_average(running: Any, new: Any, momentum: float) -> None:
    paddle.assign(running * momentum + new * (1.0 - momentum), running)


def _replace_backward(
    operator: Any, statistics: _Statistics, exchange: StatisticsExchange, chain: Any
) -> tuple[dict[int, Any], Any]:
    """Returns {old result: new value} and the next token. The gradients of scale and bias stay this rank's own."""
    sources = operator.operands_source()
    x, scale, out_gradient = sources[0], sources[1], sources[-1]
    paddle.pir.set_insertion_point(operator)
    axes, shape = _axes_and_shape(x, operator.attrs()["data_format"])
    incoming = out_gradient.cast("float32")
    factor = statistics.inverse_deviation.reshape(shape)
    normalised = (x.cast("float32") - statistics.mean.reshape(shape)) * factor
    bias_gradient, scale_gradient = incoming.sum(axes), (incoming * normalised).sum(axes)
    what = f"gradient of '{_name_of(scale)}'"
    sums, chain = exchange.total(what, paddle.concat([bias_gradient, scale_gradient]), chain)
    mean_gradient, mean_product = (part.reshape(shape) for part in paddle.split(sums / statistics.count, 2))
    x_gradient = (incoming - mean_gradient - normalised * mean_product) * factor * scale.reshape(shape)
    new = (x_gradient.cast(x.dtype), scale_gradient, bias_gradient)
    results = {old.id: value for old, value in zip(operator.results(), new, strict=True) if old.initialized()}
    for old, value in zip(operator.results(), new, strict=True):
        if old.initialized():
            old.replace_all_uses_with(value)
    return results, chain


def _axes_and_shape(x: Any, data_format: str) -> tuple[list[int], list[int]]:
    """The axes that are summed over, and the shape in which per-channel values meet ``x``."""
    rank = len(x.shape)
    channel = 1 if data_format.startswith("NC") else rank - 1
    axes = [axis for axis in range(rank) if axis != channel]
    shape = [1] * rank
    shape[channel] = int(x.shape[channel])
    return axes, shape


def _name_of(value: Any) -> str:
    return str(value.name) if value.has_name else "batch norm"


def _current(gradient: Any, replaced: dict[int, Any]) -> Any:
    return gradient if gradient is None else replaced.get(gradient.id, gradient)
