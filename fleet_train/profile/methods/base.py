"""What a compression is: one class that holds everything the package knows about it.

Reading a profile must not load numpy or Paddle, so the two parts that need them are in functions that a description
names: `Compression.on_ranks` and `Compression.in_numpy` import them when ranks are formed or simulated. A short
compression overrides these two methods instead and stays in one file.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from fleet_train.errors import ConversionError

if TYPE_CHECKING:
    import numpy as np


FLOAT_BYTES = 4
SCALE_BYTES = 4
ITEM_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True)
class Combination:
    """Whether two strategies may be combined in a profile. ``words``: how they work together, or why they cannot and
    what to do instead.
    """

    allowed: bool
    words: str


def goes(words: str) -> Combination:
    """Two strategies may be combined; ``words``: how they work together."""
    return Combination(True, words)


def refused(reason: str, instead: str) -> Combination:
    """Two strategies cannot be combined, for this reason; ``instead``: what to do."""
    return Combination(False, f"{reason}; {instead}")


NOT_WITH_LOCAL_SGD = refused(
    "LocalSGD sends gradients in its warm-up only, and a compression's error feedback would be lost at its end",
    "use local_sgd_dtype: bfloat16",
)


NOT_SHARDED = refused("every rank needs the whole sum to keep what was not sent", "use compression: bf16 or int8")
ROUNDED_FOR_OWNERS = goes("gradients are rounded on the way to the owners, who sum in float32")


@dataclass(frozen=True)
class TensorSpec:
    """One gradient: its parameter's name, its shape, its dtype's name. Its place in a list is its readiness.

    ``is_whole``: its update reads all of it at once, a norm for example, so that one rank owns all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_whole: bool = False
    rows: int = 0
    """Rows that a rank's step is planned to touch in an embedding's table of which rows are sent; 0 = sent whole."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        if self.dtype not in ITEM_BYTES:
            raise ConversionError(f"gradient of '{self.name}': dtype {self.dtype} cannot be communicated")
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class QuantisedSettings:
    """The settings of a quantised exchange."""

    bits: int
    block: int = 512
    """Elements that share a scale; a multiple of 32."""
    error_feedback: bool = True
    """Whether rounding errors are added to the next exchange."""
    stochastic: bool = False
    """Round up with the probability of the fractional part, so that the expected value is exact."""
    seed: int = 0

    @property
    def levels(self) -> int:
        """Integers on each side of zero."""
        return (1 << self.bits - 1) - 1

    @property
    def block_bytes(self) -> int:
        """The bytes of one block on the wire."""
        return self.block * self.bits // 8 + SCALE_BYTES

    def dither(self, name: str, member: int, phase: int, step: int) -> np.random.Generator:
        """Random numbers for one rounding; the same for the same arguments on every machine."""
        import numpy as np

        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode()), member, phase, step]))


@dataclass(frozen=True)
class CollectiveSpec:
    """One exchange over all ranks, the bytes of one rank's buffer and of one item.

    ``kind``: ``allreduce``, ``allgather``, ``alltoall`` (bytes for each other rank), or ``quantised``, a sum of float32
    that is sent as described by ``quantised``.
    """

    kind: str
    nbytes: int
    item_bytes: int
    between_item_bytes: int = 0
    """Bytes of an item between the leaders of a hierarchical allreduce; 0 = item_bytes."""
    flat: bool = False
    """Whether it goes over all ranks at once, even if the plan has local groups."""
    quantised: QuantisedSettings | None = None
    owners: int = 0
    """How many neighbours, the owners of a sharded optimizer, it stays among; 0 = it goes over all ranks."""
    copies: bool = False
    """Whether it goes instead between the ranks of all these groups that own the same."""


@dataclass(frozen=True)
class Piece:
    """What one rank owns of a bucket's gradient: ``rows`` rows from ``first`` on; 0 rows = all of it."""

    gradient: int
    first: int = 0
    rows: int = 0

    def of(self, gradient: TensorSpec) -> TensorSpec:
        """The piece of a gradient with its own name and shape."""
        return replace(gradient, shape=(self.rows, *gradient.shape[1:])) if self.rows else gradient


