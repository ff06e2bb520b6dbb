"""A converted program, cut where its buckets are launched: what comes before, and what comes after it.

The operators that wait for averages, and all that depends on them, are the *update*; the others *compute*. Three
programs are made of copies:

- ``first`` computes,
- ``steady`` updates with the averages of the run before, each parameter right before its first use, and computes,
- ``flush`` updates.

A first run, steady ones and a flush carry out the same operators on the same values as as many runs of the program
itself, so that every variable has the same bits after it. What the update takes from the run whose gradients are
averaged (the learning rate, a loss scale, whether it is an update at all) is *carried* to the next run in variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.collectives.host_ops import is_launch, kind_of, passes_a_token
from fleet_train.convert.next_step.parts import Carried, Part, PartCopy, Taken
from fleet_train.convert.passes.program import draws, inputs_of, nested_operators, variable_of
from fleet_train.convert.passes.reads import Access, accesses, is_fed, learning_rates

_OF_THE_UPDATE = ("wait", "spoilt", "share", "fill", "owners")
_COMMUNICATES = ("spoilt", "share", "owners")
"""What other ranks take part in comes before all that the next run communicates: also where one rank updates alone."""
_END = "finish"
"""The end of a step compares replicas now and then: such a step is run as a whole, and the parts have no end."""
_CARRIED = "@next_step"
"""The end of the names of carried variables, after their numbers."""


@dataclass(frozen=True)
class Rotation:
    first: Part
    steady: Part
    flush: Part
    carried: tuple[Carried, ...]
    written: frozenset[str]
    """The variables that the update writes: until it has run they have the values of the step before."""
    made_late: frozenset[int]
    """The operators of the program, by their ids, that the update consists of."""

    def has(self, fetched: Any) -> bool:
        """Whether a value of the program is known when it has computed."""
        if not isinstance(fetched, paddle.pir.Value):
            return False
        maker = fetched.get_defining_op()
        return maker is not None and maker.id() not in self.made_late and variable_of(maker) not in self.written


class CannotRotate(Exception):
    """Why a program's updates stay in its own run, in words for a message."""


def rotate(program: Any, postponed: Sequence[int] = ()) -> Rotation:
    """The three programs of a converted program. ``postponed``: the buckets that are launched after all others, in this
    order. Raises CannotRotate."""
    operators = list(program.global_block().ops)
    ends = {place for place, operator in enumerate(operators) if kind_of(operator) == _END}
    access = accesses(operators)
    update = _update_of(operators, access)
    rates = learning_rates([operators[place] for place in update])
    taken = _taken(operators, set(update), rates)
    carried = tuple(_carried(number, value) for number, value in enumerate(taken.values))
    copies = [PartCopy(program, update, taken, carried) for _ in range(3)]
    first, steady, flush = copies
    first.launch_last(postponed)
    steady.launch_last(postponed)
    first.keep_what_is_carried()
    first.keep_without({*update, *ends})
    steady.take_what_was_carried()
    steady.keep_what_is_carried()
    deadlines = _deadlines(operators, access, update)
    late = _before_the_last(deadlines, operators, postponed)
    steady.move(sorted(update, key=lambda place: (deadlines[place], place in late, place)), deadlines)
    steady.keep_without(ends)
    flush.take_what_was_carried()
    flush.keep(update)
    vars(flush.program).pop("lr_scheduler", None)  # Paddle would set a variable that it does not have
    written = frozenset(name for place in update for name in access[place].writes if not name.startswith("%"))
    return Rotation(
        first.part, steady.part, flush.part, carried, written, frozenset(operators[place].id() for place in update)
    )


def _update_of(operators: Sequence[Any], access: Sequence[Access]) -> list[int]:
    """The places of the operators of the update. Raises CannotRotate where it needs what a run is fed, or where what
    follows it in a run is more than an update."""
    last = max(place for place, operator in enumerate(operators) if is_launch(operator))
    ids: set[int] = set()
    places: list[int] = []
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    for place, operator in enumerate(operators):
        begins = place > last and kind_of(operator) in _OF_THE_UPDATE
        depends = any(source.get_defining_op().id() in ids for source in _values_of(operator))
        follows = not access[place].reads.isdisjoint(writes) or not access[place].writes.isdisjoint(reads | writes)
        if kind_of(operator) == _END or not (begins or depends or follows):
            continue
        if is_launch(operator) or (passes_a_token(operator) and kind_of(operator) not in _OF_THE_UPDATE):
            raise CannotRotate("after an update it computes with the new parameters, and communicates again")
        if operator.name().startswith("pd_op.") and draws(operator):
            raise CannotRotate("its update draws random numbers")
        places.append(place)
        ids.add(operator.id())
        reads, writes = reads | access[place].reads, writes | access[place].writes
    return sorted({*places, *_lists_for(operators, places)})


