"""``fleet.even_batches``: ranks whose data are of unequal length end an epoch together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from fleet_train import fleet
from fleet_train.convert.planning import dtype_name
from fleet_train.convert.program_state import statistics_of
from fleet_train.errors import ConversionError, DataError
from fleet_train.log import log_once


def even_batches(loader: Iterable[Any], valid: str | None = None) -> Iterator[Any]:
    """The batches of an epoch, as many on every rank, whatever each rank's ``loader`` has; all ranks call it.

    Without ``valid`` the epoch ends for all with the first rank that has no more batch: what the others have left is
    not trained in this epoch.

    With it, it ends with the last one, and every batch is trained once: ``valid`` names an input of the program, by
    which the loss is weighted, and that this function feeds. It is 1 for each sample; a rank that has no more batch
    gets its last one again, with 0. The loss then has to divide by its sum over the batch, which is taken over all
    ranks, so that the step is that of the joint batch without these copies::

        valid = paddle.static.data("valid", [None, 1], "float32")
        loss = (cost * valid).sum() / valid.sum()  # cost: [batch, 1]
        for batch in fleet.even_batches(loader, valid="valid"):
            exe.run(fleet.main_program, feed=batch, fetch_list=[loss])

    Batches are then dicts of arrays with the samples first. If every rank's loader has a length, the ranks exchange
    one message in an epoch, otherwise one before each batch.

    Raises DataError where a rank has no batch at all to copy, ConversionError where copies would count: with
    ``average_over`` other than ``samples``, LocalSGD, gradient merge, batch norm, or without such an input.
    """
    weights = None if valid is None else _Weights(valid)
    batches, own = iter(loader), None
    with suppress(TypeError):
        own = len(loader)  # type: ignore[arg-type]
    lengths = fleet.gather(own)
    if all(each is not None for each in lengths):
        steps = (min if weights is None else max)(lengths)
        _say_left(lengths, is_cut=weights is None)
        presence = ([number < length for length in lengths] for number in range(steps))
        return _drawn(batches, presence, weights)
    return _agreed(batches, weights)


def _drawn(batches: Iterator[Any], presence: Iterable[list[bool]], weights: _Weights | None) -> Iterator[Any]:
    rank = fleet.worker_index()
    for here in presence:
        batch = next(batches, None) if here[rank] else None
        yield batch if weights is None else weights.joined(batch, here)


def _agreed(batches: Iterator[Any], weights: _Weights | None) -> Iterator[Any]:
    while True:
        batch = next(batches, None)
        here = fleet.gather(batch is not None)
        if not any(here) or (weights is None and not all(here)):
            _say_left(here, is_cut=any(here))
            return
        yield batch if weights is None else weights.joined(batch, here)


def _say_left(lengths: list[Any], is_cut: bool) -> None:
    if is_cut and min(lengths) < max(lengths):
        short = ", ".join(str(rank) for rank, length in enumerate(lengths) if length == min(lengths))
        log_once(
            [
                f"fleet.even_batches: rank {short} has fewer batches than others, whose rest is left out of each "
                "epoch; valid= trains it, too"
            ],
            fleet.worker_index(),
        )


class _Weights:
    """The input of the program that is 1 for samples that count. Raises ConversionError where copies would count."""

    def __init__(self, name: str) -> None:
        program, profile = fleet.main_program, fleet.profile()
        inputs = {
            operator.attrs()["name"]: operator.result(0)
            for operator in program.global_block().ops
            if operator.name() == "pd_op.data"
        }
        if name not in inputs:
            known = ", ".join(sorted(each for each in inputs if not inputs[each].persistable))
            raise ConversionError(
                f"fleet.even_batches(valid={name!r}): the program has no input of this name, only {known}; make one "
                f'with paddle.static.data("{name}", [None, 1], "float32") and weight the loss by it'
            )
        problem = ""
        if fleet.worker_num() > 1:
            if profile.use_local_sgd:
                problem = "in LocalSGD's local steps a rank's loss is its own batch's, of copies alone"
            elif profile.accumulate_steps > 1:
                problem = "gradient merge may count a micro-batch of copies like any other"
            elif profile.average_over != "samples":
                problem = f"average_over: {profile.average_over} counts a batch of copies like any other"
        if not problem and statistics_of(program):
            problem = "batch norm's statistics would be taken over copies, too"
        if problem:
            raise ConversionError(
                f"fleet.even_batches(valid={name!r}): {problem}; leave valid= out, which ends the epoch with the first "
                "rank that has no more batch"
            )
        self._name, self._rank = name, fleet.worker_index()
        self._trailing = len(inputs[name].shape) - 1
        self._dtype = np.dtype(dtype_name(inputs[name].dtype).lower())
        self._last: dict[str, Any] | None = None

    def joined(self, batch: Any, here: list[bool]) -> dict[str, Any]:
        """The batch with weights 1; without a batch the last one, with weights 0. ``here``: which ranks have one."""
        if batch is not None:
            if not isinstance(batch, Mapping):
                raise ConversionError(
                    f"fleet.even_batches(valid={self._name!r}): a batch is a {type(batch).__name__}; it takes dicts of "
                    "arrays, as feeds are"
                )
            self._last = dict(batch)
        if self._last is None:
            empty = [rank for rank, has_one in enumerate(here) if not has_one]
            raise DataError(
                f"rank {self._rank} (of {empty} without a batch now) has no batch at all, so none that it could feed "
                "with the weight 0; give it one sample"
            )
        rows = {np.shape(value)[0] for value in self._last.values()}
        if len(rows) > 1:
            raise ConversionError(
                f"fleet.even_batches(valid={self._name!r}): the arrays of a batch have {sorted(rows)} rows, and which "
                "of them are samples is not known; give arrays with the samples first"
            )
        weights = np.full([*rows, *[1] * self._trailing], batch is not None, self._dtype)
        return {**self._last, self._name: weights}
