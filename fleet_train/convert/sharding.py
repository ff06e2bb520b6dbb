"""A sharded optimizer in a program: each rank's update covers what it owns, and everyone gets the new parameters.

A parameter that is cut has a variable for this rank's rows, ``<name>@rows``, which the optimizer updates in its place:
it gets the rows of the parameter before every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import paddle
from paddle import _C_ops, nn

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import emit_fill, emit_over_owners, emit_share, is_launch, token
from fleet_train.collectives.job import Job
from fleet_train.convert.passes.program import all_inputs_of, persistable
from fleet_train.convert.passes.skipping import checked_values
from fleet_train.convert.planning import ReadyGradient, dtype_name
from fleet_train.convert.program_state import belongs_to
from fleet_train.convert.updates import BucketUpdates, Pairs, UpdateOfPairs
from fleet_train.plan import Bucket, CommPlan
from fleet_train.profile.methods.base import Piece

ROWS = "@rows"
"""The end of the name of a variable with this rank's rows of a parameter; the optimizer's state is named after it."""


class OwnersUpdate(BucketUpdates):
    """Each rank updates what it owns, with a sharded optimizer, and sends it to the others."""

    def __init__(self, exchange: GradientExchange, inner: Any, ready: Sequence[ReadyGradient]) -> None:
        super().__init__(inner, ready)
        self._exchange = exchange
        self._originals = {f"{name}{ROWS}": parameter for name, parameter in self._parameters.items()}
        self._own: dict[int, list[Any]] = {}
        self._factor: Any = None
        self._places: dict[int, Any] = {}
        """The operators after which buckets are updated; the others at the end."""
        self._last: Any = None
        _show_originals(inner, self._originals)

    def in_turn(self, plan: CommPlan) -> Sequence[Bucket]:
        return in_order_of_sums(plan)

    def overlap(self, operators: Sequence[Any], plan: CommPlan) -> None:
        """Let buckets be updated and sent during the backward pass, if they are updated one by one: when the next one
        on their communicator has been launched, and after the last operator that reads one of their parameters.

        ``operators``: of the main block, with all launches. The link then always has another bucket to send, and what
        follows the backward pass is the last bucket.
        """
        launches = [position for position, operator in enumerate(operators) if is_launch(operator)]
        readers = _last_readers(operators)
        place = 0
        for bucket in plan.buckets[: -plan.communicators]:
            read = [readers.get(gradient.name, 0) for gradient in bucket.gradients]
            place = max(place, launches[bucket.index + plan.communicators], *read)
            self._places[bucket.index] = operators[place]

    def go_to(self, bucket: Bucket) -> None:
        place = self._places.get(bucket.index)
        if place is None:
            paddle.pir.reset_insertion_point_to_end()
        else:
            before = self._places.get(bucket.index - 1)
            same = before is not None and before.id() == place.id()
            paddle.pir.set_insertion_point_after(self._last if same else place)

    def pairs(self, bucket: Bucket, gradients: Sequence[Any]) -> Pairs:
        pieces = bucket.shards[self._exchange.member]
        own = [self._owned(self._parameters[bucket.gradients[piece.gradient].name], piece) for piece in pieces]
        self._own[bucket.index] = own
        return list(zip(own, gradients, strict=True))

    def _owned(self, parameter: Any, piece: Piece) -> Any:
        if not piece.rows:
            return parameter
        shape = [piece.rows, *parameter.shape[1:]]
        rows = persistable(f"{parameter.name}{ROWS}", parameter.dtype, shape)
        for name in ("trainable", "optimize_attr", "regularizer", "need_clip", "stop_gradient"):
            setattr(rows, name, getattr(parameter, name))
        paddle.assign(paddle.slice(parameter, [0], [piece.first], [piece.first + piece.rows]), rows)
        return rows

    def update(
        self, pairs: Pairs, update: UpdateOfPairs, scale: Any, checks: bool, chain: Any
    ) -> tuple[list[Any], Pairs, Any]:
        if not pairs:  # of these buckets this rank owns nothing
            return [], pairs, chain
        pairs, chain = self._agree(pairs, scale, checks, chain)
        with self._clipping():
            operators = update(pairs)
        return operators or [], pairs, chain

    def _agree(self, pairs: Pairs, scale: Any, checks: bool, chain: Any) -> tuple[Pairs, Any]:
        """Insert what the owners must know of one another before an update of all pairs: the norm for a clip, and with
        ``checks`` whether a gradient is NaN or infinite, which then is one here, too. ``scale``: the loss scale that is
        still in the gradients."""
        clip = self._inner._grad_clip
        norm = isinstance(clip, nn.ClipGradByGlobalNorm)
        if not norm and not checks:
            return pairs, chain
        values, broken = checked_values([gradient for _, gradient in pairs] if checks else [])
        if checks:
            pairs = [(parameter, value) for (parameter, _), value in zip(pairs, values, strict=True)]
        # The same on every rank, whatever it owns itself.
        wide = "float64" if any(each.dtype == paddle.float64 for each in self._parameters.values()) else "float32"
        clipped = [gradient for parameter, gradient in pairs if getattr(parameter, "need_clip", True)] if norm else []
        squares = sum_of_squares(clipped, wide)
        told = paddle.concat([squares, broken.astype(wide)])
        total, chain = emit_over_owners(self._exchange, told, chain)
        if norm:
            length = paddle.sqrt(total[0:1])
            length = length if scale is None else length / scale.reshape([1]).astype(wide)
            most = paddle.full([1], clip.clip_norm, wide)
            self._factor = most / paddle.maximum(length, most)
        if checks:
            at = min(range(len(pairs)), key=lambda index: prod(pairs[index][1].shape))
            parameter, gradient = pairs[at]
            spoilt = paddle.full([1], float("nan"), gradient.dtype)
            pairs[at] = (parameter, paddle.where(total[1:2] > 0, spoilt, gradient))
        return pairs, chain

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        """Within the block the optimizer's clip by the global norm uses the norm over all owners."""
        clip = self._inner._grad_clip
        if self._factor is None:
            yield
            return
        self._inner._grad_clip = _ClipByFactor(clip.clip_norm, self._factor)
        try:
            yield
        finally:
            self._inner._grad_clip = clip

    def share(self, buckets: Sequence[Bucket], chain: Any) -> Any:
        for bucket in buckets:
            parameters = [self._parameters[gradient.name] for gradient in bucket.gradients]
            if not paddle.get_flags(_SERIAL)[_SERIAL]:
                _after_other_readers(parameters)
            chain = emit_share(self._exchange, bucket, parameters, self._own[bucket.index], chain)
            self._last = chain.get_defining_op()
        return chain

    def fill(self, buckets: Sequence[Bucket], chain: Any) -> Any:
        if not self._exchange.overlaps_next_step:
            return emit_fill(self._exchange, [bucket.index for bucket in buckets], [], chain)
        for bucket in reversed(buckets):  # each before the first use of its parameters, in the next run
            parameters = [self._parameters[gradient.name] for gradient in bucket.gradients]
            chain = emit_fill(self._exchange, [bucket.index], parameters, chain)
            if not paddle.get_flags(_SERIAL)[_SERIAL]:
                _after_other_readers(parameters)
        return chain

    def sum_over_owners(self) -> Callable[[Any], Any]:
        return lambda value: emit_over_owners(self._exchange, value, token())[0]


