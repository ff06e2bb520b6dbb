"""Published checkpoints with a tensor or two, for tests of what is done with their folders."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleet_train.convert import persistables, program_state
from fleet_train.train.checkpoint import storage
from tests.support.processes import clean_environ, python


def publish(
    checkpoints: Path,
    step: int,
    state: Mapping[str, Any],
    score: float | None = None,
    run: storage.TrainingRun = storage.TrainingRun(),  # noqa: B008
    *,
    content: bytes = b"tensors",
    own: bytes = b"",
) -> Path:
    """``content``: the bytes of its only tensor; ``own``: those of the only rank's own one, none if empty."""
    draft = storage.begin(checkpoints, step)
    ranks = [{"own": np.frombuffer(own, "uint8")}] if own else []
    state_of_program = program_state.SavedState({"w": np.frombuffer(content, "uint8")}, {}, ranks)
    tensors = persistables.write_tensors(draft, state_of_program)
    return storage.publish(checkpoints, step, state, score, run, tensors)


def write_folder(folder: Path, state: program_state.SavedState) -> None:
    """A saved state alone, without a trainer's."""
    persistables.publish(folder, persistables.write_tensors(folder, state))


def change(folder: Path, **entries: Any) -> None:
    """Give entries of the description other values, with the right SHA-256."""
    path = folder / persistables.DESCRIPTION
    told = {name: value for name, value in persistables.read_entries(folder).items() if name != "sha256"}
    path.write_bytes(persistables.sealed({**told, **entries}))


_HOLDS = """
import sys
from pathlib import Path
from fleet_train.files import hold
held = hold(Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held_by_another_process(checkpoints: Path) -> Iterator[subprocess.Popen[str]]:
    """The process of another run that uses the folder."""
    command, pipe = python("-c", _HOLDS, str(checkpoints)), subprocess.PIPE
    with subprocess.Popen(command, env=clean_environ(), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()
