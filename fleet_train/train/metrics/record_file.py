"""An append-only file of whole records that survives a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from fleet_train.files import publish_where_linked


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
