"""Which strategies can be combined: one table, enforced by the loader, shown by ``fleet_train profiles
--compatibility``.

To add a strategy, add its line to ``STRATEGIES`` and a line to ``PAIRS`` for each existing one; a test fails if one is
missing. A knob that only has an effect with another one is not a pair: see ``needs`` and ``only_with`` of
`fleet_train.profile.knobs.Knob`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fleet_train.profile.knobs import AUTO, shown
from fleet_train.profile.schema import KNOBS


@dataclass(frozen=True)
class Strategy:
    """A strategy and the knob that switches it on; ``is_on`` tests the knob's value."""

    name: str
    knob: str
    title: str
    is_on: Callable[[Any], bool] = bool


@dataclass(frozen=True)
class Verdict:
    """Whether two strategies may be combined in a profile. ``words``: how they work together, or why they cannot and
    what to do instead.
    """

    allowed: bool
    words: str


@dataclass(frozen=True)
class Clash:
    """Two strategies in one profile that cannot be combined, reported for the knob that was set."""

    knob: str
    message: str


def _goes(words: str) -> Verdict:
    return Verdict(True, words)


def _refused(reason: str, instead: str) -> Verdict:
    return Verdict(False, f"{reason}; {instead}")


STRATEGIES: tuple[Strategy, ...] = (
    Strategy("fused", "fuse_all_reduce_ops", "fused buckets"),
    Strategy("communicators", "nccl_comm_num", "several communicators", lambda number: number not in (1, AUTO)),
    Strategy("hierarchical", "use_hierarchical_allreduce", "hierarchical allreduce"),
    Strategy("waiting", "sync_nccl_allreduce", "waiting for each bucket"),
    Strategy("local_sgd", "use_local_sgd", "LocalSGD"),
    Strategy("outer", "outer_optimizer", "outer momentum", lambda kind: kind != "none"),
    Strategy("bf16", "compression", "bfloat16 on the wire", lambda kind: kind in ("bf16", "fp16")),
    Strategy("quantised", "compression", "quantised wire format", lambda kind: kind in ("int8", "int4")),
    Strategy("powersgd", "compression", "PowerSGD", lambda kind: kind == "powersgd"),
    Strategy("dgc", "compression", "DGC", lambda kind: kind == "dgc"),
    Strategy("merge", "accumulate_steps", "gradient merge", lambda number: number > 1),
    Strategy("amp", "amp_level", "mixed precision", lambda level: level != "O0"),
    Strategy("sync_bn", "sync_batch_norm", "synchronised batch norm"),
    Strategy("recompute", "recompute_segments", "recompute", lambda segments: segments > 1),
)

PAIRS: dict[tuple[str, str], Verdict] = {
    ("fused", "communicators"): _goes("the communicators take the buckets in turn"),
    ("fused", "hierarchical"): _goes(
        "each bucket takes the three steps; fewer buckets wait for the leaders less often"
    ),
    ("fused", "waiting"): _goes("each bucket is waited for before the next operator starts"),
    ("fused", "local_sgd"): _goes("buckets are for the gradients of the warm-up; parameters are averaged in one piece"),
    ("fused", "outer"): _goes("the outer step uses averaged parameters and does not depend on the warm-up's buckets"),
    ("communicators", "hierarchical"): _goes("each communicator has its own local groups and leaders' group"),
    ("communicators", "waiting"): _goes("only one bucket is in flight at a time, so one communicator is enough"),
    ("communicators", "local_sgd"): _goes("the warm-up uses all of them, an averaging the first one"),
    ("communicators", "outer"): _goes("the averaged difference is sent on the first communicator"),
    ("hierarchical", "waiting"): _goes("a bucket's three steps end before the next operator starts"),
    ("hierarchical", "local_sgd"): _goes("parameters are averaged in the same three steps as gradients in the warm-up"),
    ("hierarchical", "outer"): _goes(
        "the difference is averaged in the three steps, then each rank takes the outer step"
    ),
    ("waiting", "local_sgd"): _goes("concerns the warm-up only: local steps send no gradients"),
    ("waiting", "outer"): _goes("concerns the warm-up only: the outer step follows an averaging, which is waited for"),
    ("local_sgd", "outer"): _goes("the outer step is taken at each averaging; without LocalSGD there is none"),
}


def _with(strategy: str, others: str, verdict: Verdict) -> dict[tuple[str, str], Verdict]:
    return {(other, strategy): verdict for other in others.split()}


