"""Synchronised batch norm: statistics over the batches of all ranks, forward and backward.

Works on a program that has its gradient operators: before Paddle's ``batch_norm_`` come local sums and an exchange,
and it normalises by their results, as with ``use_global_stats``; so what a script holds of it stays what it was.
``batch_norm_grad`` is replaced by the same and arithmetic. So no gradient of an exchange must be derived, all
exchanges are in the main block, and one chain of tokens gives them the same order on every rank. Norms share an
exchange where no other operator has to move: in the forward pass it waits for the last of its norms, if no operator
reads the others' results before; in the backward pass it is placed at the first of its norms, if the others' inputs
already exist. In a residual network these are the norm of a shortcut and the last norm of the parallel branch. The
program keeps what ``one_card.py`` needs to write it with plain batch norms: further operands of the exchanges, and
marks on operators. Paddle's own ``sync_batch_norm_`` exists only on GPUs and uses its own communicator from the
calculation stream: each device would order it against the gradients' collectives independently.

On CPUs the local part uses Paddle's batch norm kernels (`Kernels`), which read the values once, while composed
operators allocate and broadcast at each step: there a broadcast costs five times a pass of the kernel. On GPUs, whose
kernels differ (an unbiased running variance, a reserved space that a backward pass must be given), it is composed of
single operators (`Composed`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

from fleet_train.collectives.host_ops import once_until_grown
from fleet_train.collectives.sync_batch_norm import LocalNorm, RankStatistics, Statistics
from fleet_train.convert import process
from fleet_train.convert.passes.program import all_inputs_of, inputs_of, line_of, nested_operators, operators_behind
from fleet_train.errors import ConversionError

_BATCH_NORMS = ("pd_op.batch_norm_", "pd_op.batch_norm")
_GRADIENT = "pd_op.batch_norm_grad"
FORWARD_MARK, BACKWARD_MARK = "fleet_train_norm", "fleet_train_norm_gradient"
_ATTRIBUTES = ("momentum", "epsilon", "data_format", "use_global_stats", "trainable_statistics")


def synchronize_batch_norms(
    params_grads: Sequence[tuple[Any, Any]],
    exchange: RankStatistics,
    arithmetic: Arithmetic,
    held: Collection[int] = (),
) -> list[tuple[Any, Any]]:
    """Change every training-mode batch norm of the current program, and its gradient; returns the new pairs.

    ``held``: the operators whose results a script may hold, by their ids: gradients among them keep their values.

    Call it after the backward pass and before anything that reads gradients. Ranks may have batches of different sizes:
    each value counts once. Running statistics become the same on every rank.
    """
    operators = list(paddle.static.default_main_program().global_block().ops)
    _refuse_hidden(operators)
    forward = [operator for operator in operators if _is_training(operator)]
    if not forward:
        return list(params_grads)
    paddle.pir.set_insertion_point(forward[0])
    chain = exchange.start()
    owners = {user.id(): operator.id() for operator in forward for user in _gradients_of(operator)}
    backward = [operator for operator in operators if operator.id() in owners]
    together = _groups_of_forward(operators, forward), _groups_of_backward(operators, backward)
    statistics: dict[int, Statistics] = {}
    for group in together[0]:
        statistics_of_group, chain = _replace_forward(group, exchange, arithmetic, chain)
        statistics |= statistics_of_group
    replaced: dict[int, Any] = {}
    for group in together[1]:
        of_forward = [statistics[owners[operator.id()]] for operator in group]
        results, chain = _replace_backward(group, of_forward, exchange, arithmetic, chain)
        replaced |= results
    for operator in reversed(backward):
        if operator.id() in held:
            _keep_results(operator, statistics[owners[operator.id()]], replaced)
        else:
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


def notice_of_own_norms(loss: Any) -> list[str]:
    """Rank 0's note if batch norms behind ``loss`` normalise by each rank's own samples."""
    norms = [operator for operator in operators_behind(loss) if _is_training(operator)]
    if not norms:
        return []
    others = f", and {len(norms) - 1} more" if len(norms) > 1 else ""
    where = f" ({line_of(norms[0])}{others})" if line_of(norms[0]) else others
    return [
        f"average_over: samples: batch norm{where} normalises by each rank's own samples; sync_batch_norm: true takes "
        "those of all ranks, as one process does"
    ]


def _refuse_hidden(operators: Sequence[Any]) -> None:
    for operator in operators:
        if any(_is_training(inner) for inner in nested_operators(operator)):
            raise ConversionError(
                "sync_batch_norm: a batch norm is inside a control-flow block, where communication has no order "
                "that is the same on every rank; move it out, or use_global_stats=True for it"
            )


def _gradients_of(operator: Any) -> list[Any]:
    users = {
        user.id(): user for result in operator.results()[3:] if result.initialized() for user in result.all_used_ops()
    }
    if others := sorted({user.name() for user in users.values()} - {_GRADIENT}):
        raise ConversionError(
            f"sync_batch_norm: {', '.join(others)} reads what a batch norm keeps for its gradient, and only its first "
            "gradient is synchronised; leave sync_batch_norm out, or take the second gradient of a part without "
            "batch norms"
        )
    return list(users.values())


def _keep_results(operator: Any, statistics: Statistics, replaced: Mapping[int, Any]) -> None:
    """Let the results of a gradient operator, whose readers got ``replaced``, have these values in the end."""
    for index in (3, 5):
        operator.operand(index).set_source(statistics.mean)
        operator.operand(index + 1).set_source(statistics.variance)
    operator.set_bool_attr("use_global_stats", True)  # so that it waits for the exchange, and reads nothing else
    paddle.pir.set_insertion_point_after(operator)
    for result in operator.results():
        if result.initialized() and result.id in replaced:
            paddle._C_ops.assign_out_(replaced[result.id], result)


def _norm_of(operator: Any, inputs: Sequence[Any], mean: Any) -> Norm:
    """The batch norm of ``inputs``: values, scale and bias. ``mean`` [channels]: ones and zeros like it stand for a
    scale and a bias that the layer does not have."""
    attributes, (x, scale, bias) = operator.attrs(), inputs
    scale = scale if scale.initialized() else paddle.ones(mean.shape, mean.dtype)
    bias = bias if bias.initialized() else paddle.zeros(mean.shape, mean.dtype)
    return Norm(x, scale, bias, attributes["epsilon"], attributes["data_format"])


def _replace_forward(
    group: Sequence[Any], exchange: RankStatistics, arithmetic: Arithmetic, chain: Any
) -> tuple[dict[int, Statistics], Any]:
    """Replace batch norms that share an exchange; returns {id of an operator: its statistics} and the next token."""
    norms, local = [], []
    for operator in group:
        x, running_mean, running_variance, scale, bias = operator.operands_source()
        paddle.pir.set_insertion_point(operator)
        norms.append(_norm_of(operator, (x, scale, bias), running_mean))
        unread = (running_mean, running_variance, norms[-1].scale, norms[-1].bias)
        local.append(replace(arithmetic.local(norms[-1]), unread=unread))
    combined, chain = exchange.combine(f"statistics of {_names_of(norms)}", local, chain)
    for number, (operator, statistics) in enumerate(zip(group, combined, strict=True)):
        _move_averages(operator, statistics)
        if number < len(group) - 1:
            operator.move_before(group[-1])  # behind the exchange
        mark_forward(operator, local[number].variance, statistics, number, operator.attrs())
        _normalise_by(operator, statistics)
    return {operator.id(): statistics for operator, statistics in zip(group, combined, strict=True)}, chain


def _normalise_by(operator: Any, statistics: Statistics) -> None:
    """Let a batch norm normalise by the statistics of all ranks: it then computes none, and moves no average."""
    held = (*operator.operands_source()[1:3], statistics.mean)
    for index, value in enumerate(held, 1):
        _HELD[operator.id(), index] = value
    process.before_each_run(_give_held_statistics)
    operator.operand(1).set_source(statistics.mean)
    operator.operand(2).set_source(statistics.variance)
    operator.set_bool_attr("use_global_stats", True)


_HELD: dict[tuple[int, int], Any] = {}
"""What the further results of a changed batch norm were, by its id and their place: a script may hold them, too."""


def _give_held_statistics(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    """A hook before each run: give the running statistics, and the batch's mean, to a script that fetches them."""
    running = paddle.static.default_main_program() if program is None else program
    if isinstance(running, paddle.static.Program):
        _read_what_was(running)
    if isinstance(fetch_list, (list, tuple)):
        fetch_list = [_what_was(value) for value in fetch_list]
    return feed, fetch_list


