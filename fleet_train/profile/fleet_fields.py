"""The fate of every field of Fleet's own strategy objects, 1.8 and 2.x, that is not a knob of the same name.

Paths are those of the protobuf inside ``paddle.distributed.fleet.DistributedStrategy`` (``localsgd_configs.k_steps``);
a path without its own row has the fate of its parent's row: ``amp_configs`` applies to all of its fields. Names of
Fleet 1.8, whose strategy inherited from BuildStrategy, are included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleet_train.errors import ProfileError
from fleet_train.profile import fleet_sections
from fleet_train.profile.knobs import GONE, Fate, shown
from fleet_train.profile.schema import DESCRIPTIVE, FLAG_KNOBS, KNOBS


@dataclass(frozen=True)
class Switch:
    """The value of a field that stands for settings of other knobs; ``note`` is a note to the user.

    ``yields``: the settings apply only unless another field or knob sets them, in any order.
    """

    value: Any
    settings: tuple[tuple[str, Any], ...]
    note: str = ""
    yields: bool = False

    @property
    def words(self) -> str:
        settings = " and ".join(f"{name}: {shown(value)}" for name, value in self.settings)
        return f"read as {settings}{', unless another field says otherwise' if self.yields else ''}{self.note}"


@dataclass(frozen=True)
class StockField:
    """How a field's values are handled.

    ``silent`` values ask for what happens anyway; ``mapped`` ones do as well, but rank 0 prints the sentence
    ``mapping``; a ``switch`` stands for settings of several knobs; any other value goes to ``knob``, or is refused with
    ``refusal``. ``reading`` turns Fleet's value into the knob's, and ``note`` says so; ``also`` are settings of other
    knobs that it implies. ``needs`` names the field that must be on.
    """

    path: str
    silent: tuple[Any, ...] = ()
    mapped: tuple[Any, ...] = ()
    mapping: str = ""
    refusal: str = ""
    knob: str = ""
    switch: Switch | None = None
    reading: Callable[[Any], Any] | None = None
    note: str = ""
    needs: str = ""
    also: tuple[tuple[str, Any], ...] = ()

    @property
    def fate(self) -> Fate:
        if self.knob == self.path:
            return KNOBS[self.knob].fate
        return "mapped" if self.knob or self.mapping or self.switch else "refused"


_OFF: tuple[Any, ...] = (False, None)
_PARAMETER_SERVER = "belongs to parameter servers, which are out of scope here: every rank holds the whole model"
_DATA_PARALLEL = "splits the model; only data parallelism is supported, every rank holds the whole model"
_OLD_PASS = "has no such field here; remove it, and choose the profile's knobs instead"
_SAME_RESULTS = "passes over the old IR do not run on PIR programs; results are the same"
_AUTO = "belongs to automatic parallelism, which is out of scope here; choose a profile instead"

_ON_OR_OFF = "allowed: true or false"
_FIXED_LISTS = "which operators run in low precision follows from amp_level; leave it out"
_RECOMPUTE = "has no such field here; checkpoints is known"

_TO_KNOBS = {
    "amp_loss_scaling": "amp_init_loss_scaling",
    "amp_configs.init_loss_scaling": "amp_init_loss_scaling",
    "amp_configs.use_dynamic_loss_scaling": "amp_dynamic_loss_scaling",
    **{
        f"amp_configs.{name}": f"amp_{name}"
        for name in ("incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")
    },
    "amp_configs.level": "amp_level",
    "amp_configs.dtype": "amp_dtype",
    "gradient_merge_configs.k_steps": "accumulate_steps",
    "recompute_configs.checkpoints": "recompute_checkpoints",
    "build_strategy.sync_batch_norm": "sync_batch_norm",
    "fuse_grad_size_in_num": "fuse_parameter_groups_size",
    "fuse_grad_size_in_TFLOPS": "fuse_parameter_groups_size",
    "_fuse_grad_size_in_TFLOPS": "fuse_parameter_groups_size",
    "sharding_configs.stage": "sharding_stage",
    "sharding_configs.sharding_degree": "sharding_degree",
    "sharding_configs.sharding_group_size": "sharding_degree",
    "hybrid_configs.sharding_degree": "sharding_degree",
    "localsgd": "use_local_sgd",
    "localsgd_configs.k_steps": "local_sgd_steps",
    "localsgd_configs.begin_step": "local_sgd_is_warm_steps",
    "adaptive_localsgd_configs.init_k_steps": "local_sgd_steps",
    "adaptive_localsgd_configs.begin_step": "local_sgd_is_warm_steps",
    "cudnn_exhaustive_search": "environment.FLAGS_cudnn_exhaustive_search",
    "conv_workspace_size_limit": "environment.FLAGS_conv_workspace_size_limit",
    "cudnn_batchnorm_spatial_persistent": "environment.FLAGS_cudnn_batchnorm_spatial_persistent",
}

_AMP = Switch(True, (("amp_level", "O1"), ("amp_dtype", "float16")), "; float16 is Fleet's default", yields=True)

_RECOMPUTED = Switch(
    True,
    (("recompute_checkpoints", []),),
    "; recompute_configs.checkpoints names parameters to split at; without any, nothing is recomputed, as in Fleet",
    yields=True,
)

_NO_LIMIT = {
    "fuse_grad_size_in_MB": Switch(
        0, (("fuse_grad_size_in_MB", 4096),), "; Fleet's 0 is no limit by size, fuse_parameter_groups_size is the limit"
    ),
}
"""Values that a knob does not have under its own name."""

_SWITCHES = {
    "recompute": _RECOMPUTED,
    "forward_recompute": _RECOMPUTED,
    "amp": _AMP,
    "use_amp": _AMP,
    "amp_configs.use_pure_fp16": Switch(
        True,
        (("amp_level", "O2"), ("amp_dtype", "float16")),
        "; parameters stay float32, and the whole program is converted, as with use_fp16_guard: false",
    ),
    "amp_configs.use_pure_bf16": Switch(
        True, (("amp_level", "O2"), ("amp_dtype", "bfloat16")), "; parameters stay float32"
    ),
    "fp16_allreduce": Switch(True, (("compression", "fp16"),), "; on Gloo use compression: bf16"),
    "gradient_merge": Switch(
        True, (("accumulate_steps", 1),), "; gradient_merge_configs.k_steps is the number", yields=True
    ),
    "sharding_configs.sharding_degree": Switch(
        8, (("sharding_degree", 0),), ", all ranks: 8 is what Fleet has when nothing is set", yields=True
    ),
    "adaptive_localsgd": Switch(
        True,
        (("use_local_sgd", True), ("local_sgd_schedule", "adaptive")),
        "; periods grow up to local_sgd_max_steps, Fleet's up to 16",
    ),
    "collective_mode": Switch("local_sgd", (("use_local_sgd", True),)),
    "gradient_scale_configs.scale_strategy": Switch("sum", (("average_over", "nothing"),)),
    "build_strategy.gradient_scale_strategy": Switch(1, (("average_over", "nothing"),)),
    **dict.fromkeys(
        ("calc_comm_same_stream", "_calc_comm_same_stream"), Switch(True, (("collective_stream", "calc"),))
    ),
}

# Fields that only made the old executor faster or smaller: on or off, the numbers are the same.
_OLD_PASSES = """
    build_cinn_pass enable_addto enable_auto_fusion fuse_adamw fuse_all_optimizer_ops fuse_bn_act_ops
    fuse_bn_add_act_ops fuse_dot_product_attention fuse_elewise_add_act_ops fuse_gemm_epilogue fuse_relu_depthwise_conv
    fuse_resunit fused_attention fused_feedforward
