"""Whether saved tensors fit a program: a pure comparison of names, kinds, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet_train.convert.state.program_state import OPTIMIZER, PASS
from fleet_train.errors import CheckpointError

Described = Mapping[str, tuple[str, list[int], str]]
"""Kind, shape and dtype by name."""


@dataclass(frozen=True)
class Fit:
    """``names``: the tensors to load. ``notes``: notes to the user about the rest."""

    names: list[str]
    notes: list[str]


def fit(saved: Described, ours: Described, source: str) -> Fit:
    """Compare saved tensors with the program's own.

    Parameters and optimizer state must exist, with the same shapes and dtypes, and nothing may be left over; but a
    program without an optimizer (for evaluation) ignores saved optimizer state. State of the profile's passes (gradient
    merge's sums, the loss scale) may exist on one side only. CheckpointError names the first tensor that does not fit.
    """
    for name in sorted(ours):
        kind, shape, dtype = ours[name]
        if name in saved and (shape, dtype) != tuple(saved[name][1:]):
            raise CheckpointError(
                f"{source}: '{name}' is {saved[name][1]} {saved[name][2]}, this program needs {shape} {dtype}"
            )
        if name not in saved and kind != PASS:
            raise CheckpointError(
                f"{source} has no tensor '{name}', which this program needs: is it from another model?"
            )
    trains = any(kind == OPTIMIZER for kind, _, _ in ours.values())
    aside = {PASS} if trains else {PASS, OPTIMIZER}
    left_over = sorted(name for name in saved if name not in ours)
    for name in left_over:
        if saved[name][0] not in aside:
            raise CheckpointError(f"{source} has a tensor '{name}' that this program does not have")
    notes = []
    if started := sorted(name for name in ours if name not in saved):
        notes.append(f"{source} has no {_several(started)}, which keep their start values")
    if trains and left_over:
        notes.append(f"{source} has {_several(left_over)}, which this profile does not use")
    return Fit([name for name in ours if name in saved], notes)


def _several(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"
