"""The local arithmetic of a synchronised batch norm: local sums, and normalisation with the global ones.

On CPUs it uses Paddle's batch norm kernels, which read the values once, while composed operators allocate and broadcast
at each step: there a broadcast costs five times a pass of the kernel. On GPUs, whose kernels differ (an unbiased
running variance, a reserved space that a backward pass must be given), it is composed of single operators.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.collectives.sync_batch_norm import Local, Statistics
from fleet_train.convert.passes.blocks import inputs_of


@dataclass(frozen=True)
class Norm:
    """A batch norm of the program: ``x`` [...], ``scale`` and ``bias`` [channels], and its attributes."""

    x: Any
    scale: Any
    bias: Any
    epsilon: float
    data_format: str

    @property
    def channels(self) -> int:
        return int(self.scale.shape[0])

    @property
    def axes(self) -> list[int]:
        """The axes that are summed over."""
        return [axis for axis in range(len(self.x.shape)) if axis != self._channel]

    def spread(self, values: Any) -> Any:
        """``values`` [channels], reshaped to broadcast against ``x``."""
        shape = [1] * len(self.x.shape)
        shape[self._channel] = self.channels
        return values.reshape(shape)

    @property
    def _channel(self) -> int:
        return 1 if self.data_format.startswith("NC") else len(self.x.shape) - 1


class Composed:
    """Composed of single operators, in float32. Like `Kernels`, emits them at the current insertion point."""

    def local(self, norm: Norm) -> Local:
        """The statistics of this rank's ``x``."""
        values = norm.x.cast("float32")
        mean = values.mean(norm.axes)
        variance = (values - norm.spread(mean)).square().mean(norm.axes)
        return Local(norm.x, mean, variance)

    def normalised(self, norm: Norm, statistics: Statistics) -> Any:
        """``x`` with the mean and variance ``statistics``, scaled and shifted; its shape and dtype."""
        centred = norm.x.cast("float32") - norm.spread(statistics.mean)
        factor = paddle.rsqrt(statistics.variance + norm.epsilon) * norm.scale
        return (centred * norm.spread(factor) + norm.spread(norm.bias)).cast(norm.x.dtype)

    def gradients(self, norm: Norm, statistics: Statistics, incoming: Any) -> tuple[Any, Any, Any]:
        """The sums of ``incoming`` and of its products with the normalised ``x`` ([channels] each: this rank's own
        gradients of bias and scale); and the values that ``x_gradient`` needs."""
        factor = norm.spread(paddle.rsqrt(statistics.variance + norm.epsilon))
        normalised = (norm.x.cast("float32") - norm.spread(statistics.mean)) * factor
        incoming = incoming.cast("float32")
        begun = (incoming, normalised, factor)
        return incoming.sum(norm.axes), (incoming * normalised).sum(norm.axes), begun

    def x_gradient(self, norm: Norm, statistics: Statistics, begun: Any, means: tuple[Any, Any]) -> Any:
        """The gradient of ``x``. ``means``: the two sums of all ranks, over the count of all values."""
        del statistics
        incoming, normalised, factor = begun
        mean_gradient, mean_product = (norm.spread(mean) for mean in means)
        gradient = (incoming - mean_gradient - normalised * mean_product) * factor * norm.spread(norm.scale)
        return gradient.cast(norm.x.dtype)


class Kernels:
    """With Paddle's CPU kernels, in the dtype of ``x`` (float32 or float64, the only ones they have)."""

    def local(self, norm: Norm) -> Local:
        """The running statistics of a batch norm with a momentum of 0.

        It overwrites its running statistics inputs (as views, even ``pd_op.batch_norm`` without an underscore), so
        these are created only for it.
        """
        dtype, channels = norm.x.dtype, [norm.channels]
        old = paddle.zeros(channels, dtype), paddle.zeros(channels, dtype)
        # trainable_statistics: even in a clone for testing, these are the statistics of the batch.
        made = paddle._C_ops.batch_norm(
            norm.x, *old, norm.scale, norm.bias, False, 0.0, norm.epsilon, norm.data_format, False, True
        )
        # For a single value the kernel computes nothing and leaves zeros, which is correct for the variance.
        mean = norm.x.mean(norm.axes) if _may_be_one(norm) else made[1]
        return Local(norm.x, mean, made[2])

    def normalised(self, norm: Norm, statistics: Statistics) -> Any:
        return _normalised(norm, statistics, norm.scale, norm.bias)

    def gradients(self, norm: Norm, statistics: Statistics, incoming: Any) -> tuple[Any, Any, Any]:
        """The gradient with given statistics: its sums are the ones needed, and its gradient of ``x`` is
        ``incoming`` * scale / deviation."""
        mean, variance = statistics.mean, statistics.variance
        x_gradient, scale_gradient, bias_gradient = paddle._C_ops.batch_norm_grad(
            norm.x, norm.scale, norm.bias, mean, variance, mean, variance, None, incoming,
            0.0, norm.epsilon, norm.data_format, False, True, False,
        )  # fmt: skip
        return bias_gradient, scale_gradient, x_gradient

    def x_gradient(self, norm: Norm, statistics: Statistics, begun: Any, means: tuple[Any, Any]) -> Any:
        """Minus (mean gradient + normalised * mean product) * scale / deviation, which is also a batch norm."""
        factor = paddle.rsqrt(statistics.variance + norm.epsilon) * norm.scale
        mean_gradient, mean_product = means
        return begun - _normalised(norm, statistics, factor * mean_product, factor * mean_gradient)


def _normalised(norm: Norm, statistics: Statistics, scale: Any, bias: Any) -> Any:
    return paddle._C_ops.batch_norm(
        norm.x,
        statistics.mean,
        statistics.variance,
        scale,
        bias,
        False,
        0.0,
        norm.epsilon,
        norm.data_format,
        True,
        False,
    )[0]


def _may_be_one(norm: Norm) -> bool:
    """Whether a batch may hold a single value per channel."""
    return all(norm.x.shape[axis] in (-1, 1) for axis in norm.axes)


Arithmetic = Composed | Kernels


# Undoes ``sync_norm.py`` in a copy of a program: plain batch norms, for one card.


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