""".split()
_OLD_EXECUTOR = {
    "sequential_run": "operators run as their data allows; num_threads: 1 runs them one by one",
    "enable_sequential_execution": "operators run as their data allows; num_threads: 1 runs them one by one",
    "remove_unnecessary_lock": "the current executor has no such lock",
    "enable_backward_optimizer_op_deps": "updates wait for their own bucket of gradients",
    "enable_inplace": "PIR's own in-place pass is switched off, because it can spoil gradients",
    "memory_optimize": "the executor frees a variable after its last reader",
    "cache_runtime_context": "the executor prepares its instructions once per program",
    "fuse_broadcast_ops": "the start state is broadcast once, by fleet itself",
}
_ON_BY_DEFAULT = ("fuse_bn_add_act_ops", "enable_backward_optimizer_op_deps")
# Their default has changed over time.
_EITHER_WAY = ("enable_inplace", "memory_optimize", "fuse_broadcast_ops", "remove_unnecessary_lock")

_REFUSED = {
    "amp": _ON_OR_OFF,
    "use_amp": _ON_OR_OFF,
    "amp_configs": "has no such field here; level, dtype, use_pure_fp16, use_pure_bf16 and those of the loss scale are "
    "known",
    "amp_configs.use_pure_fp16": _ON_OR_OFF,
    "amp_configs.use_pure_bf16": _ON_OR_OFF,
    "amp_configs.use_fp16_guard": "allowed: true or false",
    "amp_configs.use_optimizer_fp16": "the optimizer and its state stay float32; leave it off",
    "amp_configs.custom_white_list": _FIXED_LISTS,
    "amp_configs.custom_black_list": _FIXED_LISTS,
    "amp_configs.custom_black_varnames": _FIXED_LISTS,
    "fp16_allreduce": _ON_OR_OFF,
    "recompute": _ON_OR_OFF,
    "recompute_configs": _RECOMPUTE,
    "forward_recompute": _ON_OR_OFF,
    "gradient_merge": _ON_OR_OFF,
    "gradient_merge_configs": "has no such field here; k_steps and avg are known",
    "gradient_merge_configs.avg": "asks for the sum of the micro-batches' gradients, which are averaged here; leave it "
    "at True and scale the learning rate",
    "fuse_grad_merge": "merged gradients are not fused; leave it off, results are the same",
    **dict.fromkeys(("dgc", "use_dgc", "dgc_configs"), GONE["dgc"]),
    "adaptive_localsgd": "allowed: true or false",
    "adaptive_localsgd_configs": "has no such field here; init_k_steps and begin_step are known",
    "localsgd_configs": "has no such field here; k_steps and begin_step are known",
    "lars": "belongs to the optimizer: build paddle.incubate.optimizer.LarsMomentumOptimizer yourself and wrap that",
    "lars_configs": "belongs to the optimizer: give these values to LarsMomentumOptimizer",
    "lamb": "belongs to the optimizer: build paddle.optimizer.Lamb yourself and wrap that",
    "lamb_configs": "belongs to the optimizer: give these values to paddle.optimizer.Lamb",
    "adam_d2sum": "belongs to the optimizer: wrap the optimizer that you want",
    "asp": "prunes weights, which is out of scope here; use paddle.incubate.asp on the model",
    "qat": "quantizes, which is out of scope here; use paddle.quantization on the model",
    "qat_configs": "quantizes, which is out of scope here; use paddle.quantization on the model",
    "pipeline": _DATA_PARALLEL,
    "pipeline_configs": _DATA_PARALLEL,
    "tensor_parallel": _DATA_PARALLEL,
    "tensor_parallel_configs": _DATA_PARALLEL,
    "sharding_configs": "has no such field here; stage, sharding_degree and those that only tune are known",
    "hybrid_configs": _DATA_PARALLEL,
    "hybrid_configs.dp_degree": "is the number of ranks, which follows from the launch command; leave it out",
    "hybrid_parallel_order": _DATA_PARALLEL,
    "sync_param_name": _DATA_PARALLEL,
    "use_dist_fc": _DATA_PARALLEL,
    "dist_fc_config": _DATA_PARALLEL,
    "auto": _AUTO,
    "semi_auto": _AUTO,
    "auto_search": _AUTO,
    "split_data": _AUTO,
    "elastic": "changes the number of ranks during training, which is not supported; leave it off",
    "a_sync": f"{_PARAMETER_SERVER}; set it to False",
    "a_sync_configs": _PARAMETER_SERVER,
    "is_fl_ps_mode": _PARAMETER_SERVER,
    "with_coordinator": _PARAMETER_SERVER,
    "is_with_coordinator": _PARAMETER_SERVER,
    "trainer_desc_configs": _PARAMETER_SERVER,
    "downpour_table_param": _PARAMETER_SERVER,
    "sparse_table_configs": _PARAMETER_SERVER,
    "fleet_desc_configs": _PARAMETER_SERVER,
    "fs_client_param": _PARAMETER_SERVER,
    "heter_ccl_mode": "joins different kinds of devices in one job, which is not supported; leave it off",
    "mode": "only the collective mode is supported; leave it out",
    "collective_mode": "allowed: grad_allreduce or local_sgd",
    "without_graph_optimization": "the old graph passes do not run on PIR programs; leave it at True",
    "gradient_scale_configs": "scale_strategy: avg (average_over: samples) or sum (average_over: nothing); for another "
    "scale, scale the loss",
    "build_strategy": _OLD_PASS,
    "build_strategy.reduce_strategy": "gradients are reduced by allreduce; leave it out",
    "build_strategy.gradient_scale_strategy": "0 averages gradients (average_over: samples), 1 sums "
    "them (average_over: nothing); for another scale, scale the loss",
    "build_strategy.debug_graphviz_path": "PIR programs have no such graph; print(program) shows the operators",
    "build_strategy.allow_cuda_graph_capture": "host operators cannot be captured in a CUDA graph; leave it off",
    "build_strategy.num_trainers": "follows from the cluster; remove it",
    "build_strategy.is_distribution": "follows from the cluster; remove it",
    "build_strategy.trainer_id": "follows from the cluster; remove it",
    "build_strategy.trainers_endpoints": "follows from the cluster; remove it",
    "build_strategy.async_mode": _PARAMETER_SERVER,
    **{f"build_strategy.{name}": _ON_OR_OFF for name in (*_OLD_PASSES, *_OLD_EXECUTOR)},
    "build_strategy.mkldnn_enabled_op_types": "Paddle chooses its kernels itself; leave it out, results stay the same",
    "build_strategy.onednn_enabled_op_types": "Paddle chooses its kernels itself; leave it out, results stay the same",
    "build_strategy.bkcl_comm_num": "is for Kunlun devices, which are not supported; use nccl_comm_num",
    "exec_strategy.num_iteration_per_run": "one run of the executor is one step; loop in Python and leave it at 1",
    "exec_strategy.allow_op_delay": _ON_OR_OFF,
    "exec_strategy.use_thread_barrier": _ON_OR_OFF,
    **fleet_sections.REFUSED,
}

_MAPPED = {
    "a_sync": ("training is always synchronous here", (False,)),
    "mode": ("the collective mode is the only one here", ("collective", "nccl2")),
    "collective_mode": ("gradients are averaged by allreduce, unless use_local_sgd is set", ("grad_allreduce",)),
    "amp_configs.use_fp16_guard": ("the whole program is converted", (False,)),
    "find_unused_parameters": ("parameters without a gradient are found when the program is converted", (True,)),
    **{f"build_strategy.{name}": (_SAME_RESULTS, (name not in _ON_BY_DEFAULT,)) for name in _OLD_PASSES},
    **{
        f"build_strategy.{name}": (words, (True, False) if name in _EITHER_WAY else (name not in _ON_BY_DEFAULT,))
        for name, words in _OLD_EXECUTOR.items()
    },
    "build_strategy.reduce_strategy": ("gradients are reduced by allreduce, with the same results", (1,)),
    "exec_strategy.allow_op_delay": ("the current executor has no such delay; results stay the same", (True,)),
    "exec_strategy.use_thread_barrier": ("the current executor has no such barrier; results stay the same", (True,)),
    "exec_strategy.use_experimental_executor": ("the current executor is the only one", (True, False)),
    "exec_strategy.use_cuda": ("a rank computes on fleet.place(), which the launcher chooses", (True, False)),
}

_SILENT: dict[str, tuple[Any, ...]] = {
    "a_sync_configs.k_steps": (-1, 0),  # what `stock.a_sync = False` leaves behind
    "mode": (1,),
    "split_data": (True,),
    "hybrid_configs.dp_degree": (-1,),
    **{f"hybrid_configs.{axis}_degree": (1,) for axis in ("mp", "pp", "sharding", "sep", "ep", "cp")},
    "without_graph_optimization": (True,),
    "amp_loss_scaling": (2**15, 2.0**15),
    "amp_configs.init_loss_scaling": (2.0**15, 2**15),
    "amp_configs.use_dynamic_loss_scaling": (True,),
    "amp_configs.incr_every_n_steps": (1000,),
    "amp_configs.decr_every_n_nan_or_inf": (2,),
    "amp_configs.incr_ratio": (2.0, 2),
    "amp_configs.decr_ratio": (0.8,),
    "recompute_configs.checkpoints": ([], None),
    **{f"amp_configs.custom_{name}": ([], None) for name in ("white_list", "black_list", "black_varnames")},
    "gradient_merge_configs.avg": (True,),
    "gradient_scale_configs.scale_strategy": ("avg",),  # average_over: samples
    "build_strategy.reduce_strategy": (0,),
    "build_strategy.gradient_scale_strategy": (0,),
    **{f"build_strategy.{name}": (True,) for name in _ON_BY_DEFAULT},
    "exec_strategy.num_iteration_per_run": (1,),
}


_NEEDS = {
    **dict.fromkeys(("amp_configs.level", "amp_configs.use_pure_fp16", "amp_configs.use_pure_bf16"), "amp"),
    "gradient_merge_configs.k_steps": "gradient_merge",
    "recompute_configs.checkpoints": "recompute",
    **{f"sharding_configs.{name}": "sharding" for name in ("stage", "sharding_degree", "sharding_group_size")},
}
"""Fields that would enable a feature that Fleet leaves off without its switch; the other knobs have ``only_with``."""


def _without_noise(value: Any) -> Any:
    """A number without the rounding error of a protobuf's 32 bits."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _count(value: Any) -> Any:
    """Fleet writes ``int(fuse_grad_size_in_TFLOPS)`` into FLAGS_fuse_parameter_groups_size."""
    return int(value) if isinstance(value, float) else value


