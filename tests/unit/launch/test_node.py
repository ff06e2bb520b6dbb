from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from fleet_train.errors import ClusterError
from fleet_train.launch.node import Machine, Node, check_ports, choose_interface, choose_node, choose_processes, place
from fleet_train.launch.request import LaunchRequest

CPU = Machine({"lo": ("127.0.0.1",), "eth0": ("10.0.0.1", "10.9.0.1")}, 8, False, None, {})


def asked(**flags: object) -> LaunchRequest:
    return LaunchRequest(command=("train.py",), **flags)  # type: ignore[arg-type]


def test_without_flags_it_is_one_process_on_this_machine() -> None:
    assert place(asked(), CPU) == Node(("127.0.0.1",), 0, 6170, 1, None, "lo")


def test_second_of_two_loopback_nodes() -> None:
    node = place(asked(hosts=("127.0.0.2", "127.0.0.3"), node_host="127.0.0.3", processes_per_node=2), CPU)
    assert node == Node(("127.0.0.2", "127.0.0.3"), 1, 6170, 2, None, "lo")
    assert (node.world_size, list(node.ranks), node.store_endpoint) == (4, [2, 3], "127.0.0.2:6172")


def test_the_only_listed_address_of_this_machine_is_found() -> None:
    assert choose_node(("10.0.0.7", "10.0.0.1"), ("10.0.0.7", "10.0.0.1"), None, CPU.addresses) == 1


@pytest.mark.parametrize(
    ("hosts", "node_host", "said"),
    [
        (("10.0.0.7", "10.0.0.8"), None, "none of them is its own .this machine has 127.0.0.1, 10.0.0.1, 10.9.0.1"),
        (("127.0.0.2", "127.0.0.3"), None, "127.0.0.2, 127.0.0.3 of them are its own"),
        (
            ("10.0.0.7", "10.0.0.8"),
            "10.0.0.7",
            "is not an address of this machine: this machine has 127.0.0.1, 10.0.0.1",
        ),
        (("10.0.0.7", "10.0.0.8"), "10.0.0.1", "--node_ip=10.0.0.1 is not among --cluster_node_ips=10.0.0.7,10.0.0.8"),
        (("10.0.0.1", "127.0.0.1"), "10.0.0.1", "127.0.0.1 means another machine on every node"),
        (("10.0.0.1", "127.0.0.5"), "10.0.0.1", "can be reached from this machine only"),
        (("10.0.0.1", "010.0.0.1"), "10.0.0.1", "not an IPv4 address"),
        (("10.0.0.1", "fe80::1"), "10.0.0.1", "IPv6"),
    ],
)
def test_wrong_addresses_say_what_this_machine_has(hosts: tuple[str, ...], node_host: str | None, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        place(asked(hosts=hosts, node_host=node_host), CPU)


@pytest.mark.parametrize(
    ("selected", "number", "gpus", "expected"),
    [
        (None, None, None, (1, None)),
        (("0", "1"), None, None, (2, None)),  # a CPU build: that many processes
        (("4", "5"), 2, None, (2, None)),
        (None, 3, None, (3, None)),
        (None, None, ("0", "1"), (2, ("0", "1"))),
        (("1",), None, ("0", "1"), (1, ("1",))),
        (None, 1, ("2", "3"), (1, ("2",))),
        (None, 2, (), (2, None)),  # a GPU build on a machine without GPUs
    ],
)
def test_processes_and_devices(
    selected: tuple[str, ...] | None, number: int | None, gpus: tuple[str, ...] | None, expected: object
) -> None:
    assert choose_processes(selected, number, gpus) == expected


@pytest.mark.parametrize(
    ("selected", "number", "gpus", "said"),
    [
        (("0", "1"), 3, None, "names 2 devices, but --nproc_per_node=3"),
        (None, 0, None, "at least 1 process"),
        (("0", "2"), None, ("0", "1"), "the visible GPUs are 0,1"),
        (None, 3, ("0", "1"), "--nproc_per_node=3: the visible GPUs are 0,1"),
        (("0",), None, (), "no visible GPU; to train on its processors use --nproc_per_node=1"),
    ],
)
def test_devices_that_do_not_exist_are_refused(
    selected: tuple[str, ...] | None, number: int | None, gpus: tuple[str, ...] | None, said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        choose_processes(selected, number, gpus)


@pytest.mark.parametrize("port", [0, -1, 65535, 70000])
def test_ports_outside_the_range_are_refused(port: int) -> None:
    with pytest.raises(ClusterError, match=f"--started_port={port}"):
        place(asked(started_port=port), CPU)


def test_a_pod_has_a_port_for_every_process() -> None:
    assert place(asked(ports_per_node=2, processes_per_node=2), CPU).processes == 2
    with pytest.raises(ClusterError, match="TRAINER_PORTS_NUM=2 is too few for 3 processes"):
        place(asked(ports_per_node=2, processes_per_node=3), CPU)


def test_the_interface_is_that_of_the_route_to_the_others() -> None:
    routes: dict[str, str | None] = {"10.0.0.2": "eth0", "10.0.0.3": "eth0", "172.16.0.1": "lo", "192.0.2.9": None}
    nodes = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert choose_interface(nodes, 0, CPU, routes.__getitem__) == "eth0"
    assert choose_interface(("10.0.0.1", "10.0.0.2", "172.16.0.1"), 0, CPU, routes.__getitem__) == "eth0"
    assert choose_interface(("10.0.0.1", "192.0.2.9"), 0, CPU, routes.__getitem__) == "eth0"
    assert choose_interface(("127.0.0.1",), 0, CPU, routes.__getitem__) == "lo"


def test_a_taken_port_is_reported_with_its_purpose_and_owner(free_ports: Callable[..., int]) -> None:
    port = free_ports(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 2))
        taken.listen()
        with pytest.raises(
            ClusterError, match=rf"port {port + 2} on 127.0.0.1, which the job store needs.*process \d+"
        ):
            check_ports(Node(("127.0.0.1",), 0, port, 2, None, "lo"))
    check_ports(Node(("127.0.0.1",), 0, port, 2, None, "lo"))


def test_with_fewer_nodes_ranks_are_renumbered_and_nodes_keep_their_numbers() -> None:
    node = Node(("10.0.0.1", "10.0.0.2", "10.0.0.3"), 2, 6170, 2, None, "eth0")
    fewer = node.among((0, 2))
    assert (fewer.addresses, fewer.index, list(fewer.ranks), fewer.world_size) == (
        ("10.0.0.1", "10.0.0.3"), 1, [2, 3], 4,
    )  # fmt: skip
    assert fewer.describe() == "node 2 (10.0.0.3)"
    assert fewer.store_endpoint == node.store_endpoint
