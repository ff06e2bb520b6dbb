"""Teams of ranks for hierarchical collectives: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence


def teams(world_size: int, ranks_per_team: int) -> list[list[int]]:
    """Neighbouring ranks in teams of ``ranks_per_team``; the last team takes what is left."""
    return [
        list(range(first, min(first + ranks_per_team, world_size))) for first in range(0, world_size, ranks_per_team)
    ]


def leaders_of(members: Sequence[Sequence[int]]) -> list[int]:
    """The first rank of each team."""
    return [team[0] for team in members]
