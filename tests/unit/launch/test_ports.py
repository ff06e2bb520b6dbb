"""Which ports a launcher takes on its machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fleet_train.cluster import network
from fleet_train.errors import ClusterError
from fleet_train.launch import ports
from fleet_train.launch.node import Node
from fleet_train.launch.ports import give_back, take_ports
from fleet_train.launch.request import LaunchRequest

ALONE = Node(("127.77.0.1",), 0, 6170, 2, None, "lo")
NO_PORT, GIVEN = LaunchRequest(("train.py",)), LaunchRequest(("train.py",), started_port=6170)


@pytest.fixture(autouse=True)
def names_are_given_back() -> Iterator[None]:
    yield
    for first in range(6170, 6190):
        give_back(replace(ALONE, started_port=first))


def of_another_process() -> None:
    """What this process has taken is another launcher's from now on: it keeps the names, and does not know it."""
    ports._names.clear()


def test_a_machine_alone_takes_the_first_free_ports_in_a_row() -> None:
    with socket.socket() as other:
        other.bind(("127.77.0.1", 6171))
        other.listen(1)
        assert take_ports(ALONE, NO_PORT) == replace(ALONE, started_port=6172)
        assert take_ports(ALONE, NO_PORT).store_port == 6174, "the same ones again"
        with pytest.raises(
            ClusterError, match=r"port 6171 on 127\.77\.0\.1, which rank 1 needs \(--started_port=6170\)"
        ):
            take_ports(ALONE, GIVEN)
    two = replace(ALONE, addresses=("127.77.0.1", "127.77.0.2"))
    assert take_ports(two, NO_PORT).started_port == 6170, "machines could not learn of another one's choice"


def test_launchers_do_not_take_each_others_ports_though_nobody_listens_yet() -> None:
    held = dict(ports._names)
    try:
        take_ports(ALONE, GIVEN)
        held |= ports._names
        of_another_process()
        second = take_ports(ALONE, NO_PORT)
        assert (second.started_port, second.store_port) == (6173, 6175)
        assert take_ports(ALONE, GIVEN) == ALONE, "given ports are only looked at"
    finally:
        ports._names.update(held)
    give_back(ALONE)
    assert take_ports(ALONE, NO_PORT) == ALONE


def test_a_machine_without_free_ports_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "port_is_free", lambda *_: False)
    monkeypatch.setattr(network, "port_owner", lambda *_: "process 7 (x)")
    monkeypatch.setattr(ports, "_LAST_CHOSEN", 6180)
    with pytest.raises(ClusterError, match=r"no 3 ports in a row from 6170 to 6180 free on 127\.77\.0\.1"):
        take_ports(ALONE, NO_PORT)
