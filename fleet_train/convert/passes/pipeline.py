"""The passes of one conversion, in the only valid order; gradient merge and loss scaling, which are around the update.

Gradient merge: one update, and one communication, per ``accumulate_steps`` micro-batches. The gradients are summed in
the main block, each after the operator that makes it, so that launch operators can follow the sums and communication
still overlaps the last backward pass. Only the update is conditional.

Loss scaling (float16): a larger loss preserves small gradients, and an update with an overflow is skipped. The
gradients are checked after averaging over the ranks: an overflow on one rank is then an overflow on every rank, so all
ranks skip the same updates and keep the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import _C_ops
from paddle.utils import unique_name

from fleet_train.collectives.job import Job
from fleet_train.collectives.joint_values import JointValues, joint_values_of
from fleet_train.collectives.paddle_compat import scaled
from fleet_train.collectives.sync_batch_norm import RankStatistics
from fleet_train.convert.passes.exchanged import exchange_marked, with_own_values
from fleet_train.convert.passes.joint_batch.rewrite import say, sum_over_ranks, take_over_ranks
from fleet_train.convert.passes.precision import give_out_float32, lower_precision, notice_of_layout, notices_of
from fleet_train.convert.passes.program import persistable, run_if
from fleet_train.convert.passes.recompute import recompute_segments
from fleet_train.convert.passes.sync_norm import Composed, Kernels, notice_of_own_norms, synchronize_batch_norms
from fleet_train.convert.planning import in_ready_order
from fleet_train.errors import ConversionError
from fleet_train.log import log_once
from fleet_train.profile import Profile
from fleet_train.profile.knobs import refuse_unknown
from fleet_train.profile.methods.base import CollectiveSpec

Pairs = list[tuple[Any, Any]]


class ProgramPasses:
    """Three calls around the optimizer's work: ``backward``, ``merge``, ``update``, in the current program."""

    def __init__(self, profile: Profile, job: Job) -> None:
        self._profile = profile
        self._job = job
        self._on_gpu = not isinstance(job.place, paddle.CPUPlace)
        self._synchronizes = profile.sync_batch_norm and job.world_size > 1
        self._scaler: LossScaler | None = None
        self._statistics: RankStatistics | None = None
        self._joint: JointValues | None = None
        self._micro_batches: MicroBatches | None = None
        self.held: set[int] = set()
        """The operators that were there before ``backward``, by their ids."""

    @property
    def exchanges(self) -> list[CollectiveSpec]:
        """The exchanges of synchronised batch norm and of joint values in one pass; known after ``merge``."""
        return [sent for each in (self._statistics, self._joint) if each is not None for sent in each.exchanges]

    @property
    def notices(self) -> list[str]:
        """Rank 0's notes on how the settings are carried out on this device."""
        return notices_of(self._profile, self._on_gpu)

    @property
    def update_each_alone(self) -> bool:
        """Whether ``update`` may be called several times in a step, for some of the parameters each."""
        return self._profile.accumulate_steps == 1 and self._scaler is None and self._statistics is None

    def backward(self, loss: Any, derive: Callable[[Any], Sequence[tuple[Any, Any]]]) -> Pairs:
        """Lower the forward program, append its gradients with ``derive(loss)``, rewrite both; returns the pairs.

        Rank 0 says what of ``loss`` cannot be the joint batch's.
        """
        log_once(notice_of_layout(self._profile, self._on_gpu, loss), self._job.cluster.rank)
        if lower_precision(loss, self._profile, on_gpu=self._on_gpu):
            give_out_float32()
        # A script holds what it, or Paddle for it, has made until now; what follows is ours alone.
        program = paddle.static.default_main_program()
        self.held = {operator.id() for operator in program.global_block().ops}
        target = self._over_ranks(loss)
        with with_own_values(program):
            pairs = list(derive(self._scaled(target)))
        if self._micro_batches is not None:
            self._micro_batches.keep()
        if self._synchronizes:
            self._statistics = RankStatistics(self._job)
            arithmetic = Composed() if self._on_gpu else Kernels()
            pairs = synchronize_batch_norms(pairs, self._statistics, arithmetic, self.held)
        self._exchange(program)
        recompute_segments(loss, self._profile)
        return pairs

    def _over_ranks(self, loss: Any) -> Any:
        """What to derive gradients from: ``loss``, taken over the batches of all ranks and micro-batches."""
        profile, micro_batches = self._profile, self._profile.accumulate_steps
        refuse_unknown("average_over", profile.average_over, ("samples", "ranks", "nothing"), "mean")
        if profile.average_over == "ranks":
            return loss
        if profile.average_over == "nothing":
            return sum_over_ranks(loss, self._job) if self._job.world_size > 1 else loss
        period = (profile.local_sgd_steps, profile.local_sgd_schedule)
        if profile.use_local_sgd and period != (1, "constant"):
            notice = (
                "average_over: samples: LocalSGD's local steps send nothing, so each rank's loss is its own batch's"
            )
            log_once([notice], self._job.cluster.rank)
            return loss
        if self._job.world_size * micro_batches == 1:
            return loss
        if self._job.world_size > 1 and not self._synchronizes:
            log_once(notice_of_own_norms(loss), self._job.cluster.rank)
        joint = take_over_ranks(loss, self._job, micro_batches)
        say(joint.found, self._job, micro_batches)
        if joint.count is None:
            return joint.value
        self._micro_batches = MicroBatches(joint.count, micro_batches, is_guarded=joint.is_guarded)
        return self._micro_batches.weighted(joint.value)

    def _exchange(self, program: Any) -> None:
        """Insert what is exchanged inside the program, if it is not there yet."""
        if self._job.world_size > 1:
            self._joint = joint_values_of(program, self._job)
            exchange_marked(program, self._joint)

    def gradient_scale(self) -> Any:
        """What averaged gradients still have to be divided by, float32 [1], at the current place; None for nothing."""
        if self._micro_batches is None:
            return self.loss_scale
        divisor = (1.0 / self._micro_batches.factor).cast("float32")
        return divisor if self.loss_scale is None else divisor * self.loss_scale

    @property
    def loss_scale(self) -> Any:
        """The loss scale, float32 [1]; None until it exists."""
        return None if self._scaler is None else self._scaler.scale

    @property
    def loss_scale_name(self) -> str | None:
        """The variable with the loss scale; None until it exists."""
        return None if self._scaler is None else str(self._scaler.scale.name)

    def merge(self, pairs: Sequence[tuple[Any, Any]], others: Collection[str] = ()) -> MergedGradients:
        """Call it before the plan is made: launch operators then follow the sums, not the gradients. ``others``:
        parameters whose gradients the exchange adds up itself."""
        self._exchange(paddle.static.default_main_program())  # a script may have derived its gradients without us
        buffers = () if self._micro_batches is None else self._micro_batches.buffers
        return merge_gradients(pairs, self._profile.accumulate_steps, others, buffers)

    def update(self, merged: MergedGradients, averaged: Pairs, update: Callable[[Pairs], Any]) -> Any:
        """Append ``update(pairs)``, the optimizer's operators, for the steps with an update; returns its result.

        ``averaged``: ``merged.pairs`` after the exchange. All ranks call it after they have agreed on the plan.
        """
        if self._statistics is not None:
            self._statistics.connect()
        if self._joint is not None and self._joint.exchanges:
            self._joint.connect()
        scaler, weights = self._scaler, self._micro_batches

        def update_by_weights() -> Any:
            pairs = averaged if weights is None else weights.of_update(averaged)
            return update(pairs) if scaler is None else scaler.apply(pairs, update)

        return merged.apply(update_by_weights)

    def _scaled(self, loss: Any) -> Any:
        if self._profile.amp_level == "O0" or self._profile.amp_dtype != "float16":
            return loss
        if self._scaler is not None:
            raise ConversionError(
                "amp dtype float16: backward was called twice on one optimizer; make one optimizer per loss, each has "
                "its own loss scale"
            )
        self._scaler = LossScaler(self._profile)
        return self._scaler.scaled(loss)


