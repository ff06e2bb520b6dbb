"""Which strategies can be combined: one table, enforced by the loader, shown by ``fleet_train profiles
--compatibility``.

To add a strategy, add its line to ``STRATEGIES`` and a line to ``PAIRS`` for each existing one; a test fails if one is
missing. Compressions say in their own descriptions what they go with. A knob that only has an effect with another one
is not a pair: see ``needs`` and ``only_with`` of `fleet_train.profile.knobs.Knob`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fleet_train.profile.knobs import AUTO, Problem, shown
from fleet_train.profile.methods import COMPRESSIONS, FAMILIES
from fleet_train.profile.methods.base import IN_16_BITS, Combination, Family, goes, refused
from fleet_train.profile.schema import KNOBS


@dataclass(frozen=True)
class Strategy:
    """A strategy and the knob that switches it on; ``is_on`` tests the knob's value."""

    name: str
    knob: str
    title: str
    is_on: Callable[[Any], bool] = bool


def _is_one_of(family: Family) -> Callable[[str], bool]:
    members = {compression.name for compression in COMPRESSIONS.values() if compression.family is family}
    return lambda kind: kind in members


STRATEGIES: tuple[Strategy, ...] = (
    Strategy("fused", "fuse_all_reduce_ops", "fused buckets"),
    Strategy("communicators", "nccl_comm_num", "several communicators", lambda number: number not in (1, AUTO)),
    Strategy("hierarchical", "use_hierarchical_allreduce", "hierarchical allreduce"),
    Strategy("waiting", "sync_nccl_allreduce", "waiting for each bucket"),
    Strategy("local_sgd", "use_local_sgd", "LocalSGD"),
    Strategy("outer", "outer_optimizer", "outer momentum", lambda kind: kind != "none"),
    *(Strategy(family.name, "compression", family.title, _is_one_of(family)) for family in FAMILIES),
    Strategy("merge", "accumulate_steps", "gradient merge", lambda number: number > 1),
    Strategy("amp", "amp_level", "mixed precision", lambda level: level != "O0"),
    Strategy("sync_bn", "sync_batch_norm", "synchronised batch norm"),
    Strategy("recompute", "recompute_segments", "recompute", lambda segments: segments > 1),
    Strategy("sharding", "sharding", "a sharded optimizer"),
    Strategy("rows", "sparse_embeddings", "rows of embeddings", lambda choice: choice is True),
    Strategy("next_step", "overlap_next_step", "updates a step later"),
)

PAIRS: dict[tuple[str, str], Combination] = {
    ("fused", "communicators"): goes("the communicators take the buckets in turn"),
    ("fused", "hierarchical"): goes("each bucket takes the three steps; fewer buckets wait for the leaders less often"),
    ("fused", "waiting"): goes("each bucket is waited for before the next operator starts"),
    ("fused", "local_sgd"): goes("buckets are for the gradients of the warm-up; parameters are averaged in one piece"),
    ("fused", "outer"): goes("the outer step uses averaged parameters and does not depend on the warm-up's buckets"),
    ("communicators", "hierarchical"): goes("each communicator has its own local groups and leaders' group"),
    ("communicators", "waiting"): goes("only one bucket is in flight at a time, so one communicator is enough"),
    ("communicators", "local_sgd"): goes("the warm-up uses all of them, an averaging the first one"),
    ("communicators", "outer"): goes("the averaged difference is sent on the first communicator"),
    ("hierarchical", "waiting"): goes("a bucket's three steps end before the next operator starts"),
    ("hierarchical", "local_sgd"): goes("parameters are averaged in the same three steps as gradients in the warm-up"),
    ("hierarchical", "outer"): goes(
        "the difference is averaged in the three steps, then each rank takes the outer step"
    ),
    ("waiting", "local_sgd"): goes("concerns the warm-up only: local steps send no gradients"),
    ("waiting", "outer"): goes("concerns the warm-up only: the outer step follows an averaging, which is waited for"),
    ("local_sgd", "outer"): goes("the outer step is taken at each averaging; without LocalSGD there is none"),
}


def _with(strategy: str, others: str, verdict: Combination) -> dict[tuple[str, str], Combination]:
    return {(other, strategy): verdict for other in others.split()}


_ONE_COMPRESSION = refused("a gradient is compressed in one way", "choose one")
_COMPRESSIONS = " ".join(family.name for family in FAMILIES)
for _position, _family in enumerate(FAMILIES):
    PAIRS |= {
        **_with(_family.name, "fused communicators waiting", _family.with_buckets),
        **_with(_family.name, "hierarchical", _family.with_local_groups),
        **_with(_family.name, "local_sgd outer", _family.with_local_sgd),
        **_with("sharding", _family.name, _family.with_sharding),
        **_with(_family.name, " ".join(family.name for family in FAMILIES[:_position]), _ONE_COMPRESSION),
    }
