from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import Absence, ClusterError, JoinTimeout, ScheduleMismatch, WorkerFailed
from tests.support.processes import clean_environ


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0).start()
    yield server
    server.stop()


def connect(server: StoreServer, member: int, **options: object) -> StoreClient:
    return StoreClient.connect(server.endpoint, member, timeout_seconds=5, **options)  # type: ignore[arg-type]


def in_thread(call: object) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())  # type: ignore[operator]
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_set_then_get_from_another_member(server: StoreServer) -> None:
    connect(server, 0).set("port", 6170)
    assert connect(server, 1).get("port") == 6170


def test_get_of_unknown_key_is_none(server: StoreServer) -> None:
    assert connect(server, 0).get("nothing") is None


def test_gather_gives_every_member_all_values(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: two.all_gather("join", "b", 2, 5))
    assert one.all_gather("join", "a", 2, 5) == {0: "a", 1: "b"}
    thread.join()
    assert results == [{0: "a", 1: "b"}]


def test_gather_can_be_repeated_under_the_same_name(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    for step in range(3):
        thread, _ = in_thread(lambda step=step: two.all_gather("step", step, 2, 5))
        assert one.all_gather("step", step, 2, 5) == {0: step, 1: step}
        thread.join()


def test_gather_timeout_names_the_missing_members(server: StoreServer) -> None:
    one = connect(server, 0, describe=lambda i: f"rank {i} (10.0.0.{i}:6170)")
    with pytest.raises(
        JoinTimeout, match=r"rank 1 \(10.0.0.1:6170\), rank 2 \(10.0.0.2:6170\) did not arrive within 0.2 s"
    ):
        one.all_gather("join", None, 3, 0.2)


def test_gather_after_a_timeout_starts_clean(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    with pytest.raises(JoinTimeout):
        one.all_gather("join", "old", 2, 0.1)
    thread, _ = in_thread(lambda: two.all_gather("join", "b", 2, 5))
    assert one.all_gather("join", "new", 2, 5) == {0: "new", 1: "b"}
    thread.join()


def test_member_whose_connection_breaks_is_named_to_the_waiters(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: one.all_gather("step 5", None, 2, 30))
    time.sleep(0.1)
    two.close()
    thread.join(timeout=20)
    assert isinstance(results[0], WorkerFailed)
    assert str(results[0]).startswith("rank 1 was lost")


def test_member_that_dies_inside_a_gather_is_named(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: one.all_gather("step", None, 3, 30))
    waiting, _ = in_thread(lambda: two.all_gather("step", None, 3, 30))
    time.sleep(0.1)
    two._sock.shutdown(2)
    waiting.join(timeout=20)
    third = connect(server, 2)
    with pytest.raises(WorkerFailed, match="rank 1 was lost"):
        third.all_gather("next step", None, 3, 5)
    one._sock.shutdown(2)
    thread.join(timeout=20)
    assert results


def test_a_member_that_left_is_distinguished_from_one_that_died(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    two.leave()
    with pytest.raises(WorkerFailed, match="rank 1 finished and left the job"):
        one.all_gather("step 9", None, 2, 30)
    assert one.gone() == {1: "left"}


def test_connection_that_is_not_watched_may_close(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    connect(server, 1, watched=False).close()
    thread, _ = in_thread(lambda: two.all_gather("step", 2, 2, 5))
    assert one.all_gather("step", 1, 2, 5) == {0: 1, 1: 2}
    thread.join()


def test_the_first_failure_report_counts_and_wakes_the_waiters(server: StoreServer) -> None:
    one, two, three = (connect(server, i) for i in range(3))
    thread, results = in_thread(lambda: one.all_gather("step", None, 3, 30))
    time.sleep(0.05)
    two.fail({"message": "rank 1 ran out of memory"})
    three.fail({"message": "rank 2 followed"})
    thread.join(timeout=20)
    assert str(results[0]) == "rank 1 ran out of memory"
    assert three.failure() == {"message": "rank 1 ran out of memory"}


def test_every_failure_report_is_kept_with_its_time_on_one_clock(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    before = one.clock()
    one.fail({"message": "first"})
    two.fail({"message": "second"})
    reports = two.failures()
    assert [report for report, _ in reports] == [{"message": "first"}, {"message": "second"}]
    assert before <= reports[0][1] <= reports[1][1] <= two.clock()


def test_whose_patience_ends_first_is_not_missed_by_the_others(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: two.all_gather("step 4", None, 3, 1.0))
    with pytest.raises(JoinTimeout, match="rank 2 did not arrive"):
        one.all_gather("step 4", None, 3, 0.1)
    thread.join()
    assert str(results[0]) == "step 4: rank 2 did not arrive within 1 s"


def test_errors_say_what_became_of_those_who_are_missed(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    with pytest.raises(JoinTimeout) as late:
        one.all_gather("step 4", None, 2, 0.1)
    assert late.value.absent == (Absence(1, "missing", "did not arrive at step 4 within 0.1 s"),)
    two.leave()
    with pytest.raises(WorkerFailed) as left:
        one.all_gather("step 5", None, 2, 5)
    assert left.value.absent == (Absence(1, "left", "left the job while others waited for it at step 5"),)
    connect(server, 1).close()
    while one.gone().get(1, "left") == "left":
        time.sleep(0.01)
    with pytest.raises(WorkerFailed) as lost:
        one.all_gather("step 6", None, 2, 5)
    assert [each.kind for each in lost.value.absent] == ["lost"]
    one.fail({"message": "rank 0 has said it"})
    with pytest.raises(WorkerFailed) as told:
        one.all_gather("step 7", None, 2, 5)
    assert told.value.absent == ()


def test_whose_process_has_ended_without_having_come_is_not_waited_for(server: StoreServer) -> None:
    launcher, one, two = connect(server, 0, group="node"), connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: one.all_gather("join", None, 3, 30))
    launcher.ended("rank", 1)  # it is still connected: its own goodbye counts
    launcher.ended("rank", 2)
    thread.join(timeout=20)
    assert isinstance(results[0], WorkerFailed)
    assert str(results[0]).startswith("rank 2 finished and left the job")
    assert launcher.gone("rank") == {2: "left"}
    two.leave()


_FORKS = """
import os, sys, time
from fleet_train.cluster.store.client import StoreClient
from fleet_train.errors import ClusterError
client = StoreClient.connect(sys.argv[1], 1, describe=lambda i: f"rank {i}")
if os.fork() == 0:
    try:
        client.leave()
    except ClusterError as error:
        print(error, flush=True)
    time.sleep(60)
client.set("forked", True)
time.sleep(60)
"""


def test_a_forked_child_neither_sends_for_its_parent_nor_hides_its_death(server: StoreServer) -> None:
    one = connect(server, 0)
    command = [sys.executable, "-c", _FORKS, server.endpoint]
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": clean_environ()}
    with subprocess.Popen(command, **options) as parent:  # type: ignore[call-overload]
        try:
            assert parent.stdout is not None
            assert "was forked from rank 1 and has no place in the job" in parent.stdout.readline()
            while one.get("forked") is None:
                time.sleep(0.01)
            assert one.gone() == {}
            parent.kill()  # its child lives on, with what it has inherited
            with pytest.raises(WorkerFailed, match="rank 1 was lost"):
                one.all_gather("step 1", None, 2, 20)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_both_get_a_disagreement_on_the_world_size(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: one.all_gather("join", None, 4, 30))
    time.sleep(0.05)
    with pytest.raises(ScheduleMismatch, match="rank 0 says that the job has 4 ranks, rank 1 says 2"):
        two.all_gather("join", None, 2, 5)
    thread.join(timeout=20)
    assert isinstance(results[0], ScheduleMismatch)


def test_same_rank_twice_is_refused(server: StoreServer) -> None:
    first = connect(server, 0)
    with pytest.raises(ClusterError, match="rank 0 has joined this job already"):
        connect(server, 0)
    assert first.get("x") is None


def test_connect_without_a_server_names_the_address() -> None:
    with pytest.raises(JoinTimeout, match=r"nobody answers at 127\.0\.0\.1:9"):
        StoreClient.connect("127.0.0.1:9", 0, timeout_seconds=0.2)


def test_server_on_a_taken_port_says_which(server: StoreServer) -> None:
    with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        StoreServer("127.0.0.1", server.port).start()


def test_server_that_stops_is_named_to_its_clients(server: StoreServer) -> None:
    client = connect(server, 0)
    server.stop()
    with pytest.raises(WorkerFailed, match=f"store at {server.endpoint} no longer answers"):
        client.get("x")


def test_a_stranger_with_another_protocol_does_no_harm(server: StoreServer) -> None:
    import socket

    with socket.create_connection((server.host, server.port)) as stranger:
        assert stranger.recv(4096)  # the server's challenge
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(10) == b""
    client = connect(server, 0)
    client.set("a", 1)
    assert client.get("a") == 1


def test_members_that_wait_for_each_other_at_different_points_get_an_error(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: one.all_gather("step 12", None, 2, 30))
    with pytest.raises(ScheduleMismatch, match="rank 0 at 'step 12', rank 1 at 'all_reduce 0'"):
        two.all_gather("all_reduce 0", None, 2, 30)
    thread.join(timeout=20)
    assert isinstance(results[0], ScheduleMismatch)


def test_namespaces_share_a_port_and_nothing_else(server: StoreServer) -> None:
    first, second = connect(server, 0), StoreClient.connect(f"{server.endpoint}/1", 0, timeout_seconds=5)
    first.set("key", "of the first")
    first.fail({"message": "the first has failed"})
    assert (second.get("key"), second.failure()) == (None, None)
    first.close()
    thread, results = in_thread(lambda: StoreClient.connect(f"{server.endpoint}/1", 1).all_gather("join", "b", 2, 5))
    assert second.all_gather("join", "a", 2, 5) == {0: "a", 1: "b"}
    thread.join()
    assert results == [{0: "a", 1: "b"}]
    assert server.connected_members(namespace="1") >= {0}


def test_a_silent_member_is_lost_in_every_namespace_and_may_return(server: StoreServer) -> None:
    def participant() -> StoreClient:
        return connect(server, 1, machine="b", silence_seconds=0.3)

    silent = participant()
    elsewhere = StoreClient.connect(f"{server.endpoint}/2", 1, machine="b")
    waiting = StoreClient.connect(f"{server.endpoint}/2", 0, timeout_seconds=5)
    for _ in range(4):
        silent.beat()
        time.sleep(0.15)  # twice as often as it must
    assert connect(server, 0).gone() == {}
    with pytest.raises(WorkerFailed, match=r"rank 1 was lost \(not heard of for 0.3 s"):
        waiting.all_gather("join", 0, 2, 5)
    with pytest.raises(WorkerFailed):
        silent.beat()
    assert participant().get("nothing") is None
    elsewhere.close()


def test_members_at_a_step_and_in_a_call_get_the_name_of_the_call(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, results = in_thread(lambda: two.all_gather("step 5", None, 2, 10))
    with pytest.raises(ScheduleMismatch) as caught:
        one.all_gather("save to out 0", None, 2, 10, "fleet.save_persistables('out')")
    thread.join()
    expected = (
        "the ranks wait for each other at different points: rank 0 in fleet.save_persistables('out'), rank 1 at 'step "
        "5'; call fleet.save_persistables('out') on all ranks, without `if rank == 0` around it; if all of them do, "
        "they have made unequal numbers of steps before it"
    )
    assert (str(caught.value), str(results[0])) == (expected, expected)


def test_members_at_different_steps_are_asked_for_their_batches(server: StoreServer) -> None:
    one, two = connect(server, 0), connect(server, 1)
    thread, _ = in_thread(lambda: two.all_gather("step 5", None, 2, 10))
    with pytest.raises(ScheduleMismatch, match=r"\(unequal numbers of batches\?\)$"):
        one.all_gather("step 6", None, 2, 10)
    thread.join()


def test_a_member_missing_in_a_call_is_reported_with_the_call(server: StoreServer) -> None:
    one, _ = connect(server, 0), connect(server, 1)
    with pytest.raises(
        JoinTimeout, match=r"^fleet\.barrier_worker\(\): rank 1 did not arrive within 0\.2 s; call fleet\."
    ):
        one.all_gather("barrier 0", None, 2, 0.2, "fleet.barrier_worker()")