@dataclass(frozen=True)
class MergedGradients:
    """The gradients of merged micro-batches. ``pairs``: parameter and mean gradient of those since the last update (of
    fewer, between updates).

    ``boundary``: bool, shape [1]: true in the step that ends with an update; on every rank in the same step. None
    when every step does.
    """

    pairs: Pairs
    boundary: Any
    buffers: tuple[Any, ...]

    def apply(self, update: Callable[[], Any]) -> Any:
        """Append ``update`` (which creates the optimizer's operators) to run at the boundary; returns its result."""
        if self.boundary is None:
            return update()

        def update_and_empty() -> Any:
            operators = update()
            for buffer in self.buffers:
                paddle.assign(paddle.zeros_like(buffer), buffer)
            return operators

        return run_if(self.boundary, update_and_empty)


def merge_gradients(
    params_grads: Sequence[tuple[Any, Any]],
    accumulate_steps: int,
    others: Collection[str] = (),
    buffers: Sequence[Any] = (),
) -> MergedGradients:
    """Append the sum over micro-batches after each gradient of the current program. ``buffers``: further variables
    that an update empties.

    ``accumulate_steps``: micro-batches per update, their gradients averaged; 1 = an update every step.

    The sums and the count of micro-batches are persistable: a checkpoint in the middle of an update continues it.
    The pairs keep their order; a parameter without a gradient keeps None, and ``others`` keep theirs.
    """
    if accumulate_steps < 1:
        raise ConversionError(f"accumulate_steps={accumulate_steps}: must be 1 micro-batch or more per update")
    if accumulate_steps == 1:
        return MergedGradients(list(params_grads), None, ())
    ready = in_ready_order(params_grads)
    paddle.pir.set_insertion_point(ready[0].value.get_defining_op())
    boundary = _count_micro_batches(accumulate_steps)
    means: dict[str, Any] = {}
    emptied = list(buffers)
    for item in ready:
        if item.parameter.name in others:
            means[item.parameter.name] = item.value
            continue
        paddle.pir.set_insertion_point_after(item.value.get_defining_op())
        buffer = persistable(f"{item.parameter.name}@gradient_merge", item.value.dtype, item.value.shape)
        total = buffer + item.value
        paddle.assign(total, buffer)
        means[item.parameter.name] = scaled(total, 1.0 / accumulate_steps)
        emptied.append(buffer)
    paddle.pir.reset_insertion_point_to_end()
    pairs = [(parameter, means.get(parameter.name)) for parameter, _ in params_grads]
    return MergedGradients(pairs, boundary, tuple(emptied))


