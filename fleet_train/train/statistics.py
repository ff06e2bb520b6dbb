"""Values that are not trained but move with the training: batch norm's running mean and variance."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from fleet_train import fleet


def statistics_of(program: Any) -> list[str]:
    """Names of the float parameters of `program` that are not trained, sorted."""
    values = program.global_block().all_parameters()
    return sorted(each.name for each in values if each.stop_gradient and "float" in str(each.dtype).lower())


def share_statistics(program: Any) -> None:
    """Give every rank the statistics of rank 0, bit by bit. All ranks call it.

    Each rank's batch norm has seen its own batches only. The statistics of rank 0 are those that a checkpoint holds, so
    an evaluation that is shared out must use them, too; training does not read them. LocalSGD averages them and
    sync_batch_norm keeps them equal: both are left as they are.
    """
    profile = fleet.profile()
    names = statistics_of(program)
    if fleet.worker_num() == 1 or not names or profile.use_local_sgd or profile.sync_batch_norm:
        return
    tensors = [paddle.static.global_scope().find_var(name).get_tensor() for name in names]
    mine = np.concatenate([np.asarray(tensor).reshape(-1) for tensor in tensors]).astype(np.float32)
    shared = fleet.all_reduce(mine if fleet.is_first_worker() else np.zeros_like(mine), op="sum")
    begin = 0
    for tensor in tensors:
        old = np.asarray(tensor)
        tensor.set(shared[begin : begin + old.size].reshape(old.shape).astype(old.dtype), fleet.place())
        begin += old.size


def describe_statistics(program: Any) -> str | None:
    """What becomes of batch norm's statistics in this job, or None where there is nothing to say."""
    if fleet.worker_num() == 1 or not statistics_of(program):
        return None
    if fleet.profile().sync_batch_norm:
        return "batch norm: over the batches of all ranks (sync_batch_norm)"
    if fleet.profile().use_local_sgd:
        return "batch norm: each rank over its own batch; running statistics are averaged with the parameters"
    return "batch norm: each rank over its own batch; rank 0's running statistics are evaluated and saved"