@once_until_grown
def _read_what_was(program: Any) -> None:
    for operator in program.global_block().ops:
        results = operator.results()[1:5] if operator.has_attr(FORWARD_MARK) else []  # without the reserved space
        for result in results:
            if result.initialized() and not result.use_empty():
                result.replace_all_uses_with(_what_was(result))


def _what_was(value: Any) -> Any:
    operator = value.get_defining_op() if isinstance(value, paddle.pir.Value) else None
    if operator is None or not operator.has_attr(FORWARD_MARK) or value.index() == 0:
        return value
    if (operator.id(), value.index()) not in _HELD:
        raise ConversionError(
            "sync_batch_norm: what a batch norm keeps for its gradient is not that of all ranks; read the layer's "
            "output, its running mean or its running variance"
        )
    return _HELD[operator.id(), value.index()]


def _move_averages(operator: Any, batch: Statistics) -> None:
    _, running_mean, running_variance, _, _ = operator.operands_source()
    share = paddle.full([1], 1.0 - operator.attrs()["momentum"], running_mean.dtype)
    paddle._C_ops.lerp_(running_mean, batch.mean, share)
    paddle._C_ops.lerp_(running_variance, batch.variance, share)


def _replace_backward(
    group: Sequence[Any],
    statistics: Sequence[Statistics],
    exchange: RankStatistics,
    arithmetic: Arithmetic,
    chain: Any,
) -> tuple[dict[int, Any], Any]:
    """Replace gradients of batch norms; returns {old result: new value} and the next token. The gradients of scale and
    bias are those of this rank alone."""
    paddle.pir.set_insertion_point(group[0])
    norms = [
        _norm_of(operator, operator.operands_source()[:3], forward.mean)
        for operator, forward in zip(group, statistics, strict=True)
    ]
    begun = [
        arithmetic.gradients(norm, forward, operator.operands_source()[-1])
        for operator, norm, forward in zip(group, norms, statistics, strict=True)
    ]
    sums = [(bias, scale) for bias, scale, _ in begun]
    counts = [forward.count for forward in statistics]
    incoming = [operator.operands_source()[-1] for operator in group]
    means, chain = exchange.average(f"gradient of {_names_of(norms)}", sums, counts, chain, incoming)
    replaced: dict[int, Any] = {}
    parts = zip(group, norms, statistics, begun, means, strict=True)
    for number, (operator, norm, forward, (bias, scale, rest), mean) in enumerate(parts):
        new = (arithmetic.x_gradient(norm, forward, rest, mean), scale, bias)
        mark_backward(new[0], mean[0], number)
        for old, value in zip(operator.results(), new, strict=True):
            if old.initialized():
                replaced[old.id] = value
                old.replace_all_uses_with(value)
    return replaced, chain


