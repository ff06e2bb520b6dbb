"""Cases of knobs that control how gradients are sent, and of those that run a job; see knob_effects_table."""

from __future__ import annotations

from typing import Any

from tests.parallel import knob_effects_seen as see
from tests.parallel.knob_effects_case import ByRank, Case, Look

WHOLE = "all_reduce 9376"
"""All gradients, or all parameters, in one float32 buffer."""


def rank_0_says(*sentences: str) -> ByRank:
    return ByRank([list(sentences), []])


_UNFUSED = ["all_reduce 8192", "all_reduce 128", "all_reduce 1024", "all_reduce 32"]
_ALONE = {"fuse_parameter_groups_size": 1}
_PAIRS = {"fuse_parameter_groups_size": 2}
_IN_PAIRS = ["all_reduce 8320", "all_reduce 1056"]
_IN_SIZES = ["all_reduce 8192", "all_reduce 1184"]

DESCRIPTIONS = [
    Case(
        "name",
        "effects",
        {see.plan_is_of: "effects", see.called: ByRank([["effects"], []])},
        {"environment": {"NCCL_BLOCKING_WAIT": "1"}},  # a variable of which rank 0 has to say something
    ),
    Case("description", "EFFECT of it", {see.printed: ["shown: EFFECT of it"]}, run="catalogue"),
    Case("measured", ["2026-11-21, EFFECT"], {see.printed: ["measured: 2026-11-21, EFFECT"]}, run="catalogue"),
]

BUCKETS = [
    Case("fuse_all_reduce_ops", False, {see.sent: [_UNFUSED] * 2}),
    Case("fuse_all_reduce_ops", True, {see.sent: [[WHOLE]] * 2}),
    Case("fuse_grad_size_in_MB", 0.002, {see.sent: [_IN_SIZES] * 2}),
    Case("fuse_grad_size_in_MB", 0.0005, {see.sent: [_UNFUSED] * 2}),
    Case("fuse_parameter_groups_size", 2, {see.sent: [_IN_PAIRS] * 2}),
    Case("last_comm_group_size_MB", 0.001, {see.sent: [["all_reduce 8192", "all_reduce 1152", "all_reduce 32"]] * 2}),
    Case(
        "FLAGS_fuse_parameter_memory_size",
        "0.002",
        {
            see.sent: [_IN_SIZES] * 2,
            see.said: rank_0_says("FLAGS_fuse_parameter_memory_size=0.002 is used as fuse_grad_size_in_MB: 0.002"),
        },
    ),
    Case(
        "FLAGS_fuse_parameter_groups_size",
        "2",
        {
            see.sent: [_IN_PAIRS] * 2,
            see.said: rank_0_says("FLAGS_fuse_parameter_groups_size=2 is used as fuse_parameter_groups_size: 2"),
        },
    ),
]

_CHOSEN = (
    "nccl_comm_num: {}, fuse_grad_size_in_MB: {}, last_comm_group_size_MB: {}: chosen for {} (link_gigabits and "
    "link_latency_ms given) and 2 MB of gradients, which makes {}; numbers in the profile override this"
)
LINK = [
    Case(
        "link_gigabits",
        100.0,
        {
            see.sent: [["all_reduce 2097152"]] * 2,
            see.said: rank_0_says(_CHOSEN.format(1, 2, 2, "100 Gb/s, 0.1 ms", "1 bucket")),
        },
        {"link_latency_ms": 0.1},
        run="large",
    ),
    Case(
        "link_latency_ms",
        1.0,
        {
            see.sent_in_any_order: [["all_reduce 1048576"] * 2] * 2,
            see.said: rank_0_says(_CHOSEN.format(2, 2, 1, "2 Gb/s, 1 ms", "2 buckets")),
        },
        {"link_gigabits": 2.0},
        run="large",
    ),
    Case(
        "compression_declines",
        False,
        {see.sent_as: ["int8"]},
        {"compression": "int8", "link_gigabits": 1000.0, "link_latency_ms": 0.01},
        run="large",
    ),
    Case(
        "compression_declines",
        True,
        {see.sent_as: ["none"]},
        {"compression": "int8", "link_gigabits": 1000.0, "link_latency_ms": 0.01},
        run="large",
    ),
]

