"""What horovodrun gives its processes: their variables, and the server that keeps values for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def place_of(rank: int, ranks: int) -> dict[str, str]:
    """The variables of one of so many processes on this machine."""
    of_host = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {f"HOROVOD_{name}": str(value) for name, value in of_host.items()}


@contextmanager
def horovodruns_server() -> Iterator[dict[str, str]]:
    """A server that answers as Horovod's ``horovod/runner/http/http_server.py``; the variables that say where it is."""
    values: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, value: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(value)))
            self.end_headers()
            self.wfile.write(value)

        def do_GET(self) -> None:
            _, scope, key = self.path.split("/")
            found = values.get(f"{scope}/{key}")
            self.answer(404) if found is None else self.answer(200, found)

        def do_PUT(self) -> None:
            _, scope, key = self.path.split("/")
            values[f"{scope}/{key}"] = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        }
        server.shutdown()
