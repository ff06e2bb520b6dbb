"""Which training a run of a program belongs to: that of the variables in its scope, anew after a startup program.

What the ranks remember beside the variables (`fleet_train.collectives.training`) follows them in this one way: before
every run, the scope and what the program stores are looked at.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import paddle

from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.host_ops import exchanges_in, once_until_grown
from fleet_train.convert.passes.program import variable_of
from fleet_train.convert.program_state import belongs_to, counts_micro_batches
from fleet_train.convert.replicas import make_equal
from fleet_train.convert.rewrite import broadcast_start_state, names_stored_by
from fleet_train.convert.session import Converted, current
from fleet_train.convert.sharding import owned_by_one_rank

_stored_by = once_until_grown(names_stored_by)


def choose(program: Any, scope: Any) -> None:
    """Called before ``program`` runs in ``scope``. Every rank chooses alike: all run the same programs."""
    if not isinstance(program, paddle.static.Program):
        return
    stored, carried_out, now = _stored_by(program), exchanges_in(program), current()
    for main, exchange in now.exchanges:
        if exchange.number in carried_out:
            exchange.enter(now.owner_of(scope, exchange))
        elif _starts(stored, main, exchange):
            owner = now.owner_of(scope, exchange)
            if exchange.has_trained_in(owner):
                _begin_anew(program, stored, main, exchange, owner)
    if stored:
        now.started.add(scope)


def _starts(stored: Set[str], main: Any, exchange: GradientExchange) -> bool:
    """Whether something is initialized that ``exchange`` trains, or that its optimizer keeps of it."""
    if not stored:
        return False
    trained = set(exchange.trained)
    return not trained.isdisjoint(stored) or any(belongs_to(name, trained) for name in stored & _names_of(main))


def _names_of(program: Any) -> set[str]:
    """The variables that a program uses."""
    return {name for each in program.global_block().ops if (name := variable_of(each)) is not None}


def _begin_anew(program: Any, stored: Set[str], main: Any, exchange: GradientExchange, scope: Any) -> None:
    """What a startup program leaves is what a training begins with, and so it must be equal on all ranks: also what is
    not initialized, and drifts in LocalSGD's local steps. Gradient merge's count tells whether an update continues."""
    job = current().job
    exchange.enter(scope)
    averager = exchange.averager
    is_drifting = averager is not None and not averager.schedule.is_synchronous(exchange.step)
    if is_drifting and not stored >= set(exchange.trained):
        with paddle.static.scope_guard(scope), job.inside("the run of a startup program"):
            make_equal(job, [own := Converted(main, exchange, is_own=True)], [own])
    exchange.begin_anew(scope, is_inside_update=not any(map(counts_micro_batches, stored)))
    broadcast_start_state(job, program, owned_by_one_rank(job))
