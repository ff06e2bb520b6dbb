"""Local groups of ranks for hierarchical collectives: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def local_groups(world_size: int, ranks_per_group: int) -> list[list[int]]:
    """Neighbouring ranks in local groups of ``ranks_per_group``; the last local group gets the rest."""
    return [
        list(range(first, min(first + ranks_per_group, world_size))) for first in range(0, world_size, ranks_per_group)
    ]


def leaders_of(members: Sequence[Sequence[int]]) -> list[int]:
    """The first rank of each local group."""
    return [local_group[0] for local_group in members]