@dataclass(frozen=True)
class Bucket:
    """Gradients that are communicated together, in the order in which the backward pass finishes them."""

    index: int
    gradients: tuple[TensorSpec, ...]
    communicator: int
    algorithm: str = "allreduce"
    compression: str = "none"
    sent: tuple[CollectiveSpec, ...] = ()
    """The exchanges of a step once compression runs at full strength."""
    updated: tuple[CollectiveSpec, ...] = ()
    """The exchanges after the update of its parameters: the owners' new values."""
    shards: tuple[tuple[Piece, ...], ...] = ()
    """What each member of a group of owners has of it; empty without a sharded optimizer."""

    def owned_by(self, member: int) -> tuple[TensorSpec, ...]:
        """The gradients that a member gets, or their rows; all of them without a sharded optimizer."""
        if not self.shards:
            return self.gradients
        return tuple(piece.of(self.gradients[piece.gradient]) for piece in self.shards[member])

    @cached_property
    def part_elements(self) -> int:
        """Elements of the largest of the members' parts: those on each wire."""
        return max(sum(spec.elements for spec in self.owned_by(member)) for member in range(len(self.shards)))

    @property
    def dtype(self) -> str:
        return self.gradients[0].dtype

    @property
    def elements(self) -> int:
        return sum(gradient.elements for gradient in self.gradients)

    @cached_property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def handled_bytes(self) -> int:
        """What a rank copies of it in a step: of tables the planned rows."""
        return sum(sent.nbytes for sent in self.sent) if self.gradients[0].rows else self.nbytes

    @property
    def is_quantised(self) -> bool:
        """Whether it is sent quantised."""
        return any(sent.quantised is not None for sent in self.sent)

    def describe(self) -> str:
        first, last = self.gradients[0].name, self.gradients[-1].name
        names = first if first == last else f"{first} .. {last}"
        return f"bucket {self.index} ({names}, {self.nbytes / 2**20:.2f} MB)"


@dataclass(frozen=True)
class CodingCosts:
    """Seconds per byte of the float32 values exchanged, in addition to the link's: measured with all processors
    computing (``python tools/bench.py coding``). By default those of float32."""

    handing: float = 0.12e-9
    """Cost on the computing thread, before a bucket is passed to its communicator: copies."""
    codec: float = 0.05e-9
    """Cost on the communicators' threads: coding (quantised by compiled loops) and copies."""
    waiting: float = 3.5e-9
    """How much longer coding takes while computing: zero if enough processors are idle."""
    taken: float = 4e-9
    """How much longer the computing takes while values are coded."""


class NumpyReference(Protocol):
    """All ranks of one bucket in numpy, over all steps."""

    def step(self, gradients: Sequence[Sequence[Any]]) -> list[Any]:
        """``gradients[rank][position]``, arrays of the bucket's shapes -> the result on every rank, in its order and
        shapes."""
        ...


@dataclass(frozen=True)
class Family:
    """Compressions that are one strategy in a profile: what they may be combined with, and why not."""

    name: str
    title: str
    with_buckets: Combination
    """The combination with fused buckets, several communicators, waiting for each bucket."""
    with_local_groups: Combination
    """The combination with a hierarchical allreduce."""
    with_local_sgd: Combination
    """The combination with LocalSGD, with or without outer momentum."""
    with_sharding: Combination = NOT_SHARDED
    """The combination with a sharded optimizer."""
    reason: str = ""
    """How it is carried out: a sentence of the knob."""
    sources: str = ""


