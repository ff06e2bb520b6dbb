"""A plan as readable text."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_train.cluster import Cluster
from fleet_train.plan.phases import phases_of, sent_by_rank
from fleet_train.plan.plan import MEGABYTE, CommPlan, Note
from fleet_train.plan.shards import elements_of, memory_of, rows_cut
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import ITEM_BYTES, Bucket, CollectiveSpec, TensorSpec
from fleet_train.profile.methods.rows import ROWS, most_rows, wire_dtype
from fleet_train.profile.profile import CHOSEN, buckets_of


def explain(plan: CommPlan) -> str:
    """Buckets, bytes and collectives per step, and what each knob did."""
    lines = [
        f"profile {plan.profile_name or '(defaults)'}: {_count(plan.world_size, 'rank')} on "
        f"{_count(plan.node_num, 'node')}, {_count(plan.communicators, 'communicator')}",
        "",
        f"{'bucket':>6}  {'gradients':>9}  {'MB':>9}  {'dtype':<9} {'communicator':>12}  {'algorithm':<12} names",
    ]
    for bucket in plan.buckets:
        names = f"{bucket.gradients[0].name} .. {bucket.gradients[-1].name}"
        method = bucket.algorithm if bucket.compression == "none" else f"{bucket.algorithm}, {bucket.compression}"
        lines.append(
            f"{bucket.index:>6}  {len(bucket.gradients):>9}  {bucket.nbytes / MEGABYTE:>9.3f}  {bucket.dtype:<9} "
            f"{bucket.communicator:>12}  {method:<12} "
            f"{names if len(bucket.gradients) > 1 else bucket.gradients[0].name}"
        )
    lines += [
        "",
        *_per_update(plan),
        *_memory(plan),
        f"digest: {plan.digest}",
        "",
        "effect of each knob:",
    ]
    lines += [f"  {note.knob}: {note.effect}" for note in plan.notes]
    return "\n".join(lines)


def _per_update(plan: CommPlan) -> list[str]:
    """Collectives and bytes; with LocalSGD those of an averaging, and separately of the warm-up."""
    gradients = f"{_collectives(plan, True)}, {_sent(plan, True)} for {_mb(plan.gradient_bytes)} MB of gradients"
    lines = [f"per update: {gradients}"]
    if plan.averaging is not None:
        averaging = (
            f"{_collectives(plan, False)} every {plan.averaging.period} updates, {_sent(plan, False)} per update"
        )
        lines = [f"in the warm-up, per update: {gradients}", f"after it: {averaging}"]
    if plan.statistics:
        number = _count(len(plan.statistics) * plan.accumulate_steps, "collective")
        lines.append(f"of these inside the passes (batch norm, values of all ranks): {number}, not overlapped")
    return lines + _tables(plan)


def _tables(plan: CommPlan) -> list[str]:
    """What is planned of embeddings' rows, and between what the bytes of a step can be."""
    lines: list[str] = []
    most, planned = 0.0, 0.0
    for bucket in plan.buckets:
        for table in bucket.gradients if bucket.algorithm == ROWS else ():
            lines.append(
                f"rows of '{table.name}' {list(table.shape)}: planned with {table.rows:,} of a rank (--ids_per_step "
                f"changes that); a step with more than {most_rows(table, bucket, plan.world_size):,} sends the table"
            )
            whole = CollectiveSpec("allreduce", table.elements * ITEM_BYTES[wire_dtype(bucket)], 1)
            most += _most_sent(plan, [whole])
        planned += _most_sent(plan, bucket.sent) if bucket.algorithm == ROWS else 0.0
    if lines:
        lines.append(
            f"of these for embeddings: {_mb(planned)} MB as planned, from 0 to {_mb(most)} MB by what is touched"
        )
    return lines


def _memory(plan: CommPlan) -> list[str]:
    """What the rank with the largest share keeps."""
    parts = memory_of(plan)
    words = ", ".join(f"{_mb(nbytes)} {name}" for name, nbytes in parts.items())
    return [f"memory of a rank, without activations: {_mb(sum(parts.values()))} MB ({words})"]


def _most_sent(plan: CommPlan, sent: Sequence[CollectiveSpec]) -> float:
    phases = [phase for each in sent for phase in phases_of(plan.world_size, plan.group_size, each)]
    return max(sent_by_rank(phases, plan.world_size), default=0.0)


def _collectives(plan: CommPlan, warm_up: bool) -> str:
    return _count(len(plan.phases(warm_up)), "collective")


def _sent(plan: CommPlan, warm_up: bool) -> str:
    sent = plan.sent_by_rank(warm_up)
    low, high = _mb(min(sent)), _mb(max(sent))
    return f"{high} MB sent by each rank" if low == high else f"{low} to {high} MB sent by a rank"


