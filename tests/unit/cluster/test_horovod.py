"""How processes of horovodrun find process 0, over a server that keeps values as horovodrun's does."""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from fleet_train.cluster import engines, horovod
from fleet_train.cluster.engines import MeetingPoint, detect, locate
from fleet_train.errors import ClusterError, JoinTimeout
from tests.support.horovod import horovodruns_server, place_of
from tests.support.ports import free_ports


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """That of process 1 of 2."""
    with horovodruns_server() as where:
        yield {**where, **place_of(1, 2)}


def place(environ: dict[str, str], rank: int, seconds: float = 30.0) -> MeetingPoint:
    environ = environ | {"HOROVOD_RANK": str(rank)}
    started = detect(environ)
    assert started is not None
    assert started.in_words() == f"started by horovodrun: process {rank} of 2"
    return locate(started, environ, seconds)


def test_all_processes_meet_at_process_0_whoever_comes_first(environ: dict[str, str]) -> None:
    found: list[MeetingPoint] = []
    early = threading.Thread(target=lambda: found.append(place(environ, 1)))
    early.start()
    first = place(environ, 0)
    early.join()
    assert found == [first]
    assert first.master == "127.0.0.1"
    assert len(first.secret) == 32


def test_who_waits_for_process_0_in_vain_says_so(environ: dict[str, str]) -> None:
    with pytest.raises(JoinTimeout, match=r"not all 2 processes that horovodrun started arrived within 0\.2 s"):
        place(environ, 1, 0.2)


def test_without_its_server_the_place_can_be_named(environ: dict[str, str]) -> None:
    gone = environ | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_ports(1))}
    with pytest.raises(ClusterError, match=r"does not answer .*; name rank 0's node: FLEET_TRAIN_MASTER=host:6170"):
        place(gone, 1)
    del gone["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    with pytest.raises(ClusterError, match=r"without HOROVOD_GLOO_RENDEZVOUS_ADDR and .*_PORT.*; name rank 0's node"):
        place(gone, 1)
    assert place(gone | {engines.MASTER: "127.0.0.1:6180"}, 1) == MeetingPoint("127.0.0.1", 6180)


@pytest.mark.parametrize("answer", ["<html>", "n1:80", "n1:99999999/ab", "n1:80/ab/../c"])
def test_what_is_no_place_of_rank_0_is_not_believed(environ: dict[str, str], answer: str) -> None:
    where = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    horovod._ask(*where, "PUT", answer)
    with pytest.raises(ClusterError, match="has another answer than rank 0's; name rank 0's node"):
        place(environ, 1)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "\u4e3b\u673a"])
def test_an_address_that_is_none_is_named(environ: dict[str, str], host: str) -> None:
    with pytest.raises(ClusterError, match=f"horovodrun's server at {host}:.* does not answer"):
        place(environ | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": host}, 1)


def test_a_server_that_says_nothing_is_named(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod, "_ASK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        gone = environ | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(silent.getsockname()[1])}
        with pytest.raises(ClusterError, match=r"does not answer \(timed out\)"):
            place(gone, 0)


def test_the_next_script_of_the_same_horovodrun_waits_for_its_own_rank_0(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", lambda function, *given: at_exit.append(partial(function, *given)))
    place(environ, 0)
    (forget,) = at_exit
    forget()
    with pytest.raises(JoinTimeout):
        place(environ, 1, 0.2)
    assert place(environ, 0) == place(environ, 1)


def test_a_server_that_answers_otherwise_is_not_believed(environ: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod, "_PLACE", "/nothing/has/this")
        with pytest.raises(ClusterError, match="does not answer"):
            place(environ, 0)
