"""The optimizer that a script gets back from ``fleet.distributed_optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import paddle

from fleet_train.cluster.flight import trace
from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.engines import CALC, OWN
from fleet_train.collectives.exchange import GradientExchange, Kept
from fleet_train.collectives.finite import IGNORE, SKIP
from fleet_train.collectives.host_ops import emit_finish, emit_is_spoilt, onednn_flags
from fleet_train.collectives.job import Job
from fleet_train.convert import process, verify
from fleet_train.convert.embeddings import Table, find_tables, planned_rows, remove_dense_gradients
from fleet_train.convert.foreign import refuse_foreign, refuse_unreached, trained_of, untrained_of
from fleet_train.convert.paddle_calls import PaddleCalls, leaves_one_process_alone, refuse_dynamic_mode
from fleet_train.convert.paddle_optimizers import (
    moments_of,
    noting_state,
    one_learning_rate,
    owner_of,
    refuse_to_shard,
    updates_each_alone,
)
from fleet_train.convert.passes.aliases import keep_shared_memory, separate_results_of_branches, settle_assignments
from fleet_train.convert.passes.pipeline import MergedGradients, ProgramPasses
from fleet_train.convert.passes.program import held_values
from fleet_train.convert.passes.replayed import refuse_random_order
from fleet_train.convert.passes.skipping import SkipNotFinite, keep_statistics_finite
from fleet_train.convert.planning import (
    agreed_plan,
    fitted_to,
    in_ready_order,
    parameters_first,
    refuse_on_this_device,
    summed_over_uses,
    uses_a_name_twice,
)
from fleet_train.convert.rewrite import (
    HostOperators,
    UpdatedGradients,
    chain_in_program_order,
    insert_gradient_norm,
    insert_launches,
    insert_mark_of_backward,
    insert_waits,
    make_start_equal,
    refuse_foreign_startup,
)
from fleet_train.convert.sharding import OwnersUpdate, owned_by_one_rank, owned_state_of
from fleet_train.convert.strategy import one_of
from fleet_train.convert.updates import BucketUpdates
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.log import log_once
from fleet_train.plan import Bucket, CommPlan
from fleet_train.profile import KNOBS, Profile
from fleet_train.profile.knobs import shown

ParamsGrads = list[tuple[Any, Any]]
UpdateWrap = Callable[[Callable[[ParamsGrads], Any], ParamsGrads], Any]


class DistributedOptimizer(PaddleCalls):
    """Any Paddle optimizer, with its gradients averaged over all ranks before they are clipped and applied.

    Other attributes (``set_lr``, ``state_dict``, ``_grad_clip``, ...) are read from and set on the wrapped optimizer.
    With one process the wrapped optimizer's program is unchanged, unless the profile asks for a pass over it, or a
    branch returns values that it has not made (`passes.aliases`).
    """

    def __init__(
        self,
        inner: Any,
        profile: Profile,
        job: Job,
        on_converted: Callable[[Any, Any, CommPlan | None, GradientExchange | None], None],
    ):
        self.amp_level, self._rank = profile.amp_level, job.cluster.rank
        refuse_dynamic_mode("fleet.distributed_optimizer", job, profile)
        for method in ("backward", "apply_gradients", "minimize"):
            if not callable(getattr(inner, method, None)):
                raise ConversionError(
                    f"distributed_optimizer was given {type(inner).__name__}, which has no {method}(); "
                    "it takes an optimizer of paddle.optimizer"
                )
        refuse_on_this_device(profile, job.place)
        profile, fitted = fitted_to(job.engine, profile)
        log_once(fitted, job.cluster.rank)
        self._passes = ProgramPasses(profile, job)
        log_once([*self._passes.notices, *keep_shared_memory(profile.environment)], job.cluster.rank)
        if profile.replay_check_steps and job.world_size == 1:
            log_once(["replay_check_steps: nothing is compared, because one process averages no gradients"], self._rank)
        if profile.overlap_next_step and job.world_size == 1:
            log_once(
                ["overlap_next_step: nothing is sent under a forward pass, because there is one process"], self._rank
            )
        self._profile = profile
        self._job = job
        self._on_converted = on_converted
        self._loss: Any = None
        self._wraps: list[UpdateWrap] = []
        self._applied: list[Any] = []
        self._startups: list[Any] = []
        """Default startup programs at the time of the script's calls: they may initialize its network."""
        self._is_minimizing = False
        self._updated: UpdatedGradients | None = None
        self._norm: Any = None
        self._kept: dict[str, Kept] = {}
        self.owns: list[Callable[[str], bool]] = []
        """Whether a variable is this rank's alone, by its name, for each update that is sharded."""
        self._inner = inner  # the last one: from now on __setattr__ passes other names on

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._refuse_update_by, name) if self._would_update_alone(name) else found

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
        parameters = one_of("minimize", parameter_list=parameter_list, parameters=parameters)
        if self._is_dynamic("minimize"):
            updated: tuple[Any, ParamsGrads] = self._inner.minimize(loss, startup_program, parameters, no_grad_set)
            return updated
        main, startup = self._programs_of(loss, startup_program)
        refuse_foreign_startup(main, (startup, self._startups[-1]))
        with paddle.static.program_guard(main, startup):
            if self._is_untouched and not uses_a_name_twice(main):
                parameters, no_grad_set = self._listed(main, parameters, no_grad_set)
                separate_results_of_branches(main)
                settle_assignments(loss)
                operators, params_grads = self._inner.minimize(loss, startup, parameters, no_grad_set)
                refuse_unreached(parameters, params_grads, self._job.advise)
                self._converted(UpdatedGradients(main, params_grads), startup)
            else:
                self._is_minimizing = True
                try:
                    params_grads = self.backward(loss, startup, parameters, no_grad_set)
                    operators, params_grads = self._apply(params_grads)
                finally:
                    self._is_minimizing = False
        return operators, params_grads

    def _is_dynamic(self, method: str) -> bool:
        """Whether one process trains in dynamic mode, as Paddle does. ConversionError for everything else there."""
        refuse_dynamic_mode(f"optimizer.{method}()", self._job, self._profile)
        return bool(paddle.in_dynamic_mode())

    def updates(self, program: Any) -> bool:
        """Whether this optimizer has made the update of ``program``."""
        return self._updated is not None and self._updated.program is program

    @property
    def boundary(self) -> Any:
        """Bool [1]: whether a run of the program ends with an update; None if each does, or before ``minimize``."""
        return None if self._updated is None else self._updated.boundary

    @property
    def changes_weights_at_the_end(self) -> bool:
        """Whether a host operator writes into parameters behind the update, unseen by operators that read them."""
        return self._job.world_size > 1 and (self._profile.use_local_sgd or self._profile.sharding)

    @property
    def loss_scale_name(self) -> str | None:
        """The variable with the loss scale, once a float16 backward pass has been appended."""
        return self._passes.loss_scale_name

    def backward(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
        callbacks: Any = None,
    ) -> ParamsGrads:
        """Append the backward pass; returns (parameter, local gradient) pairs as Paddle does. Nothing is sent yet."""
        if self._is_dynamic("backward"):
            found: ParamsGrads = self._inner.backward(loss, startup_program, parameters, no_grad_set, callbacks)
            return found
        self._loss = loss
        main, startup = self._programs_of(loss, startup_program)
        self._refuse_what_needs_the_program_alone(main)
        parameters, no_grad_set = self._listed(main, parameters, no_grad_set)
        self._job.optimizers.append((main, self))
        with paddle.static.program_guard(main, startup):
            separate_results_of_branches(main)
            settle_assignments(loss)
            check = verify.current and verify.current.begin_check(loss, self._profile)
            pairs = self._passes.backward(
                loss, lambda target: self._inner.backward(target, startup, parameters, no_grad_set, callbacks)
            )
            refuse_unreached(parameters, pairs, self._job.advise)
            several = self._job.world_size > 1 and self._job.engine.reads_values
            pairs = parameters_first(pairs, self._passes.held) if several else pairs
            if verify.current and check:
                verify.current.follow(check, pairs, parameters, no_grad_set, self._passes.loss_scale_name)
            return pairs

    def apply_gradients(self, params_grads: ParamsGrads) -> Any:
        """Append communication and update to the current program (``paddle.static.program_guard``).

        The plan is compared over all ranks first. Clipping and weight decay act on the averaged gradients.
        """
        if self._is_dynamic("apply_gradients"):
            return self._inner.apply_gradients(params_grads)
        return self._apply(params_grads)[0]

    def _apply(self, params_grads: ParamsGrads) -> tuple[Any, ParamsGrads]:
        """The update's operators, and the pairs of `minimize`: local gradients; averaged ones where those are gone, or
        None where another rank has them, or where only the rows of a table are made."""
        main, startup = paddle.static.default_main_program(), paddle.static.default_startup_program()
        self._applied.append(main)
        if verify.current:
            verify.current.note_update(main)
        if self._profile.nonfinite == SKIP and self._skipping is None:
            self._wraps.append(SkipNotFinite().guard)  # last, so that nothing else sees such gradients
        params_grads, several = summed_over_uses(
            params_grads, getattr(owner_of(self._inner, "_grad_clip"), "_grad_clip", None) is not None
        )
        log_once(map(_notice_of_sum, several), self._rank)
        tables = self._tables_of(params_grads)
        merged = self._passes.merge(params_grads, tables)
        if self._job.world_size == 1:
            operators = self._update(merged, merged.pairs)
            self._keep_statistics(main)
            updated = UpdatedGradients(main, merged.pairs, merged.boundary, self._passes.gradient_scale)
            self._converted(updated, startup)
        else:
            with one_learning_rate(self._inner, main):
                operators, updated, plan, exchange = self._average_and_update(main, merged, tables)
            if exchange is not None:
                if exchange.owners:
                    self.owns.append(owned_state_of(main, exchange))
                make_start_equal(self._job, main, startup, self._startups, owned_by_one_rank(self._job))
            self._converted(updated, startup, plan, exchange)
        by_name = {parameter.name: value for parameter, value in updated.pairs}
        by_name |= {name: None for name, table in tables.items() if table.rows_only}
        return operators, [(p, by_name.get(p.name) if p.name in tables else value) for p, value in params_grads]

    def _tables_of(self, params_grads: ParamsGrads) -> dict[str, Table]:
        """The embeddings whose rows are sent; rank 0 says what was asked for in vain."""
        tables, notices = find_tables(
            self._job,
            self._profile,
            params_grads,
            self._inner,
            is_ours=self._is_minimizing,
            plain=not self._wraps and self._passes.loss_scale is None,
        )
        log_once(notices, self._rank)
        if tables:
            self._add_rows_alike()
        return tables

    def _average_and_update(
        self, main: Any, merged: MergedGradients, tables: Mapping[str, Table]
    ) -> tuple[list[Any], UpdatedGradients, CommPlan, GradientExchange | None]:
        """Several ranks: insert the launch operators into the backward pass, append the waits, each with its part of
        the update, and the end of the step. Returns the update's operators, and the averaged gradients; in a job that
        only plans, the plan alone."""
        self._switch_off_onednn()
        ready = in_ready_order(merged.pairs, planned_rows(tables))
        if self._profile.sharding:
            refuse_to_shard(self._inner, self._wraps, {g.name: g.dtype for g in (item.gradient for item in ready)})
        values = held_values(main, [item.parameter for item in ready])
        plan, profile = agreed_plan(self._job, self._profile, ready, values, self._passes.exchanges, self._inner)
        if not self._job.carries_out(plan):
            return [], UpdatedGradients(main, merged.pairs), plan, None
        lookups = {name: table.described for name, table in tables.items()}
        exchange = GradientExchange(self._job, plan, profile, self._inner.get_lr, lookups, self._on_not_finite)
        log_once(exchange.notices, self._rank)
        sums = HostOperators(exchange, tables)
        updates = OwnersUpdate(exchange, self._inner, ready) if plan.owners else BucketUpdates(self._inner, ready)
        chain = insert_launches(exchange, sums, plan, ready, values, merged.boundary)
        if trace.current is not None and self._loss is not None:
            insert_mark_of_backward(self._loss)
        if exchange.asks_all and self._skipping is not None:
            chain, self._skipping.spoilt = emit_is_spoilt(exchange, chain)
        operators: list[Any] = []
        averaged: ParamsGrads = []
        scale, update = self._passes.loss_scale, partial(self._update, merged)
        together = self._updated_together(plan, updates)
        if len(together) > 1 and not profile.replay_check_steps:  # which checks all gradients before the first update
            updates.overlap(main.global_block().ops, plan)
        for buckets in together:
            updates.go_to(buckets[-1])
            pairs, chain = insert_waits(sums, buckets, ready, chain, updates)
            checks = scale is not None or bool(self._wraps)
            made, pairs, chain = updates.update(pairs, update, scale, checks, chain)
            chain = updates.share(buckets, chain)
            operators += made
            averaged += pairs
        chain = updates.fill(plan.buckets, chain)
        exchange.kept = self._kept
        if not verify.current:
            remove_dense_gradients(main, [item.value for item in ready if item.rows])
        self._keep_statistics(main)
        self._finish_step(exchange, values, chain)
        chain_in_program_order(main.global_block().ops)
        if profile.replay_check_steps:
            refuse_random_order(main)
        scale_of, summed = self._passes.gradient_scale, updates.sum_over_owners()
        updated = UpdatedGradients(main, averaged, merged.boundary, scale_of, summed)
        return operators, updated, plan, exchange

    @property
    def _skipping(self) -> SkipNotFinite | None:
        """What skips updates with NaN or infinity, by the profile or by a call of `around_update`."""
        owners = [getattr(wrap, "__self__", None) for wrap in self._wraps]
        return next((owner for owner in owners if isinstance(owner, SkipNotFinite)), None)

    @property
    def _on_not_finite(self) -> str:
        """What happens with a gradient that is not finite, as a reaction of `FiniteCheck`. A loss scale makes infinite
        gradients on purpose, and skips such updates itself."""
        if self._passes.loss_scale is not None:
            return IGNORE
        return self._profile.nonfinite if self._skipping is None else SKIP

    def _keep_statistics(self, main: Any) -> None:
        if self._skipping is not None:
            keep_statistics_finite(main)

    def _programs_of(self, loss: Any, startup_program: Any) -> tuple[Any, Any]:
        """The program of ``loss`` and its startup program."""
        self._startups.append(paddle.static.default_startup_program())
        return loss.block.program, self._startups[-1] if startup_program is None else startup_program

    def _listed(self, main: Any, parameters: Any, no_grad_set: Any) -> tuple[Any, Any]:
        """The values of ``main`` that the two arguments name. Raises ConversionError for what is not in it."""
        trained = trained_of(main, parameters)
        if trained is None:
            refuse_foreign(main, getattr(self._inner, "_parameter_list", None))
        return trained, untrained_of(main, no_grad_set)

    @property
    def _is_untouched(self) -> bool:
        """Whether Paddle's own path is taken, operator by operator: with one process and a profile without passes."""
        return self._job.world_size == 1 and leaves_one_process_alone(self._profile) and not self._wraps

    def _refuse_what_needs_the_program_alone(self, program: Any) -> None:
        """A program may have several optimizers or updates, but some settings rewrite the forward program once, or keep
        one state per program."""
        others = [other for other, owner in self._job.optimizers if owner is not self]
        if all(other is not program for other in (*others, *self._applied)):
            return
        if self._job.world_size == 1 and leaves_one_process_alone(self._profile):
            return
        for knob in _FOR_ONE_OPTIMIZER:
            value = getattr(self._profile, knob)
            if value != KNOBS[knob].default and value not in ("bf16", "fp16", CALC, OWN):
                raise ConversionError(
                    f"this is the second optimizer in one program, and {knob}: {shown(value)} works with one optimizer "
                    f"per program; leave {knob} out, or minimize the second loss in its own program "
                    "(paddle.static.program_guard), which may share parameters by name"
                )

    def _switch_off_onednn(self) -> None:
        if flags := onednn_flags():
            process.set_flags(dict.fromkeys(flags, False))
            log_once(
                [f"{' and '.join(flags)}: switched off, because ranks would send values in oneDNN's memory layout"],
                self._rank,
            )

    def _add_rows_alike(self) -> None:
        """Make Paddle's kernel add the rows of embeddings in one order: on GPUs it would take them as its threads come,
        not with the same bits on every rank."""
        flag = "FLAGS_embedding_deterministic"
        if not self._job.engine.reads_values and flag in paddle.base.core.globals().keys():  # noqa: SIM118
            process.set_flags({flag: 1})
            log_once([f"{flag}: set, because all ranks must add the rows of embeddings in one order"], self._rank)

    def _updated_together(self, plan: CommPlan, updates: BucketUpdates) -> list[Sequence[Bucket]]:
        """Buckets whose parameters are updated together: each bucket alone, while the next ones are sent, if that gives
        the same arithmetic."""
        by_bucket = self._passes.update_each_alone and updates_each_alone(self._inner) and not self._wraps
        return [[bucket] for bucket in updates.in_turn(plan)] if by_bucket else [plan.buckets]

    def _update(self, merged: MergedGradients, pairs: ParamsGrads) -> Any:
        update: Callable[[ParamsGrads], Any] = self._inner.apply_gradients
        for wrap in self._wraps:
            update = partial(wrap, update)
        with noting_state(self._inner, self._kept):
            return self._passes.update(merged, pairs, update)

    def _finish_step(self, exchange: GradientExchange, values: HeldValues, chain: Any) -> None:
        if exchange.averager is None and not self._profile.divergence_check_steps:
            return
        if self._profile.local_sgd_momentum != "keep":
            values.accumulators.extend(moments_of(self._inner))
        adaptive = self._profile.use_local_sgd and self._profile.local_sgd_schedule == "adaptive"
        names = [parameter.name for parameter in values.parameters]
        emit_finish(exchange, values, names, self._loss if adaptive else None, chain)

    def _converted(
        self,
        updated: UpdatedGradients,
        startup: Any,
        plan: CommPlan | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:
        self._updated, self._norm = updated, None
        self._on_converted(updated.program, startup, plan, exchange)

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


def _notice_of_sum(name: str) -> str:
    return (
        f"parameter '{name}' is used by name in several places: its gradients are summed and it is updated once. "
        "Paddle 3.3.1 alone updates it once per use, which is the same for SGD without weight decay and clip only"
    )


_FOR_ONE_OPTIMIZER = (
    "collective_stream",
    "use_local_sgd",
    "sharding",
    "compression",
    "accumulate_steps",
    "amp_level",
    "sync_batch_norm",
    "recompute_segments",
    "recompute_checkpoints",
    "recompute_every_blocks",
    "replay_check_steps",
)
