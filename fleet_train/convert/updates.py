"""Where and by whom the parameters of a program's buckets are updated, once their gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fleet_train.convert.embeddings import update_rows
from fleet_train.convert.planning import ReadyGradient
from fleet_train.plan import Bucket, CommPlan

Pairs = list[tuple[Any, Any]]
"""Parameters with their averaged gradients; with indices and values (a tuple) where only rows are updated."""
UpdateOfPairs = Callable[[Pairs], Any]
"""Inserts the optimizer's update of these pairs; returns its operators."""


class BucketUpdates:
    """Every rank updates all parameters, behind the backward pass. A sharded optimizer does otherwise: `OwnersUpdate`.

    ``ready``: the gradients in the order of the plan. Tokens put communicating operators into one order: methods that
    insert some take the last one, and return the next.
    """

    def __init__(self, inner: Any, ready: Sequence[ReadyGradient]) -> None:
        self._inner = inner
        self._parameters = {item.parameter.name: item.parameter for item in ready}

    def in_turn(self, plan: CommPlan) -> Sequence[Bucket]:
        """The plan's buckets in the order of their updates."""
        return plan.buckets

    def overlap(self, operators: Sequence[Any], plan: CommPlan) -> None:
        """Called if buckets are updated one by one, with the ``operators`` of the main block, all launches included."""

    def go_to(self, bucket: Bucket) -> None:
        """Move the insertion point to the place of a bucket's update."""

    def pairs(self, bucket: Bucket, gradients: Sequence[Any]) -> Pairs:
        """What this rank updates of a bucket, with its averaged gradients."""
        parameters = [self._parameters[gradient.name] for gradient in bucket.gradients]
        return list(zip(parameters, gradients, strict=True))

    def update(
        self, pairs: Pairs, update: UpdateOfPairs, scale: Any, checks: bool, chain: Any
    ) -> tuple[list[Any], Pairs, Any]:
        """Insert the update of ``pairs``; returns its operators, the pairs as they were updated, and the next token.

        ``scale``: the loss scale that is still in the gradients; ``checks``: whether something looks for NaN in them.
        """
        del scale, checks
        whole = [(parameter, value) for parameter, value in pairs if not isinstance(value, tuple)]
        rows = [(parameter, *value) for parameter, value in pairs if isinstance(value, tuple)]
        operators = update(whole) if whole else []
        return operators or [], [*whole, *(update_rows(self._inner, *each) for each in rows)], chain

    def share(self, buckets: Sequence[Bucket], chain: Any) -> Any:
        """Insert what starts sending the new parameters of ``buckets`` to ranks that have not updated them."""
        del buckets
        return chain

    def fill(self, buckets: Sequence[Bucket], chain: Any) -> Any:
        """Insert what waits for the new parameters of other ranks."""
        del buckets
        return chain

    def sum_over_owners(self) -> Callable[[Any], Any] | None:
        """What inserts the sum of a value over the ranks that each update a part; None if every rank updates all."""
        return None
