"""The same records for VisualDL's pages. Its errors are reported once and never stop the training."""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from fleet_train.files import where_linked, write_new
from fleet_train.train.metrics.jsonl import AppendOnlyFile, JsonLinesSink
from fleet_train.train.metrics.sinks import MetricSink, NullSink, Pixels, Scalars, Settings, TeeSink

# As wide as a digit, and non-breaking. The length is half the text column of a wide screen.
_FIXED_SPACE, _LINE_LENGTH = "\u2007", 120


class VisualDLSink:
    """Writes the file format of VisualDL 2.5 with VisualDL's own record types.

    VisualDL's LogWriter is not used: it writes in a thread, so that a full disk leaves half a record in the file and
    everything after it unreadable, and it cannot return to the step of a resume. A record here is the length (uint64,
    little-endian) and a serialized `visualdl.proto.record_pb2.Record`.
    """

    # One fixed name: each restart would otherwise add a file, and VisualDL shows only one file per folder.
    FILE_NAME = "vdlrecords.train.log"

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        self._file: AppendOnlyFile | None = None
        try:
            from visualdl.component import base_component

            self._make = base_component
            path = folder / self.FILE_NAME
            self._file = AppendOnlyFile(path, list(_records_until(path, resume_step)) if resume_step else ())
            self._append(base_component.meta_data(display_name="", step=0, walltime=_now()))
        except Exception as error:
            self._give_up(error)

    def write(self, step: int, scalars: Scalars) -> None:
        for tag, value in scalars.items():
            self._add("scalar", tag, value, step)

    def text(self, step: int, tag: str, text: str) -> None:
        self._add("text", tag, _with_lines(text), step)

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        # It treats a bool as an int, which current protobuf refuses.
        shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
        self._add("hparam", "fleet_train", shown, list(metrics))

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        self._add("image", tag, pixels.copy(), step)  # it modifies its argument

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _add(self, kind: str, *content: Any) -> None:
        if self._file is None:
            return
        try:
            self._append(getattr(self._make, kind)(*content, walltime=_now()))
        except Exception as error:
            self._give_up(error)

    def _append(self, record: Any) -> None:
        assert self._file is not None
        data = record.SerializeToString()
        self._file.append(struct.pack("<Q", len(data)) + data)

    def _give_up(self, error: Exception) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        print(
            f"fleet_train: no VisualDL curves ({type(error).__name__}: {error}); training goes on and metrics.jsonl "
            "has the same numbers. To see curves: python -m pip install visualdl",
            file=sys.stderr,
            flush=True,
        )


def _with_lines(text: str) -> str:
    """The text in a form whose lines the page shows: it folds line ends and spaces, as in any HTML paragraph.

    Non-breaking spaces keep a line together, and many of them at its end push the next line below it. The page would
    hide the end of a longer line: it is continued on further ones, indented.
    """
    lines = [part for line in text.split("\n") for part in wrap(line, _LINE_LENGTH, subsequent_indent=" " * 6) or [""]]
    return " ".join(line.replace(" ", _FIXED_SPACE).ljust(_LINE_LENGTH, _FIXED_SPACE) for line in lines)


def _now() -> int:
    return round(time.time() * 1000)


def _records_until(path: Path, step: int) -> Iterator[bytes]:
    """The records up to `step` without the file's header and the settings, which a resumed run writes again."""
    if not path.exists():
        return
    from visualdl.proto.record_pb2 import Record

    content, place = path.read_bytes(), 0
    while place + 8 <= len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        end = place + 8 + length
        if end > len(content):
            return  # cut off when the run was killed
        value = Record.FromString(content[place + 8 : end]).values[0]
        if value.id <= step and value.WhichOneof("one_value") not in ("meta_data", "hparam"):
            yield content[place:end]
        place = end


# Opens the sinks of a run: always JSON lines, VisualDL if it works, none on other ranks.


def open_sinks(output: Path, reporting: bool, resume_step: int = 0) -> MetricSink:
    """`metrics.jsonl`, `images/` and `visualdl/` below `output` on the reporting rank, nothing on the others.

    One file of each kind, also after restarts. Records of an earlier run after `resume_step` (of a checkpoint:
    `TrainState.recorded_step`) are dropped: this run repeats those steps.
    """
    if not reporting:
        return NullSink()
    return TeeSink([JsonLinesSink(output, resume_step), VisualDLSink(output / "visualdl", resume_step)])


# The logs of a run that another one is to replace: kept beside the new ones until its first checkpoint is published.
#
# They get a second name, so that no moment is without them: writers replace files, and only append to their own.


_KEPT = ".replaced-"


def keep_logs(output: Path) -> None:
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


def restore_logs(output: Path) -> None:
    """At a start: if the new run has ended without a checkpoint, the logs are again those of the earlier one. Raises
    OSError.
    """
    for kept in _all_kept(output):
        os.replace(kept, kept.with_name(kept.name.removeprefix(_KEPT)))


def forget_logs(output: Path) -> None:
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
