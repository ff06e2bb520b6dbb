"""How processes of horovodrun find process 0, over a server that keeps values as horovodrun's does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleet_train.cluster import engines, horovod
from fleet_train.cluster.engines import MeetingPoint, detect, locate
from fleet_train.errors import ClusterError, JoinTimeout
from tests.support.ports import free_ports


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """That of process 1 of 2. The server answers as ``horovod/runner/http/http_server.py``."""
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

        def do_DELETE(self) -> None:
            raise AssertionError

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {
            "HOROVOD_RANK": "1",
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "1",
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        }
        server.shutdown()


def place(environ: dict[str, str], rank: int, seconds: float = 30.0) -> MeetingPoint:
    environ = environ | {"HOROVOD_RANK": str(rank)}
    started = detect(environ)
    assert started is not None
    assert started.in_words() == f"started by horovodrun: process {rank} of 2"
    return locate(started, environ, seconds)


def test_all_processes_meet_at_process_0_whoever_comes_first(environ: dict[str, str]) -> None:
    found: list[MeetingPoint] = []
    early = threading.Thread(target=lambda: found.append(place(environ, 1)))
    early.start()
    first = place(environ, 0)
    early.join()
    assert found == [first]
    assert first.master == "127.0.0.1"
    assert len(first.secret) == 32


def test_who_waits_for_process_0_in_vain_says_so(environ: dict[str, str]) -> None:
    with pytest.raises(JoinTimeout, match=r"not all 2 processes that horovodrun started arrived within 0\.2 s"):
        place(environ, 1, 0.2)


def test_without_its_server_the_place_can_be_named(environ: dict[str, str]) -> None:
    gone = environ | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_ports(1))}
    with pytest.raises(ClusterError, match=r"does not answer .*; name rank 0's node: FLEET_TRAIN_MASTER=host:6170"):
        place(gone, 1)
    del gone["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    with pytest.raises(ClusterError, match=r"without HOROVOD_GLOO_RENDEZVOUS_ADDR and .*_PORT.*; name rank 0's node"):
        place(gone, 1)
    assert place(gone | {engines.MASTER: "127.0.0.1:6180"}, 1) == MeetingPoint("127.0.0.1", 6180)


def test_a_server_that_answers_otherwise_is_not_believed(environ: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod, "_PLACE", "/nothing/has/this")
        with pytest.raises(ClusterError, match="does not answer"):
            place(environ, 0)
