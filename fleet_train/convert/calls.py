"""``fleet.util``: small helpers of Fleet 2.x that communicate between ranks or split work; a rank's part of a batch;
and `ABSENT`, every name of Fleet's facade, 1.8 and 2.x, that ours does not have: why, and what to use instead."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.job import Array
from fleet_train.convert.session import current, current_shares
from fleet_train.errors import GUIDE, ConversionError
from fleet_train.profile.rules import suggestion

_COLLECTIONS = ("worker", "all")
_OPERATIONS = ("sum", "max", "min", "mean")


class UtilBase:
    """All ranks call ``all_reduce``, ``barrier`` and ``all_gather``, in the same order.

    ``comm_world``: ``worker`` and ``all`` are the same here; ``server`` is refused, there are none.
    """

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Array:
        """``sum``, ``min``, ``max`` or ``mean`` of an array over all ranks, on every rank, same shape and dtype."""
        _refuse_servers("all_reduce", comm_world)
        return reduce("fleet.util.all_reduce()", np.asarray(input), mode)

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait for all ranks."""
        _refuse_servers("barrier", comm_world)
        meet("fleet.util.barrier()")

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[Any]:
        """The number, or other JSON value, of every rank, by rank."""
        _refuse_servers("all_gather", comm_world)
        value = input.item() if isinstance(input, (np.generic, np.ndarray)) else input
        return values_of_all("fleet.util.all_gather()", value)

    def get_file_shard(self, files: list[str]) -> list[str]:
        """This rank's part of a list: contiguous; the first ranks get one more item if it does not divide evenly."""
        if not isinstance(files, list):
            raise ConversionError(f"get_file_shard was given a {type(files).__name__}; it takes a list of file names")
        cluster = current().job.cluster
        size, odd = divmod(len(files), cluster.world_size)
        first = cluster.rank * size + min(cluster.rank, odd)
        return files[first : first + size + (cluster.rank < odd)]

    def print_on_rank(self, message: str, rank_id: int) -> None:
        """Print on one rank."""
        if current().job.cluster.rank == rank_id:
            print(message, flush=True)


def batch_size(global_batch_size: int) -> int:
    """How many of ``global_batch_size`` samples this rank is to be fed in the next step, by the profile's
    ``batch_shares``: the ranks' numbers add up to it.

    With ``batch_shares: auto`` all ranks call it once before each step, on the thread that trains; after 10 calls at
    the latest, and then after every ``batch_shares_steps``, they agree on new shares in it. Raises DataError for fewer
    samples than ranks.
    """
    mine = batch_slice(global_batch_size)
    return int(mine.stop - mine.start)


def batch_slice(global_batch_size: int) -> slice:
    """This rank's part of a joint batch that every rank has: ``joint[fleet.batch_slice(len(joint))]``. Called like
    ``batch_size``, instead of it."""
    return current_shares().part(global_batch_size)


def batch_shares() -> tuple[float, ...]:
    """The parts of the joint batch that the ranks take now, by rank; they add up to 1."""
    shares = current_shares()
    shares.is_used = True
    return shares.now


def meet(call: str, timeout_seconds: float | None = None) -> None:
    """Wait for all ranks. Here and below, ``call`` is the call that errors name."""
    job = current().job
    with job.inside(call):
        job.barrier(f"barrier {job.count('barrier')}", timeout_seconds)


def values_of_all(call: str, value: Any) -> list[Any]:
    """The JSON value of every rank, by rank."""
    job = current().job
    with job.inside(call):
        values = job.all_gather(f"gather {job.count('gather')}", value)
    return [values[rank] for rank in range(job.world_size)]


def reduce(call: str, values: Array, op: str) -> Array:
    """``values`` reduced over all ranks; ``mean`` for floating point only."""
    job = current().job
    if op not in _OPERATIONS:
        raise ConversionError(f"all_reduce: op={op!r} is unknown; it takes {', '.join(_OPERATIONS)}")
    if op == "mean" and values.dtype.kind != "f":
        raise ConversionError(
            f"all_reduce: the mean of {values.dtype} is no {values.dtype}; give a floating point array"
        )
    with job.inside(call):
        total = job.reduce(values, "sum" if op == "mean" else op)
    return (total / job.world_size).astype(values.dtype) if op == "mean" else total


