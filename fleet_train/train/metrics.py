"""Where numbers go: JSON lines always, VisualDL when it works, nowhere on ranks that do not report."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Scalars = Mapping[str, float]


class MetricSink(Protocol):
    """Tags look like `train/loss`. They must not contain `%`: VisualDL's pages fail on it."""

    def write(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...


class NullSink:
    """For ranks that do not report, so that call sites need no `if rank == 0`."""

    def write(self, step: int, scalars: Scalars) -> None:
        pass

    def close(self) -> None:
        pass


class JsonLinesSink:
    """One line per record: `{"step": 10, "time": 1763640000.1, "train/loss": 0.5}`. Each line is flushed."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        """Keep records up to `resume_step` of an earlier run: a resumed run writes the later ones again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _records_until(path, resume_step)
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def write(self, step: int, scalars: Scalars) -> None:
        record = {"step": step, "time": round(time.time(), 3), **scalars}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class VisualDLSink:
    """Scalars for VisualDL's pages. Whatever goes wrong in there is said once and never stops the training."""

    # One fixed name: each restart would otherwise add a file, and VisualDL shows only one file per folder.
    FILE_NAME = "vdlrecords.train.log"

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        self._writer: Any = None
        try:
            from visualdl import LogWriter

            if resume_step == 0:
                (folder / self.FILE_NAME).unlink(missing_ok=True)
            with contextlib.redirect_stdout(sys.stderr):  # it prints a notice when the file is there already
                self._writer = LogWriter(str(folder), file_name=self.FILE_NAME)
        except Exception as error:
            self._give_up(error)

    def write(self, step: int, scalars: Scalars) -> None:
        if self._writer is None:
            return
        try:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        print(
            f"fleet_train: no VisualDL curves ({type(error).__name__}: {error}); training goes on and metrics.jsonl "
            "has the same numbers. To see curves: python -m pip install visualdl",
            file=sys.stderr,
            flush=True,
        )


class TeeSink:
    """Every record to each of several sinks."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = sinks

    def write(self, step: int, scalars: Scalars) -> None:
        for sink in self._sinks:
            sink.write(step, scalars)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_sinks(output: Path, reporting: bool, resume_step: int = 0) -> MetricSink:
    """`metrics.jsonl` and `visualdl/` below `output` on the reporting rank, nothing on the others."""
    if not reporting:
        return NullSink()
    return TeeSink(
        [JsonLinesSink(output / "metrics.jsonl", resume_step), VisualDLSink(output / "visualdl", resume_step)]
    )


def _records_until(path: Path, step: int) -> list[str]:
    if step == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError):  # a killed run may have left half a line
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
    return kept