def mark_forward(operator: Any, variance: Any, statistics: Any, number: int, attributes: Mapping[str, Any]) -> None:
    """Note that ``operator`` is layer ``number`` of the exchange behind ``statistics``, and the layer's attributes.

    Paddle sets ``is_test`` in the copy of a program that is for inference. It is found at the operator of ``variance``,
    that of this rank: Paddle cannot read attributes of host operators.
    """
    noted = {name: attributes[name] for name in _ATTRIBUTES}
    mark = json.dumps([statistics.count.get_defining_op().name(), number, noted])
    operator.set_str_attr(FORWARD_MARK, mark)
    if not variance.get_defining_op().has_attr("is_test"):
        variance.get_defining_op().set_bool_attr("is_test", False)


def mark_backward(gradient: Any, mean: Any, number: int) -> None:
    """Note that ``gradient``, of the values, is layer ``number`` of the exchange behind ``mean``."""
    mark = json.dumps([mean.get_defining_op().name(), number])
    gradient.get_defining_op().set_str_attr(BACKWARD_MARK, mark)


def _names_of(norms: Sequence[Norm]) -> str:
    return ", ".join(f"'{norm.scale.name if norm.scale.has_name else 'batch norm'}'" for norm in norms)


def _current(gradient: Any, replaced: dict[int, Any]) -> Any:
    return gradient if gradient is None else replaced.get(gradient.id, gradient)


