"""Ranks that an engine started meet before they know each other's addresses: where, over what, and what they tell.

Below, the addresses, ports and connections of this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet_train.cluster import engines, network, partial
from fleet_train.cluster.engines import MeetingPoint, alone_in_allocation, locate, resolve_hosts
from fleet_train.cluster.mpi import exchange_pmi
from fleet_train.cluster.partial import ranks_of
from fleet_train.cluster.started import Started
from fleet_train.cluster.store import access as callers_module
from fleet_train.cluster.store.access import Callers
from fleet_train.errors import ClusterError, JoinTimeout
from tests.support.processes import Ended, Job, clean_environ

_RANK = """
import json, os
from fleet_train.cluster.environment import cluster_from_environ
from fleet_train.cluster.partial import complete
from fleet_train.errors import FleetTrainError
try:
    cluster, host = complete(cluster_from_environ(os.environ), float(os.environ["SECONDS"]))
except FleetTrainError as error:
    raise SystemExit(f"{type(error).__name__}: {error}")
print(json.dumps([cluster.rank, cluster.local_rank, cluster.node_num, cluster.endpoints, cluster.formed_by]))
"""


def meet(folder: Path, environs: list[dict[str, str]], seconds: float = 20.0) -> list[Ended]:
    with Job(folder) as job:
        for index, environ in enumerate(environs):
            job.start(
                f"rank{index}", [sys.executable, "-c", _RANK], clean_environ({**environ, "SECONDS": str(seconds)})
            )
        ended = job.wait(60.0)
        assert job.orphans() == []
        return ended


def variables(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**place, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), **more}


def test_ranks_learn_where_they_are_and_slurms_nodes_on_one_machine_are_distinguished(
    tmp_path: Path, free_ports: Callable[..., int]
) -> None:
    port = free_ports(2, ["127.0.0.2", "127.0.0.3"])
    common = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    common |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_RESV_PORTS": f"{port}-{port + 1}"}
    common |= {"SLURM_STEP_NODELIST": "127.0.0.[2-3]"}
    places = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % 2), "SLURM_NODEID": str(i // 2)} for i in (2, 0, 3, 1)]
    ended = meet(tmp_path, [common | place for place in places])
    endpoints = [f"127.0.0.{host}:{port + local}" for host in (2, 3) for local in (0, 1)]
    expected = [[i, i % 2, 2, endpoints, "Slurm (job 1, step 0)"] for i in (2, 0, 3, 1)]
    assert [json.loads(one.output) for one in ended] == expected


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, free_ports: Callable[..., int]) -> None:
    port = free_ports(3)
    first, other = meet(tmp_path, [variables(rank, 3, port) for rank in (0, 1)], seconds=3.0)
    for one in (first, other):
        assert one.exit_code == 1
        assert "rank 2 (started by whoever set RANK and WORLD_SIZE)" in one.output, one.output
        assert "within 3 s" in one.output


def test_rank_0_on_another_machine_than_configured_is_an_error(tmp_path: Path) -> None:
    (one,) = meet(tmp_path, [variables(0, 2, 6170, MASTER_ADDR="198.51.100.7")])
    assert "says that it is on 198.51.100.7, which is not one of this machine's addresses" in one.output
    (one,) = meet(tmp_path, [variables(0, 2, 6170, FLEET_TRAIN_MASTER="198.51.100.8:6170")])
    assert "but FLEET_TRAIN_MASTER says that it is on 198.51.100.8" in one.output
    assert "FLEET_TRAIN_MASTER=host:port" in one.output


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (  # by address: two nodes, ranks in blocks
            {0: ["10.0.0.1", None, "10.0.0.1"], 1: ["10.0.0.1", None, ""], 2: ["10.0.0.2", None, "10.0.0.1"]},
            [("10.0.0.1", 0, 0), ("10.0.0.1", 0, 1), ("10.0.0.2", 1, 0)],
        ),
        (  # ranks dealt out in turn
            {i: [f"10.0.0.{1 + i % 2}", None, "10.0.0.1"] for i in range(4)},
            [("10.0.0.1", 0, 0), ("10.0.0.2", 1, 0), ("10.0.0.1", 0, 1), ("10.0.0.2", 1, 1)],
        ),
        (  # rank 0's own name means 127.0.1.1 there; the others know the address
            {0: ["127.0.1.1", None, ""], 1: ["127.0.1.1", None, ""], 2: ["10.0.0.2", None, "10.0.0.1"]},
            [("10.0.0.1", 0, 0), ("10.0.0.1", 0, 1), ("10.0.0.2", 1, 0)],
        ),
        (  # two nodes of one address, told apart by the engine's numbers
            {0: ["10.0.0.1", 4, "10.0.0.1"], 1: ["10.0.0.1", 7, "10.0.0.1"]},
            [("10.0.0.1", 0, 0), ("10.0.0.1", 1, 0)],
        ),
    ],
)
def test_ranks_from_what_each_reported(told: dict[int, list[object]], expected: list[tuple[str, int, int]]) -> None:
    found = ranks_of(dict(reversed(told.items())), 7000)
    assert [(rank.host, rank.node_index, rank.local_index) for rank in found] == expected
    assert len({rank.endpoint for rank in found}) == len(found)
    assert min(rank.port for rank in found) == 7000
    with pytest.raises(ClusterError, match=r"ranks \[0\] know their node's number"):
        ranks_of({0: ["10.0.0.1", 0, ""], 1: ["10.0.0.2", None, ""]}, 7000)


def test_a_name_is_looked_up_again_for_a_stranger_at_most_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    looks: list[float] = []

    def addresses_of(_: str) -> frozenset[str]:
        looks.append(now[0])
        return frozenset({"10.0.0.6"} if now[0] > 103.5 else {"10.0.0.5"})

    monkeypatch.setattr(callers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(callers_module, "addresses_of", addresses_of)
    named, fixed = Callers(["pod-0.set", "10.0.0.9"]), Callers(["10.0.0.9"])
    assert (named.may_change, fixed.may_change) == (True, False)
    for now[0] in (100.0, 101.9, 102.1, 103.0, 104.0, 104.2):
        assert named.hears("10.0.0.6") in (False, now[0] > 104.1)  # known as soon as the lookup has ended
        assert not fixed.hears("10.0.0.6")
        if named._resolving is not None:  # threading.enumerate() leaves it out before it has ended
            named._resolving.join()
    assert looks == [100.0, 102.1, 104.2]
    assert [named.hears(f"10.0.0.{last}") for last in (5, 6, 7, 9)] == [True, True, False, True]


@pytest.mark.parametrize(("master", "seen"), [("10.0.0.1", "10.0.0.1"), ("127.0.0.1", "")])
def test_each_rank_tells_its_address_its_node_and_how_it_sees_rank_0(
    monkeypatch: pytest.MonkeyPatch, master: str, seen: str
) -> None:
    """As a loopback address rank 0 is seen on its own machine only, so that is no news for the others."""
    brought: list[object] = []

    def all_gather(name: str, value: object, count: int, *_: object) -> dict[int, object]:
        brought.append((name, value, count))
        return {0: value}

    client = SimpleNamespace(all_gather=all_gather, leave=lambda: None, close=lambda: None)
    monkeypatch.setattr(partial.StoreClient, "connect", lambda *_, **__: client)
    monkeypatch.setattr(partial.network, "address_towards", lambda _: "10.0.0.7")
    started = partial.PartialCluster(Started("an engine", 1, 3, node=2))
    partial._exchange(started, MeetingPoint(master, 6170), 5.0)
    assert brought == [("addresses", ["10.0.0.7", 2, seen], 3)]


MASTER = "FLEET_TRAIN_MASTER"
OURS = ("127.0.0.1", "10.0.0.5", "10.0.0.6")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This machine has two addresses; names are known by this table."""
    names = {"here": "10.0.0.5", "itself": "127.0.1.1"}

    def look_up(name: str) -> str:
        if name not in names:
            raise OSError("unknown")
        return names[name]

    monkeypatch.setattr("socket.gethostbyname", look_up)
    monkeypatch.setattr("socket.gethostname", lambda: "itself")
    monkeypatch.setattr(network, "local_addresses", lambda: OURS)
    monkeypatch.setattr(network, "address_towards", lambda _: None)
    return names


