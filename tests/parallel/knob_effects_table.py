"""Every knob with what it changes in a run of real ranks: settings, what is looked at, and what is seen.

A case is also run with its knob left at the default. What is seen then must differ: a knob that nothing reads would
make the two runs equal. The numbers are small enough to be worked out by hand; parameters have 2048, 32, 256 and 8
elements (w0 .. w3) of float32; their gradients become ready in this order.
"""

from __future__ import annotations

from typing import Any

from tests.parallel import knob_effects_seen as see
from tests.parallel.knob_effects_case import ByRank, Case, Look


def rank_0_says(*sentences: str) -> ByRank:
    return ByRank([list(sentences), []])


_WHOLE = "all_reduce 9376"
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
    Case("fuse_all_reduce_ops", True, {see.sent: [[_WHOLE]] * 2}),
    Case("fuse_grad_size_in_MB", 0.002, {see.sent: [_IN_SIZES] * 2}),
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

_BESIDE: dict[Look, Any] = {see.sends_beside_the_computing: True}
_ONE_STEP: dict[str, Any] = {"options": {"steps": 1}}
CHANNELS = [
    Case("nccl_comm_num", 1, {see.threads: "aaaa", see.groups: "aaaa", **_BESIDE}, _ALONE),
    Case("nccl_comm_num", 2, {see.threads: "abab", see.groups: "abab", **_BESIDE}, _ALONE),
    Case("nccl_comm_num", 4, {see.threads: "abcd", see.groups: "abcd", **_BESIDE}, _ALONE),
    Case("sync_nccl_allreduce", True, {see.launches_wait: [True, True]}, _PAIRS, holds=0.3, **_ONE_STEP),
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

_TEAMS = [
    ["reduce 0,1", "all_reduce 0,2", "broadcast 0,1"],
    ["reduce 0,1", "broadcast 0,1"],
    ["reduce 2,3", "all_reduce 0,2", "broadcast 2,3"],
    ["reduce 2,3", "broadcast 2,3"],
]
TEAMS = [
    Case("use_hierarchical_allreduce", True, {see.members: ByRank(_TEAMS), see.moved: [2.5, 2.5]}, ranks=4),
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
        {see.compared_at: ["step 4", "step 8"]},
        {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2},
        options={"steps": 9},
    ),
    Case("collective_timeout_seconds", 7, {see.bounds: [7]}),
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

_LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2}
_EACH_STEP = _LOCAL | {"local_sgd_steps": 1}
_SLOWMO = _EACH_STEP | {"outer_optimizer": "slowmo"}
_MOMENTUM: dict[str, Any] = {"beside": _LOCAL, "options": {"optimizer": "momentum"}}
_FALLING: dict[str, Any] = {"options": {"optimizer": "falling", "steps": 12}}
_STEPS: dict[int, dict[str, Any]] = {number: {"options": {"steps": number}} for number in (3, 4, 5, 6, 7)}
LOCAL_SGD = [
    Case(
        "use_local_sgd",
        True,
        {
            see.sent: [[_WHOLE], [], [_WHOLE], [], [_WHOLE]],
            see.first_values: ByRank([[-0.5, -1.5, -3.5, -4.5, -6.5], [-0.5, -2.5, -3.5, -5.5, -6.5]]),
        },
        {"local_sgd_is_warm_steps": 1, "local_sgd_steps": 2},
        **_STEPS[5],
    ),
    Case("use_local_sgd", False, {see.sending_steps: [1, 2, 3]}, **_STEPS[3]),
    Case("local_sgd_is_warm_steps", 3, {see.sending_steps: [1, 2, 3, 5]}, _LOCAL, **_STEPS[5]),
    Case("local_sgd_steps", 3, {see.sending_steps: [3, 6]}, _LOCAL, **_STEPS[6]),
    Case("local_sgd_schedule", "constant", {see.sending_steps: [2, 4, 6]}, _LOCAL, **_STEPS[6]),
    Case(
        "local_sgd_schedule", "doubling", {see.sending_steps: [1, 3, 7]}, _LOCAL | {"local_sgd_steps": 4}, **_STEPS[7]
    ),
    Case("local_sgd_schedule", "adaptive", {see.sending_steps: [2, 4]}, _LOCAL, **_FALLING),
    Case(
        "local_sgd_max_steps",
        3,
        {see.sending_steps: [2, 4, 7, 10]},
        _LOCAL | {"local_sgd_schedule": "adaptive"},
        **_FALLING,
    ),
    Case("local_sgd_momentum", "keep", {see.velocities: ByRank([[1.0, 1.9], [2.0, 3.8]])}, **_MOMENTUM),
    Case(
        "local_sgd_momentum",
        "average",
        {see.velocities: ByRank([[1.0, 2.85], [2.0, 2.85]]), see.sent: [[], [_WHOLE, _WHOLE]]},
        **_MOMENTUM,
    ),
    Case("local_sgd_momentum", "reset", {see.velocities: ByRank([[1.0, 0.0], [2.0, 0.0]])}, **_MOMENTUM),
    Case("local_sgd_dtype", "float32", {see.sent: [[], [_WHOLE]]}, _LOCAL),
    Case("local_sgd_dtype", "bfloat16", {see.sent: [[], ["all_reduce 4688 bfloat16"]]}, _LOCAL),
    Case(
        "local_sgd_overlap_steps",
        1,
        {see.first_values: ByRank([[0.0, -1.0, -3.0, -4.0], [-1.0, -3.0, -4.0, -6.0]])},
        _LOCAL,
        **_STEPS[4],
    ),
    Case("outer_optimizer", "none", {see.moved: [1.5] * 3}, _EACH_STEP, **_STEPS[3]),
    Case(
        "outer_optimizer", "slowmo", {see.moved: [1.5, 2.25, 2.625]}, _EACH_STEP | {"outer_momentum": 0.5}, **_STEPS[3]
    ),
    Case(
        "outer_optimizer",
        "diloco",
        {see.moved: [2.25, 2.625, 2.8125]},
        _EACH_STEP | {"outer_momentum": 0.5},
        **_STEPS[3],
    ),
    Case("outer_lr", 0.5, {see.moved: [0.75] * 3}, _SLOWMO, **_STEPS[3]),
    Case("outer_momentum", 0.5, {see.moved: [1.5, 2.25, 2.625]}, _SLOWMO, **_STEPS[3]),
]

