"""Finds the embeddings' tables of a program whose rows are sent, and takes their dense gradients out of it.

In PIR the gradient of a table is dense, whatever ``Embedding(sparse=...)`` says: ``pd_op.embedding_grad`` makes it from
the indices, the table and the gradient of what was looked up, once for each lookup; several are added by
``pd_op.add_n``. A launch operator gets these operands instead of the gradient, so that it is never made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.rows import Lookups
from fleet_train.convert.paddle_optimizers import reads_whole_parameters
from fleet_train.convert.passes.one_card import remove_unused
from fleet_train.convert.planning import dtype_name
from fleet_train.plan import TensorSpec
from fleet_train.plan.build import tables_by_rows
from fleet_train.profile import Profile
from fleet_train.profile.methods.rows import ASSUMED_SAMPLES

LOOKUP_GRADIENT = "pd_op.embedding_grad"
LAZY_NOTICE = (
    "Adam's lazy_mode=True is not carried out by Paddle's PIR programs, on one card neither: rows that a step has not "
    "touched move as without it; the ranks train as one card does"
)
Pairs = Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class Table:
    """A table whose rows are sent. ``operands``: what the launch operator gets, as ``described`` says; ``rows``: as of
    `TensorSpec`."""

    parameter: Any
    operands: tuple[Any, ...]
    described: Lookups
    rows: int

    @property
    def rows_only(self) -> bool:
        return self.described.rows_only


def _table(parameter: Any, lookups: Sequence[Any], rows: int, rows_only: bool) -> Table:
    pairs = [(each.operand_source(0), each.operand_source(2)) for each in lookups]
    paddings = tuple(int(each.attrs()["padding_idx"]) for each in lookups)
    operands = (parameter, *(value for pair in pairs for value in pair))
    return Table(parameter, operands, Lookups(paddings, rows_only), rows)


def find_tables(
    job: Job, profile: Profile, pairs: Pairs, optimizer: Any, *, is_ours: bool, plain: bool
) -> tuple[dict[str, Table], list[str]]:
    """Find the tables whose rows are sent, by parameter, and sentences about embeddings that were asked for in vain.

    ``is_ours``: nobody else holds the gradients, so that they may be removed. ``plain``: nothing but the optimizer
    reads the averaged gradients.
    """
    if job.world_size == 1:
        return {}, []
    found: dict[str, tuple[TensorSpec, Table]] = {}
    reasons: list[str] = []
    is_each_ranks = job.engine.reads_values and profile.accumulate_steps == 1 and not profile.sharding
    rows_only = plain and is_each_ranks and _leaves_others_alone(optimizer)
    for parameter, value in pairs:
        if value is None or not _is_looked_up(parameter, value):
            continue
        if reason := _obstacle(parameter, value) if is_ours else _HELD:
            reasons.append(f"embedding '{parameter.name}': its whole table is sent, because {reason}")
            continue
        lookups = tuple(_makers(value))
        rows = min(_positions(lookups), int(parameter.shape[0]))
        is_whole = profile.sharding and reads_whole_parameters(optimizer)
        spec = TensorSpec(parameter.name, tuple(parameter.shape), dtype_name(parameter.dtype), is_whole, rows)
        is_alone = rows_only and getattr(parameter, "regularizer", None) is None
        found[parameter.name] = (spec, _table(parameter, lookups, rows, is_alone))
    by_rows = tables_by_rows([spec for spec, _ in found.values()], job.cluster, profile)
    tables = {name: table for name, (_, table) in found.items() if name in by_rows}
    said = reasons if profile.sparse_embeddings is True else []
    return tables, [*said, *[LAZY_NOTICE] * bool(tables and getattr(optimizer, "_lazy_mode", False))]


_HELD = (
    "the script calls backward() itself and may read its gradient, which would no longer be made; call minimize() "
    "instead of backward() and apply_gradients()"
)


def _is_looked_up(parameter: Any, value: Any) -> bool:
    users = (*_makers(value), *parameter.all_used_ops())
    return any(operator.name() in (LOOKUP_GRADIENT, "pd_op.embedding") for operator in users)


def _makers(value: Any) -> Iterator[Any]:
    """The operators whose results are added up to ``value``."""
    operator = value.get_defining_op()
    if operator.name() != "pd_op.add_n":
        yield operator
        return
    joined = operator.operand_source(0).get_defining_op()
    for source in joined.operands_source() if joined.name() == "builtin.combine" else [operator.operand_source(0)]:
        yield from _makers(source)


def _obstacle(parameter: Any, value: Any) -> str:
    """Why the rows of a table cannot be sent, or nothing."""
    if dtype_name(parameter.dtype) != "float32":
        return f"it is {dtype_name(parameter.dtype)}, and rows are added in float32"
    others = sorted({each.name() for each in _makers(value) if each.name() != LOOKUP_GRADIENT})
    if others:
        return f"{', '.join(others)} makes a part of its gradient, in all rows"
    if readers := sorted({user.name() for user in value.all_used_ops()}):
        return f"{', '.join(readers)} reads its local gradient"
    block = value.get_defining_op().get_parent_block()
    if any(each.get_parent_block() != block for each in _makers(value)):
        return "its gradient is made in a control-flow block"
    if any(len(result.all_used_ops()) > 1 for each in _makers(value) for result in each.results()):
        return "a part of its local gradient is read elsewhere"
    return ""


def _leaves_others_alone(optimizer: Any) -> bool:
    """Whether an update does not move a row without gradient: plain SGD, without decay, clip and groups."""
    return (
        type(optimizer) is paddle.optimizer.SGD
        and not any(isinstance(each, dict) for each in optimizer._parameter_list or ())
        and optimizer.regularization is None
        and optimizer._grad_clip is None
        and not optimizer._multi_precision
    )


def _positions(lookups: Sequence[Any]) -> int:
    """The number of a step's indices, for an assumed number of samples: the size of a batch may differ from rank to
    rank, and all make the same plan."""
    shapes = [list(each.operand_source(0).shape) for each in lookups]
    return ASSUMED_SAMPLES * sum(math.prod(max(int(size), 1) for size in shape[1:]) for shape in shapes)


def remove_dense_gradients(program: Any, gradients: Sequence[Any]) -> None:
    """Remove the operators that make ``gradients``, once the launch operators have been inserted behind them."""
    remove_unused(program, [gradient.get_defining_op() for gradient in gradients])


def update_rows(optimizer: Any, parameter: Any, ids: Any, values: Any) -> tuple[Any, Any]:
    """Append plain SGD's update of the rows ``ids`` [n] int64 by their gradients ``values`` [n, width], in place.

    The other rows are neither read nor written. The bits are those of the update of the whole table: see `Lookups`.
    Returns the parameter and ``values``.
    """
    optimizer._create_global_learning_rate()
    rate = optimizer._create_param_lr((parameter, values))
    rows, _ = _C_ops.sgd_(_C_ops.gather(parameter, ids, 0), rate, values, None, False)
    scatter: Any = _C_ops.scatter_  # type: ignore[attr-defined]
    scatter(parameter, ids, rows, True)
    return parameter, values


def planned_rows(tables: Mapping[str, Table]) -> dict[str, int]:
    """The number of rows of a step that the plan counts with, by parameter."""
    return {name: table.rows for name, table in tables.items()}
