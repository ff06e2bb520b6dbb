"""Negative controls: faults that the model must find, so that finding none means something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_train.cluster import Cluster
from fleet_train.profile import Profile, load_profile
from tests.streams.old_code import EndsWhenComplete, OldEngine, OnlyReads, SideBySide, WithoutGroupRule
from tests.streams.played import MakeEngine
from tests.streams.programs import record, shortened
from tests.streams.replay import Found, replay
from tests.streams.tables import tables_of
from tests.streams.trace import Trace, mismatches, without_kernels

DEADLOCK, MISMATCH, NOTHING = "deadlock", "order mismatch", "nothing"


@dataclass(frozen=True)
class Control:
    """An engine under a profile of the catalogue (with ``settings``), and what must be found."""

    name: str
    engine: MakeEngine
    profile: str
    nodes: int = 2
    ranks_per_node: int = 1
    one_resident: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    expected: str = DEADLOCK

    def traces(self, steps: int) -> list[Trace]:
        profile = shortened(self.with_settings())
        return record(profile, Cluster.imagined(self.nodes, self.ranks_per_node), steps, self.engine)

    def with_settings(self) -> Profile:
        profile = load_profile(self.profile)
        return profile.with_settings("a control", **dict(self.settings)) if self.settings else profile


_HIERARCHY = (("use_hierarchical_allreduce", True),)

CONTROLS = (
    Control("old code, two communicators", OldEngine, "multi_node"),
    Control("old code, two communicators, 8 ranks", OldEngine, "multi_node", 8),
    Control("old code, one communicator", OldEngine, "one_communicator", expected=NOTHING),
    Control("old code, PowerSGD reads on the communicators' threads", OldEngine, "powersgd", 3),
    Control("old code, DGC reads on the communicators' threads", OldEngine, "dgc", 3),
    Control("reads alone, PowerSGD on the communicators' threads", OnlyReads, "powersgd", 3),
    Control("reads alone, DGC on the communicators' threads", OnlyReads, "dgc", 3),
    Control(
        "old code, statistics beside one communicator", OldEngine, "sync_batch_norm", settings=(("nccl_comm_num", 1),)
    ),
    Control("streams, two communicators in flight", SideBySide, "multi_node", one_resident=True),
    Control("the same, kernels always side by side", SideBySide, "multi_node", expected=NOTHING),
    Control(
        "streams, statistics on a group of their own",
        SideBySide,
        "sync_batch_norm",
        one_resident=True,
        settings=(("nccl_comm_num", 1),),
    ),
    Control("streams, PowerSGD's stages end when complete", EndsWhenComplete, "powersgd", 3, expected=MISMATCH),
    Control("streams, DGC's stages end when complete", EndsWhenComplete, "dgc", 3, expected=MISMATCH),
    Control(
        "streams, hierarchical stages end when complete",
        EndsWhenComplete,
        "hierarchical",
        2,
        2,
        True,
        expected=MISMATCH,
    ),
    Control(
        "streams, hierarchy with statistics, no rule for groups",
        WithoutGroupRule,
        "sync_batch_norm",
        2,
        2,
        True,
        _HIERARCHY,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """Of one control."""

    mismatches: list[str]
    found: Found
    ranks: int

    @property
    def what(self) -> str:
        if self.mismatches:
            return MISMATCH
        return DEADLOCK if self.found.deadlocks else NOTHING


def outcome(control: Control, interleavings: int, seed: int, steps: int = 4) -> Outcome:
    """Record the control's traces, and replay them unless their orders differ already."""
    traces = control.traces(steps)
    if found := mismatches(traces):
        return Outcome(found, Found(), len(traces))
    tables = tables_of([without_kernels(trace) for trace in traces])
    random = np.random.default_rng(seed)
    return Outcome([], replay(tables, interleavings, random, control.one_resident), len(traces))
