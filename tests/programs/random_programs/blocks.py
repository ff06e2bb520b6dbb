"""What random programs are made of: functions from a value to a value, by the kind of value that they take.

A vector is [batch, n], a sequence [batch, steps, n], an image [batch, channels, height, width]. To add a block, add a
function; its decorator says what it takes, and what it needs of the case. Each sample is computed on its own (but for
batch norm), so that shares of a batch are shares of its loss. Imports Paddle, not fleet_train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from tests.programs.catalogue import classes, floats, tokens
from tests.programs.script import Script

VECTOR, SEQUENCE, IMAGE = "vector", "sequence", "image"


@dataclass(frozen=True)
class Block:
    """``kind`` is what it takes; ``needs``: of `draw`, what the case must have for it."""

    name: str
    kind: str
    build: Callable[[Builder, Any], Any]
    needs: frozenset[str] = frozenset()


BLOCKS: dict[str, Block] = {}


def block(kind: str, *needs: str) -> Callable[[Callable[[Builder, Any], Any]], Callable[[Builder, Any], Any]]:
    """Register the decorated function. ``needs``: ``sync`` (the profile synchronises batch norm), ``named`` (it uses a
    parameter by name in two places, so the reference sums), ``float32`` (Paddle has no float64 kernel)."""

    def register(build: Callable[[Builder, Any], Any]) -> Callable[[Builder, Any], Any]:
        assert build.__name__ not in BLOCKS, f"two blocks are called {build.__name__}"
        BLOCKS[build.__name__] = Block(build.__name__, kind, build, frozenset(needs))
        return build

    return register


class Builder:
    """Layers and inputs of one program, and the numbers that its blocks draw: the same ones wherever it is built."""

    def __init__(self, script: Script, seed: int, dtype: str, has_bias: bool) -> None:
        self.random = np.random.default_rng([seed, 1])
        self.dtype, self.has_bias = dtype, has_bias
        self._script, self._named = script, 0

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def name(self, stem: str) -> str:
        """A name that no other parameter or input of the program has."""
        self._named += 1
        return f"{stem}_{self._named}"

    def floats(self, *shape: int) -> Any:
        return self._input("floats", floats(*shape, dtype=self.dtype))

    def tokens(self, vocabulary: int, length: int) -> Any:
        return self._input("tokens", tokens(vocabulary, length))

    def classes(self, number: int) -> Any:
        return self._input("classes", classes(number))

    def _input(self, stem: str, one: Any) -> Any:
        return self._script.inputs(**{self.name(stem): one})[0]

    def linear(self, width_in: int, width_out: int, **given: Any) -> Any:
        return paddle.nn.Linear(width_in, width_out, **({"bias_attr": self.bias} | given))

    @property
    def bias(self) -> bool | None:
        """As ``bias_attr``: optimizers that read only a gradient's sign cannot have one that is rounding noise."""
        return None if self.has_bias else False

    def detach(self, value: Any) -> Any:
        """For a value that is used beside its detached alias, whose memory plain Paddle 3.3.1 overwrites: the reference
        has a copy."""
        return value.detach() * 1.0 if self._script.ranks == 1 else value.detach()

    def parameter(self, shape: list[int], value: float | None = None, **attributes: Any) -> Any:
        start = paddle.nn.initializer.Constant(value) if value is not None else paddle.nn.initializer.Uniform(-0.5, 0.5)
        attr = paddle.ParamAttr(name=self.name("made"), initializer=start, **attributes)
        return paddle.create_parameter(shape, self.dtype, attr=attr)


def width(h: Any) -> int:
    return int(h.shape[-1])
