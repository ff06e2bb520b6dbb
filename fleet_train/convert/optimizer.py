"""The optimizer that a script gets back from ``fleet.distributed_optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import paddle
from paddle import nn, optimizer

from fleet_train.collectives.averaging import Held
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import emit_finish, onednn_flags
from fleet_train.collectives.job import Job
from fleet_train.convert import replaced
from fleet_train.convert.passes.batch_sums import said_of_batch_sum, sum_over_batch
from fleet_train.convert.passes.gradient_merge import MergedGradients
from fleet_train.convert.passes.pipeline import ProgramPasses
from fleet_train.convert.profile_settings import (
    fitted_to,
    leaves_one_process_alone,
    owner_of,
    refuse_beside_another_optimizer,
    refuse_clip_of_sums,
    refuse_on_this_device,
    say,
    settle,
    take_over_momentum,
)
from fleet_train.convert.rewrite import (
    ReadyGradient,
    UpdatedGradients,
    agree_on_plan,
    chain_in_program_order,
    dtype_name,
    held_values,
    in_ready_order,
    insert_gradient_norm,
    insert_launches,
    insert_waits,
    summed_over_uses,
    uses_a_name_twice,
)
from fleet_train.convert.state.program_state import make_start_equal, refuse_foreign_startup
from fleet_train.convert.strategy import one_of
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan import Bucket, CommPlan, TensorSpec, build_plan
from fleet_train.profile import Profile

# Calls of Paddle's mixed-precision optimizer that scripts make after ``minimize``.


class AmpCalls:
    """For a ``DistributedOptimizer``, whose own pass lowers the precision."""

    amp_level: str
    _rank: int

    def amp_init(
        self,
        place: Any = None,
        scope: Any = None,
        test_program: Any = None,
        use_fp16_test: bool = False,
        rewrite_master_weight: bool = False,
    ) -> None:
        """Casts nothing: parameters stay float32, which is said once. ConversionError without mixed precision."""
        del place, scope, rewrite_master_weight  # Paddle's signature
        if self.amp_level == "O0":
            raise ConversionError(
                "amp_init was called, but amp_level is O0; set amp_level: O1 or O2 in the profile, or wrap an "
                "optimizer from paddle.static.amp.decorate"
            )
        text = "amp_init is mapped: parameters stay float32, so nothing is cast"
        if test_program is not None or use_fp16_test:
            text += "; the evaluation program stays float32, too"
        say([text], self._rank)

    def get_loss_scaling(self) -> Any:
        """Refused: the scale is a number, ``fleet.loss_scale()``, not a program value."""
        raise ConversionError("get_loss_scaling: use fleet.loss_scale(), the current loss scale")

    def get_scaled_loss(self) -> Any:
        """Refused: fetch the loss itself."""
        raise ConversionError("get_scaled_loss: fetch the loss itself, and multiply it by fleet.loss_scale()")


ParamsGrads = list[tuple[Any, Any]]
UpdateWrap = Callable[[Callable[[ParamsGrads], Any], ParamsGrads], Any]


class DistributedOptimizer(AmpCalls):
    """Any Paddle optimizer, with its gradients averaged over all ranks before they are clipped and applied.

    Other attributes (``set_lr``, ``state_dict``, ``_grad_clip``, ...) are read from and set on the wrapped optimizer.
    With one process the wrapped optimizer's program is unchanged, unless the profile asks for a pass over it.
    """

    def __init__(
        self,
        inner: Any,
        profile: Profile,
        job: Job,
        on_converted: Callable[[Any, Any, CommPlan | None, GradientExchange | None], None],
    ):
        self.amp_level, self._rank = profile.amp_level, job.cluster.rank
        for method in ("backward", "apply_gradients", "minimize"):
            if not callable(getattr(inner, method, None)):
                raise ConversionError(
                    f"distributed_optimizer was given {type(inner).__name__}, which has no {method}(); "
                    "it takes an optimizer of paddle.optimizer"
                )
        refuse_on_this_device(profile, job.place)
        profile, fitted = fitted_to(job.engine, profile)
        say(fitted, job.cluster.rank)
        wrapped, self._dgc = take_over_momentum(inner, profile, job.world_size)
        self._passes = ProgramPasses(profile, job)
        say(self._passes.notices, job.cluster.rank)
        self._profile = profile
        self._job = job
        self._on_converted = on_converted
        self._loss: Any = None
        self._wraps: list[UpdateWrap] = []
        self._applied: list[Any] = []
        self._startups: list[Any] = []
        """Default startup programs at the time of the script's calls: they may initialize its network."""
        self._updated: UpdatedGradients | None = None
        self._norm: Any = None
        self._inner = wrapped  # the last one: from now on __setattr__ passes other names on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_inner" not in vars(self) or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(owner_of(self._inner, name), name, value)

    def around_update(self, wrap: UpdateWrap) -> None:
        """Let ``wrap(update, averaged pairs)`` create the operators of an update; it calls ``update(pairs)``.

        They run in steps with an update, after the exchange, so their decisions are the same on every rank with
        averaged gradients. Call it before ``minimize``; a later wrap encloses an earlier one. A wrap sees all
        parameters at once, so the update then waits for the last bucket.
        """
        self._wraps.append(wrap)

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
        parameter_list: Any = None,
    ) -> tuple[Any, ParamsGrads]:
        """Append the backward pass, the communication and the update of one step.

        ``parameter_list`` is Fleet 1.8's name of ``parameters``. Returns what Paddle's ``minimize`` returns:
        (optimizer operators, parameter and gradient pairs).
        """
        _refuse_dynamic_mode()
        parameters = one_of("minimize", parameter_list=parameter_list, parameters=parameters)
        self._startups.append(paddle.static.default_startup_program())
        startup = _startup_or_default(startup_program)
        refuse_foreign_startup(_program_of(loss), (startup, self._startups[-1]))
        if self._is_untouched and not uses_a_name_twice(_program_of(loss)):
            with paddle.static.program_guard(_program_of(loss), startup):
                result: tuple[Any, ParamsGrads] = self._inner.minimize(loss, startup, parameters, no_grad_set)
            self._updated = UpdatedGradients(_program_of(loss), result[1])
            self._on_converted(_program_of(loss), startup, None, None)
            return result
        with paddle.static.program_guard(_program_of(loss), startup):
            params_grads = self.backward(loss, startup, parameters, no_grad_set)
            operators = self.apply_gradients(params_grads)
        return operators, params_grads

    @property
    def loss_scale_name(self) -> str | None:
        """The variable with the loss scale, once a float16 backward pass has been appended."""
        return self._passes.loss_scale_name

    @property
    def _is_untouched(self) -> bool:
        """With one process and a profile without passes: Paddle's own path, operator by operator."""
        return self._job.world_size == 1 and leaves_one_process_alone(self._profile) and not self._wraps

    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> ParamsGrads:
        """Append the backward pass; returns (parameter, local gradient) pairs as Paddle does. Nothing is sent yet."""
        _refuse_dynamic_mode()
        self._loss = loss
        self._refuse_what_needs_the_program_alone(_program_of(loss))
        self._startups.append(paddle.static.default_startup_program())
        startup = _startup_or_default(startup_program)
        parts = self._job.world_size * self._profile.accumulate_steps
        if parts > 1 and (place := sum_over_batch(loss, parts)):
            say([said_of_batch_sum(place, self._job.world_size, self._profile.accumulate_steps)], self._rank)
        with paddle.static.program_guard(_program_of(loss), startup):
            return self._passes.backward(
                loss, lambda target: self._inner.backward(target, startup, parameters, no_grad_set, callbacks)
            )

    def _refuse_what_needs_the_program_alone(self, program: Any) -> None:
        """A program may have several optimizers or updates; some settings allow only one per program."""
        others = [other for other, owner in self._job.optimizers if owner is not self]
        if any(other is program for other in (*others, *self._applied)):
            refuse_beside_another_optimizer(self._profile, self._job.world_size)
        self._job.optimizers.append((program, self))

    def apply_gradients(self, params_grads: ParamsGrads) -> Any:
        """Append communication and update to the current program (``paddle.static.program_guard``).

        The plan is compared over all ranks first. Clipping and weight decay act on the averaged gradients.
        """
        main, startup = paddle.static.default_main_program(), paddle.static.default_startup_program()
        self._applied.append(main)
        refuse_clip_of_sums(self._profile, self._inner)
        params_grads, several = summed_over_uses(params_grads)
        say(map(_said_of_sum, several), self._job.cluster.rank)
        merged = self._passes.merge(params_grads)
        if self._job.world_size == 1:
            operators = self._update(merged, merged.pairs)
            self._updated = self._updated_in(main, merged, merged.pairs)
            self._on_converted(main, startup, None, None)
            return operators
        if flags := onednn_flags():
            replaced.set_flags(dict.fromkeys(flags, False))
            say(
                [f"{' and '.join(flags)}: switched off, because ranks would send values in oneDNN's memory layout"],
                self._rank,
            )
        ready = in_ready_order(merged.pairs)
        values = held_values(main, [item.parameter for item in ready], [])
        plan, profile = self._agreed_plan(ready, values)
        exchange = GradientExchange(self._job, plan, profile, self._inner.get_lr, self._dgc)
        say(exchange.notices, self._job.cluster.rank)
        chain = insert_launches(exchange, plan, ready, values, merged.boundary)
        operators, all_averaged = [], []
        for buckets in self._updated_together(plan):
            averaged, chain = insert_waits(exchange, buckets, ready, chain)
            operators += self._update(merged, averaged)
            all_averaged += averaged
        self._updated = self._updated_in(main, merged, all_averaged)
        self._finish_step(exchange, values, chain)
        chain_in_program_order(main.global_block().ops)
        make_start_equal(self._job, main, startup, self._startups, paddle.static.global_scope())
        self._on_converted(main, startup, plan, exchange)
        return operators

    def _updated_in(self, main: Any, merged: MergedGradients, averaged: ParamsGrads) -> UpdatedGradients:
        self._norm = None
        return UpdatedGradients(main, averaged, merged.boundary, self._passes.loss_scale)

    def gradient_norm(self) -> Any:
        """The L2 norm over all gradients of an update: a program value to fetch, float32, shape [1].

        Of the gradients averaged over ranks and micro-batches, without the loss scale, before clipping, weight decay
        and ``around_update``; NaN or infinity if a gradient has it, 0 in a micro-batch without an update. The first
        call after ``minimize`` inserts the operators; from then on they run in every step. Raises ConversionError
        before ``minimize`` and for sparse gradients, ProfileError with LocalSGD on several ranks, whose local steps
        average no gradient.
        """
        if self._updated is None:
            raise ConversionError(
                "gradient_norm() was called before minimize(), which makes the gradients; swap the two"
            )
        if self._profile.use_local_sgd and self._job.world_size > 1:
            raise ProfileError(
                "the norm of the gradient was asked for (gradient_norm(), --gradient_norm) with use_local_sgd: its "
                "local steps average no gradient, and one rank's norm is another quantity; leave one of the two out"
            )
        if self._norm is None:
            self._norm = insert_gradient_norm(self._updated)
        return self._norm

    def _updated_together(self, plan: CommPlan) -> list[Sequence[Bucket]]:
        """Buckets whose parameters are updated together: each bucket alone, while the next ones are sent, if that gives
        the same arithmetic."""
        by_bucket = self._passes.update_each_alone and updates_each_alone(self._inner) and not self._wraps
        return [[bucket] for bucket in plan.buckets] if by_bucket else [plan.buckets]

    def _update(self, merged: MergedGradients, pairs: ParamsGrads) -> Any:
        update: Callable[[ParamsGrads], Any] = self._inner.apply_gradients
        for wrap in self._wraps:
            update = partial(wrap, update)
        return self._passes.update(merged, pairs, update)

    def _finish_step(self, exchange: GradientExchange, values: Held, chain: Any) -> None:
        if exchange.averager is None and not self._profile.divergence_check_steps:
            return
        if self._profile.local_sgd_momentum != "keep":
            values.accumulators.extend(self._accumulators())
        adaptive = self._profile.use_local_sgd and self._profile.local_sgd_schedule == "adaptive"
        names = [parameter.name for parameter in values.parameters]
        emit_finish(exchange, values, names, self._loss if adaptive else None, chain)

    def _accumulators(self) -> list[Any]:
        """The inner optimizer's moments and velocities, in an order that is the same on every rank.

        Adam's bias-correction powers are left alone: they count steps and are equal everywhere.
        """
        tables = self._inner._accumulators
        kinds = sorted(kind for kind in tables if "pow_acc" not in kind)
        found = [tables[kind][name] for kind in kinds for name in sorted(tables[kind])]
        return [value for value in found if "float" in dtype_name(value.dtype)]

    def _agreed_plan(self, ready: Sequence[ReadyGradient], values: Held) -> tuple[CommPlan, Profile]:
        """The plan that all ranks carry out, and the profile with the settings chosen for it."""
        gradients = [item.gradient for item in ready]
        averaged = [_as_gradient(value) for value in (*values.parameters, *values.statistics)]

        def planned(profile: Profile) -> CommPlan:
            state = _state_values_per_parameter(self._inner)
            return build_plan(gradients, self._job.cluster, profile, averaged, self._passes.exchanges, state)

        plan = planned(self._profile)
        # Compare the request first: ranks with other scripts or profiles would not measure together.
        agree_on_plan(self._job, plan, self._profile)
        settled = settle(self._job, self._profile, gradients)
        if settled != self._profile:
            plan = planned(settled)
            agree_on_plan(self._job, plan, settled)
        self._job.agreed(plan)
        return plan, settled