_COUNTED = (_count, ", the number of gradients, because Fleet sets FLAGS_fuse_parameter_groups_size with it")
_READINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "fuse_grad_size_in_TFLOPS": _COUNTED,
    "_fuse_grad_size_in_TFLOPS": _COUNTED,
    "amp_configs.decr_ratio": (_without_noise, ""),
    "amp_configs.incr_ratio": (_without_noise, ""),
    "recompute_configs.checkpoints": (list, "; names of parameters, because values have none in PIR programs"),
}


def _row(path: str) -> StockField:
    mapping, mapped = _MAPPED.get(path, ("", ()))
    mapping = mapping or fleet_sections.TUNING.get(path, "")
    refusal = _REFUSED.get(path) or _REFUSED.get(path.partition(".")[0], "has no other value here; remove it")
    knob = _TO_KNOBS.get(path, "")
    silent = _SILENT.get(path, () if knob or path in fleet_sections.DEFAULTS else _OFF)
    reading, note = _READINGS.get(path, (None, ""))
    also = (("sharding", True),) if path == "hybrid_configs.sharding_degree" else ()
    return StockField(
        path, silent, mapped, mapping, refusal, knob, _SWITCHES.get(path), reading, note, _NEEDS.get(path, ""), also
    )


_SAME_NAME = [name for name in KNOBS if name not in FLAG_KNOBS and name not in DESCRIPTIVE]
STOCK_FIELDS: dict[str, StockField] = {
    path: _row(path)
    for path in sorted({*_REFUSED, *_MAPPED, *_SILENT, *_SWITCHES, *_TO_KNOBS, *fleet_sections.DEFAULTS})
} | {name: StockField(name, knob=name, switch=_NO_LIMIT.get(name)) for name in _SAME_NAME}


