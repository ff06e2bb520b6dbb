"""What both sides of the rendezvous store share."""

from __future__ import annotations

import socket
from typing import Any

# A machine that vanishes without closing its connections is noticed after idle + interval * count = 20 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))

Json = Any


def keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE:
        option = getattr(socket, name, None)  # Linux has all four, other systems some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