def _state_values_per_parameter(optimizer: Any) -> int:
    """How many moments or velocities a Paddle optimizer keeps for each parameter, from its accumulator names."""
    names = [name for name in dir(type(optimizer)) if name.endswith("_acc_str")]
    return len([name for name in names if "pow" not in name])


def _said_of_sum(name: str) -> str:
    return (
        f"parameter '{name}' is used by name in several places: its gradients are summed and it is updated once. "
        "Paddle 3.3.1 alone updates it once per use, which is the same for SGD only"
    )


def _refuse_dynamic_mode() -> None:
    if paddle.in_dynamic_mode():
        raise ConversionError(
            "Paddle is in dynamic mode, and fleet_train converts static programs: call paddle.enable_static() before "
            "building the network"
        )


def _as_gradient(value: Any) -> TensorSpec:
    """A parameter's or statistic's name, shape and dtype, for the plan."""
    name = str(value.get_defining_op().attrs().get("parameter_name", value.name))
    return TensorSpec(name, tuple(int(size) for size in value.shape), dtype_name(value.dtype))


def _program_of(loss: Any) -> Any:
    return loss.block.program


def _startup_or_default(startup_program: Any) -> Any:
    return startup_program if startup_program is not None else paddle.static.default_startup_program()


# Exactly these classes, not subclasses, which may read all gradients at once.
_EACH_ALONE = (
    optimizer.SGD,
    optimizer.Momentum,
    optimizer.Adam,
    optimizer.AdamW,
    optimizer.Adamax,
    optimizer.Adagrad,
    optimizer.Adadelta,
    optimizer.RMSProp,
    optimizer.Lamb,
)
_CLIPS_EACH_ALONE = (type(None), nn.ClipGradByValue, nn.ClipGradByNorm)


def updates_each_alone(inner: Any) -> bool:
    """True if ``apply_gradients`` may be called several times, each for a part of the parameters, with equal bits.

    Not with a clip by the global norm, which needs all gradients first, nor with Paddle's multi-tensor updates.
    """
    return (
        type(inner) in _EACH_ALONE
        and type(inner._grad_clip) in _CLIPS_EACH_ALONE
        and not getattr(inner, "_use_multi_tensor", False)
    )
