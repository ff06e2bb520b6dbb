"""Uses a PMIx server (Open MPI's daemon) through libpmix: rank 0 publishes where it listens, the others read it.

All ranks enter a fence that sends the published data to every server, as MPI_Init does. Asking rank 0's server instead
hangs in Open MPI 4.1 if the request comes after rank 0 has finalized PMIx. A process may initialize PMIx several
times, so MPI can be initialized afterwards. Source: PMIx Standard 4, chapters 5 ("Initialization"), 6 and 7 (PMIx_Put,
PMIx_Commit, PMIx_Fence, PMIx_Get); structures as in ``pmix_common.h`` of versions 2 to 5.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping

_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_SUCCESS = 0
_TRUE = 1  # PMIX_BOOL
_STRING = 3  # PMIX_STRING
_GLOBAL = 3  # PMIX_GLOBAL: for processes on this node and on others
_KEY = b"fleet_train.rank0"
_COLLECT = b"pmix.collect"  # PMIX_COLLECT_DATA


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("flag", ctypes.c_bool), ("string", ctypes.c_char_p), ("room", ctypes.c_uint64 * 8))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


def exchange(own: str | None, environ: Mapping[str, str], timeout_seconds: float) -> str:
    """The value that rank 0 published; ``own``: the value to publish, on rank 0.

    "" without the library or without a server. Raises TimeoutError if not all ranks arrive within the time.
    """
    if "PMIX_NAMESPACE" not in environ:
        return ""
    library = _library()
    if library is None:
        return ""
    told: list[str] = []
    # The library's calls have no timeout that all its versions support.
    thread = threading.Thread(target=lambda: told.append(_exchange(library, own)), name="fleet_train PMIx", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not told:
        raise TimeoutError
    return told[0]


def _exchange(library: ctypes.CDLL, own: str | None) -> str:
    process = _Process()
    if library.PMIx_Init(ctypes.byref(process), None, ctypes.c_size_t(0)) != _SUCCESS:
        return ""
    try:
        if own is not None:
            value = _Value(_STRING, _Data(string=own.encode()))
            library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            library.PMIx_Commit()
        collect = _Info(_COLLECT, 0, _Value(_TRUE, _Data(flag=True)))
        if library.PMIx_Fence(None, ctypes.c_size_t(0), ctypes.byref(collect), ctypes.c_size_t(1)) != _SUCCESS:
            return ""
        first = _Process(process.namespace, 0)
        found = ctypes.POINTER(_Value)()
        status = library.PMIx_Get(ctypes.byref(first), _KEY, None, ctypes.c_size_t(0), ctypes.byref(found))
        if status != _SUCCESS or not found or found.contents.type != _STRING:
            return ""
        return (found.contents.data.string or b"").decode(errors="replace")
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