def in_order_of_sums(plan: CommPlan) -> list[Bucket]:
    """The buckets, the last ones as their sums arrive when the communicators share a link evenly: the new parameters of
    one are then sent while another is updated."""
    left = {bucket.index: sum(spec.nbytes for spec in bucket.sent) for bucket in plan.buckets}
    queues = [[each for each in plan.buckets if each.communicator == number] for number in range(plan.communicators)]
    arrived: list[int] = []
    while sending := [queue[0] for queue in queues if queue]:
        first = min(sending, key=lambda bucket: left[bucket.index])
        least = left[first.index]
        for bucket in sending:
            left[bucket.index] -= least
        queues[first.communicator].pop(0)
        arrived.append(first.index)
    last = sorted(plan.buckets[-plan.communicators :], key=lambda bucket: arrived.index(bucket.index))
    return [*plan.buckets[: -plan.communicators], *last]


def _last_readers(operators: Sequence[Any]) -> dict[str, int]:
    """The position of the last operator that may read a parameter's memory, by parameter; under whatever name: the
    results of operators in place (``detach()`` is one) and of control flow can be what they were given."""
    readers: dict[str, int] = {}
    names: dict[int, set[str]] = {}
    for position, operator in enumerate(operators):
        if operator.name() == "builtin.parameter":
            names[operator.id()] = {str(operator.attrs()["parameter_name"])}
            continue
        makers = (value.get_defining_op() for value in all_inputs_of(operator))
        read = {name for maker in makers if maker is not None for name in names.get(maker.id(), ())}
        readers |= dict.fromkeys(read, position)
        if read and (operator.name().endswith("_") or operator.num_regions()):
            names[operator.id()] = read
    return readers


