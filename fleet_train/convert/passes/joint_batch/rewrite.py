"""Rewrites the forward pass of a loss so that what it takes over the batch is taken over all ranks' batches."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle

from fleet_train.collectives.job import Job
from fleet_train.collectives.joint_values import JointValues, joint_values_of
from fleet_train.collectives.paddle_compat import scaled
from fleet_train.convert import process
from fleet_train.convert.passes.exchanged import mean_over_ranks, mean_with_gradient
from fleet_train.convert.passes.joint_batch.analysis import Analysis
from fleet_train.convert.passes.joint_batch.axes import constant
from fleet_train.convert.passes.joint_batch.counts import Counts
from fleet_train.convert.passes.joint_batch.kinds import BatchKind, Findings, Use, is_float, short
from fleet_train.convert.passes.program import all_inputs_of, line_of, nested_operators
from fleet_train.errors import ConversionError
from fleet_train.log import log_once


@dataclass
class Rewritten:
    """What is known of a program, whose losses may share values."""

    known: dict[int, BatchKind] = field(default_factory=dict)
    replaced: dict[int, Any] = field(default_factory=dict)
    """What operators behind a loss read instead of a value, by its id."""
    joined: dict[tuple[int, bool, bool], Any] = field(default_factory=dict)
    """The joined values by a value's id, whether its gradient is averaged, and whether something is divided by it."""
    shown: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """What is fetched instead of a value, by its id, and times the number of ranks to which power: its plain mean over
    the ranks is the joint batch's."""
    ranks: Any = None
    """The number of ranks, a value of the program: it is 1 on one card, and where a copy is evaluated."""

    def insert_ranks(self, program: Any, job: Job) -> None:
        """Insert the number of ranks at the beginning of the program, once."""
        if self.ranks is None:
            paddle.pir.set_insertion_point(program.global_block().ops[0])
            self.ranks = joint_values_of(program, job).number_of_ranks(paddle.ones([], "float64"))

    def fetched(self, value: Any) -> Any:
        """What is fetched instead of ``value``."""
        if not isinstance(value, paddle.pir.Value) or value.id not in self.shown:
            return value
        joint, power = self.shown[value.id]
        if power and self.ranks is not None:
            maker = joint.get_defining_op()
            with paddle.static.program_guard(maker.get_parent_block().program):
                paddle.pir.set_insertion_point_after(maker)
                joint = self.times_ranks(joint, power)
                paddle.pir.reset_insertion_point_to_end()
            self.shown[value.id] = (joint, 0)
        return joint

    def times_ranks(self, value: Any, power: int) -> Any:
        """``value`` times the number of ranks to a power, at the current insertion point."""
        factor = self.ranks
        for _ in range(abs(power) - 1):
            factor = factor * self.ranks
        return value * (factor if power > 0 else 1.0 / factor).cast(value.dtype)


_NO_BOUND = 1e38
"""What ``clip`` has where it has no bound is larger."""

_programs: weakref.WeakKeyDictionary[Any, Rewritten] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class JointLoss:
    """A loss that was rewritten: its average over the ranks and, weighted by ``count``, over micro-batches is the joint
    batch's ``value``. ``count``: float64 [], what this micro-batch's loss is divided by on average; None: the same in
    each. ``is_guarded``: of nothing the loss is 0."""

    value: Any
    count: Any
    is_guarded: bool
    found: Findings


def sum_over_ranks(loss: Any, job: Job) -> Any:
    """What to derive gradients from whose average over the ranks is the sum of those of ``loss``."""
    program = loss.block.program
    state = _programs.setdefault(program, Rewritten())
    state.insert_ranks(program, job)
    paddle.pir.reset_insertion_point_to_end()
    return state.times_ranks(loss, 1)


def take_over_ranks(loss: Any, job: Job, micro_batches: int) -> JointLoss:
    """Rewrite the operators behind ``loss`` in the current program, for so many micro-batches per update."""
    program = loss.block.program
    state = _programs.setdefault(program, Rewritten())
    before = {operator.id() for operator in program.global_block().ops}
    number = f"samples of a loss {job.count('samples of a loss')}"
    analysis = Analysis(
        loss,
        job.world_size,
        job.world_size * micro_batches,
        state.known,
        lambda size: not job.compare(number, size),
    )
    rewrite = Rewrite(analysis, state, joint_values_of(program, job), micro_batches)
    if job.world_size > 1 and rewrite.reads_ranks:
        state.insert_ranks(program, job)
    joint = rewrite.carry_out(loss)
    if job.world_size > 1 and any(power for _, power in state.shown.values()):
        state.insert_ranks(program, job)
    process.before_each_run(_fetch_shares)
    for operator in program.global_block().ops:
        if operator.id() not in before:
            for result in operator.results():
                state.known.setdefault(result.id, BatchKind(degree=None))
    paddle.pir.reset_insertion_point_to_end()
    return joint


