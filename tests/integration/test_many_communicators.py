"""Process groups form reliably: the port of a group's store is reserved, and several groups have the same ranks."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.processes import ROOT, clean_environ, python
from tools.lab import Lab

HOLDS_A_PORT = """
import socket
import struct

import paddle

from fleet_train.collectives.groups import held_port


def all_that_are_given(ask):
    sockets, ports = [], []
    while True:
        sockets.append(socket.socket())
        try:
            ask(sockets[-1])
        except OSError:
            return sockets, ports
        ports.append(sockets[-1].getsockname()[1])


def bind(one):
    one.bind(("127.0.0.1", 0))


def bind_again(one):
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))


listener = socket.socket()
listener.bind(("127.0.0.1", 30000))
listener.listen(64)
neighbours = []
for _ in range(6):
    neighbours.append(socket.socket())
    neighbours[-1].bind(("127.0.0.3", 0))
    neighbours[-1].connect(("127.0.0.1", 30000))
taken = {one.getsockname()[1] for one in neighbours}
for _ in range(20):
    with held_port() as port:
        assert port not in taken, port
for ask in (bind, bind_again, lambda one: one.connect(("127.0.0.1", 30000))):
    with held_port() as port:
        sockets, ports = all_that_are_given(ask)
        print(len(ports) > 6, port in ports)
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        store = paddle.base.core.TCPStore("127.0.0.1", port, True, 1, 10)
    store.set("key", "value")
    print(store.get("key").decode())
"""


@pytest.mark.root
def test_a_held_port_is_not_given_away_and_can_be_listened_on() -> None:
    """Of twenty ports whoever asks for one gets all but the held one, which is no connection's of another address."""
    with Lab(1, "none") as lab:
        (machine,) = lab.nodes
        inside = [*machine.prefix, "sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40019"]
        subprocess.run(inside, check=True)
        command = [*machine.prefix, *python("-c", HOLDS_A_PORT)]
        ended = subprocess.run(
            command, env=clean_environ({}), cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
        )
    assert ended.returncode == 0, ended.stderr
    found = ended.stdout.split()
    assert found == ["True", "False", "value"] * 3, ended.stdout + ended.stderr
