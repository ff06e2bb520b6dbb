"""The HTTP server of one registry of Prometheus metrics; closing it removes everything."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric as Family

from fleet_train.cluster.network import is_loopback, port_owner
from fleet_train.errors import ClusterError
from fleet_train.train.monitor.dashboard_server import FewConnections, OnlyForNames

_SILENT_SECONDS = 5.0
_POLL_SECONDS = 0.1
PATH = "/metrics"


class MetricsServer:
    """Serves the result of `collect()` at /metrics, from its own thread, until `close`. Raises ClusterError if it
    cannot listen.
    """

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Family]]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(collect))
        try:
            self._server = make_server(host, port, _application(registry, host), _Server, _Handler)
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


class _Collector:
    """The collector of a registry: an object with a method `collect`."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self.collect = collect


def _application(registry: CollectorRegistry, host: str) -> Callable[..., Iterable[bytes]]:
    """A server for this machine only does not answer a web page whose name resolves to this machine's address (DNS
    rebinding) and which so reads through a local browser."""
    only_metrics = _OnlyMetrics(make_wsgi_app(registry))
    if not is_loopback(host):
        return only_metrics
    return OnlyForNames(only_metrics, {"", host, "localhost", "127.0.0.1"}, "name it: --prometheus_host NAME")


class _OnlyMetrics:
    """404 for other paths: the client's application answers at all of them."""

    def __init__(self, behind: Callable[..., Iterable[bytes]]) -> None:
        self._behind = behind

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == PATH:
            return self._behind(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"the metrics are at {PATH}\n".encode()]


def _why_not(host: str, port: int, error: Exception) -> str:
    where = f"--prometheus_port {port} on {host}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use by {port_owner(port, host)}; choose another --prometheus_port"
    return (
        f"{where}: cannot listen there ({getattr(error, 'strerror', None) or error}); --prometheus_host takes an "
        "address of rank 0's machine, or 0.0.0.0 for all"
    )


class _Server(FewConnections, WSGIServer):
    """Four connections at a time: any client that reaches the port may connect."""

    most_connections = 4

    def server_bind(self) -> None:
        """Without the standard library's name look-up, which takes long if DNS does not answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, *_: Any) -> None:
        """Prints nothing on the terminal of a training."""