def _lists_for(operators: Sequence[Any], update: Sequence[int]) -> set[int]:
    """The places of operators that put values into a list for the update alone: lists cannot be carried."""
    places = {operator.id(): place for place, operator in enumerate(operators)}
    found = set()
    for place in update:
        for source in _values_of(operators[place]):
            maker = source.get_defining_op()
            users = {places.get(user.id()) for user in source.all_used_ops()}
            if maker.name() == "builtin.combine" and users <= set(update):
                found.add(places[maker.id()])
    return found


def _values_of(operator: Any) -> list[Any]:
    """The values that an operator and those in its sub-blocks compute with: without the token of a chain, and what the
    sub-blocks make themselves."""
    users = [operator, *nested_operators(operator)]
    inner = {each.id() for each in users[1:]}
    found = []
    for user in users:
        sources = inputs_of(user)
        for source in sources[1:] if passes_a_token(user) else sources:
            maker = source.get_defining_op()
            if maker is not None and maker.id() not in inner:
                found.append(source)
    return found


def _taken(operators: Sequence[Any], update: set[int], rates: frozenset[str]) -> Taken:
    places = {operator.id(): place for place, operator in enumerate(operators)}
    values: dict[tuple[int, int], Any] = {}
    constants, variables = set(), set()
    for place in update:
        for source in _values_of(operators[place]):
            maker = source.get_defining_op()
            at = places[maker.id()]
            if at in update:
                continue
            if is_fed(maker):
                raise CannotRotate(f"its update needs what a run is fed ('{variable_of(maker)}')")
            if _is_constant(maker):
                constants.add(at)
            elif (name := variable_of(maker)) is not None and name not in rates:
                variables.add(at)
            else:
                values[at, source.index()] = source
    return Taken(list(values.values()), constants, variables)


def _is_constant(operator: Any) -> bool:
    name = operator.name()
    plain = name.startswith("pd_op.full") or name == "builtin.constant"
    return plain and not operator.num_operands() and not draws(operator)


def _carried(number: int, value: Any) -> Carried:
    if not value.is_dense_tensor_type() or any(size < 0 for size in value.shape):
        raise CannotRotate(
            f"its update needs a result of {value.get_defining_op().name()}, of no fixed shape, which cannot be kept"
        )
    return Carried(f"{number}{_CARRIED}", tuple(int(size) for size in value.shape), value.dtype)


def _deadlines(operators: Sequence[Any], access: Sequence[Access], update: Sequence[int]) -> dict[int, int]:
    """For each operator of the update the place of the computing operator before which it has to run: the first that
    it would otherwise change the values of, the same for all that it depends on, and at the latest the first launch."""
    inside = set(update)
    ends = {place for place, operator in enumerate(operators) if kind_of(operator) == _END}
    computing = [place for place in range(len(operators)) if place not in inside | ends]
    end = next(place for place in computing if is_launch(operators[place]))
    readers, writers = _Earliest(end), _Earliest(end)
    for place in computing:
        readers.note(access[place].reads, place)
        writers.note(access[place].writes, place)
    ids = {operators[place].id(): place for place in update}
    found = dict.fromkeys(update, end)
    for place in reversed(update):
        own = access[place]
        limit = min(found[place], readers.of(own.writes), writers.of(own.writes), writers.of(own.reads))
        found[place] = 0 if kind_of(operators[place]) in _COMMUNICATES else limit
        readers.note(own.reads, found[place])
        writers.note(own.writes, found[place])
        for source in _values_of(operators[place]):
            if (needed := ids.get(source.get_defining_op().id())) is not None:
                found[needed] = min(found[needed], found[place])
    return found


def _before_the_last(deadlines: dict[int, int], operators: Sequence[Any], postponed: Sequence[int]) -> set[int]:
    """Move the updates of buckets that are needed later than a postponed one before its wait: they have arrived
    earlier, and the thread waits there anyway. Returns the places of the operators that need a postponed one."""
    waits = [place for place in sorted(deadlines) if kind_of(operators[place]) == "wait"]
    late = {waits[index] for index in postponed}
    if not late:
        return late
    limit = deadlines[waits[postponed[0]]]
    ids = {operators[place].id() for place in late}
    for place in sorted(deadlines):
        if any(source.get_defining_op().id() in ids for source in _values_of(operators[place])):
            late.add(place)
            ids.add(operators[place].id())
        elif place not in late:
            deadlines[place] = min(deadlines[place], limit)
    return late


class _Earliest:
    """The earliest place at which variables are used, by their names; ``end`` for those that are not."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._places: dict[str, int] = {}

    def note(self, names: frozenset[str], place: int) -> None:
        for name in names:
            self._places[name] = min(place, self._places.get(name, self._end))

    def of(self, names: frozenset[str]) -> int:
        return min((self._places.get(name, self._end) for name in names), default=self._end)