def _count_micro_batches(accumulate_steps: int) -> Any:
    """Count this micro-batch; true for the last one of an update, after which the count starts again."""
    count = persistable(unique_name.generate("gradient_merge_count"), paddle.int64)
    with_this_one = count + 1
    boundary = with_this_one >= accumulate_steps
    paddle.assign(paddle.where(boundary, paddle.zeros_like(with_this_one), with_this_one), count)
    return boundary


class MicroBatches:
    """Appends the weights of one program's micro-batches, relative to the first one of an update: equal counts have
    weights of exactly 1."""

    def __init__(self, count: Any, micro_batches: int, *, is_guarded: bool = False) -> None:
        """``count``: of this micro-batch, float64 []. ``is_guarded``: where all counts are 0 the gradients stay. At
        the current insertion point."""
        first = persistable(unique_name.generate("first_gradient_merge_count"), paddle.float64)
        weights = persistable(unique_name.generate("weighted_gradient_merge_count"), paddle.float64)
        count = count.reshape([1])
        one = paddle.ones_like(count)
        reference = paddle.where(first == 0, paddle.where(count == 0, one, count), first)
        self._weight = count / reference
        self._weight.stop_gradient = True
        self._total = weights + self._weight
        self._reference, self._micro_batches, self._is_guarded = reference, micro_batches, is_guarded
        self.buffers = (first, weights)
        """Variables that are to be 0 after an update."""

    def keep(self) -> None:
        """Keep the weights for the next micro-batch. Call it after the backward pass: in a program that changes a
        value in place, Paddle derives whatever stands in front of a loss."""
        for new, buffer in zip((self._reference, self._total), self.buffers, strict=True):
            paddle.assign(new, buffer)

    def weighted(self, loss: Any) -> Any:
        """``loss`` times the weight of this micro-batch."""
        return loss * self._weight.cast(loss.dtype).reshape([1] * len(loss.shape))

    def of_update(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs of an update, with gradients over the weights' sum instead of the number of micro-batches."""
        factor = self.factor
        return [
            (parameter, gradient if gradient is None else gradient * factor.cast(gradient.dtype))
            for parameter, gradient in pairs
        ]

    @property
    def factor(self) -> Any:
        """What averaged gradients are to be multiplied by, float64 [1]; at the current insertion point."""
        total = self._total
        if self._is_guarded:
            total = paddle.where(total == 0, paddle.full_like(total, self._micro_batches), total)
        return float(self._micro_batches) / total


class LossScaler:
    """The scale of one program and its counters: persistable, so that a checkpoint holds them.

    With ``amp_dynamic_loss_scaling`` false the scale stays ``amp_init_loss_scaling``. Otherwise it is multiplied by
    ``amp_incr_ratio`` after ``amp_incr_every_n_steps`` updates without overflow in a row, and by ``amp_decr_ratio``
    after ``amp_decr_every_n_nan_or_inf`` overflows in a row (never below 1).
    """

    def __init__(self, profile: Profile) -> None:
        """Append the scale to the current program. Make it before the backward pass."""
        self._profile = profile
        name, start = unique_name.generate("loss_scaling"), profile.amp_init_loss_scaling
        self.scale = persistable(name, paddle.float32, value=start)
        self._good_steps = persistable(unique_name.generate("loss_scaling_good_steps"), paddle.int32)
        self._bad_steps = persistable(unique_name.generate("loss_scaling_bad_steps"), paddle.int32)

    def scaled(self, loss: Any) -> Any:
        """The value to derive gradients from; ``loss`` itself is still fetched."""
        return loss * self.scale.reshape([1] * len(loss.shape))

    def apply(self, pairs: Sequence[tuple[Any, Any]], update: Callable[[Pairs], Any]) -> Any:
        """Append the part after the exchange of gradients; returns the result of ``update``.

        ``update(unscaled pairs)`` creates the optimizer's operators, which run unless a gradient is infinite or NaN.
        The optimizer's ``found_inf`` is not used: Paddle's Momentum updates its velocity anyway.
        """
        present = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        values, overflow = _C_ops.check_finite_and_unscale_([gradient for _, gradient in present], self.scale)
        profile = self._profile
        if profile.amp_dynamic_loss_scaling:
            _C_ops.update_loss_scaling_(
                values,
                overflow,
                self.scale,
                self._good_steps,
                self._bad_steps,
                profile.amp_incr_every_n_steps,
                profile.amp_decr_every_n_nan_or_inf,
                profile.amp_incr_ratio,
                profile.amp_decr_ratio,
                False,
            )
        unscaled = [(parameter, value) for (parameter, _), value in zip(present, values, strict=True)]
        return run_if(paddle.logical_not(overflow), lambda: update(unscaled))
