"""What a training keeps beside the variables of its scope, and which training a program goes on with.

A program that runs in two scopes trains two networks, and a run of the startup program begins a training anew. Whatever
a method, an averaging or a comparison remembers from step to step is in objects that are made for one training, and a
new training gets new ones, as in a new process: nothing has to be listed here, set back or copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleet_train.collectives.averaging import ParameterAverager, RankAveraging
from fleet_train.collectives.engine import Engine, HostCopy
from fleet_train.collectives.methods.dense import BucketMethod
from fleet_train.collectives.methods.rows import HostRows, StreamRows
from fleet_train.collectives.methods.sharded import ShardedMethod
from fleet_train.collectives.replica_check import ReplicaCheck
from fleet_train.collectives.step_barrier import StepBarrier
from fleet_train.errors import ConversionError


@dataclass
class Training:
    """One training of a converted program."""

    methods: list[BucketMethod]
    """The buckets' methods, in their order."""
    sharded: list[ShardedMethod]
    """The sharded methods, in the order of buckets; empty without a sharded optimizer. For a bucket of tables it is not
    its method, but what shares its rows."""
    barrier: StepBarrier
    check: ReplicaCheck
    boundaries: Boundaries
    averaging: RankAveraging | None
    step: int = 0
    """Updates so far; with gradient merge, not every run of the program is an update."""
    updates: bool = True
    """Whether the current run ends with an update."""
    equal_after: int | None = None
    """The update after which all ranks' values were made equal from outside; see `GradientExchange.equal_after`."""
    has_begun: bool = False
    rows: dict[int, HostRows | StreamRows] = field(init=False)
    """The methods of the buckets of tables, by bucket."""
    _is_drained: bool = False

    def __post_init__(self) -> None:
        self.rows = {i: each for i, each in enumerate(self.methods) if isinstance(each, HostRows | StreamRows)}

    @property
    def averager(self) -> ParameterAverager | None:
        """What LocalSGD keeps."""
        return self.averaging.averager if self.averaging is not None else None

    def is_synchronous(self, step: int) -> bool:
        """Whether an update averages gradients: not in LocalSGD's local steps."""
        return self.averager is None or self.averager.schedule.is_synchronous(step)

    def next_run(self, updates: bool) -> None:
        """Called once in each run of the program, before its first bucket."""
        self.drain_copies()
        self._is_drained = False
        self.updates = updates
        self.step += updates

    def drain_copies(self) -> None:
        """Read what the last step copied to the host; see `GradientExchange.drain_copies`."""
        if self._is_drained:
            return
        self._is_drained = True
        self.check.drain_copies()
        if self.averager is not None:
            self.averager.drain_copies()

    def drop_averaging(self) -> None:
        """Forget an averaging under way; see `GradientExchange.drop_averaging`."""
        self.boundaries.forget()
        if self.averaging is not None:
            self.averaging.drop()


class Trainings:
    """The trainings of one program, by scope; one is ``current``. A scope that is freed takes its training with it.

    Scopes and runs of startup programs follow one another in the script, so every rank chooses alike without a message.
    """

    def __init__(self, make: Callable[[], Training]) -> None:
        self._make = make
        self._begun = 0
        self._by_scope: weakref.WeakKeyDictionary[Any, Training] = weakref.WeakKeyDictionary()
        self._scope: weakref.ref[Any] | None = None
        self._current: Training | None = make()

    @property
    def current(self) -> Training:
        """The training of the scope that was entered last; before the first one, that of any."""
        if self._current is None:
            self._current = self._make()
            if (scope := self._scope and self._scope()) is not None:
                self._by_scope[scope] = self._current
        return self._current

    def enter(self, scope: Any) -> None:
        """Go on with the training of ``scope``."""
        if self._scope is not None:
            if self._scope() is scope:
                return
            self._current = self._by_scope.get(scope)
        elif self._current is not None:
            self._by_scope[scope] = self._current
        self._scope = weakref.ref(scope, self._freed)

    def has(self, scope: Any) -> bool:
        """Whether a training of ``scope`` has anything to forget."""
        return scope in self._by_scope

    def forget(self, scope: Any) -> None:
        """Forget the training of ``scope``: its next step is the first one of a training. All ranks call it."""
        old = self._by_scope.pop(scope, None)
        if old is not None:
            old.drain_copies()
            old.drop_averaging()
        if self._current is old:
            self._current = None

    def begin(self) -> Training:
        """The current training, at the start of a step. Its barriers name it, as ranks in different ones differ."""
        now = self.current
        if not now.has_begun:
            self._begun += 1
            now.has_begun, now.barrier.training = True, self._begun
        return now

    def _freed(self, scope: weakref.ref[Any]) -> None:
        if scope is self._scope:
            self._current = None


class Boundaries:
    """Tells the host, before a run's first bucket, whether a run with gradient merge ends with an update.

    Reads the program's own count where the host may read it; otherwise counts itself and compares one run later.

    The program counts in a variable that is saved with its state. At the start and after state was loaded, the count is
    unknown: the host then reads the variable until the next update.
    """

    def __init__(self, accumulate_steps: int, engine: Engine) -> None:
        self._size = accumulate_steps
        self._engine = engine
        self._runs: int | None = None
        """Micro-batches since the last update; None if unknown."""
        self._last: tuple[bool, HostCopy] | None = None
        """The answer given for the last run, and what the program counted in it."""

    def forget(self) -> None:
        """Called when other state is loaded."""
        self._runs, self._last = None, None

    def ends_update(self, boundary: Any) -> bool:
        """Whether this run ends with an update; ``boundary``: bool [1], as counted by the program."""
        if self._engine.reads_values:
            return bool(boundary.item())
        self._compare()
        copy = self._engine.device.to_host(boundary)
        if self._runs is None:
            ends = bool(copy.read().item())
        else:
            ends = self._runs + 1 >= self._size
            self._last = ends, copy
        self._runs = 0 if ends else None if self._runs is None else self._runs + 1
        return ends

    def _compare(self) -> None:
        last, self._last = self._last, None
        if last is not None and bool(last[1].read().item()) != last[0]:
            raise ConversionError(
                "gradient merge: the program's count of micro-batches changed between two steps, so the last step was "
                "classified wrongly; load state with fleet.load_persistables or another call of fleet"
            )
