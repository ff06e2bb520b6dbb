"""Traffic of hostile or broken clients while ranks go through barriers.

python tools/control_plane/hostile.py HOST:PORT KIND SECONDS
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fleet_train.cluster.store.wire import LENGTHS, encode, raise_descriptor_limit

_HELLO = {"do": "hello", "job": "", "nonce": "n", "namespace": "", "group": "stranger", "member": 9, "watched": False}


def idle(address: tuple[str, int], until: float) -> None:
    """Ten thousand silent connections."""
    raise_descriptor_limit(12000)
    held: list[socket.socket] = []
    while time.monotonic() < until and len(held) < 10_000:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(address, timeout=1))
    time.sleep(max(0.0, until - time.monotonic()))


def large(address: tuple[str, int], until: float) -> None:
    """Values of 60 MB, one after another."""
    body = b"x" * (60 << 20)
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as sock:
            sock.recv(1000)
            sock.sendall(encode(_HELLO))
            sock.recv(1000)
            sock.sendall(encode({"do": "set", "key": "large"}, body))
            sock.recv(1000)


def deep(address: tuple[str, int], until: float) -> None:
    """Headers with deeply nested lists or huge numbers, and incomplete ones."""
    kinds = [b"[" * 4000, b"1" * 4000, b'{"a":' * 800, b""]
    while time.monotonic() < until:
        for head in kinds:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as sock:
                sock.sendall(LENGTHS.pack(4000, 0) + head)
                if head:
                    sock.recv(1000)


if __name__ == "__main__":
    host, port = sys.argv[1].rsplit(":", 1)
    kinds = {"idle": idle, "large": large, "deep": deep}
    kinds[sys.argv[2]]((host, int(port)), time.monotonic() + float(sys.argv[3]))