PAIRS |= {
    **_with("merge", "fused communicators hierarchical waiting", goes("one exchange per update")),
    **_with("merge", "local_sgd outer", goes("a local step is an update; micro-batches within it send nothing")),
    **_with("merge", _COMPRESSIONS, goes("the merged gradient is compressed")),
    **_with(
        "amp",
        f"fused communicators hierarchical waiting local_sgd outer {_COMPRESSIONS} merge",
        goes("gradients and parameters are float32 outside the forward and backward pass"),
    ),
    **_with(
        "sync_bn",
        f"fused communicators hierarchical waiting {_COMPRESSIONS}",
        goes("statistics are sent on a separate process group"),
    ),
    **_with(
        "sync_bn",
        "local_sgd outer",
        refused("local steps send nothing, but synchronised statistics would have to", "leave sync_batch_norm off"),
    ),
    **_with("sync_bn", "merge", goes("statistics are those of one micro-batch over all ranks")),
    **_with("sync_bn", "amp", goes("statistics are float32")),
    **_with(
        "recompute",
        f"fused communicators hierarchical waiting local_sgd outer {_COMPRESSIONS} merge amp sync_bn",
        goes("gradients are the same bit by bit"),
    ),
    **_with(
        "sharding",
        "fused communicators waiting merge amp sync_bn recompute",
        goes("the update of a parameter moves to its owner, with the same gradient"),
    ),
    **_with(
        "sharding",
        "hierarchical",
        refused("a bucket goes to the owners of its parameters directly", "use sharding_degree for ranks of a node"),
    ),
    **_with(
        "sharding",
        "local_sgd outer",
        refused("local steps update all parameters on each rank", "leave one of the two out"),
    ),
    **_with("rows", "fused communicators waiting", goes("embeddings' tables are in buckets of their own")),
    **_with("rows", "hierarchical", goes("rows are gathered over all ranks at once; a whole table goes in the steps")),
    **_with("rows", "local_sgd outer", goes("concerns the warm-up only; an averaging sends whole tables")),
    **_with("rows", IN_16_BITS.name, goes("the values of rows are sent in 16 bits and added in float32")),
    **_with(
        "rows",
        " ".join(family.name for family in FAMILIES if family is not IN_16_BITS),
        refused(
            "it keeps what it does not send of a whole table, or its rounding errors",
            "use compression: bf16, or leave sparse_embeddings out, and tables are compressed as other gradients",
        ),
    ),
    **_with("rows", "merge", goes("the rows of all micro-batches are sent at the update")),
    **_with("rows", "amp sync_bn recompute", goes("an embedding's gradient is float32, and not part of these")),
    **_with("rows", "sharding", goes("all ranks add the touched rows, and the owners of a table's rows update them")),
    **_with("next_step", "fused communicators hierarchical", goes("what is on its way goes on under the forward pass")),
    **_with("next_step", "waiting", refused("each bucket is waited for at once", "leave one of the two out")),
    **_with(
        "next_step",
        "local_sgd outer",
        refused("local steps send no gradients", "use local_sgd_overlap_steps for the averagings"),
    ),
    **_with("next_step", _COMPRESSIONS, goes("it is decoded under the next forward pass")),
    **_with("next_step", "merge", goes("the runs between two updates have nothing to wait for")),
    **_with("next_step", "amp", goes("the loss scale of a step goes with its gradients")),
    **_with("next_step", "sync_bn", goes("statistics are sent on a separate process group")),
    **_with("next_step", "recompute", goes("gradients are the same bit by bit")),
    **_with("next_step", "sharding", goes("new parameters travel under the next forward pass")),
    **_with("next_step", "rows", goes("a table gets its rows before the next lookup")),
}


def verdict(first: str, second: str, pairs: Mapping[tuple[str, str], Combination] = PAIRS) -> Combination:
    """The entry of two strategies, in either order. Raises KeyError if the table has none."""
    return pairs[first, second] if (first, second) in pairs else pairs[second, first]


def clashes(
    settings: Mapping[str, Any],
    strategies: Sequence[Strategy] = STRATEGIES,
    pairs: Mapping[tuple[str, str], Combination] = PAIRS,
) -> list[Problem]:
    """Each refused pair of strategies that these settings enable, defaults included, for the knob that was set."""
    used = [strategy for strategy in strategies if strategy.is_on(_value(strategy.knob, settings))]
    problems = []
    for first, second in combinations(used, 2):
        entry = verdict(first.name, second.name, pairs)
        if not entry.allowed:
            reported, other = (second, first) if second.knob in settings else (first, second)
            clash = f"does not go with {other.title} ({other.knob}: {shown(_value(other.knob, settings))})"
            problems.append(Problem(reported.knob, f"{clash}: {entry.words}"))
    return problems


def entries() -> Iterator[tuple[Strategy, Strategy, Combination]]:
    """The whole table, pair by pair, in the order of ``STRATEGIES``."""
    for first, second in combinations(STRATEGIES, 2):
        yield first, second, verdict(first.name, second.name)


def _value(knob: str, settings: Mapping[str, Any]) -> Any:
    return settings.get(knob, KNOBS[knob].default)
