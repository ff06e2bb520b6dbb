"""A sharded optimizer's owners: which rank updates which parameters or rows, and what that saves. Pure data.

Source of the scheme: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from fleet_train.cluster import Cluster
from fleet_train.errors import ProfileError
from fleet_train.plan.plan import CommPlan
from fleet_train.profile import Profile
from fleet_train.profile.methods import compression_of
from fleet_train.profile.methods.base import ITEM_BYTES, Bucket, CollectiveSpec, Piece, TensorSpec
from fleet_train.profile.methods.quantised import BITS, QuantisedLayout, quantised_settings
from fleet_train.profile.methods.rows import ROWS, TOUCHED_ROWS

MOST_UNEVEN = 1.2
"""How much more than its share a rank may own of a bucket before a parameter is cut."""


def owners_of(cluster: Cluster, profile: Profile) -> int:
    """How many ranks share one copy of the optimizer's state; 0 if each has all of it. Raises ProfileError for a number
    that does not divide the ranks."""
    if not profile.sharding or cluster.world_size == 1:
        return 0
    degree = profile.sharding_degree or cluster.world_size
    if cluster.world_size % degree:
        raise ProfileError(
            f"sharding_degree: {degree} does not divide the number of ranks, {cluster.world_size}; use a divisor of "
            "it, or 0 for all ranks"
        )
    return degree if degree > 1 else 0


def fit_for_owners(groups: Sequence[list[TensorSpec]], owners: int) -> list[list[TensorSpec]]:
    """Buckets whose parts are even enough: where nothing may be cut, a bucket is joined with the next ones."""
    done: list[list[TensorSpec]] = []
    held: list[TensorSpec] = []
    for group in groups:
        if held and (held[0].dtype, held[0].rows > 0) != (group[0].dtype, group[0].rows > 0):
            done.append(held)
            held = []
        held = held + list(group)
        if not any(gradient.is_whole for gradient in held) or _unevenness(held, _dealt(held, owners)) <= MOST_UNEVEN:
            done.append(held)
            held = []
    if held and done and done[-1][0].dtype == held[0].dtype and not done[-1][0].rows:
        done[-1] = done[-1] + held
    elif held:
        done.append(held)
    return done


def with_owners(buckets: Sequence[Bucket], profile: Profile, shape: CommPlan) -> tuple[Bucket, ...]:
    """The buckets with their owners and what is sent to and by these. Raises ProfileError if a rank would own
    nothing."""
    loads = [0] * shape.owners
    owned = []
    for bucket in buckets:
        shards = _dealt(bucket.gradients, shape.owners, loads)
        for member, elements in enumerate(_elements(bucket.gradients, shards)):
            loads[member] += elements
        owned.append(_sending(replace(bucket, shards=shards), profile, shape))
    if 0 in loads:
        raise ProfileError(
            f"sharding: {shape.owners} ranks are to share the optimizer's state, but rank {loads.index(0)} would own "
            f"nothing of the {sum(len(bucket.gradients) for bucket in buckets)} parameters that the program trains; "
            "set sharding_degree to a smaller divisor of the number of ranks, or leave sharding out"
        )
    return tuple(owned)


def _sending(bucket: Bucket, profile: Profile, shape: CommPlan) -> Bucket:
    own = ITEM_BYTES[bucket.dtype]
    whole = bucket.part_elements * own
    updated = CollectiveSpec("allgather", whole, own, owners=shape.owners)
    if bucket.algorithm == ROWS:
        return replace(bucket, sent=TOUCHED_ROWS.sent(bucket, profile, False), updated=(updated,))
    sums = [_to_owners(bucket, profile, shape.owners)]
    if shape.owners < shape.world_size:
        sums.append(CollectiveSpec("allreduce", whole, own, owners=shape.owners, copies=True))
    return replace(bucket, sent=tuple(sums), updated=(updated,))


def _to_owners(bucket: Bucket, profile: Profile, owners: int) -> CollectiveSpec:
    if bucket.compression in BITS:
        nbytes = layout_of(bucket, profile).part_bytes
        return CollectiveSpec("alltoall", nbytes, 1, owners=owners)
    item = ITEM_BYTES[compression_of(bucket.compression).wire_dtype or bucket.dtype]
    return CollectiveSpec("alltoall", bucket.part_elements * item, item, owners=owners)


def layout_of(bucket: Bucket, profile: Profile) -> QuantisedLayout:
    """How a quantised bucket is cut into one part for each owner, of whole blocks."""
    settings, owners = quantised_settings(profile, bucket.compression), len(bucket.shards)
    return QuantisedLayout(owners * bucket.part_elements, owners, settings, always_in_parts=True)


def _dealt(gradients: Sequence[TensorSpec], owners: int, loads: Sequence[int] = ()) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each owner: whole gradients, the largest first to the owner with the least; if that is too uneven,
    as few of the largest as necessary are cut by rows. ``loads``: what each owner has of other buckets, for ties."""
    order = sorted(range(len(gradients)), key=lambda index: -gradients[index].elements)
    can_cut = [index for index in order if _has_rows(gradients[index])]
    best = _dealt_with(gradients, order, (), owners, loads)
    for number in range(1, len(can_cut) + 1):
        if _unevenness(gradients, best) <= MOST_UNEVEN:
            break
        candidate = _dealt_with(gradients, order, can_cut[:number], owners, loads)
        best = min(best, candidate, key=lambda shards: _unevenness(gradients, shards))
    return best


