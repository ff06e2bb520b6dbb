"""Cases of knobs that change what is trained: LocalSGD, compression, passes; see knob_effects_table."""

from __future__ import annotations

from typing import Any

from tests.parallel import knob_effects_seen as see
from tests.parallel.knob_effects_case import ByRank, Case
from tests.parallel.knob_effects_sending import WHOLE

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
            see.sent: [[WHOLE], [], [WHOLE], [], [WHOLE]],
            see.counted: 3 * 9376,
            see.first_values: ByRank([[-0.5, -1.5, -3.5, -4.5, -6.5], [-0.5, -2.5, -3.5, -5.5, -6.5]]),
        },
        {"local_sgd_is_warm_steps": 1, "local_sgd_steps": 2},
        **_STEPS[5],
    ),
    Case("use_local_sgd", False, {see.sending_steps: [1, 2, 3]}, **_STEPS[3]),
    Case(
        "local_sgd_is_warm_steps",
        3,
        {
            see.sending_steps: [1, 2, 3, 5],
            see.planned_averaging: "3 warm-up steps, then every 2 (constant, 0 beside it) in float32, outer none",
        },
        _LOCAL,
        **_STEPS[5],
    ),
    Case(
        "local_sgd_steps",
        3,
        {
            see.sending_steps: [3, 6],
            see.planned_averaging: "0 warm-up steps, then every 3 (constant, 0 beside it) in float32, outer none",
        },
        _LOCAL,
        **_STEPS[6],
    ),
    Case("local_sgd_schedule", "constant", {see.sending_steps: [2, 4, 6]}, _LOCAL, **_STEPS[6]),
    Case(
        "local_sgd_schedule",
        "doubling",
        {
            see.sending_steps: [1, 3, 7],
            see.planned_averaging: "0 warm-up steps, then every 4 (doubling, 0 beside it) in float32, outer none",
        },
        _LOCAL | {"local_sgd_steps": 4},
        **_STEPS[7],
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
        {see.velocities: ByRank([[1.0, 2.85], [2.0, 2.85]]), see.sent: [[], [WHOLE, WHOLE]], see.counted: 2 * 9376},
        **_MOMENTUM,
    ),
    Case("local_sgd_momentum", "reset", {see.velocities: ByRank([[1.0, 0.0], [2.0, 0.0]])}, **_MOMENTUM),
    Case("local_sgd_dtype", "float32", {see.sent: [[], [WHOLE]]}, _LOCAL),
    Case(
        "local_sgd_dtype",
        "bfloat16",
        {
            see.sent: [[], ["all_reduce 4688 bfloat16"]],
            see.counted: 4688,
            see.planned_averaging: "0 warm-up steps, then every 2 (constant, 0 beside it) in bfloat16, outer none",
        },
        _LOCAL,
    ),
    Case(
        "local_sgd_overlap_steps",
        1,
        {
            see.first_values: ByRank([[0.0, -1.0, -3.0, -4.0], [-1.0, -3.0, -4.0, -6.0]]),
            see.planned_averaging: "0 warm-up steps, then every 2 (constant, 1 beside it) in float32, outer none",
        },
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
        {
            see.moved: [2.25, 2.625, 2.8125],
            see.planned_averaging: "0 warm-up steps, then every 1 (constant, 0 beside it) in float32, outer diloco",
        },
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
    Case("compression", "none", {see.sent: [[WHOLE]] * 2}),
    Case(
        "compression", "bf16", {see.sent: [["all_reduce 4688 bfloat16"]] * 2, see.moved: [1.5, 1.5], see.counted: 9376}
    ),
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
    Case("compression", "powersgd", {see.sent: [_FACTORS] * 2, see.counted: 2 * 672}),
    Case(
        "compression",
        "dgc",
        {see.sent: [_LARGEST] * 2, see.counted: 2 * (1184 + 160)},
        {"dgc_min_elements": 1000, "dgc_sparsity": 0.99},
    ),
    Case("powersgd_rank", 2, {see.sent: [["all_reduce 800", "all_reduce 384"]] * 2}, _POWERSGD),
    Case("powersgd_start_step", 1, {see.sent: [[WHOLE], _FACTORS]}, _POWERSGD),
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
    Case("dgc_rampup_begin_step", 1, {see.sent: [[WHOLE], _LARGEST]}, _DGC),
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
    Case(
        "accumulate_steps",
        2,
        {
            see.sending_steps: [2, 4],
            see.moved: [0.0, 1.5, 0.0, 1.5],
            see.counted: 2 * 9376,
            see.planned: "every 2 micro-batches",
        },
        **_STEPS[4],
    ),
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
        {see.running_mean: 0.1, see.sent_in_any_order: [["all_gather 32", "all_gather 36", "all_reduce 52"]]},
        run="batch_norm",
    ),
    Case("sync_batch_norm", False, {see.running_mean: ByRank([0.0, 0.2])}, run="batch_norm"),
    Case("recompute_segments", 2, {see.tanhs: 6}, run="layers"),
    Case("recompute_every_blocks", 2, {see.tanhs: 5}, run="layers"),
    Case("recompute_checkpoints", ["layer_3"], {see.tanhs: 6}, run="layers"),
]
