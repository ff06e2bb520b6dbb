"""The records of docs/benchmarks as words: who takes part in what. ``--scenario NAME``; other flags win over it."""

from __future__ import annotations

from typing import Any

_OWN = "tools/benchmarks/profiles"

SCENARIOS: dict[str, dict[str, Any]] = {
    # Every kind of strategy beside its rival: step times, bytes, time to a target accuracy.
    "strategies": {
        "ours": [
            f"{_OWN}/three_communicators.yaml",
            f"{_OWN}/bf16_small_buckets.yaml",
            f"{_OWN}/powersgd_1.yaml",
            f"{_OWN}/local_sgd_8.yaml",
            f"{_OWN}/diloco_8.yaml",
        ],
        "rivals": "torch:ddp,torch:bf16,torch:powersgd_1,torch:post_local_sgd_8",
    },
    # How much of two machines low-frequency strategies use. No evaluation on the way: an averaging that travels beside
    # local steps would go on while the clock is stopped. 128 timed steps are whole periods of all contestants.
    "scaling": {
        "ours": [
            f"{_OWN}/three_communicators.yaml",
            f"{_OWN}/local_sgd_8.yaml",
            f"{_OWN}/local_sgd_overlap.yaml",
            f"{_OWN}/local_sgd_overlap_float32.yaml",
            f"{_OWN}/diloco_overlap.yaml",
        ],
        "rivals": "torch:post_local_sgd_8",
        "steps": 144,
        "evaluate_every": 144,
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
