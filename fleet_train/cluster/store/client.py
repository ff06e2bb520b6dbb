"""The rendezvous store's client: one member's connection, with bounded waits and errors that carry names."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from fleet_train.cluster.store.access import Access, Caller, Refused
from fleet_train.cluster.store.members import MOST_MEMBERS, each, from_ranges
from fleet_train.cluster.store.payloads import unpack
from fleet_train.cluster.store.reports import Describe, Words, with_absent
from fleet_train.cluster.store.wire import (
    MOST_BODY_BYTES,
    PREAMBLE,
    Body,
    Decoder,
    Header,
    Json,
    ProtocolError,
    encode,
    keep_alive,
    parse,
)
from fleet_train.errors import ClusterError, JoinTimeout, WorkerFailed

# How much longer than the server's own timeout a client waits for its answer.
_ANSWER_GRACE_SECONDS = 10.0
_CHUNK_BYTES = 1 << 18
JOINED = "joined"
"""Rank 0 sets it in the store once all ranks have joined."""

# A child made by fork inherits the connections: see StoreClient.close_in_child.
_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for client in list(_clients):
        client.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)


T = TypeVar("T")
Read = Callable[[Header, Body], T]
"""Converts the server's answer to a call's result."""

Variants = list[tuple[list[list[int]], Any]]
"""(ranges of members, their JSON value) for each distinct value."""


class StepNote(NamedTuple):
    """A member's report at a step barrier: its work since the last one."""

    steps: int
    busy_ms: float
    wait_ms: float
    stop: str | None = None
    """Why it asks all members to stop."""
    gradients: int | None = None
    """A digest of its own gradients, in a program's first steps."""


class StepAnswer(NamedTuple):
    """The result of a step barrier, the same for every member."""

    slowest_ms: float | None
    """The slowest member's own work, per step; None if a member reported no step."""
    stop: tuple[int, str] | None
    """The lowest member that requests a stop, and why."""
    number: int
    """The barrier's number, in the order of completion."""
    same_gradients: bool = False
    """Whether every member gave the same digest of its gradients."""


