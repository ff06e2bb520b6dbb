"""The rendezvous endpoint of processes that an engine started, by its variables."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from fleet_train.cluster import engines, network
from fleet_train.cluster.engines import MeetingPoint, alone_in_allocation, locate, resolve_hosts
from fleet_train.cluster.started import Started
from fleet_train.errors import ClusterError, JoinTimeout

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


def test_a_port_is_that_of_the_master_or_of_the_engine_or_the_usual_one() -> None:
    told = Started("an engine", 1, 2, master="127.0.0.1", port=7000)
    untold = Started("an engine", 1, 2, master="127.0.0.1")
    assert locate(told, {}) == MeetingPoint("127.0.0.1", 7000)
    assert locate(untold, {}) == MeetingPoint("127.0.0.1", 6170)
    for started, port in ((told, 7000), (untold, 6170)):
        assert locate(started, {MASTER: "127.0.0.2"}) == MeetingPoint("127.0.0.2", port)
        assert locate(started, {MASTER: "127.0.0.2:8000"}) == MeetingPoint("127.0.0.2", 8000)
    hosts = Started("an engine", 1, 2, hosts=("127.0.0.3", "127.0.0.4"), master="127.0.0.3")
    assert locate(hosts, {}) == MeetingPoint("127.0.0.3", 6170, ("127.0.0.3", "127.0.0.4"))


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