def _mb(nbytes: float) -> str:
    return f"{nbytes / MEGABYTE:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def notes_of(plan: CommPlan, gradients: Sequence[TensorSpec], cluster: Cluster, profile: Profile) -> list[Note]:
    """One note for each knob that affects what is sent, or the program around it."""
    return [
        *_fusing(gradients, plan.buckets, profile),
        *_strategies(gradients, cluster, profile, plan.group_size),
        *_sharding(plan),
        *_local_sgd(profile),
        *_program(profile, plan.statistics),
        *_running(profile),
    ]


def _fusing(gradients: Sequence[TensorSpec], buckets: Sequence[Bucket], profile: Profile) -> list[Note]:
    asked = buckets_of(profile)
    notes = [
        Note(
            "fuse_all_reduce_ops",
            f"{len(gradients)} gradients in {len(buckets)} collectives"
            if profile.fuse_all_reduce_ops
            else f"off: one collective for each of {len(gradients)} gradients",
        ),
        Note(
            "nccl_comm_num",
            f"{asked.communicators} communicator{'s' if asked.communicators > 1 else ''}, buckets in turn"
            + _chosen(profile, "nccl_comm_num"),
        ),
    ]
    if profile.fuse_all_reduce_ops:
        largest = max((bucket.nbytes for bucket in buckets if bucket.algorithm != ROWS), default=0) / MEGABYTE
        notes += [
            Note(
                "fuse_grad_size_in_MB",
                f"at most {asked.megabytes:g} MB per bucket; largest {largest:.2f} MB"
                + _chosen(profile, "fuse_grad_size_in_MB"),
            ),
            Note(
                "fuse_parameter_groups_size",
                f"at most {profile.fuse_parameter_groups_size} gradients per bucket; "
                f"most {max((len(bucket.gradients) for bucket in buckets), default=0)}",
            ),
            Note(
                "last_comm_group_size_MB",
                f"first and last bucket at most {asked.edge_megabytes:g} MB: communication starts early "
                "and ends soon after the backward pass" + _chosen(profile, "last_comm_group_size_MB"),
            ),
        ]
    return notes


def _chosen(profile: Profile, knob: str) -> str:
    """How the number of an open knob was chosen, or nothing."""
    origin = profile.origin(knob)
    return f" ({origin})" if origin.startswith(CHOSEN) else ""


def _strategies(gradients: Sequence[TensorSpec], cluster: Cluster, profile: Profile, group_size: int) -> list[Note]:
    notes = []
    if profile.use_hierarchical_allreduce:
        effect = (
            f"local groups of {group_size} ranks; {cluster.world_size // group_size} leaders send between local groups"
            if group_size
            else "every local group would have one rank, or all: the same as the flat allreduce"
        )
        notes.append(Note("use_hierarchical_allreduce", effect))
    if tables := [gradient for gradient in gradients if gradient.rows]:
        effect = f"the touched rows of {_count(len(tables), 'embedding')}; of others, whole tables"
        notes.append(Note("sparse_embeddings", effect))
    if profile.sync_nccl_allreduce:
        notes.append(Note("sync_nccl_allreduce", "each bucket is waited for immediately: nothing overlaps"))
    if profile.overlap_next_step:
        notes.append(
            Note(
                "overlap_next_step",
                "each bucket is waited for in the next step, before the first use of its parameters",
            )
        )
    if profile.compression != "none":
        notes.append(Note("compression", f"float32 buckets go as {profile.compression}{_tuning(profile)}"))
    if profile.accumulate_steps > 1:
        notes.append(Note("accumulate_steps", f"all of this once per {profile.accumulate_steps} micro-batches"))
    return notes


def _sharding(plan: CommPlan) -> list[Note]:
    if not plan.owners:
        return []
    held, cut = elements_of(plan), rows_cut(plan)
    share = max(held) / (sum(held) or 1)
    copies = plan.world_size // plan.owners
    effect = f"each rank of {plan.owners} keeps at most {share:.3f} of the optimizer's state"
    effect += f", {copies} copies of it in the job" if copies > 1 else ""
    effect += f"; cut by rows: {', '.join(cut)}" if cut else "; no parameter is cut"
    return [Note("sharding", effect)]


def _tuning(profile: Profile) -> str:
    """The settings of the chosen compression: each of its knobs with its value."""
    prefix = f"{profile.compression}_"
    values = {name: value for name, value in profile if name.startswith(prefix)}
    words = [f"{name.removeprefix(prefix)} {value}" for name, value in values.items()]
    return f" ({', '.join(words)})" if words else ""


