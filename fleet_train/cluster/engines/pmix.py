"""Asks a PMIx server (Open MPI's daemon, Slurm with ``--mpi=pmix``) on which host rank 0 is, through libpmix.

A process may begin and end PMIx several times, so MPI can be begun afterwards. Source: PMIx Standard 4, chapters 5
("Client initialization") and 6 (PMIx_Get); structures as in ``pmix_common.h`` of versions 2 to 5.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_SUCCESS = 0
_STRING = 3  # PMIX_STRING
_HOSTNAME = b"pmix.hname"  # PMIX_HOSTNAME


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("string", ctypes.c_char_p), ("room", ctypes.c_uint64 * 8))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


def host_of_rank_0(environ: Mapping[str, str]) -> str:
    """Its name; "" without the library, without a server, or where that does not say."""
    if "PMIX_NAMESPACE" not in environ:
        return ""
    library = _library()
    if library is None:
        return ""
    own = _Process()
    if library.PMIx_Init(ctypes.byref(own), None, ctypes.c_size_t(0)) != _SUCCESS:
        return ""
    try:
        first = _Process(own.namespace, 0)
        value = ctypes.POINTER(_Value)()
        status = library.PMIx_Get(ctypes.byref(first), _HOSTNAME, None, ctypes.c_size_t(0), ctypes.byref(value))
        if status != _SUCCESS or not value or value.contents.type != _STRING:
            return ""
        return (value.contents.data.string or b"").decode(errors="replace")
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
