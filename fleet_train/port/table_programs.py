"""Programs, executors, places, readers, saving outside of fleet: names directly below ``paddle.fluid``."""

from __future__ import annotations

from fleet_train.port.rules import Rule, To, Todo
from fleet_train.port.table_layers import ATTRIBUTES, AUC, CLIPS, LAYERS, OF_2_0, OPTIMIZERS, STATIC_LAYERS

_LOADER = "paddle.io.DataLoader(dataset, feed_list=[...], return_list=False), and feed what it yields"
_DYNAMIC = "fleet_train converts static programs; dynamic mode is not supported"
DATASETS = ("QueueDataset", "InMemoryDataset", "DatasetFactory")
GENERATORS = ("MultiSlotDataGenerator", "MultiSlotStringDataGenerator")
_STATE = "paddle.static.save(program, prefix) / paddle.static.load(program, prefix)"

_STATIC = (
    "Program Variable cpu_places cuda_places default_main_program default_startup_program "
    "device_guard global_scope gradients name_scope program_guard scope_guard"
)
_LOAD_STATE = To("paddle.static.load_program_state", "model_path var_list")
_SET_STATE = To("paddle.static.set_program_state", "program state_dict")

PROGRAMS: dict[str, Rule] = {
    **{name: To(f"paddle.static.{name}") for name in _STATIC.split()},
    "Executor": To("compat.Executor"),
    "append_backward": To("compat.append_backward"),
    "CPUPlace": To("paddle.CPUPlace"),
    "CUDAPlace": To("paddle.CUDAPlace"),
    "CUDAPinnedPlace": To("paddle.CUDAPinnedPlace"),
    "is_compiled_with_cuda": To("paddle.is_compiled_with_cuda"),
    "core.is_compiled_with_cuda": To("paddle.is_compiled_with_cuda"),
    "core.get_cuda_device_count": To("paddle.device.cuda.device_count"),
    "core.Scope": To("paddle.base.core.Scope", ""),
    "core.EOFException": To("paddle.base.core.EOFException"),
    "require_version": To(
        "paddle.utils.require_version",
        "min_version / max_version-None",
        hand="delete the call: the script is for Paddle 3 now, which is newer",
    ),
    "set_flags": To("paddle.set_flags"),
    "get_flags": To("paddle.get_flags"),
    "unique_name": To("paddle.utils.unique_name"),
    "unique_name.guard": To("paddle.utils.unique_name.guard"),
    "unique_name.generate": To("paddle.utils.unique_name.generate"),
    "data": To("paddle.static.data", "name shape dtype / lod_level-0", hand="pad sequences: levels of detail are gone"),
    "embedding": To("compat.embedding_v2"),
    "one_hot": To(
        "paddle.nn.functional.one_hot",
        "input>x depth>num_classes / allow_out_of_range-False",
        hand="clip the indices, then paddle.nn.functional.one_hot(x, num_classes)",
    ),
    "DataFeeder": To("compat.DataFeeder"),
    **{name: To(f"compat.{name}") for name in DATASETS},
    "incubate.fleet.utils.fleet_util": Todo("fleet.metrics: auc, acc, mae, mse, rmse, sum, max, min of all ranks"),
    **{f"incubate.data_generator.{name}": To(f"compat.{name}") for name in GENERATORS},
    "CompiledProgram": Todo("the program itself; its build and execution settings belong to DistributedStrategy"),
    "BuildStrategy": To("paddle.static.BuildStrategy"),
    "ExecutionStrategy": Todo(
        "nothing: threads are FLAGS today; in a fleet script, DistributedStrategy().exec_strategy"
    ),
    "ParallelExecutor": Todo("paddle.static.Executor with one process per device (fleet_train launch)"),
    "DistributeTranspiler": Todo("fleet.distributed_optimizer; parameter servers are not supported"),
    "DistributeTranspilerConfig": Todo("DistributedStrategy; parameter servers are not supported"),
    "memory_optimize": Todo("delete the call: the executor frees memory by itself"),
    "release_memory": Todo("delete the call: the executor frees memory by itself"),
    "LoDTensor": Todo("numpy arrays, padded"),
    "create_lod_tensor": Todo("numpy arrays, padded"),
    "enable_dygraph": Todo(_DYNAMIC),
    "disable_dygraph": To("paddle.enable_static", ""),
    "dygraph": Todo(_DYNAMIC),
    "metrics": Todo("paddle.metric, or numpy over fetched values"),
    "profiler": Todo("paddle.profiler.Profiler"),
    "contrib": Todo("today's place of it; mixed precision is strategy.amp = True"),
    "contrib.mixed_precision.decorate": Todo("strategy.amp = True, and give the optimizer itself to fleet"),
    "transpiler": Todo("fleet.distributed_optimizer"),
    "io.DataLoader": Todo(_LOADER),
    "io.DataLoader.from_generator": To("compat.from_generator"),
    "io.PyReader": To("compat.from_generator"),
    "io.batch": To("paddle.batch", "reader batch_size drop_last"),
    "io.save": To("paddle.static.save", "program model_path"),
    "save": To("paddle.static.save", "program model_path"),
    **{f"{module}load_program_state": _LOAD_STATE for module in ("", "io.")},
    **{f"{module}set_program_state": _SET_STATE for module in ("", "io.")},
    "io.load": To("paddle.static.load", "program model_path executor var_list"),
    "load": To("paddle.static.load", "program model_path executor var_list"),
    **{f"io.{do}_persistables": Todo(f"{_STATE}; files of Paddle 1.x are not read") for do in ("save", "load")},
    **{f"io.{name}": Todo(_STATE) for name in ("save_params", "load_params", "save_vars", "load_vars")},
    "io.save_inference_model": Todo("paddle.static.save_inference_model(path_prefix, feed_vars, fetch_vars, executor)"),
    "io.load_inference_model": Todo("paddle.static.load_inference_model(path_prefix, executor)"),
    **{
        f"io.{name}": To(f"paddle.reader.{name}")
        for name in ("shuffle", "buffered", "cache", "chain", "compose", "firstn", "map_readers", "xmap_readers")
    },
}

