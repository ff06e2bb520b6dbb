"""The wire protocol of PMI 1 against a process manager in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from fleet_train.cluster.mpi import exchange_pmi
from fleet_train.cluster.started import Started
from fleet_train.errors import ClusterError

STARTED = Started("MPICH (Hydra)", 1, 2)
GOOD = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7",
    "put": "cmd=put_result rc=0",
    "barrier_in": "cmd=barrier_out",
    "get": "cmd=get_result rc=0 value=10.0.0.1:6170=x",
    "finalize": "cmd=finalize_ack",
}


class Manager:
    """Answers each command with its line, in pieces; keeps what was asked."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.asked: list[str] = []
        self._answers = answers
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._theirs.makefile("r") as lines:
            for line in lines:
                self.asked.append(line.rstrip("\n"))
                answer = self._answers.get(line.split()[0].removeprefix("cmd="))
                if answer == "end":
                    self._theirs.shutdown(socket.SHUT_RDWR)
                if answer is None or answer == "end":
                    continue
                text = f"{answer}\n".encode()
                self._theirs.sendall(text[:7])
                self._theirs.sendall(text[7:])

    def close(self) -> None:
        self.ours.close()
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._theirs.close()


@pytest.fixture
def manager() -> Iterator[Callable[..., Manager]]:
    made: list[Manager] = []

    def make(**changes: str) -> Manager:
        made.append(Manager({**GOOD, **changes}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(manager: Manager, own: str | None = None, timeout_seconds: float = 30.0) -> str:
    return exchange_pmi(STARTED, own, {"PMI_FD": str(manager.ours.fileno())}, timeout_seconds)


def test_what_rank_0_has_published_is_read_behind_a_barrier(manager: Callable[..., Manager]) -> None:
    hydra = manager()
    assert ask(hydra) == "10.0.0.1:6170=x"
    assert hydra.asked == [
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_my_kvsname",
        "cmd=barrier_in",
        "cmd=get kvsname=kvs_7 key=fleet_train_rank_0",
        "cmd=finalize",
    ]
    hydra.ours.sendall(b"cmd=finalize\n")  # the descriptor is still the process's own


def test_rank_0_publishes_before_the_barrier(manager: Callable[..., Manager]) -> None:
    hydra = manager()
    ask(hydra, "10.0.0.1:6170")
    assert hydra.asked[2:4] == ["cmd=put kvsname=kvs_7 key=fleet_train_rank_0 value=10.0.0.1:6170", "cmd=barrier_in"]


@pytest.mark.parametrize(
    "changes",
    [
        {"init": "cmd=response_to_init rc=-1"},
        {"barrier_in": "cmd=abort"},
        {"get": "cmd=get_result rc=-1 msg=key_not_found value=unknown"},
        {"get": "cmd=get_result rc=0"},
        {"get_my_kvsname": "end"},
        {"get_my_kvsname": "x" * 80_000},
    ],
)
def test_an_answer_that_does_not_help_names_the_way_out(
    manager: Callable[..., Manager], changes: dict[str, str]
) -> None:
    with pytest.raises(
        ClusterError, match=r"did not report rank 0's address over PMI_FD .* FLEET_TRAIN_MASTER host:6170"
    ):
        ask(manager(**changes))


def test_ranks_that_do_not_come_are_a_timeout(manager: Callable[..., Manager]) -> None:
    hydra = manager()
    del hydra._answers["barrier_in"]
    with pytest.raises(TimeoutError):
        ask(hydra, timeout_seconds=0.1)


@pytest.mark.parametrize("environ", [{}, {"PMI_FD": "x"}, {"PMI_FD": "-1"}])
def test_without_a_descriptor_the_way_out_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match="gave this process no PMI_FD"):
        exchange_pmi(STARTED, None, environ, 1.0)
