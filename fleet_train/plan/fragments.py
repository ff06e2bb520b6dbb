"""Which parameters are averaged together when fragments are averaged in turn: pure arithmetic.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet_train.errors import ProfileError
from fleet_train.plan.plan import TensorSpec
from fleet_train.profile.knobs import entry_of


def fragments_of(values: Sequence[TensorSpec], number: int, pattern: str) -> tuple[tuple[int, ...], ...]:
    """Positions of ``values`` in ``number`` fragments of whole layers; empty for one fragment.

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


def _deal(layers: Sequence[list[int]], _: Sequence[TensorSpec], number: int) -> list[list[list[int]]]:
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
    "strided": _deal,
    "sequential": _cut,
}