_POWERSGD = {"compression": "powersgd"}
_FACTORS = ["all_reduce 480", "all_reduce 192"]
_DGC = {"compression": "dgc", "dgc_min_elements": 1000, "dgc_sparsity": 0.99}
_DGC_TWO = _DGC | {"dgc_sparsity": 0.999}
_LARGEST = ["all_reduce 1184", "all_gather 160 int32"]
COMPRESSION = [
    Case("compression", "none", {see.sent: [[_WHOLE]] * 2}),
    Case("compression", "bf16", {see.sent: [["all_reduce 4688 bfloat16"]] * 2, see.moved: [1.5, 1.5]}),
    Case(
        "compression",
        "bf16",
        {
            see.sent: ByRank(
                [
                    [["reduce 9376", *(["all_reduce 4688 bfloat16"] if leads else []), "broadcast 9376"]] * 2
                    for leads in (True, False, True, False)
                ]
            )
        },
        {"use_hierarchical_allreduce": True},
        ranks=4,
    ),
    Case("compression", "fp16", {see.sent: [["all_reduce 4688 float16"]] * 2, see.moved: [1.5, 1.5]}),
    Case("compression", "powersgd", {see.sent: [_FACTORS] * 2}),
    Case("compression", "dgc", {see.sent: [_LARGEST] * 2}, {"dgc_min_elements": 1000, "dgc_sparsity": 0.99}),
    Case("powersgd_rank", 2, {see.sent: [["all_reduce 800", "all_reduce 384"]] * 2}, _POWERSGD),
    Case("powersgd_start_step", 1, {see.sent: [[_WHOLE], _FACTORS]}, _POWERSGD),
    Case("powersgd_min_compression", 10.0, {see.sent: [["all_reduce 1440", "all_reduce 128"]] * 2}, _POWERSGD),
    Case(
        "powersgd_warm_start",
        False,
        {see.finds_the_largest_direction: False},
        _POWERSGD | {"powersgd_error_feedback": False},
        options={"gradients": "of rank two", "steps": 8},
    ),
    Case(
        "powersgd_error_feedback",
        False,
        {see.sends_both_directions: False},
        _POWERSGD,
        options={"gradients": "of rank two", "steps": 30},
    ),
    Case("dgc_sparsity", 0.9, {see.sent: [["all_reduce 1184", "all_gather 1632 int32"]] * 2}, _DGC),
    Case("dgc_rampup_begin_step", 1, {see.sent: [[_WHOLE], _LARGEST]}, _DGC),
    Case(
        "dgc_rampup_steps",
        4,
        {see.sent: [["all_reduce 1184", f"all_gather {8 * kept} int32"] for kept in (512, 128, 32, 20, 20)]},
        _DGC,
        **_STEPS[5],
    ),
    Case(
        "dgc_local_grad_clip_norm",
        1.0,
        {see.moved: [0.4243, 0.0]},  # 3 of a norm of 5, over the root of two ranks
        _DGC,
        options={"gradients": "once"},
    ),
    Case(
        "dgc_momentum_factor_masking",
        False,
        {see.moved: [3.0, 2.7]},
        _DGC_TWO,
        options={"gradients": "once", "optimizer": "momentum"},
    ),
    Case(
        "dgc_momentum_factor_masking",
        True,
        {see.moved: [3.0, 0.0]},
        _DGC_TWO,
        options={"gradients": "once", "optimizer": "momentum"},
    ),
    Case("dgc_min_elements", 200, {see.sent: [["all_reduce 160", "all_gather 176 int32"]] * 2}, _DGC),
]

