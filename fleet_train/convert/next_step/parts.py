"""Copies of a converted program that become its parts: operators are moved, removed, and get what was carried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from fleet_train.collectives.host_ops import is_launch, passes_a_token, token
from fleet_train.convert.passes.program import nested_operators, persistable, variable_of
from fleet_train.convert.rewrite import chain_in_program_order

NUMBER = "fleet_train_part"
"""The attribute of a part's program that has its number, unique in the process."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Carried:
    """A variable that keeps a value from one run to the next."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Part:
    """One of the programs. ``found``: its value for one of the program that it was made of."""

    program: Any
    found: Callable[[Any], Any]


@dataclass(frozen=True)
class Taken:
    """What an update takes from the operators that compute. ``values``: to be carried; ``constants``: places of
    operators that make the same in every run; ``variables``: places of declarations."""

    values: list[Any]
    constants: set[int]
    variables: set[int]


class PartCopy:
    """A copy of the program that becomes one of the three."""

    def __init__(self, program: Any, update: Sequence[int], taken: Taken, carried: Sequence[Carried]) -> None:
        mapping = paddle.base.libpaddle.pir.IrMapping()
        self.program = program.clone(mapping)
        setattr(self.program, NUMBER, next(_numbers))
        self._operators = list(self.program.global_block().ops)
        self._update, self._taken = update, taken
        self._values = [mapping.look_up(value) for value in taken.values]
        self._carried = carried
        self._held: list[Any] = []
        self.part = Part(self.program, mapping.look_up)

    def _variables(self) -> list[Any]:
        """The carried variables in this program."""
        if not self._held:
            with paddle.static.program_guard(self.program, paddle.static.Program()):
                paddle.pir.set_insertion_point(self._operators[0])
                self._held = [persistable(each.name, each.dtype, each.shape) for each in self._carried]
                paddle.pir.reset_insertion_point_to_end()
        return self._held

    def keep_what_is_carried(self) -> None:
        """Append what carries values to the next run."""
        for value, held in zip(self._values, self._variables(), strict=True):
            with paddle.static.program_guard(self.program, paddle.static.Program()):
                paddle.assign(value, held)

    def take_what_was_carried(self) -> None:
        """Let the update read what the run before carried."""
        held = self._variables()
        for place in self._update:
            for user in (self._operators[place], *nested_operators(self._operators[place])):
                for operand in user.operands():
                    source = operand.source()
                    if not source.initialized():
                        continue
                    for value, kept in zip(self._values, held, strict=True):
                        if source.is_same(value):
                            operand.set_source(kept)

    def move(self, update: Sequence[int], deadlines: dict[int, int]) -> None:
        """Move the update's operators, given in their new order, before their deadlines."""
        needed = self._taken.constants | self._taken.variables
        others = (each for place, each in enumerate(self._operators) if place not in needed)
        anchor = next(each for each in others if variable_of(each) is None)
        for place in sorted(needed):
            self._operators[place].move_before(anchor)
        for place in update:
            before = self._operators[deadlines[place]] if deadlines[place] else anchor
            self._operators[place].move_before(before)

    def launch_last(self, postponed: Sequence[int]) -> None:
        """Move launches behind all others."""
        launches = [each for each in self._operators if is_launch(each)]
        for index in postponed:
            ids = [each.id() for each in self.program.global_block().ops]
            last = max(ids.index(each.id()) for each in launches)
            launches[index].move_before(self.program.global_block().ops[last + 1])

    def keep(self, places: Sequence[int]) -> None:
        """Remove all other operators, but for what these need."""
        kept = {*places, *self._taken.constants, *self._taken.variables}
        self.keep_without([place for place in range(len(self._operators)) if place not in kept])

    def keep_without(self, places: Collection[int]) -> None:
        """Remove operators, and leave the communicating ones that stay in one chain."""
        gone = {self._operators[place].id() for place in places}
        block = self.program.global_block()
        self._chain([each for each in block.ops if each.id() not in gone])
        for place in sorted(places, reverse=True):
            block.remove_op(self._operators[place])

    def _chain(self, operators: Sequence[Any]) -> None:
        """Give the communicating ones of ``operators`` their order."""
        first = next(each for each in operators if passes_a_token(each))
        with paddle.static.program_guard(self.program, paddle.static.Program()):
            paddle.pir.set_insertion_point(first)
            begin = token()
            paddle.pir.reset_insertion_point_to_end()
        first.operand(0).set_source(begin)
        chain_in_program_order(operators)
