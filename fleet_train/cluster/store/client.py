"""The rendezvous store's client: one member's connection, with bounded waits and errors that carry names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from fleet_train import timeouts
from fleet_train.cluster.network import connect_from
from fleet_train.cluster.store.access import Access, Caller, Refused
from fleet_train.cluster.store.reports import Describe, Messages, with_absent
from fleet_train.cluster.store.wire import (
    MOST_BODY_BYTES,
    Body,
    Decoder,
    Header,
    Json,
    ProtocolError,
    all_members,
    each_member,
    encode,
    first_member,
    from_ranges,
    keep_alive,
    pack,
    pack_times,
    parse,
    to_json,
    to_ranges,
    unpack,
)
from fleet_train.errors import ClusterError, JoinTimeout, WorkerFailed

_CHUNK_BYTES = 1 << 18
# How many values are shown of those that differ.
_MOST_SHOWN = 4
JOINED = "joined"
"""Rank 0 sets it in the store once all ranks have joined."""
ROUND = "round"
"""The namespace of a launched job's present attempt, in the one without a name."""

_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def close_after_fork(thing: Any) -> None:
    """Call ``close_in_child`` of an object in each child that this process forks, and that inherits it."""
    _inherited.add(thing)


os.register_at_fork(after_in_child=lambda: [thing.close_in_child() for thing in list(_inherited)])

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
    """Why the member asks all members to stop; None if it does not."""
    gradients: int | None = None
    """A digest of the member's own gradients, in a program's first steps."""


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
    """One member's connection to the store. Calls from several threads are serialized; a waiting call blocks others.

    Once the server has not answered in time, the connection is closed (`broken`).
    """

    def __init__(
        self,
        sock: socket.socket,
        endpoint: str,
        member: int,
        group: str,
        describe: Describe,
        answer_seconds: float = timeouts.STORE_ANSWER_SECONDS,
    ) -> None:
        self.endpoint = endpoint
        """The store's endpoint with the namespace: what another connection to the same store is given."""
        self.member = member
        self.group = group
        self._sock = sock
        self._decoder = Decoder(most_bytes=1 << 31)
        self._lock = threading.Lock()
        self._messages = Messages(endpoint.partition("/")[0], group, describe)
        self._describe = describe
        self._answer_seconds = answer_seconds
        self._is_in_child = False
        self.broken = ""
        """Why the server has not answered; every further call raises WorkerFailed with it."""
        self._reports: list[tuple[dict[str, Json], float]] = []
        self._times = [0.0, 0.0, 0.0]
        """Sums of this member's notes so far: steps, milliseconds of own work, milliseconds at barriers."""
        close_after_fork(self)

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
        answer_seconds: float = timeouts.STORE_ANSWER_SECONDS,
        dial_seconds: float = timeouts.STORE_DIAL_SECONDS,
        access: Access | None = None,
    ) -> StoreClient:
        """Connect, retrying for ``timeout_seconds`` until the server listens (0: one try). ``endpoint`` is
        ``host:port``, or ``host:port/namespace``.

        A *watched* connection represents the member: if it breaks without ``leave()``, the member counts as lost; if
        it sends nothing for ``silence_seconds``, so do all members on the same ``machine``, in every round.
        ``answer_seconds`` is how long the server may take for an answer that needs no waiting, ``dial_seconds`` for
        accepting the connection.
        Raises JoinTimeout if no server listens within the time, ClusterError if the member is already connected or
        the server belongs to another job, has another secret, or does not accept this address.
        """
        address, _, namespace = endpoint.partition("/")
        describe = describe or (lambda i: f"{group} {i}")
        identity: Header = {"namespace": namespace, "group": group, "member": member, "watched": watched}
        identity |= {"machine": machine, "silence": silence_seconds}
        try:
            sock = dial(address, access or Access(), identity, timeout_seconds, answer_seconds, dial_seconds)
        except (OSError, Refused) as error:
            if isinstance(error, Refused) and not error.is_temporary:
                raise _refused(error, describe(member), address) from None
            raise JoinTimeout(
                f"nobody answers at {address}, where the rendezvous store of this job should be, within "
                f"{timeout_seconds:g} s ({error}); start the job on the first node, and check that the node "
                "list is the same everywhere and that the port can be reached"
            ) from error
        return cls(sock, endpoint, member, group, describe, answer_seconds)

    # barriers

    def barrier(
        self, name: str, note: StepNote | None, count: int, timeout_seconds: float, call: str = ""
    ) -> StepAnswer:
        """Wait until members 0 .. count-1 of this group reach the barrier of this name; raises as ``all_gather``."""
        header: Header = {}
        times = self._times
        if note is not None:
            header["slowest"] = note.busy_ms / note.steps if note.steps else None
            header["stop"] = None if note.stop is None else [self.member, note.stop]
            if note.gradients is not None:
                header["digest"] = note.gradients
            times = [times[0] + note.steps, times[1] + note.busy_ms, times[2] + note.wait_ms]
        body = pack_times(self.member, times) if any(times) else b""
        answer = self._meet("barrier", name, header, body, count, timeout_seconds, call, _step_answer)
        self._times = times
        return answer

    def all_gather(self, name: str, value: Json, count: int, timeout_seconds: float, call: str = "") -> dict[int, Json]:
        """Wait until members 0 .. count-1 of this group have called with this name; every member gets all values.

        ``value``: anything that JSON can hold, at most 64 MB.
        ``call``: the call in the member's script, for messages; empty for a step of training.
        Raises JoinTimeout with the members that did not arrive; WorkerFailed with a member that died, left, or
        reported a failure; ScheduleMismatch if the members do not agree on ``count``. The first two give in ``absent``
        the members that caused the error, and what they did.
        """

        def read(values: list[tuple[int, Body]]) -> dict[int, Json]:
            by_member = _by_member(values)
            return {member: by_member[member] for member in range(count)}

        return self._gather("all_gather", name, to_json(value), count, timeout_seconds, call, read)

    def broadcast(
        self, name: str, value: Json, source: int, count: int, timeout_seconds: float, call: str = ""
    ) -> Json:
        """Give every member the value of ``source``; other values are not sent. Waits as ``all_gather`` does."""
        own = to_json(value) if self.member == source else b""
        named = f"{name} from {source}"  # whoever means another source waits elsewhere, and is named
        return self._gather(
            "all_gather", named, own, count, timeout_seconds, call, lambda values: _by_member(values)[source]
        )

    def compare(self, name: str, value: Json, count: int, timeout_seconds: float, call: str = "") -> Variants:
        """Compare the values of all members, waiting as ``all_gather`` does: returns an empty list if they are equal.

        Else ``(ranges of members, their value)`` for each value, the one of the lowest member first; ``None`` is used
        for the values beyond the first four. Hashes are gathered, and values only if these differ.
        """

        def masks(values: list[tuple[int, Body]]) -> list[int]:
            if sum(mask for mask, _ in values) != all_members(count):
                raise ValueError("not of every member")
            return sorted((mask for mask, _ in values), key=first_member)

        own = to_json(value)
        variants = self._gather("compare", name, hashlib.sha256(own).digest(), count, timeout_seconds, call, masks)
        if len(variants) == 1:
            return []
        firsts = [first_member(mask) for mask in variants]
        own = own if self.member in firsts[:_MOST_SHOWN] else b""
        shown = self._gather("compare", f"{name}: values", own, count, timeout_seconds, call, _by_member)
        return [(to_ranges(mask), shown.get(first)) for mask, first in zip(variants, firsts, strict=True)]

    def _gather(
        self,
        kind: str,
        name: str,
        own: Body,
        count: int,
        timeout_seconds: float,
        call: str,
        read: Callable[[list[tuple[int, Body]]], T],
    ) -> T:
        """What ``read`` makes of the members' values; an empty value is not sent."""
        body = pack({own: 1 << self.member}) if own else b""
        return self._meet(kind, name, {}, body, count, timeout_seconds, call, lambda _, answer: read(unpack(answer)))

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
        header = {"do": kind, "name": name, "count": count, "timeout": timeout_seconds, **header}
        if call:
            header["calls"] = [[call, [[self.member, self.member]]]]
        where = call or name
        try:
            return self._call(header, body, read, where, timeout_seconds)
        except JoinTimeout as error:
            on_all = self._messages.on_all(call)
            timeout = JoinTimeout(f"{where}: {error} within {timeout_seconds:g} s{on_all}")
            raise with_absent(timeout, error.absent, f" at {where} within {timeout_seconds:g} s") from None
        except WorkerFailed as error:
            # A report that is passed on, and a member that left, name their places.
            names_it = not error.absent or where in str(error)
            lost = error if names_it else WorkerFailed(f"{where}: {error}")
            raise with_absent(lost, error.absent, f" while others waited for it at {where}") from None

    # calls that do not wait for other members

    def set(self, key: str, value: Json) -> None:
        self._ask("set", _as_it_is, to_json(value), key=key)

    def get(self, key: str) -> Json:
        """The value of ``key``, or None."""
        return self._ask("get", _as_it_is, key=key)

    def keys(self, prefix: str) -> list[str]:
        """The keys with this prefix that have a value."""
        return self._ask("keys", lambda answer: list(map(str, answer)), prefix=prefix)

    def times(self, number: int) -> dict[int, list[float]]:
        """The sums of all members' reports up to the step barrier of that number, by member: steps, milliseconds of
        own work, milliseconds at barriers."""
        return self._ask("times", lambda answer: dict(answer), group=self.group, number=number)

    def fail(self, report: dict[str, Json]) -> None:
        """Publish why this job has failed. The first report counts; every waiting member receives it."""
        self._ask("fail", _as_it_is, to_json(report))

    def failure(self) -> dict[str, Json] | None:
        """The first failure that a member reported, or None."""
        reports = self.failures()
        return reports[0][0] if reports else None

    def failures(self) -> list[tuple[dict[str, Json], float]]:
        """Every reported failure and its time, in the seconds of ``clock``; the first one first."""
        self._reports += self._ask("failures", _reports, known=len(self._reports))
        return list(self._reports)

    def clock(self) -> float:
        """Seconds since the server created this round: one clock for all machines."""
        return self._ask("clock", float)

    def gone(self, group: str | None = None) -> dict[int, str]:
        """Members that were connected and are no longer: member -> ``left`` or how it was lost."""
        return self._ask("gone", _gone, group=group or self.group)

    def beat(self) -> None:
        """Heartbeat: resets the server's ``silence_seconds``. Raises WorkerFailed if the server does not answer."""
        self._ask("beat", _as_it_is)

    def ended(self, group: str, member: int) -> None:
        """Report that a member's process ended with 0: if it has not connected, the others need not wait for it."""
        self._ask("ended", _as_it_is, group=group, member=member)

    def leave(self) -> None:
        """Disconnect properly: from now on this member counts as finished, not as lost."""
        self._ask("leave", _as_it_is)

    def _ask(self, do: str, read: Callable[[Json], T], body: Body = b"", **fields: Json) -> T:
        """What ``read`` makes of the answer's JSON."""
        return self._call(
            {"do": do, **fields},
            body,
            lambda _, answer: read(json.loads(answer) if answer else None),
            fields.get("key"),
        )

    # the connection

    def close_in_child(self) -> None:
        """Close the connection in a process that was forked from ours, without a message to the server.

        While a child holds it too, the server does not notice our death. No lock is taken: a thread of the parent may
        have held it.
        """
        self._is_in_child = True
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _call(self, header: Header, body: Body, read: Read[T], name: str | None, patience_seconds: float = 0.0) -> T:
        if self._is_in_child:
            raise ClusterError(
                f"process {os.getpid()} was forked from {self._describe(self.member)} and has no place in the job: "
                "call fleet only in the process that called fleet.init"
            )
        if len(body) > MOST_BODY_BYTES:
            raise ClusterError(
                f"{name}: the value has {len(body)} bytes as JSON; the rendezvous store takes "
                f"{MOST_BODY_BYTES >> 20} MB; send arrays with fleet.all_reduce"
            )
        with self._lock:
            if self.broken:
                raise WorkerFailed(self._messages.lost_server(self.broken))
            try:
                self._sock.settimeout(patience_seconds + self._answer_seconds)
                self._sock.sendall(encode(header, body))
                answer, body = _receive(self._sock, self._decoder)
            except (OSError, ValueError, ProtocolError) as error:
                self.broken = str(error)
                self.close()  # an answer that comes late would be taken for that of the next call
                raise WorkerFailed(self._messages.lost_server(self.broken)) from error
        try:
            if "error" not in answer:
                return read(answer, body)
            refusal = self._messages.error(answer, body)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, ProtocolError) as nonsense:
            raise WorkerFailed(self._messages.lost_server(f"its answer is invalid: {nonsense!r}"[:200])) from None
        raise refusal


