"""The forward and backward pass of a converted program alone: what a checked step computes a second time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import paddle

from fleet_train.collectives import replay
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import exchanges_in, is_launch, once_until_grown
from fleet_train.collectives.job import Job
from fleet_train.collectives.replay import Pass, Replay
from fleet_train.convert import process
from fleet_train.convert.passes.program import is_random, nested_operators, variable_of
from fleet_train.convert.passes.reads import accesses
from fleet_train.errors import ConversionError, FleetTrainError


class Replays:
    """Runs the first pass of steps that are checked, and the further ones after a difference: hooks of a run."""

    def __init__(self, job: Job, exchanges: Sequence[tuple[Any, GradientExchange]]) -> None:
        self._job, self._exchanges = job, exchanges
        self._passes_of = once_until_grown(passes_of)
        self._program: Any = None
        self._scope: Callable[[], Any] = lambda: None
        self._feed: Any = None

    def note(self, program: Any, scope: Any) -> None:
        """Called before a run: what runs, and where its variables are."""
        self._program, self._scope, replay.current = program, weakref.ref(scope), None

    def before_run(self, _: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        """Called last before a run: compute the first pass, if the run belongs to a checked step."""
        numbers = exchanges_in(self._program)
        exchange = next((each for _, each in reversed(self._exchanges) if each.number in numbers), None)
        if exchange is not None and (moment := exchange.checked_step):
            self._feed = feed
            replay.current = Replay(self._job, moment)
            self._run()
            replay.current.begin(Pass.STEP)
        return feed, fetch_list

    def why_failed(self, error: Exception) -> FleetTrainError | None:
        """The error of a run that a difference has ended."""
        del error
        return None if replay.current is None else replay.current.judge(self._run)

    def _run(self) -> None:
        """Compute one pass, and leave everything as it was."""
        passes = self._passes_of(self._program)
        devices = dict.fromkeys((None, "cpu"))
        states = {device: paddle.get_rng_state(device) for device in devices}
        process.run_without_hooks(process.running()(), passes, self._feed, self._scope())
        for device, state in states.items():
            paddle.set_rng_state(state, device)


def passes_of(program: Any) -> Any:
    """A copy of a converted program up to its last launch, which changes no variable of the scope."""
    passes = program.clone()
    block = passes.global_block()
    operators = list(block.ops)
    last = max(place for place, operator in enumerate(operators) if is_launch(operator))
    for operator in reversed(operators[last + 1 :]):
        block.remove_op(operator)
    changed = _changed_in(block)
    with paddle.static.program_guard(passes, paddle.static.Program()):
        for value in changed:
            paddle.pir.set_insertion_point_after(value.get_defining_op())
            before = paddle.assign(value)
            paddle.pir.reset_insertion_point_to_end()
            paddle.assign(before, value)
    return passes


def _changed_in(block: Any) -> list[Any]:
    """The variables, or what is fed, that operators of a block write in place."""
    operators = list(block.ops)
    written = frozenset().union(*(each.writes for each in accesses(operators)))
    return [operator.result(0) for operator in operators if variable_of(operator) in written]


_SERIAL = "FLAGS_new_executor_serial_run"


def refuse_random_order(program: Any) -> None:
    """Raise ConversionError where random operators, which draw from one state, may run side by side: each pass would
    give them other numbers."""
    block = program.global_block()
    random = [each for each in chain(block.ops, *map(nested_operators, block.ops)) if is_random(each)]
    if len(random) > 1 and not paddle.get_flags([_SERIAL])[_SERIAL]:
        raise ConversionError(
            f"replay_check_steps with {len(random)} random operators ({random[0].name()}, ...) and several threads of "
            "the executor, which run them in any order, so that each pass draws other numbers: set num_threads: 1, or "
            "replay_check_steps: 0"
        )
