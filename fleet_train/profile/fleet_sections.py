"""Fields of Fleet's ``*_configs`` that are no knobs: their defaults, which ask for nothing; tuning of what this package
does in its own way; and what it does not do.

Paths as in `fleet_train.profile.fleet_fields`, which asks here.
"""

from __future__ import annotations

from typing import Any

_NO_MODEL_PARTS = {f"{axis}_degree": 1 for axis in ("mp", "pp", "sep", "ep", "cp", "cp_sharding", "moe_sharding")}

# What Fleet 2.x has where nothing is set.
_OF_SECTIONS: dict[str, dict[str, Any]] = {
    "amp_configs": {
        "use_pure_fp16": False,
        "use_pure_bf16": False,
        "use_fp16_guard": True,
        "use_optimizer_fp16": False,
        "use_master_grad": False,
        "use_promote": False,
    },
    "recompute_configs": {"enable_offload": False, "checkpoint_shape": [], "enable_tuning": False}
    | {"refined_ops_patterns": []},
    "gradient_merge_configs": {"avg": True},
    "pipeline_configs": {"micro_batch_size": 1, "micro_batch": 1, "accumulate_steps": 1, "schedule_mode": "1F1B"}
    | {"p2p_cache_shape": True, "enable_partial_send_recv": True},
    "tensor_parallel_configs": {"tensor_parallel_degree": 1, "tensor_init_seed": -1},
    "lars_configs": {"lars_coeff": 0.001, "lars_weight_decay": 0.0005, "epsilon": 0.0, "exclude_from_weight_decay": []},
    "lamb_configs": {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": []},
    "qat_configs": {"channel_wise_abs_max": True, "weight_bits": 8, "activation_bits": 8, "not_quant_pattern": []}
    | {"algo": ""},
    "gradient_scale_configs": {"scale_strategy": "avg", "scale_gradient": False},
    "a_sync_configs": {"max_merge_var_num": 1, "send_queue_size": 16, "independent_recv_thread": False}
    | {"min_send_grad_num_before_recv": 1, "thread_pool_size": 1, "send_wait_times": 1, "lr_decay_steps": 10}
    | {"runtime_split_send_recv": False, "launch_barrier": True, "heter_worker_device_guard": "cpu"}
    | {"use_ps_gpu": 0, "use_gpu_graph": 0},
    "trainer_desc_configs": {"dump_fields_path": "", "dump_fields": [], "dump_param": [], "stat_var_names": []}
    | {"trainer": "", "device_worker": "", "local_sparse": [], "remote_sparse": []},
    "sharding_configs": {"sharding_segment_strategy": "segment_broadcast_MB", "segment_broadcast_MB": 32.0}
    | {"segment_anchors": [], "fuse_broadcast_MB": 32.0, "mp_degree": 1, "dp_degree": 1, "pp_degree": 1}
    | {"hybrid_dp": False, "gradient_merge_acc_step": 1, "optimize_offload": False, "offload": False}
    | {"pp_allreduce_in_optimize": False, "optimize_cast": False, "_dp_as_optimizer_sharding": False}
    | {"enable_tuning": False, "use_calc_stream": False},
    "hybrid_configs": _NO_MODEL_PARTS
    | {"dp_degree": 1, "enable_optimizer_timer": False, "split_norm_comm": False}
    | {"order": ["dp", "pp", "sharding", "sep", "mp"]}
    | {f"{part}_configs": {} for part in ("mp", "pp", "dp", "sep", "ep", "cp", "sharding", "moe_sharding")},
}

DEFAULTS = {f"{section}.{name}": value for section, names in _OF_SECTIONS.items() for name, value in names.items()}

_BUCKETS = "what is sent together follows from fuse_grad_size_in_MB and fuse_parameter_groups_size"
_NO_PIPELINE = "there are no pipeline stages here"
# Any other value of these changes the speed at most.
TUNING = {
    "sharding_configs.sharding_segment_strategy": _BUCKETS,
    "sharding_configs.segment_broadcast_MB": _BUCKETS,
    "sharding_configs.fuse_broadcast_MB": _BUCKETS,
    "sharding_configs.segment_anchors": _BUCKETS,
    "sharding_configs.optimize_cast": "parameters are sent as they are updated, in float32",
    "sharding_configs.pp_allreduce_in_optimize": _NO_PIPELINE,
    "sharding_configs.hybrid_dp": "ranks beyond sharding_degree hold copies, as their number says",
    "sharding_configs.use_calc_stream": "collective_stream is the knob",
    "hybrid_configs.order": "only data is split here, whose ranks have one order",
    "hybrid_configs.enable_optimizer_timer": "`fleet.trace` and the timeline measure steps",
    "hybrid_configs.split_norm_comm": "the norm of the gradient is summed once, over the owners",
    "tensor_parallel_configs.tensor_init_seed": "no tensor is split here, so that no part has a seed of its own",
    "pipeline_configs.p2p_cache_shape": _NO_PIPELINE,
    "pipeline_configs.enable_partial_send_recv": _NO_PIPELINE,
}

_ONE_MODEL = "splits the model; only data parallelism is supported, every rank holds the whole model"
_OFFLOAD = "keeps the optimizer's state on the host, which is not supported; leave it off"
_OF_SHARDING = "follows from the number of ranks and sharding_degree; leave it out"
REFUSED = {
    "recompute_configs.enable_offload": "keeps activations on the host, which is not supported; leave it off",
    "recompute_configs.checkpoint_shape": "is for offloaded activations, which are not supported; leave it out",
    "recompute_configs.enable_tuning": "is not tuned automatically; name checkpoints, and leave it off",
    "recompute_configs.refined_ops_patterns": "which operators are kept follows from the segments; leave it out",
    "amp_configs.use_master_grad": "gradients are float32 anyway; leave it off",
    "amp_configs.use_promote": "which operators run in low precision follows from amp_level; leave it off",
    "sharding_configs.mp_degree": _ONE_MODEL,
    "sharding_configs.pp_degree": _ONE_MODEL,
    "sharding_configs.dp_degree": _OF_SHARDING,
    "sharding_configs._dp_as_optimizer_sharding": "set sharding_degree to the number of owners, or leave it out",
    "sharding_configs.gradient_merge_acc_step": "set gradient_merge and gradient_merge_configs.k_steps instead",
    "sharding_configs.optimize_offload": _OFFLOAD,
    "sharding_configs.offload": _OFFLOAD,
    "sharding_configs.enable_tuning": "is not tuned automatically; `fleet_train recommend` tries profiles",
    "hybrid_configs.sharding_configs": "tunes Fleet's dynamic mode; here fuse_grad_size_in_MB is a knob",
    "hybrid_configs.dp_configs": "tunes Fleet's dynamic mode; here fuse_grad_size_in_MB is a knob",
}

_LOW = frozenset(
    "matmul matmul_v2 mul bmm addmm conv2d depthwise_conv2d conv3d conv2d_transpose depthwise_conv2d_transpose "
    "conv3d_transpose".split()
)
"""Names, old and new, of operators that run in low precision at O1 and O2."""
_FLOAT32 = frozenset(
    "softmax softmax_with_cross_entropy cross_entropy cross_entropy2 sigmoid_cross_entropy_with_logits layer_norm "
    "reduce_sum reduce_mean mean sum exp log square cos_sim c_softmax_with_cross_entropy p_norm squared_l2_norm "
    "lookup_table lookup_table_v2 embedding linear_interp_v2 bilinear_interp_v2 nearest_interp_v2".split()
)
"""Names of operators that run in float32 at both levels."""
_LISTS = {"amp_configs.custom_white_list": _LOW, "amp_configs.custom_black_list": _FLOAT32}


def asks_for_nothing(path: str, value: Any) -> bool:
    """Whether this is what Fleet has anyway: its default, or none of a list."""
    if path not in DEFAULTS or value is None:
        return path in DEFAULTS
    default = DEFAULTS[path]
    if isinstance(default, list):
        return isinstance(value, (list, tuple)) and list(value) in ([], default)
    if isinstance(default, (bool, str, dict)):
        return isinstance(value, type(default)) and value == default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value - default) <= 1e-6 * abs(default)


def lists_what_happens(path: str, value: Any) -> bool:
    """Whether a list of operators names only those that amp treats like this anyway."""
    if path not in _LISTS or not isinstance(value, (list, tuple, set)) or not value:
        return False
    return _LISTS[path].issuperset(value)