class StoreClient:
    """One member's connection to the store. Calls from several threads are serialized; a waiting call blocks others."""

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
        self._decoder = Decoder(expects_preamble=False, most_bytes=1 << 31)
        self._lock = threading.Lock()
        self._words = Words(endpoint, group, describe)
        self._describe = describe
        self._answer_seconds = answer_seconds
        self._is_in_child = False
        self._reports: list[tuple[dict[str, Json], float]] = []
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
        dial_seconds: float = 5.0,
        access: Access | None = None,
    ) -> StoreClient:
        """Connect, retrying for ``timeout_seconds`` until the server listens (0: one try). ``endpoint`` is
        ``host:port``, or ``host:port/round``.

        A *watched* connection represents the member: if it breaks without ``leave()``, the member counts as lost; if
        it sends nothing for ``silence_seconds``, so do all members on the same ``machine``, in every round.
        ``answer_seconds`` is how long the server may take for an answer that needs no waiting, ``dial_seconds`` for
        accepting the connection.
        Raises JoinTimeout if no server listens within the time, ClusterError if the member is already connected or
        the server belongs to another job, has another secret, or does not accept this address.
        """
        address, _, round_name = endpoint.partition("/")
        describe = describe or (lambda i: f"{group} {i}")
        identity: Header = {"round": round_name, "group": group, "member": member, "watched": watched}
        identity |= {"machine": machine, "silence": silence_seconds}
        deadline = time.monotonic() + timeout_seconds
        for pause in _pauses():
            try:
                left = deadline - time.monotonic() if timeout_seconds else dial_seconds
                sock = _dial(address, access or Access(), max(0.1, min(dial_seconds, left)))
                client = cls(sock, address, member, group, describe, answer_seconds)
                client._greet(Caller(access or Access(), identity))
                return client
            except (OSError, Refused) as error:
                if isinstance(error, Refused) and not error.is_temporary:
                    raise _refused(error, describe(member), address) from None
                if time.monotonic() + pause >= deadline:
                    raise JoinTimeout(
                        f"nobody answers at {address}, where the rendezvous store of this job should be, within "
                        f"{timeout_seconds:g} s ({error}); start the job on the first node, and check that the node "
                        "list is the same everywhere and that the port can be reached"
                    ) from error
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _greet(self, caller: Caller) -> None:
        try:
            self._sock.settimeout(self._answer_seconds)
            self._sock.sendall(PREAMBLE)
            word: Header | None = caller.hello
            while word is not None:
                self._sock.sendall(encode(word))
                word = caller.heard(self._receive()[0])
        except ProtocolError as error:
            self.close()
            raise OSError(f"the server there is not a rendezvous store of this version: {error}") from None
        except BaseException:
            self.close()
            raise

    # barriers

    def barrier(
        self, name: str, note: StepNote | None, count: int, timeout_seconds: float, call: str = ""
    ) -> StepAnswer:
        """Wait until members 0 .. count-1 of this group reach the barrier of this name; raises as ``all_gather``."""
        header: Header = {}
        if note is not None:
            header["slowest"] = note.busy_ms / note.steps if note.steps else None
            header["times"] = [note.steps, note.busy_ms, note.wait_ms]
            header["stop"] = None if note.stop is None else [self.member, note.stop]
            if note.gradients is not None:
                header["digest"] = note.gradients
        return self._meet("barrier", name, header, b"", count, timeout_seconds, call, _step_answer)

    def all_gather(self, name: str, value: Json, count: int, timeout_seconds: float, call: str = "") -> dict[int, Json]:
        """Wait until members 0 .. count-1 of this group have called with this name; every member gets all values.

        ``value``: anything that JSON can hold, at most 64 MB.
        ``call``: the call in the member's script, for messages; empty for a step of training.
        Raises JoinTimeout with the members that did not arrive; WorkerFailed with a member that died, left, or
        reported a failure; ScheduleMismatch if the members do not agree on ``count``. The first two give in ``absent``
        the members that caused the error, and what they did.
        """
        return self._meet("all_gather", name, {}, _json(value), count, timeout_seconds, call, _values)

    def broadcast(
        self, name: str, value: Json, source: int, count: int, timeout_seconds: float, call: str = ""
    ) -> Json:
        """As ``all_gather``, but every member gets the value of ``source`` only; other values are not sent."""
        body = _json(value) if self.member == source else b""
        return self._meet("broadcast", name, {"source": source}, body, count, timeout_seconds, call, _value)

    def compare(self, name: str, value: Json, count: int, timeout_seconds: float, call: str = "") -> Variants:
        """As ``all_gather``, but only compares the values: returns an empty list if they are equal.

        Else ``(ranges of members, their value)`` for each value, the one of the lowest member first; ``None`` is used
        for the values beyond the first four.
        """
        return self._meet("compare", name, {}, _json(value), count, timeout_seconds, call, _variants)

    def _meet(
        self,
        kind: str,
        name: str,
        header: Header,
        body: Body,
        count: int,
        timeout_seconds: float,
        call: str,
        read: Read[T],
    ) -> T:
        header = {"do": kind, "name": name, "count": count, "timeout": timeout_seconds, "call": call, **header}
        try:
            return self._call(header, body, read, timeout_seconds)
        except JoinTimeout as error:
            on_all = self._words.on_all(call)
            told = JoinTimeout(f"{call or name}: {error} within {timeout_seconds:g} s{on_all}")
            raise with_absent(told, error.absent, f" at {call or name} within {timeout_seconds:g} s") from None
        except WorkerFailed as error:
            raise with_absent(error, error.absent, f" while others waited for it at {call or name}") from None

    # calls that do not wait for other members

    def set(self, key: str, value: Json) -> None:
        self._call({"do": "set", "key": key}, _json(value), _nothing)

    def get(self, key: str) -> Json:
        """The value of ``key``, or None."""
        return self._call({"do": "get", "key": key}, b"", lambda header, body: _value(header, body) if body else None)

    def keys(self, prefix: str) -> list[str]:
        """The keys with this prefix that have a value."""
        return self._call({"do": "keys", "prefix": prefix}, b"", lambda _, body: [str(key) for key in json.loads(body)])

    def times(self, number: int) -> dict[int, list[float]]:
        """The sums of all members' reports up to the step barrier of that number, by member: steps, milliseconds of
        own work, milliseconds at barriers."""
        return self._call(
            {"do": "times", "group": self.group, "number": number}, b"", lambda _, body: dict(json.loads(body))
        )

    def fail(self, report: dict[str, Json]) -> None:
        """Publish why this job has failed. The first report counts; every waiting member receives it."""
        self._call({"do": "fail"}, _json(report), _nothing)

    def failure(self) -> dict[str, Json] | None:
        """The first failure that a member reported, or None."""
        reports = self.failures()
        return reports[0][0] if reports else None

    def failures(self) -> list[tuple[dict[str, Json], float]]:
        """Every reported failure and its time, in the seconds of ``clock``; the first one first."""
        self._reports += self._call({"do": "failures", "known": len(self._reports)}, b"", _reports)
        return list(self._reports)

    def clock(self) -> float:
        """Seconds since the server created this round: one clock for all machines."""
        return self._call({"do": "clock"}, b"", lambda header, _: float(header["value"]))

    def gone(self, group: str | None = None) -> dict[int, str]:
        """Members that were connected and are no longer: member -> ``left`` or how it was lost."""
        return self._call({"do": "gone", "group": group or self.group}, b"", _gone)

    def beat(self) -> None:
        """Heartbeat: resets the server's ``silence_seconds``. Raises WorkerFailed if the server does not answer."""
        self._call({"do": "beat"}, b"", _nothing)

    def ended(self, group: str, member: int) -> None:
        """Report that a member's process ended with 0: if it has not connected, the others need not wait for it."""
        self._call({"do": "ended", "group": group, "member": member}, b"", _nothing)

    def leave(self) -> None:
        """Disconnect properly: from now on this member counts as finished, not as lost."""
        self._call({"do": "leave"}, b"", _nothing)

    # the connection

    def close_in_child(self) -> None:
        """In a process that was forked from ours: close the connection, without a message to the server.

        While a child holds it too, the server does not notice our death. No lock is taken: a thread of the
        parent may have held it.
        """
        self._is_in_child = True
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _call(self, header: Header, body: Body, read: Read[T], patience_seconds: float = 0.0) -> T:
        if self._is_in_child:
            raise ClusterError(
                f"process {os.getpid()} was forked from {self._describe(self.member)} and has no place in the job: "
                "call fleet only in the process that called fleet.init"
            )
        if len(body) > MOST_BODY_BYTES:
            raise ClusterError(
                f"{header.get('call') or header.get('name') or header.get('key')}: the value has {len(body)} bytes as "
                f"JSON; the rendezvous store takes {MOST_BODY_BYTES >> 20} MB; send arrays with fleet.all_reduce"
            )
        with self._lock:
            try:
                self._sock.settimeout(patience_seconds + self._answer_seconds)
                self._sock.sendall(encode(header, body))
                answer, body = self._receive()
            except (OSError, ValueError, ProtocolError) as error:
                raise WorkerFailed(self._words.lost_server(str(error))) from error
        try:
            if "error" not in answer:
                return read(answer, body)
            told = self._words.error(answer, body)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, ProtocolError) as nonsense:
            raise WorkerFailed(self._words.lost_server(f"its answer is invalid: {nonsense!r}"[:200])) from None
        raise told

    def _receive(self) -> tuple[Header, Body]:
        """The next frame. Raises OSError, ProtocolError."""
        while True:
            data = self._sock.recv(_CHUNK_BYTES)
            if not data:
                raise OSError("the connection was closed")
            for header, body in self._decoder.feed(data):
                return parse(header), body