def _local_sgd(profile: Profile) -> list[Note]:
    if not profile.use_local_sgd:
        return []
    longest = f", at most {profile.local_sgd_max_steps}" if profile.local_sgd_schedule == "adaptive" else ""
    notes = [
        Note(
            "use_local_sgd",
            f"gradients are sent in the first {profile.local_sgd_is_warm_steps} steps only; then parameters are "
            f"averaged every {profile.local_sgd_steps} steps ({profile.local_sgd_schedule}{longest})",
        ),
        Note("local_sgd_momentum", f"{profile.local_sgd_momentum}: the optimizer's state at an averaging"),
        Note("local_sgd_dtype", f"an averaging sends {profile.local_sgd_dtype}"),
    ]
    if profile.local_sgd_overlap_steps:
        effect = f"an averaging's change is added {profile.local_sgd_overlap_steps} steps later, which overlap it"
        notes.append(Note("local_sgd_overlap_steps", effect))
    if profile.outer_optimizer != "none":
        effect = (
            f"{profile.outer_optimizer}: lr {profile.outer_lr:g}, momentum {profile.outer_momentum:g} on the averaged "
            "difference"
        )
        notes.append(Note("outer_optimizer", effect))
    return notes


def _program(profile: Profile, statistics: Sequence[CollectiveSpec]) -> list[Note]:
    """Notes on a rank's own pass, which does not change what is sent, except for batch norm."""
    notes = []
    nbytes = sum(sent.nbytes for sent in statistics)
    effect = f"{len(statistics)} exchanges per pass, {nbytes} bytes of a rank in all"
    if profile.sync_batch_norm:
        notes.append(
            Note("sync_batch_norm", effect if statistics else "no batch norm in training mode, so nothing to send")
        )
    elif statistics:
        notes.append(Note("average_over", f"numbers of the batch: {effect}"))
    if profile.amp_level != "O0":
        scale = ", with a loss scale" if profile.amp_dtype == "float16" else ""
        notes.append(
            Note("amp_level", f"{profile.amp_level} in {profile.amp_dtype}{scale}; gradients are sent as float32")
        )
    if profile.batch_shares != "equal":
        notes.append(Note("batch_shares", _shares(profile)))
    if cuts := _recompute_cuts(profile):
        notes.append(Note("recompute", f"the forward pass is cut {cuts} and recomputed; communication is unchanged"))
    return notes


def _shares(profile: Profile) -> str:
    if profile.batch_shares != "auto":
        return f"ranks take parts of the joint batch as {', '.join(f'{each:g}' for each in profile.batch_shares)}"
    most = profile.max_share if isinstance(profile.max_share, list) else [profile.max_share]
    bound = f", each at most {' and '.join(f'{100 * each:g} %' for each in most)}" if min(most) < 1 else ""
    return (
        f"ranks take parts of the joint batch with which they compute equally long{bound}; measured between epochs, or "
        f"every {profile.batch_shares_steps} steps in a loop of one's own"
    )


def _recompute_cuts(profile: Profile) -> str:
    if profile.recompute_segments > 1:
        return f"in {profile.recompute_segments} pieces"
    if profile.recompute_every_blocks:
        return f"every {profile.recompute_every_blocks} blocks"
    return f"at {', '.join(profile.recompute_checkpoints)}" if profile.recompute_checkpoints else ""


def _running(profile: Profile) -> list[Note]:
    """Notes on other communication of a running job, whose bytes are negligible."""
    return [
        Note(
            "divergence_check_steps",
            f"a digest of the parameters is compared {_when_compared(profile)}",
        ),
        *_replays(profile.replay_check_steps),
        Note(
            "collective_timeout_seconds",
            f"a rank that does not arrive is named after {profile.collective_timeout_seconds} s",
        ),
        *_barriers(profile.barrier_every_steps),
        Note("fetch_frequency", _fetching(profile.fetch_frequency)),
    ]


def _replays(every: int) -> list[Note]:
    effect = (
        f"every {every} steps the passes are computed twice, and the ranks tell one another whether gradients differ"
    )
    return [Note("replay_check_steps", effect)] if every else []


def _barriers(every: int) -> list[Note]:
    if every == 1:
        return []
    effect = (
        f"a barrier every {every} synchronous steps, and where one is needed; in between Gloo waits for "
        "a rank for 30 s, which cannot be set, and a stop request is not seen"
    )
    return [Note("barrier_every_steps", effect)]


def _fetching(every: int) -> str:
    """How often the loss is fetched, in words; a script's own training loop decides for itself, and is not known."""
    if every == 1:
        return "the reference trainer fetches the loss in every step, and fleet.should_fetch is true in every step"
    return (
        f"the reference trainer fetches the loss every {every} steps, and so does a loop that asks "
        "fleet.should_fetch(step); one that fetches in every step waits in every step"
    )


def _when_compared(profile: Profile) -> str:
    every, saves = profile.divergence_check_steps, "; and before every save"
    if not every:
        return "never"
    if not profile.use_local_sgd:
        return f"at the first step and every {every} steps{saves}"
    if not profile.local_sgd_is_warm_steps:
        return f"before the first step, then at the first averaging after {every} steps, and so on{saves}"
    return f"at the first step and every {every} steps of the warm-up, then at the first averaging after so many{saves}"