def broadcast(array: Any, source: int = 0) -> Array:
    """The numpy array of rank ``source`` on every rank, bit by bit; what the others pass is ignored, None will do:
    ``table = fleet.broadcast(read_table() if fleet.is_first_worker() else None)``. The argument itself stays as it is.

    All ranks call it in the same order. Any dtype of numpy but objects and fields. Raises ConversionError, on all
    ranks, for those, for masked arrays, and for a ``source`` that is no rank.
    """
    job = current().job
    if type(source) is bool or not isinstance(source, (int, np.integer)) or not 0 <= source < job.world_size:
        raise ConversionError(f"fleet.broadcast(): source={source!r} is no rank; ranks are 0 to {job.world_size - 1}")
    call, is_source = f"fleet.broadcast(source={source})", job.cluster.rank == source
    with job.inside(call):
        about = _about(array) if is_source else None
        about = job.broadcast(f"broadcast {job.count('broadcast')}", about, int(source))
    return _joined(call, array if is_source else None, [about])[0]


def all_gather(array: Any) -> list[Array]:
    """The numpy arrays of all ranks, by rank, on every rank, bit by bit: shapes may differ, dtypes too.

    For results of an evaluation; every rank holds them all. All ranks call it in the same order. Any dtype of numpy but
    objects and fields; for those and for masked arrays ConversionError is raised, on all ranks. JSON values of any
    kind: ``fleet.gather``.
    """
    call = "fleet.all_gather()"
    return _joined(call, array, values_of_all(call, _about(array)), current().job.cluster.rank)


def _about(array: Any) -> list[Any] | str:
    """Dtype and shape; or why an array is not taken."""
    if isinstance(array, paddle.pir.Value):
        return "a value of the program is no array yet; fetch it with exe.run first"
    values = np.asarray(array)
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array would lose its mask; send array.filled(0) and array.mask"
    if values.dtype.hasobject:
        what = "an array of objects" if isinstance(array, np.ndarray) else f"'{type(array).__name__}'"
        return f"it takes numpy arrays of numbers, not {what}; use fleet.gather"
    if np.dtype(values.dtype.str) != values.dtype:
        return (
            f"dtype {values.dtype} is none of numpy's own without fields; send each field, or a view as whole numbers"
        )
    return [values.dtype.str, list(values.shape)]