_BESIDE: dict[Look, Any] = {see.sends_beside_the_computing: True}
_ONE_STEP: dict[str, Any] = {"options": {"steps": 1}}
CHANNELS = [
    Case("nccl_comm_num", "auto", {see.threads: "aaaa", see.groups: "aaaa", **_BESIDE}, _ALONE),
    Case("nccl_comm_num", 2, {see.threads: "abab", see.groups: "abab", **_BESIDE}, _ALONE),
    Case("nccl_comm_num", 4, {see.threads: "abcd", see.groups: "abcd", **_BESIDE}, _ALONE),
    Case(
        "sync_nccl_allreduce",
        True,
        {see.launches_wait: [True, True], see.planned: "every 1 micro-batches, each bucket waited for"},
        _PAIRS,
        holds=0.3,
        **_ONE_STEP,
    ),
    Case("sync_nccl_allreduce", False, {see.launches_wait: [False, False]}, _PAIRS, holds=20.0, **_ONE_STEP),
    Case(
        "FLAGS_sync_nccl_allreduce",
        "1",
        {
            see.launches_wait: [True, True],
            see.said: rank_0_says("FLAGS_sync_nccl_allreduce=1 is used as sync_nccl_allreduce: true"),
        },
        _PAIRS,
        holds=0.3,
        **_ONE_STEP,
    ),
]

_LOCAL_GROUPS = [
    ["reduce 0,1", "all_reduce 0,2", "broadcast 0,1"],
    ["reduce 0,1", "broadcast 0,1"],
    ["reduce 2,3", "all_reduce 0,2", "broadcast 2,3"],
    ["reduce 2,3", "broadcast 2,3"],
]
LOCAL_GROUPS = [
    Case("use_hierarchical_allreduce", True, {see.members: ByRank(_LOCAL_GROUPS), see.moved: [2.5, 2.5]}, ranks=4),
    Case("use_hierarchical_allreduce", False, {see.members: ["all_reduce 0,1,2,3"], see.moved: [2.5, 2.5]}, ranks=4),
    Case(
        "hierarchical_allreduce_inter_nranks",
        4,
        {see.members: ["all_reduce 0,1,2,3"], see.moved: [2.5, 2.5]},
        {"use_hierarchical_allreduce": True},
        ranks=4,
    ),
]

RUNNING = [
    Case("fetch_frequency", 3, {see.fetches: "x..xx.x..x", see.told_other_loops: "x..x.."}, run="trainer"),
    Case("divergence_check_steps", 2, {see.compared_at: ["step 1", "step 3", "step 5"]}, options={"steps": 5}),
    Case("divergence_check_steps", 0, {see.compared_at: [], see.ends_with_an_operator: False}, options={"steps": 5}),
    Case(
        "divergence_check_steps",
        3,
        {see.compared_at: ["the start", "step 4", "step 8"]},
        {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2},
        options={"steps": 9},
    ),
    Case("collective_timeout_seconds", 7, {see.bounds: [7]}),
    Case("barrier_every_steps", 1, {see.barriers: list(range(1, 21))}, options={"steps": 20}),
    Case(
        "barrier_every_steps",
        8,
        {
            # The first two, each eighth, and those behind the comparisons at steps 1 and 13.
            see.barriers: [1, 2, 8, 14, 16],
            see.sending_steps: list(range(1, 21)),
            see.counted: 20 * 9376,
            see.said: rank_0_says(
                "barrier_every_steps: 8 (set by the caller): between two barriers Gloo waits for a rank for 30 s, "
                "which cannot be set: one that pauses for longer fails the job. NCCL's ranks wait for 300 s "
                "(collective_timeout_seconds). A stop request is known up to 7 steps later."
            ),
        },
        {"divergence_check_steps": 12},
        options={"steps": 20},
    ),
    Case(
        "num_threads",
        4,
        {
            see.serial_flags: [False, False],
            see.executor_threads: "others",
            see.said: rank_0_says("num_threads: 4 (set by the caller) is mapped"),
        },
    ),
    Case("num_threads", 1, {see.serial_flags: [True, True], see.executor_threads: "the script's"}),
    Case(
        "num_iteration_per_drop_scope",
        5,
        {
            see.large_value: "freed",
            see.said: rank_0_says("num_iteration_per_drop_scope: 5 (set by the caller) is mapped"),
        },
        run="memory",
    ),
    Case("environment", {"FLAGS_fraction_of_gpu_memory_to_use": "0.5"}, {see.memory_fraction_flag: 0.5}),
    Case("environment", {"NCCL_DEBUG": "INFO"}, {see.variable: "INFO"}),
]
