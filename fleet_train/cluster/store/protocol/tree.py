"""Which node's server speaks to which: a tree over the nodes of a job in their order, node 0 its root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# How many servers speak to one; as many ranks speak to the root directly, without relays between.
FAN_IN = 32


def parent_of(node: int, fan_in: int = FAN_IN) -> int:
    return (node - 1) // fan_in


def subtree(node: int, nodes: int, fan_in: int = FAN_IN) -> Iterator[int]:
    """The node and all whose words pass through it."""
    first = last = node
    while first < nodes:
        yield from range(first, min(last, nodes - 1) + 1)
        first, last = first * fan_in + 1, last * fan_in + fan_in


def below(node: int, ranks: Sequence[Sequence[int]], fan_in: int = FAN_IN) -> int:
    """The ranks (bits of an integer) whose words pass through a node; ``ranks``: of each node."""
    return sum(1 << rank for each in subtree(node, len(ranks), fan_in) for rank in ranks[each])
