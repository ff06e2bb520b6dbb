"""The order in which pairs of nodes are measured: each node is in one pair at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, in as few rounds as possible (the circle method of tournaments); the smaller number first."""
    seats: list[int | None] = [*sorted(nodes)]
    if len(seats) % 2:
        seats.append(None)
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def stream_seconds(nodes: int, left_seconds: float) -> float:
    """Transfer time per direction of a pair, so that all rounds end within the remaining time."""
    if nodes < 2:
        return 0.0
    number = len(rounds(range(nodes)))
    return max(0.15, min(1.0, left_seconds / number / 2 - 0.1))