_OVERFLOW = {"amp_level": "O1", "amp_dtype": "float16"}
_FIRST = 32768.0


def _scale(knob: str, value: Any, scales: list[float], overflows: tuple[int, ...] = (), **beside: Any) -> Case:
    settings = _OVERFLOW | beside
    return Case(knob, value, {see.scales: scales}, settings, run="scaled", options={"overflows": overflows})


PROGRAM = [
    Case("accumulate_steps", 2, {see.sending_steps: [2, 4], see.moved: [0.0, 1.5, 0.0, 1.5]}, **_STEPS[4]),
    Case("amp_level", "O0", {see.fetched_dtypes: ["float32", "float32"]}, run="layers"),
    Case("amp_level", "O1", {see.fetched_dtypes: ["uint16", "float32"]}, run="layers"),
    Case("amp_level", "O2", {see.fetched_dtypes: ["uint16", "uint16"]}, run="layers"),
    Case("amp_dtype", "bfloat16", {see.product_dtype: "bfloat16"}, {"amp_level": "O1"}, run="lowered"),
    Case("amp_dtype", "float16", {see.product_dtype: "float16"}, {"amp_level": "O1"}, run="lowered"),
    Case("amp_keep_batch_norm_fp32", True, {see.batch_norm_dtype: "float32"}, {"amp_level": "O2"}, run="lowered"),
    Case("amp_keep_batch_norm_fp32", False, {see.batch_norm_dtype: "bfloat16"}, {"amp_level": "O2"}, run="lowered"),
    _scale("amp_init_loss_scaling", 1024.0, [1024.0] * 6),
    _scale("amp_dynamic_loss_scaling", True, [_FIRST, _FIRST, *[26214.4] * 4], (2, 3)),
    _scale("amp_dynamic_loss_scaling", False, [_FIRST] * 6, (2, 3)),
    _scale("amp_incr_every_n_steps", 2, [_FIRST, 65536.0, 65536.0, 131072.0, 131072.0, 262144.0]),
    _scale("amp_decr_every_n_nan_or_inf", 1, [_FIRST, *[26214.4] * 5], (2,)),
    _scale("amp_incr_ratio", 4.0, [_FIRST, *[131072.0] * 2, *[524288.0] * 2, 2097152.0], amp_incr_every_n_steps=2),
    _scale("amp_decr_ratio", 0.5, [_FIRST, *[16384.0] * 5], (2,), amp_decr_every_n_nan_or_inf=1),
    Case(
        "sync_batch_norm",
        True,
        {see.running_mean: 0.1, see.sent: [["all_gather 36", "all_reduce 32", "all_reduce 52"]]},
        run="batch_norm",
    ),
    Case("sync_batch_norm", False, {see.running_mean: ByRank([0.0, 0.2])}, run="batch_norm"),
    Case("recompute_segments", 2, {see.tanhs: 6}, run="layers"),
    Case("recompute_every_blocks", 2, {see.tanhs: 5}, run="layers"),
    Case("recompute_checkpoints", ["layer_3"], {see.tanhs: 6}, run="layers"),
]

CASES = {
    case.name: case
    for case in (*DESCRIPTIONS, *BUCKETS, *CHANNELS, *TEAMS, *RUNNING, *LOCAL_SGD, *COMPRESSION, *PROGRAM)
}
