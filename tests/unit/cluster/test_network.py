from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_train.cluster import network
from fleet_train.errors import ClusterError

INTERFACES = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.1", "10.0.0.9")}


def test_the_interface_of_an_address() -> None:
    assert network.interface_of("10.0.0.9", INTERFACES) == "eth0"
    assert network.interface_of("127.0.0.7", INTERFACES) == "lo"
    assert network.interface_of("10.0.0.2", INTERFACES) is None


def test_the_whole_loopback_block_is_local_and_reached_through_the_loopback_interface() -> None:
    found = [network.is_local(address, ("10.0.0.1",)) for address in ("127.0.0.3", "10.0.0.1", "10.0.0.2")]
    assert found == [True, True, False]
    assert network.interface_towards("127.0.0.3") == network.interface_of("127.0.0.1", network.interface_addresses())
    assert "127.0.0.1" in network.local_addresses()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("10.0.0.256", "not an IPv4 address"),
        ("10.0.0", "not an IPv4 address"),
        ("::1", "IPv6"),
        ("0.0.0.0", "not the address of a machine"),
        ("224.0.0.1", "not the address of a machine"),
        ("no-such-host.invalid", "neither an IPv4 address nor a host name"),
        ("", "neither an IPv4 address nor a host name"),
    ],
)
def test_what_is_no_host_is_refused(host: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        network.resolve(host)
    assert [network.resolve(name) for name in ("10.0.0.1", "localhost")] == ["10.0.0.1", "127.0.0.1"]


def test_a_port_belongs_to_an_address_and_its_owner_is_named_by_program_only(free_ports: Callable[..., int]) -> None:
    port = free_ports(1, ["127.0.0.2", "127.0.0.3"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", port))
        taken.listen()
        assert not network.port_is_free("127.0.0.2", port)
        assert network.port_is_free("127.0.0.3", port)
        kernels = Path("/proc/self/comm").read_text().strip()  # the first 15 characters
        assert str(network.port_owner(port, "127.0.0.2")).startswith(f"process {os.getpid()} ({kernels}")
        assert network.port_owner(port, "127.0.0.3").pid is None
    assert network.port_is_free("127.0.0.2", port)
    assert network.port_owner(port) == network.PortOwner(None, None)
    assert str(network.PortOwner(None, None)) == "a process of another user"


def test_a_port_of_all_addresses_is_taken_on_each(free_ports: Callable[..., int]) -> None:
    port = free_ports()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        assert not network.port_is_free("127.0.0.3", port)
        assert network.port_owner(port, "127.0.0.3").pid == os.getpid()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_are_seen_while_they_last_and_after_their_end(
    free_ports: Callable[..., int], family: socket.AddressFamily
) -> None:
    port = free_ports()
    ours, elsewhere = ("127.0.0.1", port), ("127.0.0.2", port)
    mapped = "::ffff:127.0.0.1" if family is socket.AF_INET6 else "127.0.0.1"
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((mapped, port))
        server.listen()
        assert network.connections_at([ours]) == frozenset(), "listening alone is no connection"
        client = socket.create_connection(ours)
        served, _ = server.accept()
        seen = network.connections_at([ours])
        assert len(seen) == 2, "both ends are on this machine"
        assert network.connections_at([elsewhere]) == frozenset()
        client.close()
        served.close()
        assert len(network.connections_at([ours]) & seen) == 1, "in TIME_WAIT"
