"""Sinks of metrics: where a run's numbers, texts and images go.

Every run has `metrics.jsonl`, one JSON object per line for scripts and later analysis, and the same records for
VisualDL's pages (`open_sinks`). A user's own sinks need two methods; their errors, as those of VisualDL, are reported
once and stop nothing.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, Protocol, cast

import numpy as np

from fleet_train.errors import FleetTrainError
from fleet_train.files import lines_of, parse_json, publish_where_linked, read_regular, where_linked, write_new
from fleet_train.log import logger
from fleet_train.train.progress import make_progress

__all__ = ["MetricSink", "NullSink", "TeeSink", "make_progress", "open_sinks"]

Scalars = Mapping[str, float]
Settings = Mapping[str, "bool | int | float | str"]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]

# As wide as a digit, and non-breaking. The length is half the text column of a wide screen.
_FIXED_SPACE, _LINE_LENGTH = "\u2007", 120
_KEPT = ".replaced-"
_MOST_LOG_BYTES = 1 << 36


class MetricSink(Protocol):
    """A place for a run's metrics. In tags like `train/loss`, the part before `/` groups them on VisualDL's pages."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Take points of curves. A value may be NaN or infinite."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Take a text, as of that step."""

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        """Take the settings of this run, once, and the tags of the scalars by which runs are compared."""

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        """Take an image, uint8 [height, width, 3]."""

    def close(self) -> None: ...


class NullSink:
    """A sink for ranks that do not report, so that call sites need no `if rank == 0`."""

    def write(self, step: int, scalars: Scalars) -> None:
        pass

    def text(self, step: int, tag: str, text: str) -> None:
        pass

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        pass

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        pass

    def close(self) -> None:
        pass


def open_sinks(output: Path, reporting: bool, resume_step: int = 0) -> MetricSink:
    """`metrics.jsonl`, `images/` and `visualdl/` below `output` on the reporting rank, nothing on the others.

    One file of each kind, also after restarts. Records of an earlier run after `resume_step` (of a checkpoint:
    `TrainState.recorded_step`) are dropped: this run repeats those steps.
    """
    if not reporting:
        return NullSink()
    return TeeSink([JsonLinesSink(output, resume_step), VisualDLSink(output / "visualdl", resume_step)])


class TeeSink:
    """Forwards everything to several sinks. Refuses tags that a page could not show."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks: Sequence[Any] = sinks

    def write(self, step: int, scalars: Scalars) -> None:
        check_tags(scalars)
        self._call("write", step, scalars)

    def text(self, step: int, tag: str, text: str) -> None:
        check_tags([tag])
        self._call("text", step, tag, text)

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        check_tags([*settings, *metrics])
        self._call("hparams", settings, metrics)

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        check_tags([tag])
        self._call("image", step, tag, pixels)

    def ranks(self, step_ms: Sequence[float], wait_ms: Sequence[float]) -> None:
        """Each rank's reported step times since the last record, for sinks that use them; 0 = no report."""
        self._call("ranks", step_ms, wait_ms)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *arguments: Any) -> None:
        """A sink may lack a method that `MetricSink` does not have."""
        for sink in self._sinks:
            if hasattr(sink, name):
                getattr(sink, name)(*arguments)


class UserSink(Protocol):
    """The methods that your own sink must have. It may also have `text`, `hparams` and `image` of `MetricSink`."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Take points of curves. A value may be NaN or infinite."""

    def close(self) -> None:
        """Close the sink; called once, when `Trainer.fit` has ended, with or without an error."""


class UserSinks(TeeSink):
    """Sinks given to a trainer, which closes them. After a sink's first exception only its `close` is called."""

    def __init__(self, sinks: Sequence[UserSink]) -> None:
        """Take the sinks. Raises FleetTrainError for an object that is not a sink."""
        for sink in sinks:
            if isinstance(sink, type) or not all(callable(getattr(sink, name, None)) for name in ("write", "close")):
                raise FleetTrainError(
                    f"sinks: {sink!r} is not a sink: it takes an object with write(step, scalars) and close(), see "
                    "docs/watching.md"
                )
        self._sinks = sinks
        self._broken: set[int] = set()
        """The indices of sinks that have raised an exception."""

    def _call(self, name: str, *arguments: Any) -> None:
        for index, sink in enumerate(self._sinks):
            is_broken = index in self._broken
            if not hasattr(sink, name) or (is_broken and name != "close"):
                continue
            try:
                getattr(sink, name)(*arguments)
            except Exception as error:
                self._broken.add(index)
                if not is_broken:
                    what = f"{type(sink).__name__}.{name}: {type(error).__name__}: {error}"
                    logger.warning("%s; it is no longer called, training goes on", what)


def sinks_of(given: MetricSink | UserSink | Sequence[UserSink] | None, reporting: bool) -> MetricSink:
    """One sink for the argument of `Trainer`. A list, or an object with two methods, is guarded, called only on the
    reporting rank, and closed by the trainer; a full `MetricSink` is called unchanged, on every rank, and closed by the
    caller.

    Raises FleetTrainError, on every rank, for anything that is not a sink.
    """
    if given is None:
        return NullSink()
    if not isinstance(given, Sequence):
        if all(hasattr(given, name) for name in ("text", "hparams", "image")):
            return cast(MetricSink, given)
        given = [given]
    sinks = UserSinks(given)
    return sinks if reporting else NullSink()


def check_tags(tags: Mapping[str, Any] | Sequence[str]) -> None:
    """Raise ValueError for a tag that is empty or has a `%`, on which VisualDL's pages fail."""
    for tag in tags:
        if not tag or "%" in tag:
            raise ValueError(f"{tag!r} is not a tag: it must not be empty and must not contain a percent sign")


