"""Launchers that wait for one another in vain, on loopback addresses: who is told, of what, and who is left alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest

from fleet_train import timeouts
from fleet_train.cluster.store.access import Access
from fleet_train.errors import ScheduleMismatch
from fleet_train.launch import signpost
from fleet_train.launch.node import Node
from fleet_train.launch.request import LaunchRequest
from fleet_train.launch.signpost import Signpost, program_of
from tests.support.ports import free_ports
from tests.support.processes import until

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
TRAIN = ["/home/me/train.py"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports of this test's own, and ten looks per second."""
    first = free_ports(len(signpost.PORTS), HOSTS)
    monkeypatch.setattr(signpost, "PORTS", range(first, first + len(signpost.PORTS)))
    monkeypatch.setattr(timeouts, "SIGNPOST_SECONDS", 0.1)


def waiting(
    stack: ExitStack,
    own: str,
    hosts: Sequence[str] = HOSTS[:2],
    port: int = 6170,
    processes: int = 1,
    program: list[str] = TRAIN,
    secret: bytes | None = None,
    job: str = "a job",
) -> Signpost:
    node = Node(tuple(hosts), hosts.index(own), port, processes, None, "lo")
    facts: dict[str, Any] = {"the node list": ",".join(hosts), "--started_port": port, "processes": processes}
    return stack.enter_context(closing(Signpost(node, Access(job, secret, own), program, facts)))


def told(waits: Signpost, seconds: float = 40.0) -> str:
    """What a launcher is told within the time; empty: nothing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            waits.refuse()
        except ScheduleMismatch as error:
            return str(error)
        time.sleep(0.05)
    return ""


DIFFERENT: dict[str, tuple[dict[str, Any], str, str]] = {
    "processes": ({"processes": 2}, "processes is 2 there and 1 here", "processes is 1 there and 2 here"),
    "port": (
        {"port": 6180},
        "--started_port is 6180 there and 6170 here",
        "--started_port is 6170 there and 6180 here",
    ),
    "order": (
        {"hosts": HOSTS[1::-1]},
        "the node list is 127.0.0.3,127.0.0.2 there and 127.0.0.2,127.0.0.3 here",
        "the node list is 127.0.0.2,127.0.0.3 there and 127.0.0.3,127.0.0.2 here",
    ),
    "longer list": (
        {"hosts": HOSTS},
        "the node list is 127.0.0.2,127.0.0.3,127.0.0.4 there and 127.0.0.2,127.0.0.3 here",
        "the node list is 127.0.0.2,127.0.0.3 there and 127.0.0.2,127.0.0.3,127.0.0.4 here",
    ),
}


@pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["addresses", "secret"])
@pytest.mark.parametrize(("flags", "first", "second"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_two_with_different_flags_learn_both_values(
    flags: dict[str, Any], first: str, second: str, secret: bytes | None
) -> None:
    with ExitStack() as stack:
        one = waiting(stack, HOSTS[0], secret=secret)
        other = waiting(stack, HOSTS[1], secret=secret, **flags)
        said = told(one), told(other)
    assert first in said[0]
    assert second in said[1]
    assert "start every node with the same flags (except --node_ip)" in said[0]


@pytest.mark.parametrize("odd", range(3))
def test_of_three_all_learn_which_one_differs_and_the_last_one_too(odd: int) -> None:
    """The first two have been waiting for a while when the third one comes."""
    with ExitStack() as stack:
        waits = {host: waiting(stack, host, HOSTS) for index, host in enumerate(HOSTS) if index != odd}
        time.sleep(0.5)
        late = waiting(stack, HOSTS[odd], HOSTS, port=6180)
        said = [told(each) for each in waits.values()]
        of_late = told(late)
    assert ["--started_port is 6180 there and 6170 here" in each for each in said] == [True, True], said
    assert [HOSTS[odd] in each for each in said] == [True, True]
    assert "--started_port is 6170 there and 6180 here" in of_late


def test_who_is_told_passes_it_on() -> None:
    """The third launcher has found one of two, and ended: the other one never sees it."""
    with ExitStack() as stack:
        one, other = (waiting(stack, host, HOSTS) for host in HOSTS[1:])
        server = until(lambda: one._server)
        third = {
            **one._card,
            "host": HOSTS[0],
            "place": ["elsewhere"],
            "facts": {**one._card["facts"], "--started_port": 6180},
        }
        with other._visited(1, server.port) as client:
            client.set("told third", third)
        said = told(one), told(other)
    assert ["node 0 (127.0.0.2)" in each for each in said] == [True, True], said
    assert ["--started_port is 6180 there and 6170 here" in each for each in said] == [True, True], said


def test_who_waits_for_its_own_job_or_runs_another_program_is_left_alone() -> None:
    with ExitStack() as stack:
        late = waiting(stack, HOSTS[0])  # its other launcher comes later
        sweep = [waiting(stack, host, port=port) for host in HOSTS[:2] for port in (6180, 6190)]
        another = waiting(stack, HOSTS[1], port=6200, program=["/home/you/train.py"])
        module = waiting(stack, HOSTS[1], port=6210, program=["-m", "train", "/home/me"])
        stranger = waiting(stack, HOSTS[1], port=6220, secret=b"x" * 32)
        time.sleep(1.5)
        told_now = [told(each, 0.0 + (each is late) * 0.2) for each in (late, *sweep, another, module, stranger)]
        assert told_now == [""] * 8
    with ExitStack() as stack:
        alone = waiting(stack, HOSTS[0], HOSTS[:1])
        assert told(alone, 0.3) == ""


def test_one_that_a_store_has_refused_finds_who_waits_there() -> None:
    """The lists agree on the first machine only: the two name unlike jobs, and meet at one port."""
    with ExitStack() as stack:
        first = waiting(stack, HOSTS[0], HOSTS)
        refused = waiting(stack, HOSTS[1], (HOSTS[0], HOSTS[2], HOSTS[1]))
        with pytest.raises(ScheduleMismatch, match=r"the node list is 127.0.0.2,127.0.0.3,127.0.0.4 there"):
            refused.look_longer()
        assert "the node list is 127.0.0.2,127.0.0.4,127.0.0.3 there" in told(first)
    with ExitStack() as stack:
        first = waiting(stack, HOSTS[0], job="mine")
        with pytest.raises(ScheduleMismatch, match="--job_id is mine there and yours here"):
            waiting(stack, HOSTS[1], job="yours").look_longer()
        assert "--job_id is yours there and mine here" in told(first)
    with ExitStack() as stack:
        waiting(stack, HOSTS[0], program=["/home/you/train.py"])
        waiting(stack, HOSTS[1]).look_longer()
        waiting(stack, HOSTS[0], HOSTS[:1]).look_longer()


def test_what_tells_jobs_apart_is_the_program_and_not_its_arguments(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (LaunchRequest(command=("train.py", word)) for word in "ab")
    assert program_of(one) == program_of(other) == [str(tmp_path.resolve() / "train.py")]
    assert program_of(LaunchRequest(command=("train", "a"), is_module=True)) == ["-m", "train", str(tmp_path)]
