"""From gradients, cluster and profile to a communication plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleet_train.cluster import Cluster
from fleet_train.errors import ProfileError
from fleet_train.plan.compression_settings import sent_of
from fleet_train.plan.plan import Averaging, Bucket, CommPlan, Gradient, Note
from fleet_train.profile import Profile

MEGABYTE = 2**20


def build_plan(
    gradients: Sequence[Gradient], cluster: Cluster, profile: Profile, averaged: Sequence[Gradient] = ()
) -> CommPlan:
    """The plan for ``gradients``, given in the order in which the backward pass finishes them.

    ``averaged``: what LocalSGD averages (parameters and statistics). Pure: the same arguments give the same plan on
    every rank. Raises ProfileError for a hierarchy that the cluster cannot have.
    """
    team_size = _team_size(cluster, profile)
    groups = fuse(gradients, profile) if profile.fuse_all_reduce_ops else [[gradient] for gradient in gradients]
    buckets = tuple(
        Bucket(
            index,
            tuple(group),
            index % profile.nccl_comm_num,
            "hierarchical" if team_size else "allreduce",
            profile.compression if group[0].dtype == "float32" else "none",
        )
        for index, group in enumerate(groups)
    )
    buckets = tuple(replace(bucket, sent=sent_of(bucket, profile, bool(team_size))) for bucket in buckets)
    return CommPlan(
        world_size=cluster.world_size,
        node_num=cluster.node_num,
        communicators=profile.nccl_comm_num,
        buckets=buckets,
        team_size=team_size,
        accumulate_steps=profile.accumulate_steps,
        averaging=_averaging(averaged or gradients, profile) if profile.use_local_sgd else None,
        profile_name=profile.name,
        profile_digest=profile.digest(),
        notes=tuple(_notes(gradients, buckets, profile) + _strategy_notes(cluster, profile, team_size)),
    )


def fuse(gradients: Sequence[Gradient], profile: Profile) -> list[list[Gradient]]:
    """Group gradients into buckets of one dtype, bounded by size and count, in the order in which buckets fill.

    A bucket is closed before a gradient that would take it past ``fuse_grad_size_in_MB``; a larger gradient gets a
    bucket of its own. ``last_comm_group_size_MB`` bounds the last bucket (as in Paddle), whose transfer nothing hides,
    and the first one too, so that communication starts early (as in PyTorch's DDP).
    """
    closed: list[list[Gradient]] = []
    open_by_dtype: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        bucket = open_by_dtype.setdefault(gradient.dtype, [])
        limit = (
            profile.fuse_grad_size_in_MB
            if closed
            else min(profile.last_comm_group_size_MB, profile.fuse_grad_size_in_MB)
        )
        size = sum(member.nbytes for member in bucket) + gradient.nbytes
        if bucket and (size > limit * MEGABYTE or len(bucket) >= profile.fuse_parameter_groups_size):
            closed.append(bucket)
            bucket = open_by_dtype[gradient.dtype] = []
        bucket.append(gradient)
    rest = [bucket for bucket in open_by_dtype.values() if bucket]
    position = {id(gradient): index for index, gradient in enumerate(gradients)}
    # What is still open at the end becomes ready with its last gradient; ready buckets first.
    buckets = sorted(closed + rest, key=lambda bucket: position[id(bucket[-1])])
    return buckets[:-1] + _split_tail(buckets[-1], profile.last_comm_group_size_MB)


def _split_tail(bucket: list[Gradient], limit_megabytes: float) -> list[list[Gradient]]:
    """Cut the gradients that become ready last into a small bucket: nothing is left to hide its transfer behind."""
    size, start = 0, len(bucket)
    while start > 0 and size + bucket[start - 1].nbytes <= limit_megabytes * MEGABYTE:
        start -= 1
        size += bucket[start].nbytes
    return [part for part in (bucket[:start], bucket[start:]) if part]


def _team_size(cluster: Cluster, profile: Profile) -> int:
    """Ranks per team of the hierarchical allreduce; 0 where teams would be single ranks or the whole job."""
    if not profile.use_hierarchical_allreduce:
        return 0
    asked = profile.hierarchical_allreduce_inter_nranks
    sizes = {len(cluster.ranks_on_node(node)) for node in range(cluster.node_num)}
    if not asked and len(sizes) > 1:
        raise ProfileError(
            f"use_hierarchical_allreduce: the nodes have {sorted(sizes)} ranks; teams follow the nodes only where all "
            "have the same number. Start as many on each, or set hierarchical_allreduce_inter_nranks"
        )
    size = asked or sizes.pop()
    if asked and cluster.world_size % size:
        raise ProfileError(
            f"hierarchical_allreduce_inter_nranks={size} does not divide the world size, {cluster.world_size}"
        )
    return size if 1 < size < cluster.world_size else 0


def _averaging(values: Sequence[Gradient], profile: Profile) -> Averaging:
    return Averaging(
        tuple(values),
        profile.local_sgd_is_warm_steps,
        profile.local_sgd_steps,
        profile.local_sgd_schedule,
        profile.local_sgd_dtype,
        profile.outer_optimizer,
    )


def _notes(gradients: Sequence[Gradient], buckets: tuple[Bucket, ...], profile: Profile) -> list[Note]:
    notes = [
        Note(
            "fuse_all_reduce_ops",
            f"{len(gradients)} gradients in {len(buckets)} collectives"
            if profile.fuse_all_reduce_ops
            else f"off: each of {len(gradients)} gradients is a collective of its own",
        ),
        Note(
            "nccl_comm_num",
            f"{profile.nccl_comm_num} communicator{'s' if profile.nccl_comm_num > 1 else ''}, buckets in turn",
        ),
    ]
    if profile.fuse_all_reduce_ops:
        largest = max((bucket.nbytes for bucket in buckets), default=0) / MEGABYTE
        notes += [
            Note(
                "fuse_grad_size_in_MB",
                f"at most {profile.fuse_grad_size_in_MB:g} MB per bucket; largest {largest:.2f} MB",
            ),
            Note(
                "fuse_parameter_groups_size",
                f"at most {profile.fuse_parameter_groups_size} gradients per bucket; "
                f"most {max((len(bucket.gradients) for bucket in buckets), default=0)}",
            ),
            Note(
                "last_comm_group_size_MB",
                f"first and last bucket at most {profile.last_comm_group_size_MB:g} MB: communication starts early, "
                "little is left to send after the backward pass",
            ),
        ]
    return notes


def _strategy_notes(cluster: Cluster, profile: Profile, team_size: int) -> list[Note]:
    notes = []
    if profile.use_hierarchical_allreduce:
        effect = (
            f"teams of {team_size} ranks; {cluster.world_size // team_size} leaders send between teams"
            if team_size
            else "every team would be one rank, or all of them: the same as the flat allreduce"
        )
        notes.append(Note("use_hierarchical_allreduce", effect))
    if profile.sync_nccl_allreduce:
        notes.append(Note("sync_nccl_allreduce", "each bucket is waited for at once: nothing overlaps"))
    if profile.compression != "none":
        notes.append(Note("compression", f"float32 buckets go as {profile.compression}"))
    if profile.accumulate_steps > 1:
        notes.append(Note("accumulate_steps", f"all this once per {profile.accumulate_steps} micro-batches"))
    if profile.use_local_sgd:
        notes.append(
            Note(
                "use_local_sgd",
                f"gradients are sent in the first {profile.local_sgd_is_warm_steps} steps only; then parameters "
                f"are averaged "
                f"every {profile.local_sgd_steps} steps ({profile.local_sgd_schedule})",
            )
        )
        if profile.outer_optimizer != "none":
            notes.append(
                Note(
                    "outer_optimizer",
                    f"{profile.outer_optimizer}: lr {profile.outer_lr:g}, momentum {profile.outer_momentum:g} on the "
                    f"averaged difference, sent as {profile.local_sgd_dtype}",
                )
            )
    return notes
