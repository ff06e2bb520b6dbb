"""The communication plan: what is sent in one step, decided before Paddle is touched. Data and nothing else."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from fleet_train.errors import ConversionError

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
class Gradient:
    """One gradient: its parameter's name, its shape, its dtype's name. Its place in a list is its readiness."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        if self.dtype not in ITEM_BYTES:
            raise ConversionError(f"gradient of '{self.name}': dtype {self.dtype} cannot be communicated")
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Sent:
    """One collective over all ranks: ``allreduce`` or ``allgather``, the bytes of one rank's buffer and of one item."""

    kind: str
    nbytes: int
    item_bytes: int
    between_item_bytes: int = 0
    """Bytes of an item between the leaders of a hierarchical allreduce; 0 = item_bytes."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are communicated together, in the order in which the backward pass finishes them."""

    index: int
    gradients: tuple[Gradient, ...]
    communicator: int
    algorithm: str = "allreduce"
    compression: str = "none"
    sent: tuple[Sent, ...] = ()
    """What is sent in a step once compression runs at full strength."""

    @property
    def dtype(self) -> str:
        return self.gradients[0].dtype

    @property
    def elements(self) -> int:
        return sum(gradient.elements for gradient in self.gradients)

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    def describe(self) -> str:
        first, last = self.gradients[0].name, self.gradients[-1].name
        names = first if first == last else f"{first} .. {last}"
        return f"bucket {self.index} ({names}, {self.nbytes / 2**20:.2f} MB)"


@dataclass(frozen=True)
class Averaging:
    """LocalSGD: which parameters are averaged instead of gradients after the warm-up, and how often."""

    values: tuple[Gradient, ...]
    warm_steps: int
    period: int
    """Steps of a period: the constant one, or the longest of a doubling schedule, or the first of an adaptive one."""
    schedule: str
    wire_dtype: str
    outer_optimizer: str

    @property
    def wire_bytes(self) -> int:
        """Bytes of one rank's values as they are sent."""
        return sum(value.elements for value in self.values) * ITEM_BYTES[self.wire_dtype]


@dataclass(frozen=True)
class Note:
    """One line of explanation: what a knob did to this plan."""

    knob: str
    effect: str


@dataclass(frozen=True)
class CommPlan:
    """What every rank communicates in one step, and why."""

    world_size: int
    node_num: int
    communicators: int
    buckets: tuple[Bucket, ...]
    team_size: int = 0
    """Hierarchical allreduce: ranks per team; 0 = flat."""
    averaging: Averaging | None = None
    accumulate_steps: int = 1
    """Micro-batches per update; the numbers of this plan are per update."""
    profile_name: str = ""
    profile_digest: str = ""
    notes: tuple[Note, ...] = ()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of one rank."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def sent_bytes_per_step(self) -> float:
        """Bytes that each rank sends per step in flat ring allreduces; LocalSGD: mean of a period after warm-up."""
        if self.averaging is not None:
            return ring_bytes(self.averaging.wire_bytes, self.world_size) / self.averaging.period
        return sum(
            (self.world_size - 1) * sent.nbytes
            if sent.kind == "allgather"
            else ring_bytes(sent.nbytes, self.world_size)
            for bucket in self.buckets
            for sent in bucket.sent
        )

    @property
    def collectives_per_step(self) -> int:
        return len(self.buckets) if self.world_size > 1 else 0

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that must be equal on every rank: everything but the explanations."""
        content = self.to_json()
        del content["notes"], content["profile_name"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and texts."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content


def ring_bytes(nbytes: float, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends in a ring allreduce of ``nbytes``: 2 (N - 1) / N of them.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    return 2 * (ranks - 1) / ranks * nbytes


def first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Where two plans (as ``to_json`` gives them) part first, in words; None when they are equal.

    Shown to the user as ``<here> here, <there> there``.
    """
    for key in ("world_size", "node_num", "communicators", "team_size", "profile_digest"):
        if ours[key] != theirs[key]:
            return f"{key} is {ours[key]} here, {theirs[key]} there"
    for one, other in zip(_flat(ours), _flat(theirs), strict=False):
        if one != other:
            return f"{_say(one)} here, {_say(other)} there"
    if len(_flat(ours)) != len(_flat(theirs)):
        longer, where = (ours, "here") if len(_flat(ours)) > len(_flat(theirs)) else (theirs, "there")
        extra = _flat(longer)[min(len(_flat(ours)), len(_flat(theirs)))]
        return f"{_say(extra)} {where} only"
    return None


def _flat(plan: dict[str, Any]) -> list[tuple[int, str, tuple[int, ...], str, int, str]]:
    return [
        (
            bucket["index"],
            gradient["name"],
            tuple(gradient["shape"]),
            gradient["dtype"],
            bucket["communicator"],
            bucket["algorithm"],
        )
        for bucket in plan["buckets"]
        for gradient in bucket["gradients"]
    ]


def _say(item: tuple[int, str, tuple[int, ...], str, int, str]) -> str:
    bucket, name, shape, dtype, communicator, algorithm = item
    return f"'{name}' {list(shape)} {dtype} in bucket {bucket} ({algorithm}, communicator {communicator})"