def dial(
    address: str,
    access: Access,
    identity: Header,
    timeout_seconds: float,
    answer_seconds: float = timeouts.STORE_ANSWER_SECONDS,
    dial_seconds: float = timeouts.STORE_DIAL_SECONDS,
) -> socket.socket:
    """A connection that the server at ``host:port`` has accepted, of a member or a relay with this ``identity``.

    Tries for ``timeout_seconds`` until the server listens and has what is asked for (0: one try). Raises Refused, or
    OSError, with the reason of the last attempt.
    """
    deadline = time.monotonic() + timeout_seconds
    pause, longest_pause = timeouts.STORE_RETRY_SECONDS
    host, port = address.rsplit(":", 1)
    while True:
        try:
            left = deadline - time.monotonic() if timeout_seconds else dial_seconds
            sock = connect_from(access.source, host, int(port), max(0.1, min(dial_seconds, left)))
            return _greeted(sock, Caller(access, identity), answer_seconds)
        except (OSError, Refused) as error:
            is_final = isinstance(error, Refused) and not error.is_temporary
            if is_final or time.monotonic() + pause >= deadline:
                raise
            time.sleep(pause)
            pause = min(pause * 1.5, longest_pause)


def job_at(address: str, access: Access) -> tuple[str, Access]:
    """(the endpoint, with its namespace, of the job whose store is at ``host:port``; ``access`` with its id).

    Raises ClusterError if nobody answers there, or another secret is needed.
    """
    identity: Header = {"namespace": "", "group": "visitor", "member": 0, "watched": False, "silence": None}
    try:
        dial(address, access, {**identity, "machine": ""}, 0.0).close()
    except Refused as refusal:
        if refusal.kind != "job":
            raise ClusterError(f"the rendezvous store at {address} refuses this process: {refusal}") from None
        access = replace(access, job=refusal.job)
    except OSError as error:
        raise ClusterError(f"no job answers at {address} ({error})") from None
    client = StoreClient.connect(address, 0, group="visitor", timeout_seconds=0, watched=False, access=access)
    try:
        name = str(client.get(ROUND) or "")
    finally:
        client.close()
    return (name if "/" in name else f"{address}/{name}".rstrip("/")), access