def _dealt_with(
    gradients: Sequence[TensorSpec], order: Sequence[int], cut: Sequence[int], owners: int, loads: Sequence[int]
) -> tuple[tuple[Piece, ...], ...]:
    held, pieces = [0] * owners, [list[Piece]() for _ in range(owners)]
    for index in order:
        if index in cut:
            continue
        member = min(range(owners), key=lambda each: (held[each], loads[each] if loads else 0, each))
        pieces[member].append(Piece(index))
        held[member] += gradients[index].elements
    for index in cut:
        first, width = 0, prod(gradients[index].shape[1:])
        for member, rows in enumerate(_rows_for(gradients[index].shape[0], width, held)):
            if rows:
                pieces[member].append(Piece(index, first, rows))
                held[member] += rows * width
                first += rows
    return tuple(tuple(sorted(each, key=lambda piece: piece.gradient)) for each in pieces)


def _rows_for(rows: int, width: int, held: Sequence[int]) -> list[int]:
    """How many of ``rows`` rows each owner gets, so that what all hold becomes as even as rows allow."""
    level, lowest = 0.0, sorted(held)
    for count in range(1, len(held) + 1):
        level = (sum(lowest[:count]) + rows * width) / count
        if count == len(held) or level <= lowest[count]:
            break
    given = [max(0, int((level - each) // max(width, 1))) for each in held]
    for _ in range(rows - sum(given)):
        member = min(range(len(held)), key=lambda each: held[each] + given[each] * width)
        given[member] += 1
    return given


def _has_rows(gradient: TensorSpec) -> bool:
    return not gradient.is_whole and len(gradient.shape) > 0 and gradient.shape[0] > 1


def _elements(gradients: Sequence[TensorSpec], shards: Iterable[Sequence[Piece]]) -> list[int]:
    return [sum(piece.of(gradients[piece.gradient]).elements for piece in pieces) for pieces in shards]


def _unevenness(gradients: Sequence[TensorSpec], shards: Sequence[Sequence[Piece]]) -> float:
    """The largest part over the mean part."""
    held = _elements(gradients, shards)
    return max(held) * len(held) / max(sum(held), 1)


def elements_of(plan: CommPlan) -> list[int]:
    """How many values of parameters each member of a group of owners updates."""
    members = [_elements(bucket.gradients, bucket.shards) for bucket in plan.buckets]
    return [sum(counts) for counts in zip(*members, strict=True)]


def rows_cut(plan: CommPlan) -> list[str]:
    """The names of the parameters that are cut by rows."""
    pieces = [(bucket, piece) for bucket in plan.buckets for shard in bucket.shards for piece in shard if piece.rows]
    return list(dict.fromkeys(bucket.gradients[piece.gradient].name for bucket, piece in pieces))


def memory_of(plan: CommPlan) -> dict[str, float]:
    """Bytes of the rank with the largest share, beside activations, at the end of the backward pass.

    Parameters; gradients, that is those which the update reads; the optimizer's state; buffers, that is the largest
    bucket on its way.
    """
    parameters = float(plan.gradient_bytes)
    largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
    owned = parameters
    if plan.owners:
        counts = [_elements(bucket.gradients, bucket.shards) for bucket in plan.buckets]
        sizes = [ITEM_BYTES[bucket.dtype] for bucket in plan.buckets]
        owned = max(
            sum(count[member] * size for count, size in zip(counts, sizes, strict=True))
            for member in range(plan.owners)
        )
    alone = plan.world_size == 1
    return {
        "parameters": parameters,
        "gradients": owned,
        "state": plan.state_values * owned,
        "buffers": 0.0 if alone else largest * (2.0 if plan.owners else 1.0),
    }
