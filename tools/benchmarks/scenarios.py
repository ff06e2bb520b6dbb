"""The records of docs/benchmarks as words: who takes part in what. ``--scenario NAME``; other flags win over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet_train.profile import profile_names

_OWN = "tools/benchmarks/profiles"
# The catalogue's strategies, as they are. Names that the catalogue does not have (yet) are left out.
CATALOGUE = """
multi_node bf16_compression int8_compression int4_compression powersgd ethernet_1g local_sgd diloco streaming_diloco
""".split()
# PyTorch with the same tuning effort: two bucket sizes, and hooks that start where the catalogue's profiles start.
RIVALS = """
torch:ddp torch:ddp_4mb torch:bf16 torch:bf16_4mb torch:powersgd_2_from_100 torch:powersgd_1_from_30
torch:post_local_sgd_4_from_100
""".split()
# The same strategies with knobs chosen for a run this short, on both sides.
TUNED = [
    f"{_OWN}/{name}.yaml"
    for name in ("three_communicators", "bf16_small_buckets", "powersgd_1", "local_sgd_8", "diloco_8")
]
TUNED_RIVALS = "torch:powersgd_1_from_10 torch:post_local_sgd_8_from_10".split()


def present(names: Sequence[str]) -> list[str]:
    """Those that are in the catalogue."""
    known = profile_names()
    return [name for name in names if name in known]


SCENARIOS: dict[str, dict[str, Any]] = {
    # Every kind of strategy as it is shipped beside its rival: step times, bytes, time to a target accuracy.
    "strategies": {"ours": present(CATALOGUE), "rivals": ",".join(RIVALS)},
    # The same with tuned files beside the catalogue's, named as such, and tuned rivals.
    "tuned": {"ours": [*present(CATALOGUE), *TUNED], "rivals": ",".join([*RIVALS, *TUNED_RIVALS])},
    # How much of two machines low-frequency strategies use, and at what cost in accuracy.
    "scaling": {
        "ours": [
            *present(["multi_node", "local_sgd", "diloco", "streaming_diloco"]),
            f"{_OWN}/local_sgd_overlap.yaml",
            f"{_OWN}/local_sgd_overlap_float32.yaml",
            f"{_OWN}/diloco_overlap.yaml",
        ],
        "rivals": "torch:ddp,torch:ddp_4mb,torch:post_local_sgd_4_from_100,torch:post_local_sgd_8_from_10",
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
