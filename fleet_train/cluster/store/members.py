"""Sets of members: integers with one bit per member in memory, ranges on the wire.

Ten thousand members are 1.25 KB and a union is one operation; nothing iterates over members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fleet_train.cluster.store.wire import ProtocolError

# A bound for untrusted input; Paddle's own limits are far lower.
MOST_MEMBERS = 1 << 17


def one(member: int) -> int:
    return 1 << member


def all_of(count: int) -> int:
    """Members 0 .. count-1."""
    return (1 << count) - 1


def first(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def each(mask: int) -> Iterator[int]:
    for low, high in ranges(mask):
        yield from range(low, high + 1)


def ranges(mask: int) -> list[list[int]]:
    """``[[first, last], ...]``, both inclusive, in rising order."""
    spans = []
    start = 0
    while mask:
        zeros = first(mask)
        mask >>= zeros
        ones = first(~mask)
        spans.append([start + zeros, start + zeros + ones - 1])
        mask >>= ones
        start += zeros + ones
    return spans


def from_ranges(spans: Any, count: int) -> int:
    """The set that ``ranges`` describes. Raises ProtocolError for anything but ranges within 0 .. count-1."""
    if not isinstance(spans, list):
        raise ProtocolError("ranges of members are not a list")
    mask = 0
    for pair in spans:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)):
            raise ProtocolError("a range of members is not a pair of numbers")
        low, high = pair
        if not 0 <= low <= high < count:
            raise ProtocolError(f"a range of members does not lie in 0 .. {count - 1}")
        mask |= all_of(high - low + 1) << low
    return mask


# The tree of the nodes' servers: over the nodes of a job in their order, with node 0 as its root.


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