@dataclass(frozen=True)
class Compression:
    """One value of the knob ``compression``. To add one, write a subclass or an instance of one in a folder of
    ``fleet_train/compression/`` and list the folder in ``fleet_train/profile/methods/__init__.py``: the schema, the
    knob's text, the table of combinations, plans, prices, ranks, the simulator and the tests walk that list.
    """

    name: str
    words: str
    """What is sent of a gradient, for the knob's text."""
    family: Family | None = None
    """The family of strategies that it belongs to; None for the only one that is no strategy: all of a gradient."""
    knobs: type[BaseModel] | None = None
    """The compression's settings: knobs of the profile, with their texts."""
    wire_dtype: str = ""
    """The dtype on the wire; empty = the gradient's own. With local groups, only between their leaders."""
    has_error_feedback: bool = False
    """Whether what is not sent is kept and added later."""
    keeps_nan: bool = False
    """Whether a NaN of a gradient would stay in the kept state and be sent later."""
    short_warm_up: dict[str, int] = field(default_factory=dict)
    """The knobs of steps with whole gradients, and the number that shows them in a simulation."""
    on_purpose: str = ""
    """Why random gradients, in a simulation, are not averaged exactly."""
    costs: CodingCosts = CodingCosts()
    ranks_in: str = ""
    """``module:function`` of what a rank does with a bucket; see `on_ranks`."""
    numpy_in: str = ""
    """``module:function`` of the reference; see `in_numpy`."""

    def sent(
        self, bucket: Bucket, profile: Any, hierarchical: bool, step: int | None = None
    ) -> tuple[CollectiveSpec, ...]:
        """The exchanges of a bucket in a step (the first is 0), by default at full strength. ``hierarchical``: a
        hierarchical allreduce carries them."""
        raise NotImplementedError

    def on_streams(self, profile: Any) -> str:
        """What rank 0 says of these settings where collectives are enqueued on a device; empty: nothing."""
        del profile
        return ""

    def on_ranks(self, parts: Any) -> Any:
        """What averages a bucket on this rank: a `fleet_train.collectives.methods.dense.BucketMethod`. ``parts``: a
        `fleet_train.collectives.methods.registry.Parts`."""
        return _named(self.ranks_in)(parts)

    def in_numpy(self, parts: Any) -> NumpyReference:
        """The reference of all ranks. ``parts``: a `fleet_train.plan.simulate_methods.SimulatedParts`."""
        made: NumpyReference = _named(self.numpy_in)(parts)
        return made


def _named(name: str) -> Callable[[Any], Any]:
    module, _, attribute = name.partition(":")
    function: Callable[[Any], Any] = getattr(import_module(module), attribute)
    return function


# All of a gradient, in its own dtype or rounded to 16 bits.


IN_16_BITS = Family(
    "bf16",
    "bfloat16 on the wire",
    with_buckets=goes("each bucket is cast before it is sent and back after"),
    with_local_groups=goes("inside a local group float32, between the leaders half the bytes"),
    with_local_sgd=goes("concerns the warm-up; local_sgd_dtype is for the averaging"),
    with_sharding=ROUNDED_FOR_OWNERS,
    reason="bf16: summed in bfloat16; with a hierarchical allreduce between the leaders only. fp16 is NCCL's alone: "
    "Gloo's float16 sums are inf, so it is refused on CPU.",
)


class Dense(Compression):
    """One allreduce of a buffer with all gradients, in ``wire_dtype``."""

    def sent(
        self, bucket: Bucket, profile: Any, hierarchical: bool, step: int | None = None
    ) -> tuple[CollectiveSpec, ...]:
        del profile, step
        if not self.wire_dtype:
            return (CollectiveSpec("allreduce", bucket.nbytes, ITEM_BYTES[bucket.dtype]),)
        item_bytes = ITEM_BYTES[self.wire_dtype]
        if hierarchical:
            return (CollectiveSpec("allreduce", bucket.nbytes, ITEM_BYTES[bucket.dtype], item_bytes),)
        return (CollectiveSpec("allreduce", item_bytes * bucket.elements, item_bytes),)


def dense(name: str, words: str, wire_dtype: str = "", costs: CodingCosts | None = None) -> Compression:
    """The description of a dense exchange."""
    return Dense(
        name,
        words,
        family=IN_16_BITS if wire_dtype else None,
        wire_dtype=wire_dtype,
        costs=costs or CodingCosts(),
        ranks_in="fleet_train.collectives.methods.registry:dense",
        numpy_in="fleet_train.plan.simulate_methods:DenseSimulation",
    )


NONE = dense("none", "all of it")
BF16 = dense("bf16", "half the bits", "bfloat16", CodingCosts(0.09e-9, 0.6e-9, 5e-9, 3.8e-9))
FP16 = dense("fp16", "half the bits", "float16", CodingCosts(0.09e-9, 0.9e-9, 5e-9, 3.8e-9))
