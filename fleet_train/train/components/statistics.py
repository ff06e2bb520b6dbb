"""Values that are not trained but updated during training: batch norm's running mean and variance."""

from __future__ import annotations

from typing import Any

from fleet_train import fleet


def statistics_of(program: Any) -> list[str]:
    """Names of the float parameters of `program` that are not trained, sorted."""
    values = program.global_block().all_parameters()
    # The learning rate is also such a parameter, but has no dimensions.
    return sorted(
        each.name for each in values if not each.trainable and each.shape and "float" in str(each.dtype).lower()
    )


def describe_statistics(program: Any) -> str | None:
    """A note on batch norm's statistics in this job, or None."""
    if fleet.worker_num() == 1 or not statistics_of(program):
        return None
    if fleet.profile().sync_batch_norm:
        return "batch norm: over the batches of all ranks (sync_batch_norm)"
    if fleet.profile().use_local_sgd:
        return "batch norm: each rank over its own batch; running statistics are averaged with the parameters"
    return "batch norm: each rank over its own batch; running statistics are averaged for evaluations and checkpoints"
