"""Ports that tests may use: blocks of consecutive ports, free on all the asked addresses."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence

# Below the range from which the kernel takes the ports of outgoing connections (32768 and up), else a connection that
# some other test makes can take a port between the moment it was found free and the moment it is used.
_FIRST, _LAST = 12000, 32000
_given_out: set[int] = set()
_random = random.Random(os.getpid())  # test sessions that run side by side start looking at different places


def slice_of(environ: Mapping[str, str]) -> range:
    """The ports of this process: all of them, or a worker of pytest-xdist's part, which no other worker is given."""
    workers = int(environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    size = (_LAST - _FIRST) // workers
    return range(_FIRST + worker * size, _FIRST + (worker + 1) * size)


def free_ports(count: int = 1, addresses: Sequence[str] = ("127.0.0.1",)) -> int:
    """The first of ``count`` consecutive ports that are free on every address; none is given out twice."""
    mine = slice_of(os.environ)
    for _ in range(1000):
        first = _random.randrange(mine.start, mine.stop - count + 1)
        block = range(first, first + count)
        if _given_out.isdisjoint(block) and all(_is_free(a, p) for a in addresses for p in block):
            _given_out.update(block)
            return first
    raise RuntimeError(f"found no {count} consecutive free ports on {', '.join(addresses)}")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
