"""Ranks that an engine started reach barriers before they know each other's addresses."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet_train.cluster import partial
from fleet_train.cluster.engines import MeetingPoint, locate, resolve_hosts
from fleet_train.cluster.partial import ranks_of
from fleet_train.cluster.started import Started
from fleet_train.cluster.store import access as callers_module
from fleet_train.cluster.store.access import Callers
from fleet_train.errors import ClusterError
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


def test_three_ranks_learn_where_they_are(tmp_path: Path, free_ports: Callable[..., int]) -> None:
    port = free_ports(3)
    ended = meet(tmp_path, [variables(rank, 3, port) for rank in (2, 0, 1)])
    endpoints = [f"127.0.0.1:{port + rank}" for rank in range(3)]
    assert [json.loads(one.output) for one in ended] == [
        [rank, rank, 1, endpoints, "whoever set RANK and WORLD_SIZE"] for rank in (2, 0, 1)
    ]


def test_slurms_nodes_on_one_machine_are_distinguished(tmp_path: Path, free_ports: Callable[..., int]) -> None:
    port = free_ports(2, ["127.0.0.2", "127.0.0.3"])
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    common |= {"SLURM_STEP_NODELIST": "127.0.0.[2-3]", "SLURM_STEP_RESV_PORTS": f"{port}-{port + 1}"}
    places = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % 2), "SLURM_NODEID": str(i // 2)} for i in range(4)]
    ended = meet(tmp_path, [common | place for place in places])
    endpoints = [f"127.0.0.{host}:{port + local}" for host in (2, 3) for local in (0, 1)]
    assert [json.loads(one.output)[:4] for one in ended] == [[i, i % 2, 2, endpoints] for i in range(4)]


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


def test_the_master_given_goes_before_what_the_engine_says() -> None:
    started = Started("an engine", 1, 2, master="198.51.100.7", port=7000)
    assert locate(started, {"FLEET_TRAIN_MASTER": "127.0.0.9:7001"}).master == "127.0.0.9"
    assert locate(started, {"FLEET_TRAIN_MASTER": "127.0.0.9"}).port == 7000
    with pytest.raises(ClusterError, match=r"FLEET_TRAIN_MASTER=:7 is not of the form host:port"):
        locate(started, {"FLEET_TRAIN_MASTER": ":7"})


def test_a_host_name_that_resolves_to_loopback_is_no_endpoint() -> None:
    started = Started("an engine", 0, 2, master="localhost")
    assert locate(started, {}).is_alias
    assert not locate(Started("an engine", 0, 2, local_count=2, master="localhost"), {}).is_alias
    assert not locate(Started("an engine", 0, 2, master="127.0.0.1"), {}).is_alias


def test_unknown_names_are_named() -> None:
    with pytest.raises(ClusterError, match="the names of the nodes cannot be resolved here"):
        resolve_hosts(["no-such-node.invalid"], by_slurm=False)
    with pytest.raises(ClusterError, match=r"no-such-node\.invalid"):
        resolve_hosts(["no-such-node.invalid"], by_slurm=True)


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


def test_some_numbered_nodes_and_some_not_are_no_cluster() -> None:
    with pytest.raises(ClusterError, match=r"ranks \[0\] know their node's number"):
        ranks_of({0: ["10.0.0.1", 0, ""], 1: ["10.0.0.2", None, ""]}, 7000)


def test_a_name_that_gets_another_address_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"pod-0.set": frozenset({"10.0.0.5"})}
    monkeypatch.setattr("fleet_train.cluster.store.access.addresses_of", lambda name: addresses[name])
    monkeypatch.setattr("fleet_train.timeouts.NAMES_SECONDS", 0.0)
    callers = Callers(["pod-0.set", "10.0.0.9"])
    assert (callers.hears("10.0.0.5"), callers.hears("10.0.0.9"), callers.hears("10.0.0.6")) == (True, True, False)
    addresses["pod-0.set"] = frozenset({"10.0.0.6"})
    for _ in range(500):
        if callers.hears("10.0.0.6"):
            break
    else:
        raise AssertionError("the new address was never heard")
    assert not callers.hears("10.0.0.7")
    assert callers.may_change
    assert not Callers(["10.0.0.9"]).may_change


def test_strangers_cause_a_lookup_of_names_at_most_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    looks: list[float] = []
    monkeypatch.setattr(callers_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(callers_module, "addresses_of", lambda _: frozenset())
    monkeypatch.setattr(callers_module.Callers, "_resolve", lambda _: looks.append(now[0]))
    named, fixed = Callers(["pod-0.set"]), Callers(["10.0.0.9"])
    for now[0] in (100.0, 101.9, 102.1, 103.0, 104.0, 104.2):
        assert not named.hears("10.0.0.6")
        assert not fixed.hears("10.0.0.6")
        for thread in threading.enumerate():
            if thread.name == "fleet_train names":
                thread.join()
    assert looks == [102.1, 104.2]


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
