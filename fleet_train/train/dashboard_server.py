"""The process of VisualDL's server: its application, behind a check of the requested host name.

    dashboard_server.py '["127.0.0.1", "localhost"]' --logdir runs --host 127.0.0.1 --port 8040

A web page can make its own name resolve to this machine's address ("DNS rebinding"): the reader's browser then lets
that page read what is served here. Such a request has the page's name in its Host header. A page may also make the
browser send requests here whose answers it cannot read, such as a POST: the browser names where they come from. No
import of fleet_train.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names of other modules (statistics)

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

_MOST_SHOWN = 100
_SILENT_SECONDS = 10.0
_LONGEST_SECONDS = 10.0
"""A connection this old may be closed for a new one."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def name_in(host_header: str) -> str:
    """``LocalHost:8040`` -> ``localhost``, ``[::1]:8040`` -> ``::1``. Tunnels change the port, so it is ignored."""
    text = host_header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0].rstrip(".") if text.count(":") == 1 else text.rstrip(".")


_ADVICE = "start: fleet_train monitor --allowed_host NAME"


class OnlyForNames:
    """A WSGI application that answers 403 to requests for other names, or from other pages, and forwards the rest.

    ``advice``: the command to use if the name belongs to this machine.
    """

    def __init__(self, behind: Application, names: Collection[str], advice: str) -> None:
        self._behind = behind
        self._names = {name.lower() for name in names}
        self._advice = advice

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked = name_in(environ.get("HTTP_HOST", ""))
        if asked not in self._names:
            names = ", ".join(sorted(filter(None, self._names)))
            why = (
                f"{asked[:_MOST_SHOWN]!a} is not a name of this page, which has {names}. If it is a name of this "
                f"machine, {self._advice}"
            )
        elif self._is_from_another_page(environ):
            origin = environ.get("HTTP_ORIGIN", "another site")
            why = f"this request comes from a page of {origin[:_MOST_SHOWN]!a}, which may only link to this one"
        else:
            return self._behind(environ, start_response)
        kind = [("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")]
        start_response("403 Forbidden", kind)
        return [f"fleet_train: {why}\n".encode()]

    def _is_from_another_page(self, environ: dict[str, Any]) -> bool:
        """Whether a browser says that a page of another origin has made this request, and not by a plain link.

        Browsers send Origin with each POST, and Sec-Fetch-Site with all requests; other programs send neither.
        """
        origin = environ.get("HTTP_ORIGIN")
        if origin is not None and not self._is_own(origin, environ.get("HTTP_HOST", "")):
            return True
        is_link = environ.get("REQUEST_METHOD") == "GET" and environ.get("HTTP_SEC_FETCH_MODE") == "navigate"
        return environ.get("HTTP_SEC_FETCH_SITE", "none") not in ("same-origin", "none") and not is_link

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether it is the address of this page, directly or through a proxy with a name that the user allows."""
        try:
            place = urlsplit(origin).netloc
        except ValueError:
            return False
        return place.lower() == host.strip().lower() or name_in(place) in self._names.difference(_LOOPBACK, [""])


class FewConnections(ThreadingMixIn):
    """A mix-in for a socket server: at most `most_connections` at a time, each with a thread that ends with the
    process.

    If there are as many, the oldest is closed for a new one, unless it is younger than 10 s. The handler needs a
    `timeout`: a client may send nothing, or half a request.
    """

    most_connections: int
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._open) >= self.most_connections
            if is_full:
                oldest = min(self._open, key=self._open.__getitem__)
                if time.monotonic() - self._open[oldest] > _LONGEST_SECONDS:
                    _disconnect(oldest)
            else:
                self._open[request] = time.monotonic()
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]

    def handle_error(self, *_: Any) -> None:
        """A client may send nothing or disconnect at any time: no traceback."""

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            for request in self._open:
                _disconnect(request)


def _disconnect(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def serve(application: Application, host: str, port: int) -> None:
    """Answer forever, in a thread per connection, so that a client that is slow delays nobody.

    VisualDL's application is made for one request at a time; only the body of an upload is read beside others.
    """
    from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler

    alone = threading.Lock()

    def in_turn(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return application(environ, start_response)
        with alone:
            return application(environ, start_response)

    class Handler(WSGIRequestHandler):
        timeout = _SILENT_SECONDS

    class Server(FewConnections, BaseWSGIServer):
        most_connections = 64
        multithread = True

    Server(host, port, in_turn, Handler).serve_forever()


def main(names: str, *arguments: str) -> None:
    from visualdl.server import app

    create_app = app.create_app

    def guarded(args: Any) -> Any:
        flask = create_app(args)
        flask.wsgi_app = OnlyForNames(flask.wsgi_app, json.loads(names), _ADVICE)
        flask.run = lambda host, port, **_: serve(flask, host, port)
        return flask

    app.create_app = guarded
    sys.argv = ["visualdl", *arguments]
    app.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
