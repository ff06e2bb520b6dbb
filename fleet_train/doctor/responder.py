"""This node's server: listens on the ports of the job, answers other doctors, and takes part in their measurements."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

from fleet_train.cluster.network import port_is_free
from fleet_train.cluster.store.access import Access, Callers, Refused, accept, challenge
from fleet_train.cluster.store.wire import Header, ProtocolError
from fleet_train.doctor import channel as datagrams
from fleet_train.doctor import channel as streams
from fleet_train.doctor.channel import Channel
from fleet_train.doctor.measure_network import holder

_MOST_CONNECTIONS = 128
_TURN_SECONDS = 3.0
"""How long a stream waits for the running one."""
_MOST_STREAM_SECONDS = 5.0


class Responder:
    """``held``: ports that could not be opened, and their processes. ``callers``: nodes that have reached this one."""

    def __init__(
        self, address: str, ports: Iterable[int], access: Access, hosts: Iterable[str], state: ReplicatedState,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.state = state
        self.held: dict[int, str] = {}
        self.callers: set[int] = set()
        self._turn = threading.Lock()
        self.clock = clock
        self.nonce = nonce_of(access)
        self._access = access
        self._callers = None if access.secret else Callers(hosts)
        self._selector = selectors.DefaultSelector()
        self._connections = 0
        self._is_closing = False
        self._listeners: dict[int, socket.socket] = {}
        try:
            for port in ports:
                self._listen_or_note(address, port)
            self.extra_port = self._listen(address, 0)
            self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._udp.bind((address, 0))
            self._udp.setblocking(False)
        except BaseException:
            self.close()
            raise
        self.udp_port = int(self._udp.getsockname()[1])
        self._selector.register(self._udp, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="doctor responder", daemon=True)

    @property
    def ports(self) -> list[int]:
        """Those of the job that are open here."""
        return [port for port in self._listeners if port != self.extra_port]

    def start(self) -> Responder:
        self._thread.start()
        return self

    def close(self) -> None:
        self._is_closing = True
        if hasattr(self, "_thread") and self._thread.is_alive():
            self._thread.join(1.0)
        for sock in [*self._listeners.values(), *([self._udp] if hasattr(self, "_udp") else [])]:
            sock.close()
        self._selector.close()

    def _listen_or_note(self, address: str, port: int) -> None:
        try:
            if not port_is_free(address, port):  # also a port that would refuse only a second listener
                raise OSError
            self._listen(address, port)
        except OSError:
            self.held[port] = holder(address, port)

    def _listen(self, address: str, port: int) -> int:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(64)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        number = int(sock.getsockname()[1])
        self._listeners[number] = sock
        self._selector.register(sock, selectors.EVENT_READ)
        return number

    def _serve(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._udp:
                    datagrams.answer_datagrams(self._udp, self.nonce)
                else:
                    self._accept(key.fileobj)  # type: ignore[arg-type]

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, (address, _) = listener.accept()
        except OSError:
            return
        if self._connections >= _MOST_CONNECTIONS:
            sock.close()
            return
        self._connections += 1
        threading.Thread(target=self._attend, args=(sock, address), name="doctor caller", daemon=True).start()

    def _attend(self, sock: socket.socket, address: str) -> None:
        channel = Channel(sock)
        try:
            node = self._greet(channel, address)
            self.callers.add(node)
            channel.trust()
            while True:
                self._answer(channel, *channel.hear(), address)
        except Exception:
            pass  # the caller has gone, or does not belong to this job, whatever it has sent
        finally:
            channel.close()
            self._connections -= 1

    def _greet(self, channel: Channel, address: str) -> int:
        asked = challenge(self._access)
        try:
            channel.say(asked)
            hello, _ = channel.hear()
            proof = accept(self._access, asked, hello)
            if self._callers is not None and not self._callers.hears(address):
                raise Refused("another address", kind="address")
        except Refused as refusal:
            channel.say({"error": refusal.kind, "address": address, "job": self._access.job})
            raise
        channel.say({"ok": True, "proof": proof})
        return int(hello.get("member", -1))

    def _answer(self, channel: Channel, header: Header, body: object, address: str) -> None:
        match header.get("do"):
            case "who":
                channel.say({"seen_as": address})
            case "ping":
                channel.say({"clock": self.clock()})
            case "sync":
                self._sync(channel, body)
            case "stream to you":
                with self.my_turn() as alone:
                    channel.say({"ready": alone})
                    received = streams.receive_stream(channel.sock, _seconds(header))
                channel.say({"speed": received.mean, "best": received.best})
            case "stream to me":
                with self.my_turn() as alone:
                    channel.ask({"ready": alone})  # unframed bytes follow: the caller must be ready for them
                    sent = streams.send_stream(channel.sock, _seconds(header))
                channel.say({"segments": sent.segments, "retransmits": sent.retransmits})
            case other:
                raise ProtocolError(f"{other!r} is unknown")

    def _sync(self, channel: Channel, body: object) -> None:
        """Send the values that the caller lacks, and receive those that we lack."""
        if not isinstance(body, list):
            raise ProtocolError("no list of keys")
        channel.say({"do": "told"}, {"keys": self.state.keys(), "values": self.state.beyond(map(str, body))})
        _, told = channel.hear()
        if not isinstance(told, dict):
            raise ProtocolError("no values")
        self.state.take(told)
        channel.say({"ok": True})

    @contextlib.contextmanager
    def my_turn(self) -> Iterator[bool]:
        """Held during a transfer, so that one stream does not slow another down. False: the wait was too long."""
        alone = self._turn.acquire(timeout=_TURN_SECONDS)
        try:
            yield alone
        finally:
            if alone:
                self._turn.release()


def _seconds(header: Header) -> float:
    value = header.get("seconds")
    if not isinstance(value, (int, float)) or not 0 < value <= _MOST_STREAM_SECONDS:
        raise ProtocolError("no number of seconds")
    return float(value)


def nonce_of(access: Access) -> bytes:
    """The prefix of this job's datagrams."""
    return sha256(access.job.encode()).digest()[:8]


# State replicated to all nodes: values that never change, under keys such as ``report/2``.


MOST_KEYS = 4096


class ReplicatedState:
    """This node's copy. Two connected nodes send each other the values that the other one lacks."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._values: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self.take({key: value})

    def take(self, told: dict[str, Any]) -> None:
        """Values from another node; the first value of a key counts."""
        with self._lock:
            for key, value in told.items():
                if len(self._values) < MOST_KEYS:
                    self._values.setdefault(str(key)[:100], value)
            self._lock.notify_all()

    def get(self, key: str) -> Any:
        """None: there is no value yet."""
        with self._lock:
            return self._values.get(key)

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._values)

    def beyond(self, known: Iterable[str]) -> dict[str, Any]:
        """The values that a node with these keys lacks."""
        with self._lock:
            known = set(known)
            return {key: value for key, value in self._values.items() if key not in known}

    def nodes(self, kind: str) -> set[int]:
        """The nodes with a value of this kind (``report`` for ``report/2``)."""
        names = (key.partition("/") for key in self.keys())
        return {int(number) for name, _, number in names if name == kind and number.isdigit()}

    def wait(self, seconds: float) -> None:
        """Wait until a value arrives, at most this long."""
        with self._lock:
            self._lock.wait(seconds)
