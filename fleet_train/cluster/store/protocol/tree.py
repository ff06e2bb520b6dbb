"""The tree of the nodes' servers: over the nodes of a job in their order, with node 0 as its root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# How many servers connect to one; up to this many ranks connect to the root directly, without relays.
FAN_IN = 32


def parent_of(node: int, fan_in: int = FAN_IN) -> int:
    return (node - 1) // fan_in


def subtree(node: int, nodes: int, fan_in: int = FAN_IN) -> Iterator[int]:
    """The node and all nodes below it."""
    first = last = node
    while first < nodes:
        yield from range(first, min(last, nodes - 1) + 1)
        first, last = first * fan_in + 1, last * fan_in + fan_in


def below(node: int, ranks: Sequence[Sequence[int]], fan_in: int = FAN_IN) -> int:
    """The ranks (bits of an integer) of a node's subtree; ``ranks``: of each node."""
    return sum(1 << rank for each in subtree(node, len(ranks), fan_in) for rank in ranks[each])
