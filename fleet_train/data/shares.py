"""How a number of samples is dealt over ranks of unlike speed. Pure: equal arguments give the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_train.errors import DataError


def dealt(samples: int, shares: Sequence[float]) -> list[int]:
    """Of ``samples`` each rank's number, in proportion to its share, the largest remainders rounded up (equal ones from
    rank 0 on); at least 1 for each rank where there are as many samples as ranks.

    Raises DataError for shares that are not positive.
    """
    if not shares or min(shares) <= 0:
        raise DataError(f"shares {list(shares)}: each rank needs a share above 0")
    least = 1 if samples >= len(shares) else 0
    total, ranks = sum(shares), range(len(shares))
    exact = [samples * share / total for share in shares]
    numbers = [max(least, int(each)) for each in exact]
    while sum(numbers) < samples:
        numbers[min(ranks, key=lambda rank: (numbers[rank] - exact[rank], rank))] += 1
    while sum(numbers) > samples:  # some have the least, and more than their share
        above = [rank for rank in ranks if numbers[rank] > least]
        numbers[max(above, key=lambda rank: (numbers[rank] - exact[rank], rank))] -= 1
    return numbers
