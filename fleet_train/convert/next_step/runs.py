"""Which of a program's three parts a run is, and when an update that is still to come has to be made.

Everything here belongs to the session of one job. Every rank runs the same programs in the same order, so all choose
alike without a message.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.bucket_times import Stopwatch, slowest
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import exchanges_in
from fleet_train.collectives.job import Job
from fleet_train.convert import process
from fleet_train.convert.next_step.parts import NUMBER
from fleet_train.convert.next_step.rotate import CannotRotate, Rotation, rotate
from fleet_train.convert.passes.program import script_line
from fleet_train.errors import ConversionError
from fleet_train.log import log_once
from fleet_train.plan.order import postponed


@dataclass(frozen=True)
class Pending:
    """An update that is still to be made: the averages of a run of ``executor`` in ``scope``, of the script, are on
    their way. ``exchanges``: those of the program, one for each wrapped optimizer; ``waited``: the buckets of each that
    the run itself has waited for."""

    rotation: Rotation
    exchanges: list[GradientExchange]
    scope: Callable[[], Any]
    executor: Callable[[], Any]
    waited: tuple[int, ...] = ()

    @property
    def is_half_made(self) -> bool:
        """Whether a run has begun it, and failed."""
        states = zip(self.exchanges, self.waited, strict=True)
        return any(each.waited != waited or each.launched < len(each.methods) for each, waited in states)


_LATER = (
    "overlap_next_step: variables get a step's update in the next step, or when they are read through their scope, "
    "saved or fetched; before an array that was taken earlier is read, call fleet.flush()"
)
_STRICT = "overlap_next_step: every update is made in its own step, because the job is strict"
_IN_A_ROW = 3
"""After so many steps one after the other whose update could not wait, it is said why."""
_ASKED_BEFORE = (8, 16, 64)
"""The runs of a program before which all ranks compare their times, until the order of its buckets is chosen."""


@dataclass
class _Known:
    """What is known of a program. ``digest``: of its text, which notices every change. ``watch``: measures its buckets
    until their order is chosen."""

    digest: int
    rotation: Rotation | None
    watch: Stopwatch
    is_ordered: bool = False


class NextStep:
    """The runs of programs whose updates are made in the next run."""

    def __init__(self, job: Job, exchanges: Sequence[tuple[Any, GradientExchange]]) -> None:
        self._job, self._exchanges = job, exchanges
        self._known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
        self._runs_of: Counter[int] = Counter()
        """Runs of each exchange's programs: as many on every rank."""
        self._pending: Pending | None = None
        self._coming: Pending | None = None
        """What will be pending after the run that is under way."""
        self._is_strict = False
        self._rotation: Rotation | None = None
        self._of_run: list[GradientExchange] = []
        """The exchanges of the program that runs."""
        self._scope: Any = None
        self._thread = threading.get_ident()
        self._prevented: dict[str, tuple[int, int]] = {}
        """Lines of the script that needed an update in its own step or before the next run: after which step last, and
        after how many steps in a row."""

    def begin(self, is_strict: bool) -> None:
        """Take part in every run from now on, and in every read of a scope's variables. ``is_strict``: the updates of
        runs are made when they end."""
        process.on_each_run(self.begin_run, is_first=True)
        process.choose_each_run(self._chosen)
        process.after_each_run(self._after_run)
        self._is_strict = is_strict
        log_once([_STRICT if is_strict else _LATER], self._job.cluster.rank)
        for name in ("find_var", "var"):
            self._watch(paddle.base.core._Scope, name)
        for name in ("state_dict", "set_state_dict"):
            self._watch(paddle.static.Program, name)
        _key_parts_by_number()

    def _watch(self, owner: Any, name: str) -> None:
        """Make the update that is still to come before a call of Paddle's that reads or writes what it changes."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(self_: Any, *args: Any, **named: Any) -> Any:
            if self._pending is not None and self._coming is None and threading.get_ident() == self._thread:
                asked = args[0] if args and owner is not paddle.static.Program else named.get("name")
                if asked is None or asked in self._pending.rotation.written:
                    self.flush(f"{name} reads what it changes")
            return function(self_, *args, **named)

        process.replace(owner, name, watched)

    def _after_run(self, results: Any) -> Any:
        if self._coming is not None:
            exchanges = self._coming.exchanges
            for each in exchanges:
                each.count_step()
            self._pending = replace(self._coming, waited=tuple(each.waited for each in exchanges))
            self._coming = None
            if self._is_strict:
                self.flush()
        return results

    def begin_run(self, program: Any, scope: Any) -> None:
        """Called first before a run: make the update that is still to come, unless the run itself does."""
        self._rotation, self._scope, self._thread = None, weakref.ref(scope), threading.get_ident()
        self._coming = None  # a run before has failed, and what was pending still is
        numbers = exchanges_in(program)
        self._of_run = [each for _, each in self._exchanges if each.number in numbers]
        if self._of_run and all(each.overlaps_next_step for each in self._of_run):
            self._rotation = self._rotation_of(program, self._of_run)
        pending = self._pending
        if pending is not None and (pending.rotation is not self._rotation or pending.scope() is not scope):
            self.flush("another program or scope comes next")
        if self._rotation is not None and any(map(_is_compared, self._of_run)):
            self._make_own_update("every step is compared (divergence_check_steps, replay_check_steps)")

    def _chosen(self, program: Any, fetch_list: Any) -> tuple[Any, Any]:
        """What to run instead of ``program``, and what to fetch of it."""
        rotation = self._rotation
        if rotation is None:
            return program, fetch_list
        fetched = _flat(fetch_list)
        if not all(map(rotation.has, fetched)):
            self._make_own_update("a run fetches what is known after its own update")
            return program, fetch_list
        part = rotation.first if self._pending is None else rotation.steady
        if self._pending is None:
            self._make_room(rotation)
        else:
            _refuse_half_made(self._pending)
        self._coming = Pending(rotation, self._of_run, self._scope, process.running())
        return part.program, [part.found(each) for each in fetched]

    def _make_own_update(self, why: str) -> None:
        """The run that begins is one of the whole program."""
        self.flush()
        self._rotation = None
        self._note_prevented(self._of_run, why)

    def flush(self, why: str = "") -> None:
        """Make the update that is still to come, if there is one. All ranks call it. ``why``: said once, if a line of
        the script needs it after every step."""
        if self._pending is not None and why:
            self._note_prevented(self._pending.exchanges, why)
        pending, self._pending = self._pending, None
        if pending is not None and (scope := pending.scope()) is not None:
            _refuse_half_made(pending)
            executor = pending.executor()
            if executor is None or executor._closed:
                executor = paddle.static.Executor(self._job.place)
            process.run_without_hooks(executor, pending.rotation.flush.program, {}, scope)
            for each in pending.exchanges:
                if each.watch is not None:
                    each.watch.begin_anew()

    def _note_prevented(self, exchanges: Sequence[GradientExchange], why: str) -> None:
        """Say why, if it is so after every step; the first one is compared anyway, in all of its micro-batches."""
        line, step = script_line(), sum(each.step for each in exchanges)
        last, times = self._prevented.get(line, (0, 0))
        if step == last:
            return
        times = times + 1 if last < step <= last + len(exchanges) else 1
        self._prevented[line] = step, times
        if times == _IN_A_ROW:
            notice = f"overlap_next_step: nothing is sent under the next forward pass, because in {line} {why}"
            log_once([notice], self._job.cluster.rank)

    def flush_with_others(self) -> None:
        """Make the update that is still to come if other ranks take part in it."""
        exchanges = self._pending.exchanges if self._pending is not None and self._coming is None else []
        if any(each.owners or each.asks_all for each in exchanges):
            self.flush()

    def _rotation_of(self, program: Any, exchanges: Sequence[GradientExchange]) -> Rotation | None:
        """What was made of ``program`` as it is now; None if its updates stay in its own run."""
        digest = hash(str(program))
        known = self._known.get(program)
        if known is None or known.digest != digest:
            try:
                rotation = rotate(program)
            except CannotRotate as why:
                notice = f"overlap_next_step: nothing is sent under the next forward pass: {why}"
                log_once([notice], self._job.cluster.rank)
                rotation = None
            known = _Known(digest, rotation, Stopwatch(len(exchanges[0].methods)))
            self._known[program] = known
        if known.rotation is not None and self._can_order(exchanges):
            self._order(program, known, exchanges[0])
        return known.rotation

    def _order(self, program: Any, known: _Known, exchange: GradientExchange) -> None:
        """Let the buckets be launched in the order that its times suggest, once they are known."""
        self._runs_of[exchange.number] += 1
        if self._runs_of[exchange.number] in _ASKED_BEFORE and not known.is_ordered:
            last = self._postponed(known, exchange)
            if last:
                self.flush()
                known.rotation = rotate(program, last)
        exchange.watch = None if known.is_ordered else known.watch

    def _can_order(self, exchanges: Sequence[GradientExchange]) -> bool:
        """Whether buckets may be postponed: not where nothing follows for the device from the host's times, nor of
        several optimizers, nor of a sharded one, whose buckets are waited for while others are launched."""
        return self._job.engine.reads_values and len(exchanges) == 1 and not exchanges[0].owners

    def _postponed(self, known: _Known, exchange: GradientExchange) -> tuple[int, ...]:
        """The buckets to postpone by the times of all ranks, which call it before the same run; none until each of them
        has measured: one that reads variables between steps waits for buckets in between."""
        name = f"times of buckets {self._job.count('times of buckets')}"
        of_ranks = list(self._job.all_gather(name, known.watch.own()).values())
        if not all(of_ranks):
            return ()
        known.is_ordered = True
        return postponed(exchange.queued_buckets(), slowest(of_ranks))

    def _make_room(self, rotation: Rotation) -> None:
        scope = self._scope()
        for each in rotation.carried:
            tensor = scope.var(each.name).get_tensor()
            if not tensor._is_initialized():
                dtype = str(each.dtype).rpartition(".")[2]
                tensor.set(np.zeros(each.shape, dtype if dtype != "bfloat16" else "uint16"), self._job.place)


def _is_compared(exchange: GradientExchange) -> bool:
    """Whether the passes of the next run, or what it ends with, are compared."""
    return bool(exchange.checked_step) or exchange.check.compares_after(first=exchange.step == 0)


def _refuse_half_made(pending: Pending) -> None:
    if pending.is_half_made:
        raise ConversionError(
            "overlap_next_step: a run has failed after it had begun the update of the run before, so that its "
            "parameters are of no step: start again from a checkpoint, or set overlap_next_step: false"
        )


def _key_parts_by_number() -> None:
    """Let Paddle's executors know the parts by their number: they print each other program in every run, as the key of
    what they have compiled, and nobody changes a part."""
    executor = paddle.base.executor
    key_of = executor._get_strong_program_cache_key_for_new_exe

    @functools.wraps(key_of)
    def key(program: Any, scope: Any, feed: Any, fetch_list: Any) -> Any:
        number = getattr(program, NUMBER, None)
        if number is None:
            return key_of(program, scope, feed, fetch_list)
        rest = executor._get_program_cache_key(feed, fetch_list)
        return f"part {number} of fleet_train, {scope.raw_address()}, {rest}"

    process.replace(executor, "_get_strong_program_cache_key_for_new_exe", key)


def _flat(fetch_list: Any) -> list[Any]:
    if fetch_list is None:
        return []
    if not isinstance(fetch_list, list | tuple):
        return [fetch_list]
    return [each for item in fetch_list for each in (item if isinstance(item, list | tuple) else [item])]