_SERIAL = "FLAGS_new_executor_serial_run"


def _after_other_readers(parameters: Sequence[Any]) -> None:
    """The executor's threads run an operator that writes a variable after the earlier ones that read it. A host
    operator cannot say that it writes, so each parameter is first copied to itself."""
    for parameter in parameters:
        _C_ops.assign_out_(parameter, parameter)


def sum_of_squares(gradients: Sequence[Any], dtype: str) -> Any:
    """The sum of the squares of all elements, [1]; 0 for no gradients."""
    parts = [_C_ops.squared_l2_norm(gradient) for gradient in gradients]
    parts = [part if dtype_name(part.dtype) == dtype else part.astype(dtype) for part in parts]
    return paddle.stack(parts).sum().reshape([1]) if parts else paddle.zeros([1], dtype)


class _ClipByFactor(nn.ClipGradByGlobalNorm):  # type: ignore[misc]
    """Paddle's clip with a factor that is already known."""

    def __init__(self, clip_norm: float, factor: Any) -> None:
        super().__init__(clip_norm)
        self._factor = factor

    def _pir_clip(self, params_grads: Pairs) -> Pairs:
        clipped = []
        for parameter, gradient in params_grads:
            if getattr(parameter, "need_clip", True):
                gradient = gradient * self._factor.astype(gradient.dtype)
            clipped.append((parameter, gradient))
        return clipped


def _show_originals(inner: Any, originals: dict[str, Any]) -> None:
    """Let functions that a script gave to its optimizer see the names and values of whole parameters."""

    def by_name(function: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda name: function(name.removesuffix(ROWS))

    def by_value(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda parameter: function(originals.get(parameter.name, parameter))

    for attribute, wrapped in (("_apply_decay_param_fun", by_name), ("_lr_ratio", by_value)):
        if callable(function := vars(inner).get(attribute)):
            setattr(inner, attribute, wrapped(function))


def owned_by_one_rank(job: Job) -> Callable[[str], bool] | None:
    """Whether a variable of this name is one rank's alone, in any program of the job; None if there is none."""
    owns = [own for _, optimizer in job.optimizers for own in optimizer.owns]
    return (lambda name: any(own(name) for own in owns)) if owns else None


def owned_state_of(main: Any, exchange: GradientExchange) -> Callable[[str], bool]:
    """Whether a variable of this name is one rank's alone: the optimizer's state, which starts with constants."""
    parameters, trained = {each.name for each in main.global_block().all_parameters()}, set(exchange.trained)
    return lambda name: name not in parameters and (name in exchange.kept or belongs_to(name, trained))
