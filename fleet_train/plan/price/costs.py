"""Costs of communication in addition to the link's latency and bandwidth: seconds, measured on processors. Pure
data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Costs:
    """All zero by default: then a price is that of the link alone.

    Mappings go by compression (``none`` for float32); their seconds are per byte of the float32 values exchanged.
    """

    collective_seconds: float = 0.0
    """Per collective of a step: waking its threads, filling and draining its pipeline. Collectives on other
    communicators use the link meanwhile."""
    bucket_seconds: float = 0.0
    """Per bucket on the computing thread: the host operators that start it and wait for it."""
    handing_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """On the computing thread, before a bucket is passed to its communicator: copies, DGC's momentum."""
    codec_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """On the communicators' threads, in addition to the link's time: coding (quantised by compiled loops) and
    copies."""
    waiting_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """How much longer that takes while computing: zero if enough processors are idle."""
    taken_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """How much longer the concurrent computing takes."""
    averaging_seconds_per_byte: float = 0.0
    """For averaged parameters, on the computing thread: copies, the outer step, applying the mean."""

    @property
    def share_processors(self) -> bool:
        """Whether exchanging and computing slow one another down."""
        return any(self.taken_seconds_per_byte.values()) or any(self.waiting_seconds_per_byte.values())

    def handing(self, compression: str) -> float:
        """Seconds per byte on the computing thread."""
        return self.handing_seconds_per_byte.get(compression, 0.0)

    def codec(self, compression: str) -> float:
        """Seconds per byte on a communicator's thread."""
        return self.codec_seconds_per_byte.get(compression, 0.0)

    def waiting(self, compression: str) -> float:
        """Additional seconds per byte on a communicator's thread while computing."""
        return self.waiting_seconds_per_byte.get(compression, 0.0)

    def taken(self, compression: str) -> float:
        """Additional seconds per byte of the concurrent computing."""
        return self.taken_seconds_per_byte.get(compression, 0.0)


NOTHING = Costs()
TYPICAL = Costs(
    collective_seconds=5e-4,
    bucket_seconds=2.5e-4,
    handing_seconds_per_byte={
        "none": 0.12e-9,
        "bf16": 0.09e-9,
        "fp16": 0.09e-9,
        "int8": 0.12e-9,
        "int4": 0.12e-9,
        "powersgd": 0.13e-9,
        "dgc": 0.25e-9,
    },
    codec_seconds_per_byte={
        "none": 0.05e-9,
        "bf16": 0.6e-9,
        "fp16": 0.9e-9,
        "int8": 0.8e-9,
        "int4": 0.4e-9,
        "powersgd": 1.2e-9,
        "dgc": 2.4e-9,
    },
    waiting_seconds_per_byte={
        "none": 3.5e-9,
        "bf16": 5e-9,
        "fp16": 5e-9,
        "int8": 2e-9,
        "int4": 2e-9,
        "powersgd": 5.5e-9,
        "dgc": 7e-9,
    },
    taken_seconds_per_byte={
        "none": 4e-9,
        "bf16": 3.8e-9,
        "fp16": 3.8e-9,
        "int8": 0.8e-9,
        "int4": 1.1e-9,
        "powersgd": 2.8e-9,
        "dgc": 3.7e-9,
    },
    averaging_seconds_per_byte=2e-9,
)
"""Paddle's Gloo with all processors computing: measured by `recommend` in the lab, two ranks on two cores of a 2020s
server. tools/bench_prediction.py compares what such costs predict."""
ENQUEUED = replace(TYPICAL, waiting_seconds_per_byte={}, taken_seconds_per_byte={})
"""For collectives enqueued on a device's streams: how much they slow its computing is unknown."""
