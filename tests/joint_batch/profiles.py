"""The profiles with which the cases are trained, and how closely each has to reach one process. Imports neither Paddle
nor fleet_train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# The link is given, so that nothing is measured before each program. NaN is compared, not reported.
_COMMON = {
    "average_over": "samples",
    "link_gigabits": 1.0,
    "link_latency_ms": 0.1,
    "collective_timeout_seconds": 60,
    "nonfinite": "ignore",
}
EXACT, LOOSE = 1e-5, 2e-3
"""Of what one process moves: in float64, and in float32."""


@dataclass(frozen=True)
class Way:
    """How cases are trained. ``together``: the way of all parameters together is compared, not that of each."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    tolerance: float = EXACT
    together: bool = False
    mode: str = "unlike"
    plain: bool = False
    """The reference is the plain mean of the ranks' gradients, not the joint batch."""
    synchronized: bool = False
    strict: bool = False
    """Probable mistakes are errors."""
    late: bool = False
    """Collectives are enqueued and end late, as on GPUs."""
    optimizers: tuple[str, ...] = ("momentum", "adam")

    @property
    def micro_batches(self) -> int:
        return int(self.settings.get("accumulate_steps", 1))


def _way(options: Mapping[str, Any] | None = None, **settings: Any) -> Way:
    return Way(_COMMON | settings, **(options or {}))


_LOW = {"dtype": "float32", "together": True, "optimizers": ("momentum",)}
WAYS: dict[str, Way] = {
    "default": _way(),
    "float32": _way({"dtype": "float32", "tolerance": LOOSE}),
    "int8": _way({**_LOW, "tolerance": 0.05}, compression="int8"),
    "sharding": _way(sharding=True),
    "rows": _way(sparse_embeddings=True),
    "merge": _way(accumulate_steps=2),
    "recompute": _way(recompute_segments=2),
    "amp": _way({**_LOW, "tolerance": 0.1}, amp_level="O1"),
    "sync": _way({"synchronized": True}, sync_batch_norm=True),
    "strict": _way({"strict": True}),
    "strict, merge": _way({"strict": True}, accumulate_steps=2),
    "streams": _way({"late": True}),
    "threads": _way(num_threads=4, nccl_comm_num=3, fuse_parameter_groups_size=2),
    "hierarchical": _way(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=2),
    "local_sgd": _way({"optimizers": ("momentum",)}, use_local_sgd=True, local_sgd_is_warm_steps=0, local_sgd_steps=1),
    "merge, sharding": _way(accumulate_steps=2, sharding=True),
    "recompute, rows": _way(recompute_segments=2, sparse_embeddings=True),
    "sync, recompute": _way({"synchronized": True}, sync_batch_norm=True, recompute_segments=2),
    "static": _way({"mode": "static"}),
    "ranks": _way({"plain": True, "optimizers": ("momentum",)}, average_over="ranks"),
    "equal": _way({"mode": "equal", "dtype": "float32", "tolerance": LOOSE}),
    "equal, ranks": _way({"mode": "equal", "dtype": "float32", "tolerance": LOOSE}, average_over="ranks"),
}
IN_TURN = ("int8", "sharding", "rows", "recompute", "amp", "sync", "streams")
"""What `make test-long` trains a share of the cases with, each with one; all with ``default`` and ``merge``."""


@dataclass(frozen=True)
class Job:
    """One training on ranks."""

    case: str
    optimizer: str
    ranks: int
    way: str

    @property
    def label(self) -> str:
        return f"{self.case}, {self.optimizer}, {self.way}"

    @property
    def parts(self) -> int:
        return self.ranks * WAYS[self.way].micro_batches

    def reference(self, is_static: bool) -> str:
        """The label of the training in one process that it has to reach; others may have the same."""
        way = WAYS[self.way]
        fixed = "static" if is_static or way.mode == "static" else way.mode
        of_parts = "" if fixed == "unlike" and not way.plain else f" {self.parts}"
        kind = "plain" if way.plain else "joint"
        norm = ", norm" if way.synchronized else ""
        return f"{self.case}, {self.optimizer}, {kind} {fixed}{of_parts}, {way.dtype}{norm}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
