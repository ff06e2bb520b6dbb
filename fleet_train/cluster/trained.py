"""How a launcher learns that the ranks of its node have trained in an attempt: its first rank writes an empty file."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleet_train.files import publish

TRAINED = "FLEET_TRAIN_TRAINED"
"""The variable with the name of that file, which the launcher sets for its node's first rank."""
TRAINED_FILE = ".trained"
"""Its name in a job's log folder."""


def note_training(on_each_run: Callable[[Callable[[Any, Any], None]], None], trains: Callable[[Any], bool]) -> None:
    """Write the file before the second run of a program that ``trains``, if this rank was asked to: a step is done."""
    path, runs = os.environ.get(TRAINED, ""), 0

    def on_run(program: Any, _: Any) -> None:
        nonlocal runs
        if runs < 2 and trains(program):
            runs += 1
            if runs == 2:
                with suppress(OSError):
                    publish(Path(path), b"", f"{TRAINED_FILE}.tmp")

    if path:
        on_each_run(on_run)
