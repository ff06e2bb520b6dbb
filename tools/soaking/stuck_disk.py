"""A stuck disk: a file system (FUSE) whose one file can be found and opened, and whose reads never end. Needs root.

The kernel asks the process that holds /dev/fuse; the numbers are those of include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
from pathlib import Path

FILE_NAME = "part-0.bin"
FILE_BYTES = 1 << 20
_REQUEST = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_FORGET, _READ = 2, 15
_MOST_REQUEST_BYTES = 1 << 17
_MAJOR, _MINOR, _ASYNC_READ, _READ_AHEAD = 7, 26, 1, 1 << 17
_INIT_ANSWER = struct.Struct("<IIIIHHI40x")
_ATTRIBUTES = struct.Struct("<6Q10I")
_VALID_SECONDS = 3600
_ROOT_NODE, _FILE_NODE = 1, 2
_KEEP_CACHE = 2
_MNT_FORCE, _MNT_DETACH = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class StuckDisk:
    """Mounted at ``folder`` in its body. On leaving, the reads under way end with an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> StuckDisk:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0"
        if _libc.mount(b"stuck", bytes(self.folder), b"fuse", 0, options.encode()):
            os.close(self._device)
            raise OSError(ctypes.get_errno(), "a FUSE file system cannot be mounted", str(self.folder))
        threading.Thread(target=self._serve, name="stuck disk", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        _libc.umount2(bytes(self.folder), _MNT_FORCE | _MNT_DETACH)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MOST_REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):  # the request was withdrawn
                    continue
                os.close(self._device)
                return
            _, code, unique, node, *_ = _REQUEST.unpack_from(request)
            if code not in (_FORGET, _READ):
                failure, body = _answer(code, node, request[_REQUEST.size :])
                with contextlib.suppress(OSError):  # who asked has been killed
                    os.write(self._device, _ANSWER.pack(_ANSWER.size + len(body), -failure, unique) + body)


def _answer(code: int, node: int, asked: bytes) -> tuple[int, bytes]:
    """An error's number and nothing, or 0 and what was asked for."""
    match code:
        case 26:  # INIT
            return 0, _INIT_ANSWER.pack(_MAJOR, _MINOR, _READ_AHEAD, _ASYNC_READ, 0, 0, 1 << 12)
        case 1 if asked.rstrip(b"\0") == FILE_NAME.encode():  # LOOKUP
            valid = struct.pack("<4Q2I", _FILE_NODE, 0, _VALID_SECONDS, _VALID_SECONDS, 0, 0)
            return 0, valid + _attributes(_FILE_NODE)
        case 1:
            return errno.ENOENT, b""
        case 3:  # GETATTR
            return 0, struct.pack("<QII", _VALID_SECONDS, 0, 0) + _attributes(node)
        case 14 | 27:  # OPEN, OPENDIR
            return 0, struct.pack("<QII", 0, _KEEP_CACHE, 0)
        case 18 | 25 | 29:  # RELEASE, FLUSH, RELEASEDIR
            return 0, b""
    return errno.ENOSYS, b""


def _attributes(node: int) -> bytes:
    mode, size = (stat.S_IFDIR | 0o755, 0) if node == _ROOT_NODE else (stat.S_IFREG | 0o644, FILE_BYTES)
    return _ATTRIBUTES.pack(node, size, size // 512, *[0] * 6, mode, *[1, 0, 0, 0, 1 << 12, 0])
