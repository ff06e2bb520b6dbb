"""A random exact profile for a random program: what computes the numbers of one process with the joint batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fleet_train.errors import ProfileError
from fleet_train.profile import Profile
from tests.programs.random_programs import optimizers

if TYPE_CHECKING:
    from tests.programs.random_programs.draw import Case

LATE = 1000
# Given, so that nothing is measured before each program.
_LINK = {"link_gigabits": 1.0, "link_latency_ms": 0.1}


def settings_of(case: Case, random: np.random.Generator, low: bool) -> dict[str, Any]:
    """Settings that go together, in a random order of precedence."""

    def pick(*choices: Any) -> Any:
        return choices[int(random.integers(len(choices)))]

    offered = [
        _buckets(random, pick),
        {"nccl_comm_num": pick(1, 2, 3)},
        {"sync_nccl_allreduce": True},
        {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": pick(0, 0, 2)},
        {"sharding": True, "sharding_degree": pick(0, 0, case.ranks, 2)},
        {"sharding": True},
        {"sparse_embeddings": pick(True, True, False)},
        {"accumulate_steps": pick(2, 3)},
        {"recompute_segments": pick(2, 3, 4)},
        {"recompute_every_blocks": pick(1, 2)},
        {"num_threads": 4},
        {"divergence_check_steps": pick(1, 2)},
        {"barrier_every_steps": pick(2, 10)},
        *_late(case),
    ]
    chosen: dict[str, Any] = dict(_LINK)
    if "sync" in case.needs:
        chosen["sync_batch_norm"] = True
    if low:
        chosen["amp_level"] = "O1"
    for place in random.permutation(len(offered)):
        wanted = {**chosen, **offered[place]}
        if random.random() < 0.35 and _goes(wanted, case):
            chosen = wanted
    return chosen


def _buckets(random: np.random.Generator, pick: Any) -> dict[str, Any]:
    if random.random() < 0.25:
        return {"fuse_all_reduce_ops": False}
    return {
        "fuse_grad_size_in_MB": pick(0.0002, 0.001, 1.0, "auto"),
        "fuse_parameter_groups_size": pick(1, 2, 3, 50),
    }


def _late(case: Case) -> list[dict[str, Any]]:
    """Lossy strategies before they begin."""
    warm = {"use_local_sgd": True, "local_sgd_is_warm_steps": LATE}
    late: list[dict[str, Any]] = [warm, {"compression": "powersgd", "powersgd_start_step": LATE}]
    if case.optimizer in optimizers.LINEAR and not case.clip:
        every = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 1}
        late.append(every)
    return late


def _goes(settings: dict[str, Any], case: Case) -> bool:
    """Whether the profile, and what conversion says of this program, allow it."""
    try:
        Profile(**settings)
    except ProfileError:
        return False
    degree = settings.get("sharding_degree", 0)
    inner = settings.get("hierarchical_allreduce_inter_nranks", 0)
    uneven = settings.get("use_hierarchical_allreduce") and case.ranks % (inner or case.nodes)
    if (degree and case.ranks % degree) or uneven:
        return False
    updates_locally = settings.get("use_local_sgd") or settings.get("accumulate_steps", 1) > 1
    if case.optimizer in optimizers.WRAPS and (updates_locally or settings.get("sharding")):
        return False
    if settings.get("sharding") and (case.clip == "by_norm" or case.optimizer in optimizers.AT_ONCE):
        return False
    # Micro-batches have statistics of their own, and one process with the joint batch has not.
    return not (settings.get("accumulate_steps", 1) > 1 and "sync" in case.needs)
