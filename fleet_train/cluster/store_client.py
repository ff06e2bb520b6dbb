"""The rendezvous store's client: one member's connection, with bounded waits and errors that carry names."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fleet_train.cluster.store_wire import Json, keep_alive
from fleet_train.errors import Absence, ClusterError, FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed

# How much longer than the server's own bound a client waits for the server's answer.
_ANSWER_GRACE_SECONDS = 10.0

Describe = Callable[[int], str]

# A child made by fork inherits the connections: see StoreClient.close_in_child.
_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for client in list(_clients):
        client.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)


class StoreClient:
    """One member's connection to the store. Calls from several threads take turns; a waiting call occupies it."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: str,
        member: int,
        group: str,
        describe: Describe,
        answer_seconds: float = _ANSWER_GRACE_SECONDS,
    ) -> None:
        self.endpoint = endpoint
        self.member = member
        self.group = group
        self._sock = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()
        self._describe = describe
        self._answer_seconds = answer_seconds
        self._is_in_child = False
        _clients.add(self)

    @classmethod
    def connect(
        cls,
        endpoint: str,
        member: int,
        *,
        group: str = "rank",
        timeout_seconds: float = 300.0,
        watched: bool = True,
        describe: Describe | None = None,
        machine: str = "",
        silence_seconds: float | None = None,
        answer_seconds: float = _ANSWER_GRACE_SECONDS,
    ) -> StoreClient:
        """Connect, retrying until the server listens. ``endpoint`` is ``host:port``, or ``host:port/scope``.

        A *watched* connection stands for the member: when it breaks without ``leave()``, the member counts as lost;
        when it says nothing for ``silence_seconds``, so do all that have named the same ``machine``, in every scope.
        ``answer_seconds`` is how long the server may take for an answer that needs no waiting.
        Raises JoinTimeout when nobody listens within the bound, ClusterError when the member is connected already.
        """
        address, _, scope = endpoint.partition("/")
        host, port = address.rsplit(":", 1)
        deadline = time.monotonic() + timeout_seconds
        for pause in _pauses():
            try:
                sock = socket.create_connection(
                    (host, int(port)), timeout=max(0.1, min(5.0, deadline - time.monotonic()))
                )
                break
            except OSError as error:
                if time.monotonic() + pause >= deadline:
                    raise JoinTimeout(
                        f"nobody answers at {address}, where the rendezvous store of this job should be, within "
                        f"{timeout_seconds:g} s ({error}); start the job on the first node, and check that the node "
                        "list is the same everywhere and that the port can be reached"
                    ) from error
                time.sleep(pause)
        keep_alive(sock)
        client = cls(sock, address, member, group, describe or (lambda i: f"{group} {i}"), answer_seconds)
        hello = {"scope": scope, "group": group, "member": member, "watched": watched}
        hello |= {"machine": machine, "silence": silence_seconds}
        try:
            client._call({"do": "hello", **hello})
        except BaseException:
            client.close()
            raise
        return client

    def set(self, key: str, value: Json) -> None:
        self._call({"do": "set", "key": key, "value": value})

    def get(self, key: str) -> Json:
        """The value of ``key``, or None."""
        return self._call({"do": "get", "key": key})

    def gather(self, name: str, value: Json, count: int, timeout_seconds: float, call: str = "") -> dict[int, Json]:
        """Wait until members 0 .. count-1 of this group have called with this name; everybody gets all values.

        ``call``: what the member's script has called to get here, for messages; empty for a step of training.
        Raises JoinTimeout naming who did not come; WorkerFailed naming a member that died, left, or reported a
        failure; ScheduleMismatch when the members do not agree on ``count``. The first two say in ``absent`` what the
        members did that are to blame.
        """
        request = {"do": "gather", "name": name, "value": value, "count": count, "timeout": timeout_seconds}
        request |= {"call": call}
        try:
            values = self._call(request, timeout_seconds)
        except JoinTimeout as error:
            told = JoinTimeout(f"{call or name}: {error} within {timeout_seconds:g} s{_on_all(call)}")
            raise with_absent(told, error.absent, f" to {call or name} within {timeout_seconds:g} s") from None
        except WorkerFailed as error:
            raise with_absent(error, error.absent, f" while others waited for it at {call or name}") from None
        return dict(enumerate(values))

    def fail(self, report: dict[str, Json]) -> None:
        """Publish why this job has failed. The first report stands; every waiter is woken with it."""
        self._call({"do": "fail", "value": report})

    def failure(self) -> dict[str, Json] | None:
        """The first failure that a member reported, or None."""
        report: dict[str, Json] | None = self._call({"do": "failure"})
        return report

    def failures(self) -> list[tuple[dict[str, Json], float]]:
        """Every failure that was reported and when, in the seconds of ``clock``; the first one first."""
        return [(report, seconds) for report, seconds in self._call({"do": "failures"})]

    def clock(self) -> float:
        """Seconds since the server first heard of this scope: one clock for all machines."""
        return float(self._call({"do": "clock"}))

    def gone(self, group: str | None = None) -> dict[int, str]:
        """Members that were connected and are no longer: member -> ``left`` or how it was lost."""
        return {int(member): how for member, how in self._call({"do": "gone", "group": group or self.group})}

    def beat(self) -> None:
        """Be heard: resets the server's ``silence_seconds``. Raises WorkerFailed when the server does not answer."""
        self._call({"do": "beat"})

    def ended(self, group: str, member: int) -> None:
        """Say that a member's process has ended well: whoever waits for it without its having come need not."""
        self._call({"do": "ended", "group": group, "member": member})

    def leave(self) -> None:
        """Say goodbye: from now on this member counts as finished, not as lost."""
        self._call({"do": "leave"})

    def close_in_child(self) -> None:
        """In a process that was forked from ours: let go of the connection, without a word to the server.

        While a child holds it too, the server does not notice that we have died. No lock is taken, also not that of
        the buffered file: a thread of the parent may have held it.
        """
        self._is_in_child = True
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            self._sock.close()

    def _call(self, request: Json, patience_seconds: float = 0.0) -> Json:
        if self._is_in_child:
            raise ClusterError(
                f"process {os.getpid()} was forked from {self._describe(self.member)} and has no place in the job: "
                "call fleet in the process that called fleet.init only"
            )
        with self._lock:
            try:
                self._sock.settimeout(patience_seconds + self._answer_seconds)
                self._sock.sendall(json.dumps(request, separators=(",", ":")).encode() + b"\n")
                line = self._file.readline()
            except (OSError, ValueError) as error:
                raise WorkerFailed(self._lost_server(str(error))) from error
        if not line:
            raise WorkerFailed(self._lost_server("the connection was closed"))
        return self._unwrap(json.loads(line))

    def _lost_server(self, why: str) -> str:
        return (
            f"the rendezvous store at {self.endpoint} does not answer any more ({why}): the process that hosts it "
            "(the first node's launcher, or rank 0) has ended or its machine cannot be reached"
        )

    def _unwrap(self, reply: Json) -> Json:
        match reply.get("error"):
            case None:
                return reply["value"]
            case "timeout":
                missing = [Absence(member, "missing", "did not come") for member in reply["missing"]]
                raise with_absent(JoinTimeout(f"{self._names(reply['missing'])} did not come"), missing)
            case "gone":
                call = reply.get("call", "")
                parts = [f"{self._describe(m)} {_how_gone(how, call)}" for m, how in reply["gone"]]
                raise with_absent(WorkerFailed("; ".join(parts)), [_absence(m, how) for m, how in reply["gone"]])
            case "failed":
                raise WorkerFailed(_what_failed(reply["failure"]))
            case "count":
                (first, one), (second, other) = reply["counts"]
                raise ScheduleMismatch(
                    f"{self._describe(first)} says that the job has {one} {self.group}s, {self._describe(second)} says "
                    f"{other}; start every node with the same node list and the same number of processes"
                )
            case "crossed":
                raise ScheduleMismatch(self._crossed(reply["where"]))
            case "twice":
                raise ClusterError(
                    f"{self._describe(self.member)} has joined this job already (rendezvous store at {self.endpoint}); "
                    "two processes were started with the same rank: check that --node_ip differs on every machine, "
                    "and that no earlier job still runs"
                )
            case other:
                raise ClusterError(f"the rendezvous store at {self.endpoint} answered {other!r}")

    def _crossed(self, where: list[list[Json]]) -> str:
        """``where``: member, the name of its meeting, and the call that it is in or an empty text."""
        parts = [
            f"{self._describe(m)} in {call}" if call else f"{self._describe(m)} at '{name}'" for m, name, call in where
        ]
        calls = {call for _, _, call in where}
        if not any(calls):
            why = (
                f"every {self.group} must make the same steps and calls in the same order (unequal numbers of batches?)"
            )
        elif len(calls) == 1:
            why = f"every {self.group} must make the same calls in the same order"
        else:
            named = " and ".join(sorted(call for call in calls if call))
            why = (
                f"call {named} on all {self.group}s, without `if rank == 0` around it; if all of them do, "
                "they have made unequal numbers of steps before it"
            )
        return f"the {self.group}s wait for each other at different points: {', '.join(parts)}; {why}"

    def _names(self, members: list[int]) -> str:
        return ", ".join(self._describe(member) for member in members)


def _pauses() -> Iterator[float]:
    pause = 0.02
    while True:
        yield pause
        pause = min(pause * 1.5, 0.5)


def _on_all(call: str) -> str:
    return f"; call {call} on all ranks, without `if rank == 0` around it" if call else ""


def _how_gone(how: str, call: str = "") -> str:
    if how == "left" and call:
        return f"has finished and left the job while others wait for it in {call}{_on_all(call)}"
    if how == "left":
        return "has finished and left the job while others still wait for it (unequal numbers of steps, or an exit?)"
    return f"was lost ({how}: the process ended or its machine cannot be reached)"


def _absence(member: int, how: str) -> Absence:
    if how == "left":
        return Absence(member, "left", "left the job")
    return Absence(member, "lost", f"was lost ({how})")


_Error = TypeVar("_Error", bound=FleetTrainError)


def with_absent(error: _Error, absent: Iterable[Absence], more: str = "") -> _Error:
    """The error with those who are to blame for it; ``more`` is said of each."""
    error.absent = tuple(Absence(one.member, one.kind, one.what + more) for one in absent)
    return error


def _what_failed(report: dict[str, Json]) -> str:
    return str(report.get("message") or report)
