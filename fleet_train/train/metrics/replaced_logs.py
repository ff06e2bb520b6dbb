"""The logs of a run that another one is to replace: kept beside the new ones until its first checkpoint is published.

They get a second name, so that no moment is without them: writers replace files, and only append to their own.
"""

from __future__ import annotations

import os
from pathlib import Path

from fleet_train.files import where_linked, write_new
from fleet_train.train.metrics.jsonl import JsonLinesSink
from fleet_train.train.metrics.visualdl import VisualDLSink

_KEPT = ".replaced-"


def keep(output: Path) -> None:
    """Before the new run writes. Raises OSError."""
    images = [path for path in (output / "images").glob("*.png") if not path.name.startswith(_KEPT)]
    for log in (*_files(output), *images):
        if log.is_file():
            kept = _kept(log)
            kept.unlink(missing_ok=True)
            try:
                os.link(log, kept)
            except OSError:  # a file system without second names
                write_new(kept, log.read_bytes())


def restore(output: Path) -> None:
    """At a start: if the new run has ended without a checkpoint, the logs are again those of the earlier one. Raises
    OSError.
    """
    for kept in _all_kept(output):
        os.replace(kept, kept.with_name(kept.name.removeprefix(_KEPT)))


def forget(output: Path) -> None:
    """The new run has a checkpoint: the earlier one is about to be removed. Raises OSError."""
    for kept in _all_kept(output):
        kept.unlink()


def _all_kept(output: Path) -> list[Path]:
    files = [kept for log in _files(output) if (kept := _kept(log)).is_file()]
    return [*files, *(output / "images").glob(f"{_KEPT}*.png")]


def _files(output: Path) -> list[Path]:
    return [
        where_linked(output / JsonLinesSink.FILE_NAME),
        where_linked(output / "visualdl" / VisualDLSink.FILE_NAME),
    ]


def _kept(log: Path) -> Path:
    return log.with_name(f"{_KEPT}{log.name}")