_SERIALIZED = "paddle.static.save_inference_model and load_inference_model: today's programs have no such text"

# Of Paddle 2.x: what its static programs use that Paddle 3 does not have any more.
STATIC: dict[str, Rule] = {
    "paddle.CUDAPlace": To("paddle.CUDAPlace"),
    "paddle.static.data": To("paddle.static.data"),
    "paddle.static.append_backward": To("compat.append_backward"),
    "paddle.static.nn.conv2d": To("compat.conv2d"),
    "paddle.static.nn.conv2d_transpose": To("compat.conv2d_transpose"),
    "paddle.static.nn.batch_norm": To("compat.batch_norm"),
    "paddle.static.nn.layer_norm": To("compat.layer_norm"),
    "paddle.static.nn.group_norm": To("compat.group_norm"),
    "paddle.static.nn.embedding": To("compat.embedding_v2"),
    # Paddle 3 counts the names of these per process, heedless of unique_name.guard.
    "paddle.static.nn.fc": To(
        "compat.fc", "x>input size num_flatten_dims weight_attr>param_attr bias_attr activation>act name"
    ),
    **{f"paddle.static.nn.{name}": rule for name, rule in STATIC_LAYERS.items()},
    **{f"paddle.{name}": rule for name, rule in LAYERS.items() if name.startswith(OF_2_0)},
    "paddle.static.nn.create_parameter": To("compat.create_parameter"),
    "paddle.static.py_func": STATIC_LAYERS["py_func"],
    "paddle.static.create_parameter": To("compat.create_parameter"),
    "paddle.create_parameter": To("compat.create_parameter"),
    "paddle.static.auc": Todo(AUC),
    "paddle.static.ExponentialMovingAverage": To("compat.ExponentialMovingAverage"),
    "paddle.static.WeightNormParamAttr": ATTRIBUTES["WeightNormParamAttr"],
    "paddle.static.create_global_var": Todo(
        "paddle.pir.core.create_persistable_value(dtype, shape, name, initializer=...)"
    ),
    "paddle.static.CompiledProgram": PROGRAMS["CompiledProgram"],
    "paddle.static.ExecutionStrategy": PROGRAMS["ExecutionStrategy"],
    "paddle.static.ParallelExecutor": PROGRAMS["ParallelExecutor"],
    "paddle.static.amp.decorate": PROGRAMS["contrib.mixed_precision.decorate"],
    "paddle.io.DataLoader.from_generator": To("compat.from_generator"),
    "paddle.static.ctr_metric_bundle": Todo("fleet.metrics on sums of fetched predictions and labels"),
    **{f"paddle.static.{what}": Todo(_SERIALIZED) for what in ("serialize_program", "serialize_persistables")},
    **{f"paddle.static.{what}": Todo(_SERIALIZED) for what in ("deserialize_program", "deserialize_persistables")},
    "paddle.nn.ClipGradByValue": CLIPS["GradientClipByValue"],
    **{
        f"paddle.incubate.optimizer.{name}Optimizer": OPTIMIZERS[name]
        for name in ("GradientMerge", "Recompute", "Pipeline")
    },
    "paddle.distributed.collective._init_parallel_env": Todo("delete it: fleet.init joins the job"),
    "paddle.distributed.split": Todo("a layer of paddle.nn: only data parallelism is supported"),
    "paddle.distributed.transpiler": Todo("fleet.distributed_optimizer"),
    **{
        f"paddle.distributed.{name}": Todo("delete it: parameter servers are not supported")
        for name in ("CountFilterEntry", "ProbabilityEntry", "ShowClickEntry")
    },
}

