"""Keeps the memory of freed tensors in the process.

glibc returns large blocks to the kernel at once and faults their pages in again in the next step: copying 13 MB of
gradients took 7.6 ms that way and 0.9 ms with these settings (one thread, CPU).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 1 << 30, 32 << 20
_USERS_WORD = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Raise glibc's thresholds for this process; False if the user has set them or there is no glibc."""
    if any(name in environ for name in _USERS_WORD):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