def _fetch_shares(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    """A hook before each run: fetch the joint batch's values, where a script holds those that it was converted from."""
    running = paddle.static.default_main_program() if program is None else program
    state = _programs.get(running) if isinstance(running, paddle.static.Program) else None
    if state is None:
        return feed, fetch_list
    is_list = isinstance(fetch_list, (list, tuple))
    return feed, [state.fetched(value) for value in fetch_list] if is_list else state.fetched(fetch_list)


class Rewrite:
    """Carries out the findings on one loss."""

    def __init__(self, analysis: Analysis, state: Rewritten, values: JointValues, micro_batches: int) -> None:
        self._analysis, self._state = analysis, state
        self._found, self._ranks = analysis.found, analysis.ranks
        self._uses: dict[tuple[int, int], list[Use]] = {}
        for use in self._found.uses:
            self._uses.setdefault((use.operand.operator.id(), use.operand.place), []).append(use)
        self._counts = Counts(analysis, values, set(state.joined), is_merged=micro_batches > 1)
        self._micro_batches = micro_batches

    @property
    def reads_ranks(self) -> bool:
        """Whether something is to be multiplied by the number of ranks."""
        found = self._found
        integers = any(use.is_joined and not is_float(use.operand.value) for use in found.uses)
        return bool(found.power or found.biases or integers or any(use.power for use in found.uses))

    def carry_out(self, loss: Any) -> JointLoss:
        """Returns what to derive gradients from."""
        self._counts.start()
        behind = {operator.id() for operator in self._analysis.behind}
        for operator in [each for each in loss.block.ops if each.id() in behind]:
            self._rewire(operator)
            for result in operator.results():
                if result.id in self._found.means and result.id not in self._state.replaced:
                    paddle.pir.set_insertion_point_after(operator)
                    self._replace(result, self._weighed(result, self._found.means[result.id]))
            if operator.id() in self._found.biases:
                self._divide_bias(operator)
            self._show(operator)
        target, power = self._current(loss), self._found.power
        paddle.pir.set_insertion_point_after(target.get_defining_op())
        if power:
            target = self._times(target, power)
        self._state.shown[loss.id] = (target, 0)
        if power > 0 and self._micro_batches > 1:
            target = scaled(target, float(self._micro_batches**power))
        return JointLoss(target, *self._counts.single(self._current), self._found)

    def _show(self, operator: Any) -> None:
        """Note what a script that fetches a result of ``operator`` gets, if that is of the joint batch."""
        reads_shown = any(value.id in self._state.shown for value in all_inputs_of(operator))
        for result in operator.results():
            degree = self._analysis.kind(result).degree
            if result.id in self._state.replaced or (
                is_float(result) and degree and (reads_shown or self._is_changed(operator))
            ):
                self._state.shown[result.id] = (self._current(result), degree or 0)

    def _is_changed(self, operator: Any) -> bool:
        return any((operator.id(), place) in self._uses for place in range(operator.num_operands()))

    def _current(self, value: Any) -> Any:
        return self._state.replaced.get(value.id, value)

    def _replace(self, old: Any, new: Any) -> None:
        self._state.replaced[old.id] = new
        self._state.known[new.id] = self._analysis.kind(old)

    def _rewire(self, operator: Any) -> None:
        """Let an operator read what it is to read."""
        for inner in nested_operators(operator) if operator.num_regions() else ():
            self._read(inner, operator)
        if self._read(operator, operator):
            paddle.pir.set_insertion_point_after(operator)
            self._clip(operator)

    def _read(self, operator: Any, before: Any) -> bool:
        """Insert what ``operator`` is to read, ``before`` it or the block it is in; whether it is a clip with other
        bounds."""
        has_bounds = False
        for index, value in enumerate(operator.operands_source()):
            uses = self._uses.get((operator.id(), index), [])
            if not value.initialized() or (not uses and value.id not in self._state.replaced):
                continue
            paddle.pir.set_insertion_point(before)
            new = self._current(value)
            for use in sorted(uses, key=lambda use: use.power):
                new = self._joined(use, new) if use.is_joined or use.back else new
            power = sum(use.power for use in uses)
            is_bound = index > 0 and short(operator) == "clip"
            operator.operand(index).set_source(self._times(new, power) if power and not is_bound else new)
            has_bounds |= is_bound and power != 0
        return has_bounds

    def _joined(self, use: Use, value: Any) -> Any:
        key = (use.operand.value.id, use.back, short(use.operand.operator) == "divide")
        if key not in self._state.joined:
            self._state.joined[key] = new = self._join(use, value)
            kind = self._analysis.kind(use.operand.value)
            self._state.known[new.id] = BatchKind(degree=kind.degree, learned=kind.learned, shared=kind.learned)
        return self._state.joined[key]

    def _join(self, use: Use, value: Any) -> Any:
        if self._ranks == 1:
            return value
        if use.back:
            return mean_with_gradient(value)
        if use.learned:
            return mean_over_ranks(value)
        divides = short(use.operand.operator) == "divide"
        mean = self._counts.mean(use.operand.value, value, divides=divides)
        return self._times(mean, 1).round().cast(value.dtype) if not is_float(value) else mean

    def _times(self, value: Any, power: int) -> Any:
        """``value`` times the number of ranks to a power; what is divided, by that of micro-batches as well."""
        if power < 0 and self._micro_batches > 1:
            value = scaled(value, float(self._micro_batches**power))
        return value if self._ranks == 1 else self._state.times_ranks(value, power)

    def _clip(self, operator: Any) -> None:
        """A clip whose bounds are of one degree with what it clips. It would read computed bounds on the host."""
        result, (value, *bounds) = operator.result(0), operator.operands_source()
        for choose, bound, index in zip((paddle.maximum, paddle.minimum), bounds, (1, 2), strict=True):
            given, uses = constant(bound), self._uses.get((operator.id(), index), [])
            if given is None or abs(given) < _NO_BOUND:
                bound = self._times(bound.cast(value.dtype).reshape([]), sum(use.power for use in uses))
                value = choose(value, bound)
        self._replace(result, value)

    def _divide_bias(self, operator: Any) -> None:
        """Let ``scale`` add to a number what is to be added to the mean over ranks of it."""
        degree = self._found.biases.pop(operator.id())
        result = operator.result(0)
        if result.id in self._state.replaced:
            return
        attributes, (value, factor) = operator.attrs(), operator.operands_source()
        paddle.pir.set_insertion_point_after(operator)
        bias = self._times(paddle.full([], attributes["bias"], value.dtype), -degree)
        if attributes["bias_after_scale"]:
            self._replace(result, paddle._C_ops.scale(value, factor, 0.0, True) + bias)
        else:
            self._replace(result, paddle._C_ops.scale(value + bias, factor, 0.0, True))

    def _weighed(self, mean: Any, roots: Sequence[Any]) -> Any:
        """A mean over samples, weighted by their number on this rank; 0 where there are none, unless all have none."""
        own = self._counts.number(roots)
        joint = self._counts.mean(own, own, divides=True)
        weight = (own / joint).cast(mean.dtype)
        none = (own == 0).cast("int64").reshape([1])
        choice = paddle.stack([mean, paddle.zeros_like(mean)])  # of a where, Paddle has no second derivative
        return paddle._C_ops.slice(choice, [0], none, none + 1, [-1], [0]) * weight


def say(found: Findings, job: Job, micro_batches: int) -> None:
    """Say what of a loss cannot be the joint batch's (with ``--strict`` an error), and what was taken to be so."""
    if found.assumed:
        notices = [f"{_line(operator)}: the constant is taken as {what}" for operator, what in found.assumed]
        log_once(notices, job.cluster.rank)
    if found.several and micro_batches > 1:
        lines = ", ".join(dict.fromkeys(map(_line, found.several)))
        job.advise(
            ConversionError(
                f"accumulate_steps: the loss is no sum over samples divided by one count ({lines}), so the gradient of "
                "all micro-batches' samples needs all their forward passes at once; each micro-batch is taken over the "
                "batches of all ranks, and micro-batches are averaged: leave accumulate_steps out, or accept it: "
                "average_over: ranks in the profile, --set average_over=ranks"
            )
        )
    if found.undecided:
        reasons: dict[str, list[str]] = {}
        for operator, reason in found.undecided:
            reasons.setdefault(reason, []).append(_line(operator))
        places = "; ".join(f"{reason}: {', '.join(dict.fromkeys(lines))}" for reason, lines in reasons.items())
        job.advise(
            ConversionError(
                f"the loss depends on the batch in a way that each rank computes with its own samples alone, not with "
                f"the joint batch ({places}); let samples meet those of all ranks, value = "
                "fleet.all_gather_samples(value), or accept it: average_over: ranks in the profile, "
                "--set average_over=ranks"
            )
        )


def _line(operator: Any) -> str:
    inside = nested_operators(operator) if operator.num_regions() else ()
    line = next(filter(None, map(line_of, (operator, *inside))), "")
    return f"{line}, {short(operator)}" if line else short(operator)
