"""Named sets of flags for the records of docs/benchmarks: ``--scenario NAME``; other flags override it.

A new profile of the catalogue takes part once its name is in ``CATALOGUE``, with its PyTorch twin if it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet_train.profile import Profile, profile_names

_OWN = "tools/benchmarks/profiles"
# The catalogue's strategies, unchanged. Names that are not in the catalogue (yet) are left out.
CATALOGUE = """
multi_node bf16_compression int8_compression int4_compression powersgd ethernet_1g local_sgd diloco streaming_diloco
""".split()
# PyTorch with the same tuning effort, in two bucket sizes; twins of profiles are added (rivals_of).
BUCKETS = "torch:ddp torch:ddp_4mb torch:bf16 torch:bf16_4mb".split()
# The same strategies with knobs chosen for such short runs, on both sides.
TUNED = [
    f"{_OWN}/{name}.yaml"
    for name in ("three_communicators", "bf16_small_buckets", "powersgd_1", "local_sgd_8", "diloco_8")
]


def present(names: Sequence[str]) -> list[str]:
    """The names that are in the catalogue."""
    known = profile_names()
    return [name for name in names if name in known]


def rivals_of(profiles: Sequence[Profile]) -> list[str]:
    """PyTorch's contestants for these: DDP and its bfloat16 hook, and PowerSGD and post-local SGD of our rank or period
    that begin where ours begin.
    """
    twins = []
    for each in profiles:
        if each.use_local_sgd and each.outer_optimizer == "none":
            twins.append(f"torch:post_local_sgd_{each.local_sgd_steps}_from_{each.local_sgd_is_warm_steps}")
        elif each.compression == "powersgd" and not each.use_local_sgd:
            twins.append(f"torch:powersgd_{each.powersgd_rank}_from_{each.powersgd_start_step}")
    return list(dict.fromkeys([*BUCKETS, *twins]))


SCENARIOS: dict[str, dict[str, Any]] = {
    # Every kind of strategy as shipped, beside its rival: step times, bytes, time to a target accuracy.
    "strategies": {"ours": present(CATALOGUE)},
    # The same with tuned files beside the catalogue's, marked as such, and tuned rivals.
    "tuned": {"ours": [*present(CATALOGUE), *TUNED]},
    # Scaling efficiency of low-frequency strategies on two machines, and their cost in accuracy.
    "scaling": {
        "ours": [
            *present(["multi_node", "local_sgd", "diloco", "streaming_diloco"]),
            f"{_OWN}/local_sgd_overlap.yaml",
            f"{_OWN}/local_sgd_overlap_float32.yaml",
            f"{_OWN}/diloco_overlap.yaml",
        ],
        "steps": 400,
        "evaluate_every": 16,
    },
    # fuse_all_reduce_ops on 160 small tensors.
    "small_tensors": {"task_name": "small_tensors", "ours": ["multi_node", "unfused"], "rivals": "none"},
    # Bytes between nodes: flat beside reduce inside the node, allreduce between leaders, broadcast inside.
    "hierarchical": {
        "nodes": 2,
        "ranks_per_node": 2,
        "ours": ["multi_node", "hierarchical"],
        "rivals": "none",
        "steps": 64,
    },
}