def _greeted(sock: socket.socket, caller: Caller, answer_seconds: float) -> socket.socket:
    decoder = Decoder()
    try:
        keep_alive(sock)
        sock.settimeout(answer_seconds)
        while (word := caller.heard(_receive(sock, decoder)[0])) is not None:
            sock.sendall(encode(word))
        return sock
    except ProtocolError as error:
        sock.close()
        raise OSError(f"the server there is not a rendezvous store of this version: {error}") from None
    except BaseException:
        sock.close()
        raise


def _receive(sock: socket.socket, decoder: Decoder) -> tuple[Header, Body]:
    """The next frame. Raises OSError, ProtocolError."""
    while True:
        data = sock.recv(_CHUNK_BYTES)
        if not data:
            raise OSError("the connection was closed")
        for header, body in decoder.feed(data):
            return parse(header), body


def _as_it_is(value: Json) -> Json:
    return value


def _by_member(values: list[tuple[int, Body]]) -> dict[int, Json]:
    return {member: json.loads(value) for mask, value in values for member in each_member(mask)}


def _step_answer(header: Header, _: Body) -> StepAnswer:
    slowest, stop = header.get("slowest"), header.get("stop")
    asked = None if stop is None else (int(stop[0]), str(stop[1]))
    same = header.get("digest") is not None
    return StepAnswer(None if slowest is None else float(slowest), asked, int(header["number"]), same)


def _reports(answer: Json) -> list[tuple[dict[str, Json], float]]:
    return [(dict(report), float(seconds)) for report, seconds in answer]


def _gone(answer: Json) -> dict[int, str]:
    return {member: str(how) for who, how in answer for member in each_member(from_ranges(who))}


def _refused(refusal: Refused, who: str, address: str) -> ClusterError:
    if refusal.kind == "twice":
        return ClusterError(
            f"{who} has joined this job already (rendezvous store at {address}); two processes were started with the "
            "same rank: check that --node_ip differs on every machine, and that no earlier job still runs"
        )
    return ClusterError(f"the rendezvous store at {address} refuses {who}: {refusal}")