class JsonLinesSink:
    """A sink with one line per record: `{"step": 10, "time": 1763640000.1, "train/loss": 0.5}`.

    Texts, settings and images have a `kind`; lines without one are scalars, NaN and infinity as null. An image's line
    names a PNG file of the folder: the newest of its tag, which overwrites earlier ones.
    """

    FILE_NAME = "metrics.jsonl"

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        """Keep records up to `resume_step` of an earlier run."""
        self._folder = folder
        path = folder / self.FILE_NAME
        self._file = AppendOnlyFile(path, _lines_until(path, resume_step) if resume_step else ())
        self._images_work = True

    def write(self, step: int, scalars: Scalars) -> None:
        self._append(step, {tag: value if math.isfinite(value) else None for tag, value in scalars.items()})

    def text(self, step: int, tag: str, text: str) -> None:
        self._append(step, {"kind": "text", "tag": tag, "text": text})

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        self._append(0, {"kind": "hparams", "hparams": dict(settings), "metrics": list(metrics)})

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        name = f"images/{tag.replace('/', '_')}.png"
        if self._images_work and self._publish(self._folder / name, pixels):
            self._append(step, {"kind": "image", "tag": tag, "file": name})

    def close(self) -> None:
        self._file.close()

    def _append(self, step: int, content: dict[str, Any]) -> None:
        record = {"step": step, "time": round(time.time(), 3), **content}
        self._file.append(json.dumps(record).encode() + b"\n")

    def _publish(self, path: Path, pixels: Pixels) -> bool:
        try:
            from PIL import Image

            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, "PNG")
            path.parent.mkdir(parents=True, exist_ok=True)
            publish_where_linked(path, encoded.getvalue())
        except (ImportError, OSError) as error:
            self._images_work = False
            logger.warning("no images in %s (%s); training goes on", path.parent, error)
            return False
        return True


def _lines_until(path: Path, step: int) -> Iterator[bytes]:
    if not path.is_file():  # a pipe has none, and is replaced
        return
    for line in lines_of(path, _MOST_LOG_BYTES):
        try:
            if line.endswith(b"\n") and parse_json(line)["step"] <= step:
                yield line
        except (ValueError, KeyError, TypeError):
            continue  # a killed run may have left half a line


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
        logger.warning(
            "no VisualDL curves (%s: %s); training goes on and metrics.jsonl has the same numbers. To see curves: "
            "python -m pip install visualdl",
            type(error).__name__,
            error,
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
    if not path.is_file():
        return
    from visualdl.proto.record_pb2 import Record

    content, place = read_regular(path, _MOST_LOG_BYTES), 0
    while place + 8 <= len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        end = place + 8 + length
        if end > len(content):
            return  # cut off when the run was killed
        value = Record.FromString(content[place + 8 : end]).values[0]
        if value.id <= step and value.WhichOneof("one_value") not in ("meta_data", "hparam"):
            yield content[place:end]
        place = end


class AppendOnlyFile:
    """Appends records atomically, readable by others as soon as `append` returns."""

    def __init__(self, path: Path, kept: Iterable[bytes] = ()) -> None:
        """Begin with the records `kept` of an earlier file of that name. Raises OSError if it cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path = publish_where_linked(path, b"".join(kept))  # a job that is killed now keeps the earlier file
        self._path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags), "ab", buffering=0)
        self._size = self._file.tell()
        self._in_trouble = False

    def append(self, record: bytes) -> None:
        """Write it; if that fails (disk full), the record is dropped, which is reported once until writing works
        again."""
        try:
            written = self._file.write(record)
            if written != len(record):
                raise OSError(f"only {written} of {len(record)} bytes could be written")
        except OSError as error:
            self._file.truncate(self._size)
            if not self._in_trouble:
                logger.warning("%s misses records: %s; training goes on", self._path, error)
            self._in_trouble = True
            return
        self._in_trouble = False
        self._size += len(record)

    def close(self) -> None:
        self._file.close()


# While another run is to replace one, its logs are kept beside the new ones until the first checkpoint of the new run.
# They get a second name, so that no moment is without them: writers replace files, and only append to their own.


def keep_logs(output: Path) -> None:
    """Keep the logs of the earlier run, before the new one writes. Raises OSError."""
    images = [path for path in (output / "images").glob("*.png") if not path.name.startswith(_KEPT)]
    for log in (*_logs(output), *images):
        if log.is_file():
            kept = log.with_name(_KEPT + log.name)
            kept.unlink(missing_ok=True)
            try:
                os.link(log, kept)
            except OSError:  # a file system without second names
                write_new(kept, read_regular(log, _MOST_LOG_BYTES))


def restore_logs(output: Path) -> None:
    """Restore the earlier run's logs, at a start after a run that has ended without a checkpoint. Raises OSError."""
    for kept in _kept_logs(output):
        os.replace(kept, kept.with_name(kept.name.removeprefix(_KEPT)))


def forget_logs(output: Path) -> None:
    """The new run has a checkpoint: the earlier one is about to be removed. Raises OSError."""
    for kept in _kept_logs(output):
        kept.unlink()


def _logs(output: Path) -> list[Path]:
    return [where_linked(output / JsonLinesSink.FILE_NAME), where_linked(output / "visualdl" / VisualDLSink.FILE_NAME)]


def _kept_logs(output: Path) -> list[Path]:
    files = [log.with_name(_KEPT + log.name) for log in _logs(output)]
    return [*filter(Path.is_file, files), *(output / "images").glob(f"{_KEPT}*.png")]
