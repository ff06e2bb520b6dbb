"""Imported by scripts that tests start as ranks: return values to the test. Imports no Paddle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_reported: dict[str, Any] = {}
_arrays: dict[str, np.ndarray[Any, Any]] = {}


def report(rank: int | None = None, **values: Any) -> None:
    """Add values to what this rank hands back; arrays exactly, everything else as JSON. Written at once."""
    # getenv: a script may call this before, or without, any fleet.init
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0")) if rank is None else rank
    folder = Path(os.environ["FLEET_TRAIN_TEST_RESULTS"])
    for name, value in values.items():
        (_arrays if isinstance(value, np.ndarray) else _reported)[name] = value
    _publish(folder / f"rank{rank}.json", json.dumps(_reported, default=_plain).encode())
    if _arrays:
        temporary = folder / f".rank{rank}.npz"
        with temporary.open("wb") as sink:
            np.savez(sink, allow_pickle=False, **_arrays)
        os.replace(temporary, folder / f"rank{rank}.npz")


def digest(arrays: Mapping[str, Any]) -> str:
    """A digest of named arrays: equal digests mean bit-equal values, whatever the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(np.asarray(arrays[name]))
        sha.update(f"{name}{value.dtype}{value.shape}".encode() + value.tobytes())
    return sha.hexdigest()


def _publish(path: Path, content: bytes) -> None:
    temporary = path.with_name("." + path.name)
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
