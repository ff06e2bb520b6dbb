"""The random states of a process: Python's ``random``, ``np.random``, and generators of the script's own, as JSON."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_train.errors import CheckpointError, ConversionError

_WORDS, _ARRAY = "words", "array"
_MANY = 16
"""Tuples of more numbers are the words of a generator's state."""


@dataclass(frozen=True)
class _Stream:
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]


class RandomStates:
    """Python's ``random`` and ``np.random`` of this process, and ``given`` generators of numpy's or Python's classes.

    Raises ConversionError for anything else in ``given``.
    """

    def __init__(self, given: Sequence[Any] = ()) -> None:
        self._streams = [_stream(each) for each in (random, np.random, *given)]

    def read(self) -> list[Any]:
        """The states as JSON, about 4 kB for each Mersenne Twister, of which the first two are one each."""
        return [_as_json(stream.read()) for stream in self._streams]

    def write(self, states: Sequence[Any]) -> None:
        """Continue at states that were read. CheckpointError if they are those of other generators."""
        if len(states) != len(self._streams):
            raise CheckpointError(
                f"the checkpoint has the states of {len(states) - 2} generators of the script's own, and random= now "
                f"has {len(self._streams) - 2}; give those that were given when it was saved"
            )
        try:
            for stream, state in zip(self._streams, states, strict=True):
                stream.write(_from_json(state))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"a random state of the checkpoint does not fit: {error}; give random= the generators, in their order, "
                "that were given when it was saved"
            ) from error

    def seed(self, seed: int) -> None:
        """Begin all streams anew, each with a seed of its own made from this one (63 bits)."""
        for number, stream in enumerate(self._streams):
            stream.seed(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))


def _stream(given: Any) -> _Stream:
    if given is random or isinstance(given, random.Random):
        return _Stream(given.getstate, given.setstate, given.seed)
    if given is np.random or isinstance(given, np.random.RandomState):
        return _Stream(lambda: given.get_state(legacy=False), given.set_state, given.seed)
    if isinstance(given, np.random.Generator):
        bits = given.bit_generator

        def begin(seed: int) -> None:
            bits.state = type(bits)(seed).state

        return _Stream(lambda: bits.state, lambda state: setattr(bits, "state", state), begin)
    raise ConversionError(
        f"random= was given a {type(given).__name__}; it takes generators of np.random.default_rng(), "
        "np.random.RandomState and random.Random"
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {_ARRAY: _text(value.tobytes()), "dtype": value.dtype.str}
    if isinstance(value, tuple) and len(value) > _MANY:
        return {_WORDS: _text(np.array(value, "<u4").tobytes())}
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_as_json(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _WORDS in value:
            return tuple(np.frombuffer(base64.b64decode(value[_WORDS]), "<u4").tolist())
        if _ARRAY in value:
            return np.frombuffer(base64.b64decode(value[_ARRAY]), value["dtype"]).copy()
        return {name: _from_json(each) for name, each in value.items()}
    return [_from_json(each) for each in value] if isinstance(value, list) else value


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
