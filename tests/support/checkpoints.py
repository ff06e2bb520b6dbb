"""Published checkpoints with a tensor or two, for tests of what is done with their folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleet_train.convert import persistables, program_state
from fleet_train.train.checkpoint import storage


def publish(
    checkpoints: Path,
    step: int,
    state: Mapping[str, Any],
    score: float | None = None,
    run: storage.Run = storage.Run(),  # noqa: B008
    *,
    content: bytes = b"tensors",
    own: bytes = b"",
) -> Path:
    """``content``: the bytes of its only tensor; ``own``: those of the only rank's own one, none if empty."""
    draft = storage.begin(checkpoints, step)
    ranks = [{"own": np.frombuffer(own, "uint8")}] if own else []
    tensors = persistables.write_tensors(draft, program_state.State({"w": np.frombuffer(content, "uint8")}, {}, ranks))
    return storage.publish(checkpoints, step, state, score, run, tensors)


def write_folder(folder: Path, state: program_state.State) -> None:
    """A saved state alone, without a trainer's."""
    persistables.publish(folder, persistables.write_tensors(folder, state))


def change(folder: Path, **entries: Any) -> None:
    """Give entries of the description other values, with the right SHA-256."""
    path = folder / persistables.DESCRIPTION
    told = {name: value for name, value in persistables.read_entries(folder).items() if name != "sha256"}
    path.write_bytes(persistables.sealed({**told, **entries}))
