"""`metrics.jsonl`: everything that a run reports, one JSON object per line, for scripts and later analysis."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet_train.files import publish_where_linked
from fleet_train.train.metrics.sinks import Pixels, Scalars, Settings


class JsonLinesSink:
    """One line per record: `{"step": 10, "time": 1763640000.1, "train/loss": 0.5}`.

    Texts, settings and images have a `kind`; lines without one are scalars, NaN and infinity as null. An image's line
    names a PNG file of the folder: the newest of its tag, which overwrites earlier ones.
    """

    FILE_NAME = "metrics.jsonl"

    def __init__(self, folder: Path, resume_step: int = 0) -> None:
        """Keep records up to `resume_step` of an earlier run."""
        self._folder = folder
        path = folder / self.FILE_NAME
        self._file = AppendOnlyFile(path, _records_until(path, resume_step) if resume_step else ())
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
            print(f"fleet_train: no images in {path.parent} ({error}); training goes on", file=sys.stderr, flush=True)
            return False
        return True


def _records_until(path: Path, step: int) -> Iterator[bytes]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                yield line
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a killed run may have left half a line


# An append-only file of whole records that survives a full disk.


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
                print(
                    f"fleet_train: {self._path} misses records: {error}; training goes on", file=sys.stderr, flush=True
                )
            self._in_trouble = True
            return
        self._in_trouble = False
        self._size += len(record)

    def close(self) -> None:
        self._file.close()
