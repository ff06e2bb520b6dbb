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

from fleet_train import timeouts
from fleet_train.cluster.network import port_is_free, port_owner
from fleet_train.cluster.store.access import Access, Callers, Refused, accept, challenge
from fleet_train.cluster.store.wire import Header, ProtocolError
from fleet_train.doctor.channel import Channel, answer_datagrams, is_number

_MOST_CONNECTIONS = 128
MOST_KEYS = 4096


class Responder:
    """``held``: ports that could not be opened, and their processes. ``callers``: nodes that have reached this one."""

    def __init__(
        self, address: str, ports: Iterable[int], access: Access, hosts: Iterable[str], state: ReplicatedState,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.state = state
        self.clock = clock
        self.nonce = sha256(access.job.encode()).digest()[:8]  # the prefix of this job's datagrams
        self.callers: set[int] = set()
        self._turn = threading.Lock()
        self._access = access
        self._callers = None if access.secret else Callers(hosts)
        self._connections = 0
        self._is_closing = False
        ports = list(ports)
        self.held = held_ports(address, ports)
        self._listeners: dict[int, socket.socket] = {}
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._thread = threading.Thread(target=self._serve, name="doctor responder", daemon=True)
        try:
            for port in (*(port for port in ports if port not in self.held), 0):
                listener = socket.create_server((address, port), backlog=64)
                self._listeners[int(listener.getsockname()[1])] = listener
            self._udp.bind((address, 0))
            for sock in (*self._listeners.values(), self._udp):
                sock.setblocking(False)
        except BaseException:
            self.close()
            raise
        self.extra_port = list(self._listeners)[-1]
        self.udp_port = int(self._udp.getsockname()[1])

    @property
    def ports(self) -> list[int]:
        """Those of the job that are open here."""
        return [port for port in self._listeners if port != self.extra_port]

    def start(self) -> Responder:
        self._thread.start()
        return self

    def close(self) -> None:
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join(timeouts.DOCTOR_CLOSE_SECONDS)
        for sock in (*self._listeners.values(), self._udp):
            sock.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in (*self._listeners.values(), self._udp):
                selector.register(sock, selectors.EVENT_READ)
            while not self._is_closing:
                for key, _ in selector.select(timeouts.DOCTOR_SELECT_SECONDS):
                    if key.fileobj is self._udp:
                        answer_datagrams(self._udp, self.nonce)
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
                self._answer(channel, *channel.receive(), address)
        except Exception:
            pass  # the caller has gone, or does not belong to this job, whatever it has sent
        finally:
            channel.close()
            self._connections -= 1

    def _greet(self, channel: Channel, address: str) -> int:
        question = challenge(self._access)
        try:
            channel.send(question)
            hello, _ = channel.receive()
            proof = accept(self._access, question, hello)
            if self._callers is not None and not self._callers.hears(address):
                raise Refused("another address", kind="address")
        except Refused as refusal:
            channel.send({"error": refusal.kind, "address": address, "job": self._access.job})
            raise
        channel.send({"ok": True, "proof": proof})
        return int(hello.get("member", -1))

    def _answer(self, channel: Channel, header: Header, body: object, address: str) -> None:
        match header.get("do"):
            case "who":
                channel.send({"seen_as": address})
            case "ping":
                channel.send({"clock": self.clock()})
            case "sync":
                self._sync(channel, body)
            case "transfer":
                seconds = header.get("seconds")
                if not is_number(seconds) or not 0 < seconds <= timeouts.DOCTOR_MOST_TRANSFER_SECONDS:
                    raise ProtocolError("no number of seconds")
                with self.my_turn() as alone:
                    channel.send({"ready": alone})
                    channel.transfer(header.get("sends") is not True, seconds)
            case other:
                raise ProtocolError(f"{other!r} is unknown")

    def _sync(self, channel: Channel, body: object) -> None:
        """Send the values that the caller lacks, and receive those that we lack."""
        if not isinstance(body, list):
            raise ProtocolError("no list of keys")
        channel.send({"do": "values"}, {"keys": self.state.keys(), "values": self.state.beyond(map(str, body))})
        _, values = channel.receive()
        if not isinstance(values, dict):
            raise ProtocolError("no values")
        self.state.add(values)
        channel.send({"ok": True})

    @contextlib.contextmanager
    def my_turn(self) -> Iterator[bool]:
        """Held during a transfer, so that one stream does not slow another down. False: the wait was too long."""
        alone = self._turn.acquire(timeout=timeouts.DOCTOR_TURN_SECONDS)
        try:
            yield alone
        finally:
            if alone:
                self._turn.release()


def held_ports(address: str, ports: Iterable[int]) -> dict[int, str]:
    """Those that cannot be opened, or would refuse only a second listener, and their processes."""
    return {port: str(port_owner(port, address)) for port in ports if not port_is_free(address, port)}


class ReplicatedState:
    """State of all nodes: values that never change, under keys such as ``report/2``. Two connected nodes send each
    other the values that the other one lacks."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._values: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self.add({key: value})

    def add(self, values: dict[str, Any]) -> None:
        """Values from another node; the first value of a key counts."""
        with self._lock:
            for key, value in values.items():
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