def _joined(call: str, array: Any, about: list[list[Any] | str], place: int = 0) -> list[Array]:
    """Arrays of which each rank has one or none, in the order of ``about``; ``place``: that of this rank's. Sums with
    zeros, of the bits as whole numbers: what is summed is exact."""
    if refused := next((each for each in about if isinstance(each, str)), ""):
        raise ConversionError(f"{call}: {refused}")
    shapes = [(np.dtype(each[0]), tuple(each[1])) for each in about]
    words = [-(-dtype.itemsize * math.prod(shape) // 4) for dtype, shape in shapes]
    ends = list(accumulate(words, initial=0))
    sent = np.zeros(ends[-1], np.int32)
    if array is not None:
        given = np.ascontiguousarray(array).tobytes()
        sent[ends[place] : ends[place + 1]].view(np.uint8)[: len(given)] = np.frombuffer(given, np.uint8)
    bits = (reduce(call, sent, "sum") if sent.size else sent).tobytes()
    starts = zip(shapes, ends, strict=False)
    return [
        np.frombuffer(bits, dtype, math.prod(shape), 4 * start).reshape(shape).copy()
        for (dtype, shape), start in starts
    ]


def _refuse_servers(name: str, comm_world: str) -> None:
    if comm_world not in _COLLECTIONS:
        raise ConversionError(
            f"fleet.util.{name}: comm_world={comm_world!r}: parameter servers are not supported; leave it out"
        )


_SERVERS = "belongs to parameter servers, which are out of scope here; every rank holds the whole model"
_ABSENT = {
    "Fleet Collective": "is not needed: fleet itself is the instance; from fleet_train import fleet",
    "CollectiveOpBasedOptimizer": "is not needed; call fleet.distributed_optimizer(optimizer, strategy)",
    (
        "TrainStatus save_check_point load_check_point save_checkpoint load_checkpoint clean_redundant_check_points "
        "clean_redundant_checkpoints"
    ): (
        "is no longer part of it; call fleet.save_persistables(exe, folder) and fleet.load_persistables(exe, "
        "folder) on all ranks, or use fleet.resumable(folder, exe), which keeps checkpoints and lets a loop resume"
    ),
    "LambConfig": "belongs to the optimizer: build paddle.optimizer.Lamb yourself and wrap that",
    (
        "DistFCConfig CommunicateTopology HybridCommunicateGroup get_hybrid_communicate_group "
        "get_hybrid_parallel_topology meta_parallel layers"
    ): "splits the model; only data parallelism is supported, every rank holds the whole model",
    "meta_optimizers": "is Paddle's own conversion, which does not run on PIR programs; set the profile's knobs",
    "optimizer": "is Paddle's own module; call fleet.distributed_optimizer(optimizer, strategy)",
    "model scaler distributed_model distributed_scaler": (
        "belongs to dynamic graphs; fleet_train converts static programs: build the network under "
        "paddle.enable_static() and use fleet.distributed_optimizer"
    ),
    "recompute": "is a knob here: recompute_segments, recompute_every_blocks or recompute_checkpoints of the profile",
    "auto": "belongs to automatic parallelism, which is out of scope here; choose a profile instead",
    "base": "is Paddle's own package; use: from fleet_train import role_maker",
    "utils": "is Paddle's own package: for recompute set recompute_segments, for file systems use pathlib",
    "runtime": "is Paddle's own package, for parameter servers",
    "proto": "is Paddle's own package; fleet_train.DistributedStrategy has the fields of its strategy",
    "dataset data_generator BoxPSDataset DatasetBase FileInstantDataset": (
        "reads the slot files of parameter-server jobs; read data with paddle.io.DataLoader, or fleet_train.data"
    ),
    "InMemoryDataset QueueDataset MultiSlotDataGenerator MultiSlotStringDataGenerator": (
        "is in fleet_train.compat, for compat.train_from_dataset; docs/old-programs.md has a recipe"
    ),
    "launch": "is a command: fleet_train launch --help",
    "launch_utils": "is internal to Paddle's launcher; fleet_train launch --help",
    "cloud_utils": "is internal to Paddle's launcher; fleet_train launch --use_paddlecloud",
    "elastic": "is an option of the launcher: fleet_train launch --max_restarts 3 --min_nodes 2",
    "local_device_ids": "is not supported; fleet.place() is this rank's device, fleet.local_rank() its index",
    "world_device_ids": "is not supported; fleet.place() is this rank's device, fleet.node_num() the nodes",
    (
        "init_server run_server run_worker server_index init_coordinator make_fl_strategy get_fl_client "
        "load_one_table save_one_table save_cache_model save_cache_table check_save_pre_patch_done set_date "
        "print_table_stat shrink shrink_sparse_table shrink_dense_table get_heter_file_shard"
    ): _SERVERS,
    "load_model": f"{_SERVERS}; use fleet.load_persistables",
    "load_inference_model": f"{_SERVERS}; paddle.static.load_inference_model reads an exported network",
    "save_dense_params": f"{_SERVERS}; use fleet.save_persistables",
    "save": "stands for two calls: fleet.save_persistables (to resume) and fleet.save_inference_model (to deploy)",
    "inference_model": "is fleet.save_inference_model",
    "get_worker_endpoints": "is fleet.worker_endpoints()",
    "get_current_id current_id": "is fleet.worker_index()",
    "current_endpoint": "is fleet.worker_endpoints()[fleet.worker_index()]",
    "collective_perf allreduce_perf reduce_perf broadcast_perf allgather_perf reduce_scatter_perf": (
        "is not supported; fleet_train recommend measures this network"
    ),
    "check_memory_usage get_log_level_code get_log_level_name set_log_level log_util": (
        "is not supported; fleet_train has no log levels: it prints each message once, on rank 0's stderr"
    ),
    "amp_init": "is a call of the optimizer that fleet.distributed_optimizer returns",
    "get_loss_scaling": "is fleet.loss_scale()",
    "qat_init": "quantizes, which is out of scope here; use paddle.quantization on the model",
    "is_xpu": "is not supported; fleet.place() is this rank's device",
    "stop": "is fleet.shutdown(), which also runs when the script ends",
    "_final_strategy _get_applied_meta_list _get_applied_graph_list": (
        "is internal to Paddle's Fleet; fleet.profile() and fleet.plan() show what is carried out"
    ),
}
_ELSEWHERE = {
    "send recv isend irecv P2POp batch_isend_irecv scatter reduce reduce_scatter all_to_all alltoall allreduce_async": (
        "is not there: data parallel ranks do the same. Arrays reach all ranks by fleet.all_reduce, fleet.broadcast or "
        "fleet.all_gather, small values of any kind by fleet.gather"
    ),
    "barrier monitored_barrier": "is fleet.barrier_worker()",
    "get_rank": "is fleet.worker_index()",
    "get_world_size size": "is fleet.worker_num()",
    "local_size": "is not there; fleet.local_rank() is the index on the node, fleet.node_num() the number of nodes",
    "init_process_group init_parallel_env": "is fleet.init(is_collective=True), once",
    "is_initialized": "is not there: fleet.init(is_collective=True) is called once, at the top of the script",
    "destroy_process_group": "is not needed: ranks leave the job when the script ends (fleet.shutdown)",
    "new_group": "is not there: all ranks train one model; fleet.all_reduce is over all of them",
    "DistributedSampler": "is paddle.io.DistributedBatchSampler, or fleet_train.data.ShardedBatchSampler",
    "DistributedDataParallel DataParallel DistributedOptimizer DDP": (
        "is fleet.distributed_optimizer(optimizer), for static programs; dynamic ones use paddle.DataParallel"
    ),
    "no_sync": "is a knob here: --set accumulate_steps=4",
    "FullyShardedDataParallel FSDP ZeroRedundancyOptimizer": (
        "is a knob here, for the optimizer's state: --set sharding=true"
    ),
    "SyncBatchNorm convert_sync_batchnorm convert_syncbn_model": "is a knob here: --set sync_batch_norm=true",
    "broadcast_parameters broadcast_optimizer_state broadcast_object broadcast_object_list": (
        "is not needed: all ranks start with rank 0's parameters, and fleet.load_persistables gives all what is saved; "
        "arrays: fleet.broadcast"
    ),
    "allreduce metric_average": 'is fleet.all_reduce(array, "mean")',
    "allgather all_gather_object": "is fleet.all_gather(array), or fleet.gather(value) for small values of any kind",
    "ReduceOp reduce_op Sum Average": 'is a word here: fleet.all_reduce(array, "sum"), or "mean", "max", "min"',
    "get_local_rank": "is fleet.local_rank()",
    "Compression register_comm_hook": "is a knob here: --set compression=bf16 or fp16",
    "amp initialize scale_loss autocast GradScaler": "is a knob here: --strategy amp_bf16, or --set amp_level=O1",
    "spawn": "is fleet_train.spawn(function, nprocs=2)",
}
"""Names that the facade does not have, and the reason that they share; here those of torch.distributed and Horovod."""
ABSENT = {name: reason for names, reason in _ABSENT.items() for name in names.split()} | {
    name: f"{reason} ({GUIDE})" for names, reason in _ELSEWHERE.items() for name in names.split()
}
"""Every name of Fleet's facade, 1.8 and 2.x, that ours does not have: why, and what to use instead."""


class UnknownName(ConversionError, AttributeError):
    """A name that the facade does not have. Also an AttributeError, so that ``hasattr`` and ``import`` work."""


def unknown(name: str, known: list[str]) -> UnknownName:
    """The error for a name that the facade does not have: what to use, or the nearest existing name."""
    if name in ABSENT:
        return UnknownName(f"fleet.{name} {ABSENT[name]}")
    return UnknownName(f"module 'fleet_train.fleet' has no attribute {name!r}{suggestion(name, known)}")
