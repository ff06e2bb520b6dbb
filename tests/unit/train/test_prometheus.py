"""What Prometheus is given; and what the page of curves answers: by a bounded server, to this machine's names alone."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from socketserver import StreamRequestHandler, TCPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from fleet_train.errors import ClusterError, WorkerFailed
from fleet_train.train import dashboard_server
from fleet_train.train.dashboard import names_of
from fleet_train.train.dashboard_server import FewConnections, OnlyForNames, name_in
from fleet_train.train.prometheus_sink import PrometheusSink, Snapshot, families
from tests.support.processes import until


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    with closing(PrometheusSink(0)) as made:
        yield made


def get(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE_PLAIN_0_0_4
        return str(answer.read().decode())


def text(snapshot: Snapshot) -> str:
    """The page, from a registry that collects as the server's does."""
    return generate_latest(SimpleNamespace(collect=lambda: families(snapshot))).decode()


def values(page: str) -> dict[str, float]:
    """Sample -> value."""
    samples = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_users_own_curves_whose_names_become_equal_are_told_apart_and_no_numbers_are_shown() -> None:
    curves = {"my/x": 1.0, "my.x": 2.0, "loss": 3.0, "own/loss": 4.0, "train/loss": 5.0, "steps": 6.0, "a\ud800": 7.0}
    curves |= {"test/loss": float("inf"), "my/own-curve": -float("inf")}
    page = text(Snapshot(step=9, curves=curves))
    shown = values(page)
    del shown["fleet_train_last_record_timestamp_seconds"]
    assert shown == {
        "fleet_train_info": 1.0,
        "fleet_train_steps_total": 9.0,
        'fleet_train_my_x{curve="my/x"}': 1.0,
        'fleet_train_my_x{curve="my.x"}': 2.0,
        'fleet_train_own_loss{curve="loss"}': 3.0,
        'fleet_train_own_loss{curve="own/loss"}': 4.0,
        "fleet_train_loss": 5.0,
        "fleet_train_own_steps": 6.0,
        "fleet_train_a_": 7.0,
        "fleet_train_test_loss": float("inf"),
        "fleet_train_my_own_curve": -float("inf"),
    }
    types = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert len(types) == len(set(types)) == 10
    assert "fleet_train_loss NaN" in text(Snapshot(curves={"train/loss": float("nan")}))


def test_newest_values_are_served_and_a_scrape_says_how_old_the_reports_are(sink: PrometheusSink) -> None:
    def of_ranks(name: str, found: dict[str, float]) -> list[float]:
        return [found[f'fleet_train_rank_{name}{{rank="{rank}"}}'] for rank in range(3)]

    assert list(values(get(sink.address))) == ['fleet_train_info{version="0.1.0"}']
    sink.ranks([0.0], [0.0])  # one process reports itself
    found = values(get(sink.address))
    assert found['fleet_train_rank_up{rank="0"}'] == 1
    assert 'fleet_train_rank_step_seconds{rank="0"}' not in found
    sink.hparams({"profile": 'my "best"\\one\n', "model": "mlp", "lr": 0.1}, [])
    sink.write(10, {"train/loss": 2.0, "speed/step_ms": 20.0, "communication/sent_bytes": 4e6, "ranks/step_ms/0": 9.0})
    sink.ranks([10.0, 12.0, 11.0], [1.0, 0.0, 0.5])
    sink.write(20, {"train/loss": 1.0})
    time.sleep(0.2)
    sink.ranks([10.0, 0.0, 30.0], [1.0, 0.0, 0.5])  # rank 1 has told nothing
    page = get(sink.address)
    found, kinds = values(page), dict(re.findall(r"^# TYPE fleet_train_(\S+) (\S+)$", page, re.MULTILINE))
    names = ("loss", "step_seconds", "steps_total", "sent_bytes_total", "ranks")
    assert [found[f"fleet_train_{name}"] for name in names] == [1.0, 0.02, 20, 4e6, 3]
    assert abs(found["fleet_train_last_record_timestamp_seconds"] - time.time()) < 60
    assert found['fleet_train_info{model="mlp",profile="my \\"best\\"\\\\one\\n",version="0.1.0"}'] == 1
    assert sorted(name for name, kind in kinds.items() if kind == "counter") == ["sent_bytes_total", "steps_total"]
    assert set(kinds.values()) == {"counter", "gauge"}
    assert of_ranks("step_seconds", found) == [0.01, 0.012, 0.03]
    ages = of_ranks("last_report_age_seconds", found)
    assert ages[1] >= ages[0] + 0.2
    assert of_ranks("up", found) == [1, 1, 1]


def test_ranks_that_are_gone_are_down_and_a_store_that_is_silent_tells_nothing() -> None:
    with closing(PrometheusSink(0, gone=lambda: {1: "lost"})) as sink:
        sink.ranks([1.0, 1.0], [0.0, 0.0])
        found = values(get(sink.address))
        assert [found[f'fleet_train_rank_up{{rank="{rank}"}}'] for rank in (0, 1)] == [1, 0]

    def silent() -> dict[int, str]:
        raise WorkerFailed("the store does not answer")

    with closing(PrometheusSink(0, gone=silent)) as sink:
        sink.ranks([1.0, 1.0], [0.0, 0.0])
        assert "rank_up" not in get(sink.address)
        assert "rank_last_report_age_seconds" in get(sink.address)


class Silent(StreamRequestHandler):
    """Waits for a request."""

    timeout = 300.0

    def handle(self) -> None:
        self.rfile.readline()