# What a BuildStrategy of Paddle 3 can be given; assigning to anything else raises.
BUILD_FIELDS = frozenset(
    """
    allow_cuda_graph_capture async_mode bkcl_comm_num build_cinn_pass cache_runtime_context debug_graphviz_path
    enable_addto enable_auto_fusion enable_backward_optimizer_op_deps enable_inplace fuse_adamw fuse_all_optimizer_ops
    fuse_all_reduce_ops fuse_bn_act_ops fuse_bn_add_act_ops fuse_broadcast_ops fuse_dot_product_attention
    fuse_elewise_add_act_ops fuse_gemm_epilogue fuse_relu_depthwise_conv fuse_resunit fused_attention
    fused_feedforward hierarchical_allreduce_inter_nranks memory_optimize mkldnn_enabled_op_types nccl_comm_num
    num_trainers onednn_enabled_op_types reduce_strategy sequential_run sync_batch_norm trainer_id trainers_endpoints
    use_hierarchical_allreduce
    """.split()
)


# Fleet's own names: those of its collective mode in Paddle 1.6 to 1.8, and of ``paddle.distributed.fleet`` in 2.x.


_SERVERS = "delete it: parameter servers are not supported; collective training has workers only"
_KEPT = (
    "CollectiveOptimizer UserDefinedRoleMaker all_reduce_worker barrier_worker init init_worker is_first_worker "
    "is_server is_worker local_rank main_program node_num nranks rank server_endpoints server_num split_files "
    "startup_program stop_worker util worker_endpoints worker_index worker_num"
)

# What a ``fleet`` has: the object of 1.x and the module of 2.x.
FACADE: dict[str, Rule] = {
    **{name: To(f"fleet.{name}") for name in _KEPT.split()},
    "distributed_optimizer": To("fleet.distributed_optimizer", "optimizer strategy"),
    "_origin_program": To("fleet.main_program"),
    "save_persistables": To(
        "fleet.save_persistables",
        "executor>exe dirname main_program / filename-None",
        hand="fleet.save_persistables(exe, dirname): one folder, whose file names are fixed",
    ),
    "load_persistables": To("fleet.load_persistables", "executor>exe dirname main_program"),
    "save_inference_model": To(
        "fleet.save_inference_model",
        "executor>exe dirname feeded_var_names>feeds target_vars>targets / main_program-None "
        "export_for_deployment-True",
        hand="fleet.save_inference_model(exe, dirname, feeds, targets): the program is that of the targets",
    ),
    "DistributedStrategy": To("DistributedStrategy"),
    **{
        name: Todo("a static program: dynamic mode is not supported (paddle.enable_static(), docs/old-programs.md)")
        for name in ("distributed_model", "distributed_scaler")
    },
    "PaddleCloudRoleMaker": To("role_maker.PaddleCloudRoleMaker"),
    **{f"metrics.{name}": To(f"fleet.metrics.{name}") for name in "sum max min auc mae mse rmse acc".split()},
    **{name: To(f"compat.{name}") for name in DATASETS},
    **{name: To(f"compat.{name}") for name in GENERATORS},
    "save_check_point": Todo("fleet.save_persistables(exe, dirname) and a file of your own for the epoch"),
    "load_check_point": Todo("fleet.load_persistables(exe, dirname) and a file of your own for the epoch"),
    "save": Todo("fleet.save_persistables(exe, dirname) or fleet.save_inference_model(exe, dirname, feeds, targets)"),
    "meta_optimizers": Todo("the profile's knobs: fleet_train profiles"),
    "meta_optimizers.sharding.utils": Todo("fleet.save_persistables(exe, dirname), which gathers what ranks own"),
    **{name: Todo(_SERVERS) for name in ("init_server", "run_server", "server_index", "shrink")},
}

ROLE_MAKERS: dict[str, Rule] = {
    "PaddleCloudRoleMaker": To("role_maker.PaddleCloudRoleMaker", "is_collective"),
    "UserDefinedCollectiveRoleMaker": To("role_maker.UserDefinedCollectiveRoleMaker", "current_id worker_endpoints"),
    **{
        name: Todo("role_maker.PaddleCloudRoleMaker(is_collective=True): the launcher sets the ranks")
        for name in ("UserDefinedRoleMaker", "MPISymetricRoleMaker", "GeneralRoleMaker")
    },
}

# Saving by hand below fleet: a collective call, which no rank may leave out.
SAVING: dict[str, Rule] = {
    "io.save_persistables": FACADE["save_persistables"],
    "io.load_persistables": To(
        "fleet.load_persistables",
        "executor>exe dirname main_program / filename-None",
        hand="fleet.load_persistables(exe, dirname): a folder that fleet.save_persistables wrote",
    ),
    "io.save_inference_model": To(
        "fleet.save_inference_model",
        "/ dirname feeded_var_names>feeds target_vars>targets executor>exe main_program-None model_filename-None "
        "params_filename-None export_for_deployment-True program_only-False",
        hand="fleet.save_inference_model(exe, dirname, feeds, targets): its file names are fixed",
    ),
    "ExecutionStrategy": To("DistributedStrategy", "", then="exec_strategy"),
    "BuildStrategy": To("DistributedStrategy", "", then="build_strategy"),
}