def test_the_place_is_that_of_the_master_or_of_the_engine_or_the_usual_one() -> None:
    told = Started("an engine", 1, 2, master="127.0.0.1", port=7000)
    untold = Started("an engine", 1, 2, master="127.0.0.1")
    assert locate(told, {}) == MeetingPoint("127.0.0.1", 7000)
    assert locate(untold, {}) == MeetingPoint("127.0.0.1", 6170)
    for started, port in ((told, 7000), (untold, 6170)):
        assert locate(started, {MASTER: "127.0.0.2"}) == MeetingPoint("127.0.0.2", port)
        assert locate(started, {MASTER: "127.0.0.2:8000"}) == MeetingPoint("127.0.0.2", 8000)
    hosts = Started("an engine", 1, 2, hosts=("127.0.0.3", "127.0.0.4"), master="127.0.0.3")
    assert locate(hosts, {}) == MeetingPoint("127.0.0.3", 6170, ("127.0.0.3", "127.0.0.4"))
    with pytest.raises(ClusterError, match=r"FLEET_TRAIN_MASTER=:7 is not of the form host:port"):
        locate(told, {MASTER: ":7"})
    # a host name that resolves to loopback is no endpoint
    assert locate(Started("an engine", 0, 2, master="localhost"), {}).is_alias
    assert not locate(Started("an engine", 0, 2, local_count=2, master="localhost"), {}).is_alias
    assert not locate(Started("an engine", 0, 2, master="127.0.0.1"), {}).is_alias


