"""The strategies with which the programs are trained on two ranks. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LATE = 1000


@dataclass(frozen=True)
class Strategy:
    """A profile of the catalogue by name, or settings; and to which programs it is exact."""

    profile: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    linear: bool = False
    """Exact only where the mean of updates is the update of the mean: SGD and Momentum without a clip."""
    own_state: bool = False
    """The optimizer's state is another one, on purpose."""
    for_one_optimizer: bool = False
    """Refused for a program with two optimizers."""
    asked_for: bool = False
    """Run only with programs that name it."""
    rounded: bool = False
    """Computes in bfloat16: what is fetched is compared, to 2e-2, and the ranks with each other."""


AMP = {"amp_level": "O2"}
SPLIT = {"nccl_comm_num": 3, "fuse_parameter_groups_size": 2}

EXACT: dict[str, Strategy] = {
    "multi_node": Strategy("multi_node"),
    "single_node": Strategy("single_node"),
    "unfused": Strategy(settings={"fuse_all_reduce_ops": False}),
    "three communicators": Strategy(settings=SPLIT),
    "waiting": Strategy(settings={"sync_nccl_allreduce": True, "fuse_parameter_groups_size": 3}),
    "hierarchical": Strategy(settings={"use_hierarchical_allreduce": True, "nccl_comm_num": 2}),
    "merge": Strategy(
        for_one_optimizer=True, settings={"accumulate_steps": 2, "nccl_comm_num": 2, "fuse_parameter_groups_size": 3}
    ),
    "recompute": Strategy(for_one_optimizer=True, settings={"recompute_segments": 3}),
    "checked every step": Strategy(settings={"divergence_check_steps": 1}),
    "executor's threads": Strategy(settings={"num_threads": 4} | SPLIT),
    "local_sgd, warm-up": Strategy(
        for_one_optimizer=True, settings={"use_local_sgd": True, "local_sgd_is_warm_steps": LATE}
    ),
    "local_sgd, every step": Strategy(
        for_one_optimizer=True,
        settings={"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 1},
        linear=True,
        own_state=True,
    ),
    "powersgd, late": Strategy(
        for_one_optimizer=True, settings={"compression": "powersgd", "powersgd_start_step": LATE}
    ),
    "dgc, late": Strategy(
        for_one_optimizer=True,
        settings={"compression": "dgc", "dgc_rampup_begin_step": LATE},
        linear=True,
        own_state=True,
    ),
    "sync batch norm": Strategy(for_one_optimizer=True, settings={"sync_batch_norm": True}, asked_for=True),
    "sync batch norm, recompute": Strategy(
        for_one_optimizer=True, settings={"sync_batch_norm": True, "recompute_segments": 2}, asked_for=True
    ),
    "sync batch norm, amp": Strategy(
        for_one_optimizer=True, settings={"sync_batch_norm": True, **AMP}, asked_for=True, rounded=True
    ),
    "merge, recompute": Strategy(for_one_optimizer=True, settings={"accumulate_steps": 2, "recompute_segments": 4}),
    "amp, recompute": Strategy(for_one_optimizer=True, settings={"recompute_segments": 4, **AMP}, rounded=True),
    "amp, merge": Strategy(for_one_optimizer=True, settings={"accumulate_steps": 2, **AMP}, rounded=True),
}

# Every program meets these; the others are dealt out, so that each meets many programs.
ALWAYS = ("multi_node", "three communicators", "merge", "recompute", "local_sgd, every step")

LOSSY: dict[str, Strategy] = {
    "bf16": Strategy(settings={"compression": "bf16"}),
    "int8": Strategy(settings={"compression": "int8"}),
    "diloco, int8": Strategy(
        settings={
            "use_local_sgd": True,
            "local_sgd_is_warm_steps": 0,
            "local_sgd_steps": 2,
            "local_sgd_dtype": "int8",
            "outer_optimizer": "diloco",
            "outer_lr": 0.7,
            "outer_momentum": 0.5,
        }
    ),
    "powersgd": Strategy(settings={"compression": "powersgd", "powersgd_rank": 2, "powersgd_min_compression": 0}),
    "dgc": Strategy(settings={"compression": "dgc", "dgc_sparsity": 0.75, "dgc_min_elements": 16}, linear=True),
    "local_sgd": Strategy(
        settings={"use_local_sgd": True, "local_sgd_is_warm_steps": 1, "local_sgd_steps": 2, **SPLIT}
    ),
    "local_sgd, overlap": Strategy(
        settings={
            "use_local_sgd": True,
            "local_sgd_is_warm_steps": 0,
            "local_sgd_steps": 2,
            "local_sgd_overlap_steps": 1,
        }
    ),
    "diloco": Strategy(
        settings={
            "use_local_sgd": True,
            "local_sgd_is_warm_steps": 0,
            "local_sgd_steps": 3,
            "outer_optimizer": "diloco",
            "outer_lr": 0.7,
            "outer_momentum": 0.9,
        }
    ),
    "merge, local_sgd": Strategy(
        settings={"accumulate_steps": 2, "use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 3}
    ),
}

# Where 16 bits are rounded, the last bit of a float32 decides now and then to which side.
ROUNDED = 1e-3