def _nothing(_: Header, __: Body) -> None:
    """The answer only confirms the call."""


def _value(_: Header, body: Body) -> Any:
    return json.loads(body)


def _values(_: Header, body: Body) -> dict[int, Json]:
    return {member: json.loads(value) for member, value in unpack(body).items()}


def _step_answer(header: Header, _: Body) -> StepAnswer:
    slowest, stop = header.get("slowest"), header.get("stop")
    asked = None if stop is None else (int(stop[0]), str(stop[1]))
    same = header.get("digest") is not None
    return StepAnswer(None if slowest is None else float(slowest), asked, int(header["number"]), same)


def _variants(header: Header, body: Body) -> Variants:
    if header.get("same"):
        return []
    shown = unpack(body)
    variants = [
        (who, json.loads(shown[index]) if index in shown else None)
        for index, (_, who) in enumerate(header["variants"])
        if who
    ]
    return sorted(variants, key=lambda variant: variant[0])


def _reports(_: Header, body: Body) -> list[tuple[dict[str, Json], float]]:
    return [(dict(report), float(seconds)) for report, seconds in json.loads(body)]


def _gone(_: Header, body: Body) -> dict[int, str]:
    return {m: str(how) for who, how in json.loads(body) for m in each(from_ranges(who, MOST_MEMBERS))}


def _dial(address: str, access: Access, timeout_seconds: float) -> socket.socket:
    """A connection from this node's own address, so that the other side recognizes the node."""
    host, port = address.rsplit(":", 1)
    if access.source:
        with contextlib.suppress(_Unbindable):
            return _dial_from(access.source, host, int(port), timeout_seconds)
    sock = socket.create_connection((host, int(port)), timeout=timeout_seconds)
    keep_alive(sock)
    return sock


class _Unbindable(Exception):
    """No connection can start from that address: it is not one of this machine's (behind network address translation),
    or it is a loopback address and the destination is another machine."""


_NO_WAY = (errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENETUNREACH)


def _dial_from(source: str, host: str, port: int, timeout_seconds: float) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_seconds)
        sock.bind((source, 0))
        sock.connect((host, port))
        keep_alive(sock)
    except OSError as error:
        sock.close()
        if error.errno in _NO_WAY or isinstance(error, socket.gaierror):
            raise _Unbindable from None
        raise
    except BaseException:
        sock.close()
        raise
    return sock


def _refused(refusal: Refused, who: str, address: str) -> ClusterError:
    if refusal.kind == "twice":
        return ClusterError(
            f"{who} has joined this job already (rendezvous store at {address}); two processes were started with the "
            "same rank: check that --node_ip differs on every machine, and that no earlier job still runs"
        )
    return ClusterError(f"the rendezvous store at {address} refuses {who}: {refusal}")


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _pauses() -> Iterator[float]:
    pause = 0.02
    while True:
        yield pause
        pause = min(pause * 1.5, 0.5)
