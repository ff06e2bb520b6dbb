"""Rounding errors by parameter: saved and restored with a job's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from fleet_train.collectives.methods.base import unflatten
from fleet_train.collectives.methods.quantised_sum import QuantisedAllreduce
from fleet_train.collectives.paddle_compat.modes import dynamic_mode
from fleet_train.plan import TensorSpec


class KeptErrors:
    """The state of a `QuantisedAllreduce` whose buffer is the concatenation of ``values``."""

    own_state: tuple[str, ...] = (".error",)

    def __init__(self, kind: str, values: Sequence[TensorSpec], rounded: QuantisedAllreduce) -> None:
        self.kind = kind
        self._values = values
        self._rounded = rounded

    def state(self) -> dict[str, Any]:
        """``<first value's name>.sums``, the number of sums so far, and, with error feedback, ``<name>.error`` per
        value, [elements] float32, which differs between ranks."""
        with dynamic_mode(), paddle.no_grad():
            state = {f"{self._values[0].name}.sums": paddle.to_tensor([self._rounded.step], dtype="int64")}
            if self._rounded.keeps_back:
                parts = unflatten(self._rounded.owed, [[value.elements] for value in self._values])
                state |= {f"{v.name}.error": part.clone() for v, part in zip(self._values, parts, strict=True)}
            return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned; errors that are missing or of another size start as zero."""
        with dynamic_mode(), paddle.no_grad():
            sums = state.get(f"{self._values[0].name}.sums")
            parts = [_of_size(state.get(f"{value.name}.error"), value.elements) for value in self._values]
            self._rounded.take(paddle.concat(parts), int(sums.item()) if sums is not None and sums.numel() == 1 else 0)


def _of_size(error: Any, elements: int) -> Any:
    if error is None or error.numel() != elements:
        return paddle.zeros([elements], "float32")
    return error.reshape([-1])