class Few(FewConnections, TCPServer):
    most_connections = 4


@pytest.fixture
def few() -> Iterator[Few]:
    with Few(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_clients_that_say_nothing_take_no_more_than_four_threads_and_are_sent_away_at_the_end(
    few: Few, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboard_server, "_LONGEST_SECONDS", 300.0)
    before = set(threading.enumerate())

    def requests() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before]

    silent = [socket.create_connection(few.server_address) for _ in range(12)]  # type: ignore[arg-type]
    try:
        until(lambda: len(requests()) == 4, 5)
        time.sleep(0.2)
        assert len(requests()) == 4
    finally:
        few.server_close()
        for each in silent:
            each.close()
    until(lambda: requests() == [], 5)
    assert capfd.readouterr() == ("", "")


def test_a_client_that_is_silent_for_too_long_is_sent_away_without_a_word(
    few: Few, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Silent, "timeout", 0.2)
    with socket.create_connection(few.server_address, timeout=5) as silent:  # type: ignore[arg-type]
        assert silent.recv(1) == b""
    assert capfd.readouterr() == ("", "")


def test_a_port_in_use_names_its_owner_and_is_free_after_close(
    sink: PrometheusSink, free_ports: Callable[..., int]
) -> None:
    taken = rf"--prometheus_port {sink.port} on 127.0.0.1: the port is in use by process"
    with pytest.raises(ClusterError, match=taken):
        PrometheusSink(sink.port)
    with pytest.raises(ClusterError, match=r"cannot listen there .*--prometheus_host takes an address"):
        PrometheusSink(free_ports(1), "192.0.2.1")
    get(sink.address)
    sink.close()
    sink.close()
    with pytest.raises(urllib.error.URLError):
        get(sink.address)
    assert not sink._thread.is_alive()
    with closing(PrometheusSink(sink.port)) as again:
        get(again.address)


def answer(host: str | None, names: list[str], **more: str) -> tuple[str, bytes]:
    """Status and body of what is answered to a request with this Host header, and `more` of WSGI's environment."""
    status: list[str] = []

    def behind(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        del environ
        start_response("200 OK", [])
        return [b"the curves"]

    environ = {"REQUEST_METHOD": "GET", **({} if host is None else {"HTTP_HOST": host}), **more}
    guarded = OnlyForNames(behind, names, "start: monitor --allowed_host NAME")
    body = guarded(environ, lambda code, _: status.append(code))
    return status[0], b"".join(body)


OURS = names_of("127.0.0.1", ["curves.lab"])


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8040", "localhost:8040", "LOCALHOST", "[::1]:8040", "localhost.:9", "Curves.Lab:443"]
)
def test_this_machines_names_and_those_that_the_user_gives_are_answered_at_any_port(host: str) -> None:
    assert answer(host, OURS) == ("200 OK", b"the curves")
    assert name_in("[FE80::1]:80") == "fe80::1"


OTHER_HOSTS = ["evil.example", "evil.example:8040", "127.0.0.1.evil.example", "10.0.0.1", "", None, "\x1b[31m"]
FOREIGN: list[dict[str, str]] = [
    *({"HTTP_ORIGIN": origin} for origin in ("http://evil.example", "null", "http://[evil\x1b")),
    {"HTTP_ORIGIN": "http://127.0.0.1:9999"},  # another program's page
    {"HTTP_SEC_FETCH_SITE": "cross-site"},
    {"HTTP_SEC_FETCH_SITE": "same-site", "HTTP_SEC_FETCH_MODE": "no-cors"},
]
POST = {"REQUEST_METHOD": "POST"}
NAVIGATES = {"HTTP_SEC_FETCH_SITE": "cross-site", "HTTP_SEC_FETCH_MODE": "navigate"}


@pytest.mark.parametrize(
    ("host", "environ", "said"),
    [
        *((host, {}, b"monitor --allowed_host NAME") for host in OTHER_HOSTS),
        *(("127.0.0.1:8040", foreign, b"which may only link to this one") for foreign in FOREIGN),
        *(("127.0.0.1:8040", foreign | POST, b"which may only link to this one") for foreign in (*FOREIGN, NAVIGATES)),
    ],
)
def test_another_name_and_a_request_that_another_page_makes_are_refused(
    host: str | None, environ: dict[str, str], said: bytes
) -> None:
    status, body = answer(host, OURS, **environ)
    assert (status, b"the curves" in body, said in body) == ("403 Forbidden", False, True)
    assert body.decode().rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "own",
    [
        POST,  # no browser
        POST | {"HTTP_ORIGIN": "http://127.0.0.1:8040", "HTTP_SEC_FETCH_SITE": "same-origin"},
        POST | {"HTTP_ORIGIN": "https://Curves.Lab", "HTTP_SEC_FETCH_SITE": "same-origin"},  # a proxy
        {"HTTP_SEC_FETCH_SITE": "none"},
        NAVIGATES,  # a link in a page elsewhere
    ],
)
def test_requests_of_the_page_itself_and_links_to_it_are_answered(own: dict[str, str]) -> None:
    assert answer("127.0.0.1:8040", OURS, **own) == ("200 OK", b"the curves")


def test_a_page_at_every_address_has_those_of_this_machine() -> None:
    names = names_of("0.0.0.0")
    assert {"0.0.0.0", "127.0.0.1", "localhost", socket.gethostname()} <= set(names)
    assert "evil.example" not in names
    assert names_of("10.0.0.7") == ["10.0.0.7", "127.0.0.1", "::1", "localhost"]
