"""Connections to Paddle's stores: which options are changed, and for which connections."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from fleet_train.collectives.groups import send_at_once
from tests.support.processes import clean_environ, python

# A store of Paddle's as new_group opens one; exits without the end of the interpreter, as ranks do.
_A_STORE = """
import os, socket
import paddle
from fleet_train.collectives.groups import held_port, send_at_once

def delayed(port):
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(entry)))
            if connection.getpeername()[1] == port:
                found.append(not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        except OSError:
            pass
    return found

with held_port() as port:
    store = paddle.base.core.TCPStore("127.0.0.1", port, True, 1, 60)
before = delayed(port)
send_at_once(port)
store.set("a", "b")
print(before, delayed(port), store.get("a"), flush=True)
os._exit(0)
"""


@contextmanager
def connected() -> Iterator[tuple[socket.socket, int]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0],
    ):
        yield client, server.getsockname()[1]


def is_delayed(connection: socket.socket) -> bool:
    return not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_only_connections_to_that_port_send_at_once() -> None:
    with connected() as (store, port), connected() as (other, _):
        assert is_delayed(store)
        before = os.listdir("/proc/self/fd")
        send_at_once(port)
        assert not is_delayed(store)
        assert is_delayed(other)
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_paddles_own_connection_is_found() -> None:
    said = subprocess.run(python("-c", _A_STORE), env=clean_environ(), capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "[True] [False] b'b'"
