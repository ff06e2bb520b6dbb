"""The communication plan: what is sent in one step, decided before Paddle is used. Pure data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from fleet_train.plan.phases import CollectivePhase, phases_of, sent_by_rank
from fleet_train.profile.methods.base import ITEM_BYTES, Bucket, CollectiveSpec, QuantisedSettings, TensorSpec

MEGABYTE = 2**20

MEAN_DTYPES = ("float32", "float64")
"""The dtypes in which LocalSGD computes means, in the order of its exchanges."""


def mean_dtype(dtype: str) -> str:
    """The dtype in which the mean of values of ``dtype`` is computed: float64 for float64, float32 for the rest."""
    return "float64" if dtype == "float64" else "float32"


def by_mean_dtype(dtypes: Sequence[str]) -> dict[str, list[int]]:
    """Positions of values of these dtypes, by the dtype in which their mean is computed; in the order of exchanges."""
    means = [mean_dtype(dtype) for dtype in dtypes]
    return {name: [i for i, own in enumerate(means) if own == name] for name in MEAN_DTYPES if name in means}


@dataclass(frozen=True)
class Averaging:
    """LocalSGD: what is averaged instead of gradients after the warm-up, and how often."""

    values: tuple[TensorSpec, ...]
    """The parameters."""
    statistics: tuple[TensorSpec, ...]
    """Running means and variances: averaged uncompressed, whatever the format of the parameters."""
    state_values_per_parameter: int
    """Values of the optimizer's state that are averaged with each value of a parameter (``local_sgd_momentum``)."""
    warm_steps: int
    period: int
    """Steps of a period: constant, or the longest of a doubling schedule, or the first of an adaptive one."""
    schedule: str
    wire_dtype: str
    outer_optimizer: str
    overlap_steps: int = 0
    """Local steps of the next period that an averaging overlaps; 0 = the ranks wait for it."""
    quantised: QuantisedSettings | None = None
    """How the parameters' differences are quantised; None = sent in ``wire_dtype``."""
    fragments: tuple[tuple[int, ...], ...] = ()
    """Positions of the values of each fragment; empty = all at once."""

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The fragments, even if there is only one."""
        return self.fragments or (tuple(range(len(self.values))),)

    @property
    def compression(self) -> str:
        """How the parameters are sent, by the name of a compression; ``none`` for their own dtype."""
        return f"int{self.quantised.bits}" if self.quantised else "bf16" if self.wire_dtype == "bfloat16" else "none"

    def bytes_of(self, part: int) -> int:
        """The values of one fragment, as they are in memory."""
        return sum(self.values[position].nbytes for position in self.parts[part])

    @property
    def sent(self) -> tuple[CollectiveSpec, ...]:
        """The exchanges of a period: of one averaging, or of one averaging of each fragment."""
        return tuple(sent for part in range(len(self.parts)) for sent in self.collectives_of(part))

    def collectives_of(self, part: int) -> tuple[CollectiveSpec, ...]:
        """The exchanges of one fragment's averaging; statistics, loss and the optimizer's state are sent with the
        last."""
        trained, others = _elements([self.values[i] for i in self.parts[part]]), _elements(self.statistics)
        if part != len(self.parts) - 1:
            others = {}
        state = {dtype: elements * self.state_values_per_parameter for dtype, elements in trained.items()}
        loss = {"float32": 1} if self.schedule == "adaptive" else {}
        in_16_bits = self.wire_dtype == "bfloat16"
        parts = [("bfloat16" if in_16_bits else dtype, elements) for dtype, elements in trained.items()]
        rounded = [
            CollectiveSpec("quantised", 4 * n, 4, quantised=self.quantised) for n in trained.values() if self.quantised
        ]
        whole = [] if rounded else parts
        whole += [part for table in (others, state, loss) for part in table.items()]
        return (
            *rounded,
            *(CollectiveSpec("allreduce", n * ITEM_BYTES[dtype], ITEM_BYTES[dtype]) for dtype, n in whole if n),
        )


def _elements(values: Sequence[TensorSpec]) -> dict[str, int]:
    """The number of averaged elements, by the dtype of the mean."""
    groups = by_mean_dtype([value.dtype for value in values])
    return {dtype: sum(values[i].elements for i in positions) for dtype, positions in groups.items()}


@dataclass(frozen=True)
class Note:
    """One line of explanation: the effect of a knob on this plan."""

    knob: str
    effect: str


@dataclass(frozen=True)
class CommPlan:
    """What every rank communicates in one step, and why."""

    world_size: int
    node_num: int
    communicators: int
    buckets: tuple[Bucket, ...]
    group_size: int = 0
    """Hierarchical allreduce: ranks per local group; 0 = flat."""
    averaging: Averaging | None = None
    owners: int = 0
    """Sharded optimizer: neighbouring ranks that share one copy of its state; 0 = every rank has all of it."""
    state_values: int = 0
    """Values of the optimizer's state for each value of a parameter."""
    accumulate_steps: int = 1
    """Micro-batches per update; the numbers of this plan are per update."""
    waits_for_each: bool = False
    """``sync_nccl_allreduce``: a bucket is waited for before the next operator starts."""
    overlaps_next_step: bool = False
    """``overlap_next_step``: buckets are waited for in the next step, before the first use of their parameters."""
    statistics: tuple[CollectiveSpec, ...] = ()
    """The exchanges of one forward and backward pass, which overlap nothing: of synchronised batch norm, of samples
    (the bytes of one where their number is unknown) and of other values of all ranks."""
    profile_name: str = ""
    profile_digest: str = ""
    chosen: str = ""
    """The settings that were open and were chosen by price, as lines of a profile separated by commas: written into a
    profile, they give the same plan."""
    notes: tuple[Note, ...] = ()

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients of one rank."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def exchanges(self, warm_up: bool = False) -> tuple[CollectiveSpec, ...]:
        """What all ranks exchange in an update that synchronises, in order: in an averaging of LocalSGD, or, with
        ``warm_up`` and without LocalSGD, in an update with averaged gradients."""
        if self.averaging is not None and not warm_up:
            return self.averaging.sent
        gradients = [sent for bucket in self.buckets for sent in bucket.sent]
        parameters = [sent for bucket in self.buckets for sent in bucket.updated]
        return (*self.statistics * self.accumulate_steps, *gradients, *parameters)

    @property
    def is_quantised(self) -> bool:
        """Whether anything is sent quantised."""
        averages = self.averaging is not None and self.averaging.quantised is not None
        return averages or any(bucket.is_quantised for bucket in self.buckets)

    def phases(self, warm_up: bool = False) -> list[CollectivePhase]:
        """The collectives of `exchanges`, one after the other."""
        return [
            phase for sent in self.exchanges(warm_up) for phase in phases_of(self.world_size, self.group_size, sent)
        ]

    def sent_by_rank(self, warm_up: bool = False) -> tuple[float, ...]:
        """Payload bytes that each rank sends per update; LocalSGD: the mean of a period after the warm-up."""
        share = 1 / self.averaging.period if self.averaging is not None and not warm_up else 1.0
        return tuple(nbytes * share for nbytes in sent_by_rank(self.phases(warm_up), self.world_size))

    @property
    def sent_bytes_per_step(self) -> float:
        """The bytes of the rank that sends most: see `sent_by_rank`."""
        return max(self.sent_by_rank())

    @property
    def collectives_per_step(self) -> int:
        """Collectives that a rank takes part in, at most, in an update that synchronises."""
        return len(self.phases()) if self.world_size > 1 else 0

    @cached_property
    def digest(self) -> str:
        """Hex digest of everything that must be equal on every rank: all except the explanations."""
        content = self.to_json()
        del content["notes"], content["profile_name"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content


def first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first difference of two plans (from ``to_json``), in words; None if they are equal.

    Shown to the user as ``<here> here, <there> there``.
    """
    for key in ("world_size", "node_num"):
        if ours[key] != theirs[key]:
            return f"{key} is {ours[key]} here, {theirs[key]} there"
    # Different gradients may be in other buckets and on other communicators.
    for here, there in zip(_flat(ours), _flat(theirs), strict=False):
        if here[1:4] != there[1:4]:
            return f"{_describe(here)} here, {_describe(there)} there"
    if len(_flat(ours)) != len(_flat(theirs)):
        longer, where = (ours, "here") if len(_flat(ours)) > len(_flat(theirs)) else (theirs, "there")
        extra = _flat(longer)[min(len(_flat(ours)), len(_flat(theirs)))]
        return f"{_describe(extra)} {where} only"
    for key in ("communicators", "group_size", "owners", "accumulate_steps", "profile_digest"):
        if ours[key] != theirs[key]:
            return f"{key} is {ours[key]} here, {theirs[key]} there"
    for here, there in zip(_flat(ours), _flat(theirs), strict=True):
        if here != there:
            return f"{_describe(here)} here, {_describe(there)} there"
    for key, what in (("statistics", "exchanges inside the passes"), ("averaging", "what LocalSGD averages")):
        if ours[key] != theirs[key]:
            return f"{what}: {_short(ours[key])} here, {_short(theirs[key])} there"
    return None


def _short(part: Any) -> str:
    """A part of a plan in a few words: the number of items; --json shows the rest."""
    return f"{len(part)} of {sum(item['nbytes'] for item in part)} bytes" if isinstance(part, list) else _averaged(part)


def _averaged(part: dict[str, Any] | None) -> str:
    if part is None:
        return "nothing"
    state = part["state_values_per_parameter"]
    return (
        f"{len(part['values'])} parameters, {len(part['statistics'])} statistics and {state} values of the optimizer's "
        f"state per parameter, every {part['period']} steps"
    )


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


def _describe(item: tuple[int, str, tuple[int, ...], str, int, str]) -> str:
    bucket, name, shape, dtype, communicator, algorithm = item
    return f"'{name}' {list(shape)} {dtype} in bucket {bucket} ({algorithm}, communicator {communicator})"
