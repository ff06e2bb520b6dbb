"""A small HTTP server for one page of text: few connections at a time, each bounded, nothing left when it is closed."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from fleet_train.cluster.network import is_loopback, port_owner
from fleet_train.errors import ClusterError
from fleet_train.train.dashboard_server import name_in

_MOST_CONNECTIONS = 4
_SILENT_SECONDS = 5.0
_LONGEST_SECONDS = 10.0
"""A connection that has lasted so long makes room for another one."""
_POLL_SECONDS = 0.1
PATH = "/metrics"


class MetricsServer:
    """Serves `page()` at /metrics, from a thread of its own, until `close`. ClusterError where it cannot listen."""

    def __init__(self, host: str, port: int, page: Callable[[], str], content_type: str) -> None:
        class Handler(_Handler):
            make, kind, names = staticmethod(page), content_type, _names_of(host)

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ClusterError(_why_not(host, port, error)) from None
        self.port = int(self._server.server_address[1])
        self.address = f"http://{host}:{self.port}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="fleet_train metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Bounded; a second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.end_connections()


def _names_of(host: str) -> frozenset[str] | None:
    """By which it may be asked for. A server that only this machine reaches answers no page of the internet that has
    given its own name this machine's address, and so reads with the browser of somebody here."""
    return frozenset({"", host, "localhost", "127.0.0.1"}) if is_loopback(host) else None


def _why_not(host: str, port: int, error: Exception) -> str:
    where = f"--prometheus_port {port} on {host}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use by {port_owner(port, host)}; choose another --prometheus_port"
    return (
        f"{where}: cannot listen there ({getattr(error, 'strerror', None) or error}); --prometheus_host takes an "
        "address of rank 0's machine, or 0.0.0.0 for all"
    )


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, tuple[float, threading.Thread]] = {}
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                self._end_oldest()
                self.shutdown_request(request)
                return
            thread = threading.Thread(
                target=self._serve, args=(request, client_address), name="fleet_train metrics request", daemon=True
            )
            self._open[request] = time.monotonic(), thread
            thread.start()

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            with contextlib.suppress(OSError):  # who asks may go away at any time
                self.finish_request(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def _end_oldest(self) -> None:
        oldest = min(self._open, key=lambda each: self._open[each][0])
        if time.monotonic() - self._open[oldest][0] > _LONGEST_SECONDS:
            _hang_up(oldest)

    def end_connections(self) -> None:
        with self._lock:
            there = [(request, thread) for request, (_, thread) in self._open.items()]
        for request, thread in there:
            _hang_up(request)
            thread.join(_SILENT_SECONDS)


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request per connection (HTTP/1.0)."""

    make: Callable[[], str]
    kind: str
    names: frozenset[str] | None
    timeout = _SILENT_SECONDS
    server_version, sys_version = "fleet_train", ""

    def do_GET(self) -> None:
        if self.names is not None and name_in(self.headers.get("Host", "")) not in self.names:
            self._answer(403, "this is no name of the page; ask for localhost or its address\n")
        elif self.path.partition("?")[0] != PATH:
            self._answer(404, f"the metrics are at {PATH}\n")
        else:
            self._answer(200, self.make(), self.kind)

    do_HEAD = do_GET

    def _answer(self, code: int, content: str, kind: str = "text/plain; charset=utf-8") -> None:
        data = content.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal of a training."""