def _groups_of_forward(operators: Sequence[Any], norms: Sequence[Any]) -> list[list[Any]]:
    """``norms``, batch norms among ``operators`` of the main block in their order, by the exchange that they share."""
    chosen = {operator.id() for operator in norms}
    groups: list[list[Any]] = []
    waiting: set[int] = set()
    for operator in operators:
        if waiting.intersection(source.id for source in all_inputs_of(operator)):
            waiting.clear()
        if operator.id() in chosen:
            if not waiting or not _alike(groups[-1][0], operator):
                groups.append([])
                waiting.clear()
            groups[-1].append(operator)
            waiting.update(result.id for result in operator.results() if result.initialized())
    return groups


def _groups_of_backward(operators: Sequence[Any], norms: Sequence[Any]) -> list[list[Any]]:
    """``norms``, gradients of batch norms among ``operators`` in their order, by the exchange that they share."""
    position = {operator.id(): number for number, operator in enumerate(operators)}
    groups: list[list[Any]] = []
    for operator in norms:
        before = max(position[source.get_defining_op().id()] for source in inputs_of(operator))
        if groups and before < position[groups[-1][0].id()] and _alike(groups[-1][0], operator):
            groups[-1].append(operator)
        else:
            groups.append([operator])
    return groups


def _alike(operator: Any, other: Any) -> bool:
    """Whether two batch norms can share an exchange, which has one dtype."""
    return bool(operator.operand_source(0).dtype == other.operand_source(0).dtype)


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
    """The arithmetic of a batch norm composed of single operators, in float32. Like `Kernels`, emits them at the
    current insertion point."""

    def local(self, norm: Norm) -> LocalNorm:
        """The statistics of this rank's ``x``."""
        values = norm.x.cast("float32")
        mean = values.mean(norm.axes)
        variance = (values - norm.spread(mean)).square().mean(norm.axes)
        return LocalNorm(norm.x, mean, variance)

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
    """The arithmetic of a batch norm with Paddle's CPU kernels, in ``x``'s dtype (they have float32 and float64)."""

    def local(self, norm: Norm) -> LocalNorm:
        """The running statistics of a batch norm with a momentum of 0.

        It overwrites its running statistics inputs, so these are created only for it; without the underscore it would
        multiply by 0 what its new memory happens to hold.
        """
        dtype, channels = norm.x.dtype, [norm.channels]
        old = paddle.zeros(channels, dtype), paddle.zeros(channels, dtype)
        # trainable_statistics: even in a clone for testing, these are the statistics of the batch.
        made = paddle._C_ops.batch_norm_(
            norm.x, *old, norm.scale, norm.bias, False, 0.0, norm.epsilon, norm.data_format, False, True
        )
        # For a single value the kernel computes nothing and leaves zeros, which is correct for the variance.
        mean = norm.x.mean(norm.axes) if _may_be_one(norm) else made[1]
        return LocalNorm(norm.x, mean, made[2])

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
        """The gradient of ``x``: ``begun`` minus (mean gradient + normalised * mean product) * scale / deviation, which
        is also a batch norm."""
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