@dataclass(frozen=True)
class FieldOutcome:
    """The result for a field's value: settings, a sentence for rank 0, or nothing.

    A ``fallback`` is a setting for a knob that nothing else sets.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    fallback: tuple[tuple[str, Any], ...] = ()
    sentence: str = ""


def outcome_of(path: str, value: Any) -> FieldOutcome:
    """The result for one value of one field. Raises ProfileError for one that is refused; a knob's own rules are
    checked by the knob."""
    number = getattr(value, "value", None)
    value = number if type(number) is int else value  # an enumeration: BuildStrategy.ReduceStrategy.Reduce
    row = STOCK_FIELDS.get(path) or STOCK_FIELDS.get(path.partition(".")[0])
    prefix = f"{path}: {shown(value)} is mapped: "
    if row is None:
        raise ProfileError(f"given {shown(value)}: fleet_train does not know this field, so it cannot carry it out")
    if row.path == path and row.switch and _is_one_of(value, (row.switch.value,)):
        brought = row.switch.settings
        own, fallback = ((), brought) if row.switch.yields else (brought, ())
        return FieldOutcome(own, fallback, prefix + row.switch.words)
    if row.knob:
        read = row.reading(value) if row.reading and value is not None else value
        if _is_one_of(read, row.silent):
            return FieldOutcome()
        is_variable = row.knob.startswith("environment.") and isinstance(read, int)
        settings = ((row.knob, str(int(read)) if is_variable else read), *row.also)
        return FieldOutcome(settings, sentence="" if row.knob == row.path else f"{prefix}read as {row.knob}{row.note}")
    if fleet_sections.lists_what_happens(path, value):
        return FieldOutcome(sentence=f"{prefix}amp treats these operators so anyway")
    if _is_one_of(value, row.mapped):
        return FieldOutcome(sentence=prefix + row.mapping)
    if fleet_sections.asks_for_nothing(path, value):
        return FieldOutcome()
    if path in fleet_sections.TUNING:
        return FieldOutcome(sentence=prefix + fleet_sections.TUNING[path])
    # A section's "off" is not the default of its fields: gradient_merge_configs.avg is True when untouched.
    if row.path == path and _is_one_of(value, row.silent):
        return FieldOutcome()
    raise ProfileError(f"given {shown(value)}: {row.refusal}")


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Whether a value is equal to one of others and of the same type: 1 is not True here."""
    return any(type(value) is type(each) and value == each for each in known)