_ONE_COMPRESSION = _refused("a gradient is compressed in one way", "choose one")
_WARM_UP_ONLY = _refused(
    "LocalSGD sends gradients in its warm-up only, and a compression's error feedback would be lost at its end",
    "use local_sgd_dtype: bfloat16",
)
PAIRS |= {
    **_with("bf16", "fused communicators waiting", _goes("each bucket is cast before it is sent and back after")),
    **_with("bf16", "hierarchical", _goes("inside a local group float32, between the leaders half the bytes")),
    **_with("bf16", "local_sgd outer", _goes("concerns the warm-up; local_sgd_dtype is for the averaging")),
    **_with("quantised", "fused communicators waiting", _goes("each bucket is rounded, with scales per block")),
    **_with("quantised", "hierarchical", _goes("inside a local group float32, between the leaders quantised values")),
    **_with(
        "quantised",
        "local_sgd outer",
        _goes(
            "concerns the warm-up, at whose end the rounding errors kept (half a level of one step) are dropped; "
            "local_sgd_dtype is for the averaging"
        ),
    ),
    **_with("quantised", "bf16", _ONE_COMPRESSION),
    **_with("powersgd", "fused communicators waiting", _goes("a bucket takes two small allreduces")),
    **_with("powersgd", "hierarchical", _goes("both small allreduces take the three steps")),
    **_with("powersgd", "local_sgd outer", _WARM_UP_ONLY),
    **_with("powersgd", "bf16 quantised", _ONE_COMPRESSION),
    **_with("dgc", "fused communicators waiting", _goes("a bucket takes one all-gather")),
    **_with(
        "dgc",
        "hierarchical",
        _refused("the ranks' largest elements are gathered, not summed", "leave use_hierarchical_allreduce off"),
    ),
    **_with("dgc", "local_sgd outer", _WARM_UP_ONLY),
    **_with("dgc", "bf16 quantised powersgd", _ONE_COMPRESSION),
    **_with("merge", "fused communicators hierarchical waiting", _goes("one exchange per update")),
    **_with("merge", "local_sgd outer", _goes("a local step is an update; micro-batches within it send nothing")),
    **_with("merge", "bf16 quantised powersgd dgc", _goes("the merged gradient is compressed")),
    **_with(
        "amp",
        "fused communicators hierarchical waiting local_sgd outer bf16 quantised powersgd dgc merge",
        _goes("gradients and parameters are float32 outside the forward and backward pass"),
    ),
    **_with(
        "sync_bn",
        "fused communicators hierarchical waiting bf16 quantised powersgd dgc",
        _goes("statistics are sent on a separate process group"),
    ),
    **_with(
        "sync_bn",
        "local_sgd outer",
        _refused("local steps send nothing, but synchronised statistics would have to", "leave sync_batch_norm off"),
    ),
    **_with("sync_bn", "merge", _goes("statistics are those of one micro-batch over all ranks")),
    **_with("sync_bn", "amp", _goes("statistics are float32")),
    **_with(
        "recompute",
        "fused communicators hierarchical waiting local_sgd outer bf16 quantised powersgd dgc merge amp sync_bn",
        _goes("gradients are the same bit by bit"),
    ),
}


def verdict(first: str, second: str, pairs: Mapping[tuple[str, str], Verdict] = PAIRS) -> Verdict:
    """The entry of two strategies, in either order. Raises KeyError if the table has none."""
    return pairs[first, second] if (first, second) in pairs else pairs[second, first]


def clashes(
    settings: Mapping[str, Any],
    strategies: Sequence[Strategy] = STRATEGIES,
    pairs: Mapping[tuple[str, str], Verdict] = PAIRS,
) -> list[Clash]:
    """Each refused pair of strategies that these settings, with the defaults, enable together."""
    used = [one for one in strategies if one.is_on(_value(one.knob, settings))]
    found = []
    for first, second in combinations(used, 2):
        entry = verdict(first.name, second.name, pairs)
        if not entry.allowed:
            told, other = (second, first) if second.knob in settings else (first, second)
            beside = f"does not go with {other.title} ({other.knob}: {shown(_value(other.knob, settings))})"
            found.append(Clash(told.knob, f"{beside}: {entry.words}"))
    return found


def entries() -> Iterator[tuple[Strategy, Strategy, Verdict]]:
    """The whole table, pair by pair, in the order of ``STRATEGIES``."""
    for first, second in combinations(STRATEGIES, 2):
        yield first, second, verdict(first.name, second.name)


def _value(knob: str, settings: Mapping[str, Any]) -> Any:
    return settings.get(knob, KNOBS[knob].default)
