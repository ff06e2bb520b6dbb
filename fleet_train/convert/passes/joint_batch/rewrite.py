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
from fleet_train.convert.passes.exchanged import mean_over_ranks, mean_with_gradient
from fleet_train.convert.passes.joint_batch.analysis import Analysis
from fleet_train.convert.passes.joint_batch.counts import Counts
from fleet_train.convert.passes.joint_batch.kinds import Findings, Kind, Use, is_float, short
from fleet_train.convert.passes.program import line_of, nested_operators
from fleet_train.errors import ConversionError
from fleet_train.log import log_once


@dataclass
class Rewritten:
    """What is known of a program, whose losses may share values."""

    known: dict[int, Kind] = field(default_factory=dict)
    replaced: dict[int, Any] = field(default_factory=dict)
    """What operators behind a loss read instead of a value, by its id."""
    joined: dict[tuple[int, bool], Any] = field(default_factory=dict)
    """By the id of a value, and whether its gradient is averaged over the ranks."""


_programs: weakref.WeakKeyDictionary[Any, Rewritten] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class JointLoss:
    """A loss that was rewritten: its average over the ranks and, weighted by ``count``, over micro-batches is the joint
    batch's ``value``. ``count``: float64 [], what this micro-batch's loss is divided by on average; None: the same in
    each."""

    value: Any
    count: Any
    found: Findings


def take_over_ranks(loss: Any, job: Job, micro_batches: int) -> JointLoss:
    """Rewrite the operators behind ``loss`` in the current program, for so many micro-batches per update.

    Raises ConversionError for a loss that would need all of them at once.
    """
    program = loss.block.program
    state = _programs.setdefault(program, Rewritten())
    before = {operator.id() for operator in program.global_block().ops}
    analysis = Analysis(loss, job.world_size, job.world_size * micro_batches, state.known)
    rewrite = Rewrite(analysis, state, joint_values_of(program, job), micro_batches)
    joint = rewrite.carry_out(loss)
    for operator in program.global_block().ops:
        if operator.id() not in before:
            for result in operator.results():
                state.known.setdefault(result.id, Kind(degree=None))
    paddle.pir.reset_insertion_point_to_end()
    return joint


class Rewrite:
    """Carries out the findings on one loss."""

    def __init__(self, analysis: Analysis, state: Rewritten, values: JointValues, micro_batches: int) -> None:
        self._analysis, self._state = analysis, state
        self._found, self._ranks = analysis.found, analysis.ranks
        self._uses: dict[tuple[int, int], list[Use]] = {}
        for use in self._found.uses:
            self._uses.setdefault((use.operand.operator.id(), use.operand.place), []).append(use)
        self._counts = Counts(analysis, values, set(state.joined), is_merged=micro_batches > 1)

    def carry_out(self, loss: Any) -> JointLoss:
        """Returns what to derive gradients from."""
        self._counts.start()
        self._counts.refuse_several()
        behind = {operator.id() for operator in self._analysis.behind}
        for operator in [each for each in loss.block.ops if each.id() in behind]:
            self._rewire(operator)
            for result in operator.results():
                if result.id in self._found.means and result.id not in self._state.replaced:
                    paddle.pir.set_insertion_point_after(operator)
                    self._replace(result, self._weighed(result, self._found.means[result.id]))
            if operator.id() in self._found.biases:
                self._divide_bias(operator)
        target = self._current(loss)
        factor = float(self._analysis.shares**self._found.power)
        paddle.pir.set_insertion_point_after(target.get_defining_op())
        if factor != 1.0:
            target = scaled(target, factor)
        return JointLoss(target, self._counts.single(), self._found)

    def _current(self, value: Any) -> Any:
        return self._state.replaced.get(value.id, value)

    def _replace(self, old: Any, new: Any) -> None:
        self._state.replaced[old.id] = new
        self._state.known[new.id] = self._analysis.kind(old)

    def _rewire(self, operator: Any) -> None:
        """Let an operator read what it is to read."""
        for inner in nested_operators(operator) if operator.num_regions() else ():
            for index, value in enumerate(inner.operands_source()):
                if value.id in self._state.replaced:
                    inner.operand(index).set_source(self._current(value))
        for index, value in enumerate(operator.operands_source()):
            uses = self._uses.get((operator.id(), index), [])
            if not value.initialized() or (not uses and value.id not in self._state.replaced):
                continue
            paddle.pir.set_insertion_point(operator)
            new = self._current(value)
            for use in sorted(uses, key=lambda use: use.power):
                new = self._joined(use, new) if use.is_joined or use.back else new
            power = sum(use.power for use in uses)
            operator.operand(index).set_source(self._times(new, power) if power else new)

    def _joined(self, use: Use, value: Any) -> Any:
        key = (use.operand.value.id, use.back)
        if key not in self._state.joined:
            self._state.joined[key] = new = self._join(use, value)
            kind = self._analysis.kind(use.operand.value)
            self._state.known[new.id] = Kind(degree=kind.degree, learned=kind.learned, shared=kind.learned)
        return self._state.joined[key]

    def _join(self, use: Use, value: Any) -> Any:
        if self._ranks == 1:
            return value
        if use.back:
            return mean_with_gradient(value)
        if use.learned:
            return mean_over_ranks(value)
        mean = self._counts.mean(use.operand.value, value)
        return (mean * float(self._ranks)).round().cast(value.dtype) if not is_float(value) else mean

    def _times(self, value: Any, power: int) -> Any:
        """``value`` times the number of ranks to a power; of a constant another constant."""
        factor = float(self._ranks) ** power
        maker = value.get_defining_op()
        if maker is not None and maker.name() == "pd_op.full":
            attributes = maker.attrs()
            return paddle.full(list(value.shape), attributes["value"] * factor, value.dtype)
        return scaled(value, factor)

    def _divide_bias(self, operator: Any) -> None:
        """Let ``scale`` add to a number what is to be added to the mean over ranks of it."""
        degree = self._found.biases.pop(operator.id())
        result = operator.result(0)
        if result.id in self._state.replaced:
            return
        attributes, (value, factor) = operator.attrs(), operator.operands_source()
        bias = attributes["bias"] / float(self._ranks) ** degree
        paddle.pir.set_insertion_point_after(operator)
        if value.dtype == paddle.float64 and attributes["bias_after_scale"]:  # the attribute is a float32
            constant = paddle.full([], bias, value.dtype)
            self._replace(result, paddle._C_ops.scale(value, factor, 0.0, True) + constant)
        else:
            self._replace(result, paddle._C_ops.scale(value, factor, bias, attributes["bias_after_scale"]))

    def _weighed(self, mean: Any, roots: Sequence[Any]) -> Any:
        """A mean over samples, weighted by their number on this rank; 0 where there are none, unless all have none."""
        own = self._counts.number(roots)
        joint = self._counts.mean(own, own)
        weight = (own / joint).cast(mean.dtype)
        return paddle.where(own > 0, mean, paddle.zeros_like(mean)) * weight


def say(found: Findings, job: Job) -> None:
    """Say what of a loss cannot be the joint batch's (with ``--strict`` an error), and what was taken to be so."""
    if found.assumed:
        notices = [f"{_line(operator)}: the constant is taken as {what}" for operator, what in found.assumed]
        log_once(notices, job.cluster.rank)
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
    line = line_of(operator)
    return f"{line}, {short(operator)}" if line else short(operator)
