"""The results that ranks return to a test: a JSON file and arrays per rank, in a folder.

In a script that a test starts:  ``from tests.support.worker import report`` and ``report(loss=0.5, w=numpy_array)``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def read_results(folder: Path) -> dict[int, dict[str, Any]]:
    """rank -> everything it reported; later reports of a rank replaced earlier values of the same name."""
    results: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("rank*.json")):
        results[int(path.stem.removeprefix("rank"))] = json.loads(path.read_text())
    for path in sorted(folder.glob("rank*.npz")):
        with np.load(path) as arrays:
            results.setdefault(int(path.stem.removeprefix("rank")), {}).update({name: arrays[name] for name in arrays})
    return results