@pytest.mark.parametrize("variable", ["PMI_FD", "PMI_PORT"])
def test_hydras_processes_ask_over_pmi_and_rank_0_says_a_free_place_with_a_secret(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    said: list[str | None] = []

    def exchange(_: Started, own: str | None, __: Any, timeout_seconds: float) -> str:
        said.append(own)
        if timeout_seconds < 1:
            raise TimeoutError
        return own or "10.0.0.1:7001/abc"

    monkeypatch.setattr(engines.mpi, "exchange_pmi", exchange)
    monkeypatch.setattr(engines.mpi, "exchange_pmix", lambda *_: pytest.fail("Hydra was not asked"))
    environ = {variable: "9"}
    assert locate(Started("MPICH", 1, 2), environ) == MeetingPoint("10.0.0.1", 7001, secret="abc")
    first = locate(Started("MPICH", 0, 2, local_count=2), environ)
    assert said[0] is None
    assert said[1] == f"127.0.0.1:{first.port}/{first.secret}"
    assert len(first.secret) == 32
    with pytest.raises(JoinTimeout, match=r"not all 2 processes that MPICH started arrived within 0.5 s"):
        locate(Started("MPICH", 1, 2), environ, 0.5)


@pytest.mark.usefixtures("machine")
def test_open_mpis_processes_use_pmix_or_the_host_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["10.0.0.1:7001/abc", "", "", ""]
    monkeypatch.setattr(engines.mpi, "exchange_pmix", lambda *_: told.pop(0))
    started = Started("Open MPI", 1, 2, port=7000)
    assert locate(started, {}) == MeetingPoint("10.0.0.1", 7001, secret="abc")
    uri = {"OMPI_MCA_orte_hnp_uri": "1234.0;tcp://10.9.9.9,10.0.0.6:45678"}
    assert locate(started, uri) == MeetingPoint("10.0.0.6", 7000)  # no way leads to the first
    assert locate(Started("Open MPI", 1, 2), uri) == MeetingPoint("10.0.0.6", 6170)
    with pytest.raises(ClusterError, match=r"name rank 0's node: mpirun -x FLEET_TRAIN_MASTER=host:6170"):
        locate(started, {})


def test_the_own_address_is_that_of_the_own_name_then_of_the_way_out(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, str]
) -> None:
    assert engines._own_address({}) == "10.0.0.5"  # the name is a loopback's: the first address that is none
    assert engines._own_address({"MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "here"}) == "10.0.0.5"
    monkeypatch.setattr(network, "address_towards", lambda _: "10.0.0.6")
    assert engines._own_address({}) == "10.0.0.6"
    assert engines._own_address({"MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "here"}) == "10.0.0.5"
    assert engines._own_address({"MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "unknown"}) == "10.0.0.6"
    machine["itself"] = "10.0.0.5"
    assert engines._own_address({}) == "10.0.0.5"
    machine["itself"] = "10.0.0.7"  # another machine's
    assert engines._own_address({}) == "10.0.0.6"
    monkeypatch.setattr(network, "local_addresses", lambda: ("127.0.0.1",))
    monkeypatch.setattr(network, "address_towards", lambda _: "127.0.0.1")
    assert engines._own_address({}) == "127.0.0.1"


def test_names_of_slurm_are_asked_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"no-such-node\.invalid"):
        resolve_hosts(["no-such-node.invalid"], by_slurm=True)

    def unknown(_: str) -> str:
        raise OSError("unknown name")

    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        lines = "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 \nodd\nNodeName=n2 NodeAddr=10.0.0.2 Version=23\n"
        return subprocess.CompletedProcess(command, 0, stdout=lines)

    monkeypatch.setattr(engines, "_look_up", unknown)
    monkeypatch.setattr(subprocess, "run", run)
    assert resolve_hosts(("n1", "n2"), by_slurm=True) == ("10.0.0.1", "10.0.0.2")
    assert asked == [["scontrol", "show", "node", "n1,n2", "--oneliner"]]
    with pytest.raises(ClusterError, match="the names of the nodes cannot be resolved here: unknown name"):
        resolve_hosts(("n1", "n2"), by_slurm=False)


def test_a_single_process_in_an_allocation_of_several_nodes_gets_a_hint() -> None:
    shell = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    assert "Slurm allocated 2 nodes to the job, but srun did not start this" in alone_in_allocation(shell)
    for environ in ({}, shell | {"SLURM_JOB_NUM_NODES": "1"}, shell | {"FLEET_TRAIN_STORE": "10.0.0.1:6171"}):
        assert alone_in_allocation(environ) == ""


STARTED = Started("MPICH (Hydra)", 1, 2)
GOOD = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7",
    "put": "cmd=put_result rc=0",
    "barrier_in": "cmd=barrier_out",
    "get": "cmd=get_result rc=0 value=10.0.0.1:6170=x",
    "finalize": "cmd=finalize_ack",
}


def ask(answers: dict[str, str], own: str | None = None, seconds: float = 30.0, *, ends: bool = False) -> list[str]:
    """What is found, behind the lines that it took, over a process manager's socket with all its answers in it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall("".join(f"{line}\n" for name, line in answers.items() if own or name != "put").encode())
        if ends:
            theirs.shutdown(socket.SHUT_WR)
        found = exchange_pmi(STARTED, own, {"PMI_FD": str(ours.fileno())}, seconds)
        ours.sendall(b"still the process's own")
        return [*theirs.recv(4096).decode().splitlines(), found]


def test_what_rank_0_has_published_is_read_behind_a_barrier() -> None:
    assert ask(GOOD) == [
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_my_kvsname",
        "cmd=barrier_in",
        "cmd=get kvsname=kvs_7 key=fleet_train_rank_0",
        "cmd=finalize",
        "still the process's own",
        "10.0.0.1:6170=x",
    ]
    published = "cmd=put kvsname=kvs_7 key=fleet_train_rank_0 value=10.0.0.1:6170"
    assert ask(GOOD, "10.0.0.1:6170")[2:4] == [published, "cmd=barrier_in"]


@pytest.mark.parametrize(
    "answers",
    [
        GOOD | {"init": "cmd=response_to_init rc=-1"},
        GOOD | {"barrier_in": "cmd=abort"},
        GOOD | {"get": "cmd=get_result rc=-1 msg=key_not_found value=unknown"},
        GOOD | {"get": "cmd=get_result rc=0"},
        {"init": GOOD["init"]},
        GOOD | {"get_my_kvsname": "x" * 80_000},
    ],
)
def test_an_answer_that_does_not_help_names_the_way_out(answers: dict[str, str]) -> None:
    with pytest.raises(
        ClusterError, match=r"did not report rank 0's address over PMI_FD .* FLEET_TRAIN_MASTER host:6170"
    ):
        ask(answers, ends=True)


def test_ranks_that_do_not_come_are_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        ask({name: GOOD[name] for name in ("init", "get_my_kvsname")}, seconds=0.1)


@pytest.mark.parametrize("environ", [{}, {"PMI_FD": "x"}, {"PMI_FD": "-1"}])
def test_without_a_descriptor_the_way_out_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match="gave this process no PMI_FD"):
        exchange_pmi(STARTED, None, environ, 1.0)


# this machine's addresses, ports and connections


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
