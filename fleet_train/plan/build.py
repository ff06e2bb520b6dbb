"""Builds a communication plan from gradients, cluster and profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fleet_train.cluster import Cluster
from fleet_train.errors import ProfileError
from fleet_train.plan.explain import notes_of
from fleet_train.plan.plan import MEGABYTE, Averaging, CommPlan
from fleet_train.plan.price import PAPER, TYPICAL, Paths, with_given_link
from fleet_train.plan.shards import fit_for_owners, owners_of, with_owners
from fleet_train.profile import Profile
from fleet_train.profile.knobs import entry_of, refuse_unknown
from fleet_train.profile.methods import description_of
from fleet_train.profile.methods.base import ITEM_BYTES, Bucket, CollectiveSpec, TensorSpec
from fleet_train.profile.methods.quantised import BITS, averaging_settings
from fleet_train.profile.methods.rows import COUNT_BYTES, ROWS, WIRE_DTYPES
from fleet_train.profile.profile import Buckets, buckets_of, chosen_in_words

_SENDS_STATE = {"keep": False, "average": True, "reset": False}
_AVERAGING_DTYPES = ("float32", "bfloat16", *BITS)


def build_chosen(
    gradients: Sequence[TensorSpec],
    cluster: Cluster,
    profile: Profile,
    averaged: Sequence[TensorSpec] = (),
    statistics: Sequence[CollectiveSpec] = (),
    state_values_per_parameter: int = 0,
) -> CommPlan:
    """The plan for ``gradients``, given in the order in which the backward pass finishes them. ``profile`` has no open
    settings (see `fleet_train.plan.choose`).

    ``averaged``: what LocalSGD averages, parameters and running statistics. ``statistics``: what is
    exchanged inside one pass. ``state_values_per_parameter``: of the optimizer. Pure: the same arguments give the
    same plan on every rank. Raises ProfileError for a hierarchy that the cluster cannot have.
    """
    asked = buckets_of(profile)
    shape = without_buckets(cluster, profile)
    gradients = as_sent(gradients, cluster, profile)
    buckets = cut_into_buckets(gradients, profile, asked, shape)
    plan = replace(
        shape,
        communicators=asked.communicators,
        buckets=buckets,
        statistics=tuple(statistics),
        averaging=_averaging(gradients, averaged, profile, state_values_per_parameter),
        state_values=state_values_per_parameter,
        profile_name=profile.name,
        profile_digest=profile.digest(),
        chosen=chosen_in_words(profile),
    )
    return replace(plan, notes=tuple(notes_of(plan, gradients, cluster, profile)))


def as_sent(gradients: Sequence[TensorSpec], cluster: Cluster, profile: Profile) -> list[TensorSpec]:
    """The gradients, with ``rows`` of those tables only whose rows are sent with this profile."""
    by_rows = tables_by_rows(gradients, cluster, profile)
    return [replace(each, rows=each.rows if each.name in by_rows else 0) for each in gradients]


def tables_by_rows(tables: Sequence[TensorSpec], cluster: Cluster, profile: Profile) -> set[str]:
    """The names of the embeddings' tables of which the touched rows are sent, not all.

    ``auto``: those for which a step that touches few rows is shorter so, by the link in the profile or `PAPER`. Rows
    take two collectives of their own, a whole table its bytes beside other gradients. Where tables share these two
    (``fuse_all_reduce_ops``), those of which a step touches a part only go along with one that pays.
    """
    wanted = profile.sparse_embeddings
    if wanted is False or profile.compression not in WIRE_DTYPES:
        return set()
    able = [each for each in tables if each.rows and not each.is_whole]
    if wanted is True:
        return {each.name for each in able}
    paying = {each.name for each in able if _rows_pay(each, cluster, profile)}
    if not paying or not profile.fuse_all_reduce_ops:
        return paying
    return paying | {each.name for each in able if each.rows < each.shape[0]}


def _rows_pay(table: TensorSpec, cluster: Cluster, profile: Profile) -> bool:
    paths, shape = Paths(cluster, with_given_link(PAPER, cluster, profile), TYPICAL), without_buckets(cluster, profile)
    few = CollectiveSpec("allgather", COUNT_BYTES, COUNT_BYTES, flat=True)
    whole = CollectiveSpec("allreduce", table.nbytes, ITEM_BYTES[table.dtype])
    rows = 2 * math.fsum(phase.seconds for phase in paths.of(shape, few))
    return rows < math.fsum(phase.seconds for phase in paths.of(shape, whole) if phase.resource)


def with_rows(plan: CommPlan, profile: Profile, rows: int) -> CommPlan:
    """The plan of a step in which a rank touches so many rows of each table, or all of a smaller one."""
    buckets = []
    for bucket in plan.buckets:
        if bucket.algorithm == ROWS:
            tables = tuple(replace(each, rows=min(rows, each.shape[0])) for each in bucket.gradients)
            bucket = replace(bucket, gradients=tables)
            bucket = replace(bucket, sent=description_of(bucket).sent(bucket, profile, bool(plan.group_size)))
        buckets.append(bucket)
    return replace(plan, buckets=tuple(buckets))


def without_buckets(cluster: Cluster, profile: Profile) -> CommPlan:
    """The part of a plan that does not depend on how gradients are cut into buckets: enough to price buckets. Raises
    ProfileError for a hierarchy that the cluster cannot have."""
    return CommPlan(
        world_size=cluster.world_size,
        node_num=cluster.node_num,
        communicators=1,
        buckets=(),
        group_size=group_size_of(cluster, profile),
        owners=owners_of(cluster, profile),
        accumulate_steps=profile.accumulate_steps,
        waits_for_each=profile.sync_nccl_allreduce,
        overlaps_next_step=profile.overlap_next_step,
    )


def cut_into_buckets(
    gradients: Sequence[TensorSpec], profile: Profile, asked: Buckets, shape: CommPlan
) -> tuple[Bucket, ...]:
    """The buckets of these sizes, in turn on the communicators, with what is sent of each. Tables of embeddings whose
    rows are sent have one of their own. ``shape``: a plan of `without_buckets`."""
    tables = [gradient for gradient in gradients if gradient.rows]
    others = [gradient for gradient in gradients if not gradient.rows]
    if profile.fuse_all_reduce_ops:
        groups = fuse(others, asked, profile.fuse_parameter_groups_size) + ([tables] if tables else [])
        position = {id(gradient): index for index, gradient in enumerate(gradients)}
        groups.sort(key=lambda group: position[id(group[-1])])
    else:
        groups = [[gradient] for gradient in gradients]
    if shape.owners:
        groups = fit_for_owners(groups, shape.owners)
    algorithm = "sharded" if shape.owners else "hierarchical" if shape.group_size else "allreduce"
    buckets = tuple(
        Bucket(
            index,
            tuple(group),
            index % asked.communicators,
            ROWS if group[0].rows else algorithm,
            profile.compression if group[0].dtype == "float32" else "none",
        )
        for index, group in enumerate(groups)
    )
    if shape.owners:
        return with_owners(buckets, profile, shape)
    return tuple(
        replace(bucket, sent=description_of(bucket).sent(bucket, profile, bool(shape.group_size))) for bucket in buckets
    )


def fuse(gradients: Sequence[TensorSpec], asked: Buckets, most: int) -> list[list[TensorSpec]]:
    """Group gradients into buckets of one dtype, bounded by size and by ``most`` gradients, in the order in which
    buckets fill.

    A bucket is closed before a gradient that would exceed ``fuse_grad_size_in_MB``; a larger gradient gets its own
    bucket. ``last_comm_group_size_MB`` bounds the last bucket (as in Paddle), whose transfer overlaps nothing, and also
    the first one, so that communication starts early (as in PyTorch's DDP).
    """
    closed: list[list[TensorSpec]] = []
    open_by_dtype: dict[str, list[TensorSpec]] = {}
    for gradient in gradients:
        bucket = open_by_dtype.setdefault(gradient.dtype, [])
        limit = asked.megabytes if closed else min(asked.edge_megabytes, asked.megabytes)
        size = sum(member.nbytes for member in bucket) + gradient.nbytes
        if bucket and (size > limit * MEGABYTE or len(bucket) >= most):
            closed.append(bucket)
            bucket = open_by_dtype[gradient.dtype] = []
        bucket.append(gradient)
    rest = [bucket for bucket in open_by_dtype.values() if bucket]
    position = {id(gradient): index for index, gradient in enumerate(gradients)}
    # Buckets still open at the end become ready with their last gradient; ready buckets come first.
    buckets = sorted(closed + rest, key=lambda bucket: position[id(bucket[-1])])
    return buckets[:-1] + _split_tail(buckets[-1], asked.edge_megabytes) if buckets else []


def _split_tail(bucket: list[TensorSpec], limit_megabytes: float) -> list[list[TensorSpec]]:
    """Put the gradients that become ready last into a small bucket: no computation is left to overlap its transfer."""
    size, start = 0, len(bucket)
    while start > 0 and size + bucket[start - 1].nbytes <= limit_megabytes * MEGABYTE:
        start -= 1
        size += bucket[start].nbytes
    return [part for part in (bucket[:start], bucket[start:]) if part]


def group_size_of(cluster: Cluster, profile: Profile) -> int:
    """Ranks per local group of the hierarchical allreduce; 0 if the groups would be single ranks or the whole job.
    Raises ProfileError if the nodes have unlike numbers, and none is asked for."""
    if not profile.use_hierarchical_allreduce:
        return 0
    asked = profile.hierarchical_allreduce_inter_nranks
    sizes = {len(cluster.ranks_on_node(node)) for node in range(cluster.node_num)}
    if not asked and len(sizes) > 1:
        raise ProfileError(
            f"use_hierarchical_allreduce: the nodes have {sorted(sizes)} ranks; local groups follow the nodes only "
            "if all have the same number. Start the same number on each, or set hierarchical_allreduce_inter_nranks"
        )
    size = asked or sizes.pop()
    if asked and cluster.world_size % size:
        raise ProfileError(
            f"hierarchical_allreduce_inter_nranks={size} does not divide the world size, {cluster.world_size}"
        )
    return size if 1 < size < cluster.world_size else 0


def _averaging(
    gradients: Sequence[TensorSpec], averaged: Sequence[TensorSpec], profile: Profile, state_values: int
) -> Averaging | None:
    if not profile.use_local_sgd:
        return None
    refuse_unknown("local_sgd_dtype", profile.local_sgd_dtype, _AVERAGING_DTYPES, "bytes in the plan")
    trained = {gradient.name for gradient in gradients}
    values = tuple(value for value in averaged or gradients if value.name in trained)
    return Averaging(
        values,
        tuple(value for value in averaged if value.name not in trained),
        state_values if entry_of("local_sgd_momentum", profile.local_sgd_momentum, _SENDS_STATE, "rule") else 0,
        profile.local_sgd_is_warm_steps,
        profile.local_sgd_steps,
        profile.local_sgd_schedule,
        profile.local_sgd_dtype,
        profile.outer_optimizer,
        profile.local_sgd_overlap_steps,
        averaging_settings(profile),
        fragments_of(values, profile.local_sgd_fragments, profile.local_sgd_fragment_pattern),
    )


def fragments_of(values: Sequence[TensorSpec], number: int, pattern: str) -> tuple[tuple[int, ...], ...]:
    """Positions of ``values`` in ``number`` fragments of whole layers; empty for one fragment.

    Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, section 2.2.

    ``pattern``: ``strided`` assigns layers round-robin, ``sequential`` splits their list into parts of similar size.
    Raises ProfileError if there are fewer layers than fragments.
    """
    if number == 1:
        return ()
    layers = layers_of(values)
    if number > len(layers):
        raise ProfileError(
            f"local_sgd_fragments: {number} is more than the {len(layers)} layers that the program trains; use "
            f"{len(layers)} or fewer"
        )
    dealt = entry_of("local_sgd_fragment_pattern", pattern, _PATTERNS, "order")(layers, values, number)
    return tuple(tuple(sorted(position for layer in part for position in layer)) for part in dealt)


def layers_of(values: Sequence[TensorSpec]) -> list[list[int]]:
    """Positions of values whose names agree up to their last dot, in the order of their first ones."""
    layers: dict[str, list[int]] = {}
    for position, value in enumerate(values):
        layers.setdefault(value.name.rpartition(".")[0] or value.name, []).append(position)
    return list(layers.values())


def _round_robin(layers: Sequence[list[int]], _: Sequence[TensorSpec], number: int) -> list[list[list[int]]]:
    """``number`` lists, filled round-robin."""
    return [list(layers[first::number]) for first in range(number)]


def _cut(layers: Sequence[list[int]], values: Sequence[TensorSpec], number: int) -> list[list[list[int]]]:
    """``number`` non-empty runs of neighbouring layers: each ends where it has its share of all elements."""
    sizes = [sum(values[position].elements for position in layer) for layer in layers]
    parts: list[list[list[int]]] = [[]]
    done, share = 0, sum(sizes) / number
    for index, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        missing = number - len(parts)
        is_full = done + size / 2 > share * len(parts) or len(layers) - index == missing
        if parts[-1] and missing and is_full:
            parts.append([])
        parts[-1].append(layer)
        done += size
    return parts


_PATTERNS: dict[str, Callable[[Sequence[list[int]], Sequence[TensorSpec], int], list[list[list[int]]]]] = {
    "strided": _round_robin,
    "sequential": _cut,
}


@dataclass
class LocalSgdSchedule:
    """The schedule of LocalSGD's averagings: counts local steps and says when a period ends. Steps count from 1.

    Schedules: constant; doubling 1, 2, 4 .. ``steps``; adaptive (AdaComm, Wang and Joshi 2018).
    """

    warm_steps: int
    steps: int
    kind: str = "constant"
    max_steps: int = 64
    period: int = field(default=0, init=False)
    local_steps: int = 0
    first_rate: float = 0.0
    first_loss: float = 0.0
    fragments: int = 1
    """Parts of the parameters that are averaged in turn, each once in a period; only with a constant period."""

    def __post_init__(self) -> None:
        first = {"constant": self.steps, "doubling": 1, "adaptive": self.steps}
        self.period = entry_of("local_sgd_schedule", self.kind, first, "schedule of averagings")

    @classmethod
    def of(cls, profile: Profile) -> LocalSgdSchedule:
        return cls(
            profile.local_sgd_is_warm_steps,
            profile.local_sgd_steps,
            profile.local_sgd_schedule,
            profile.local_sgd_max_steps,
            fragments=profile.local_sgd_fragments,
        )

    def is_synchronous(self, step: int) -> bool:
        """Whether gradients are averaged in this step."""
        return step <= self.warm_steps

    def count(self) -> int | None:
        """Count one local step; returns the fragment that is averaged after it, if any: at a period's end, the last
        one.

        Fragments are spread evenly over a period.
        """
        self.local_steps += 1
        if self.local_steps >= self.period:
            return self.fragments - 1
        ends = ((fragment + 1) * self.period // self.fragments for fragment in range(self.fragments))
        return next((fragment for fragment, end in enumerate(ends) if end == self.local_steps), None)

    def begin_period(self) -> None:
        """Called when an averaging has started: after a period's last one, start the next period. For an adaptive
        schedule, call ``adapt`` before the next count."""
        if self.local_steps < self.period:
            return
        self.local_steps = 0
        if self.kind == "doubling":
            self.period = min(2 * self.period, self.steps)

    def adapt(self, rate: float, loss: float) -> None:
        """Choose the length of the current period from the learning rate and the ranks' mean loss."""
        if self.first_rate <= 0.0:
            self.first_rate, self.first_loss = rate, max(loss, 1e-12)
        if rate > 0.0 and math.isfinite(loss):
            growth = math.sqrt(self.first_rate / rate * max(loss, 0.0) / self.first_loss)
            self.period = max(1, min(self.max_steps, math.ceil(growth * self.steps)))

    def numbers(self) -> list[float]:
        """The state that a resumed run needs."""
        return [float(self.period), float(self.local_steps), self.first_rate, self.first_loss]

    def restore(self, numbers: list[float]) -> None:
        """Continue from the result of ``numbers``."""
        self.period, self.local_steps = int(numbers[0]), int(numbers[1])
        self.first_rate, self.first_loss = numbers[2], numbers[3]
