"""What Prometheus is given: literal pages, a bounded server that leaves nothing, names that the page explains."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from fleet_train.errors import ClusterError, WorkerFailed
from fleet_train.train import dashboard_server, prometheus_sink
from fleet_train.train.prometheus_sink import OF_CURVES, OTHERS, PREFIX, PrometheusSink, Snapshot, families, metric_of
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "watching.md"
METRICS = [*OTHERS, *(metric for metric in OF_CURVES.values() if metric is not None)]


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    with closing(PrometheusSink(0)) as made:
        yield made


def get(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE_PLAIN_0_0_4
        return str(answer.read().decode())


class Shown:
    """What a registry collects from, as the server's does."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        return families(self._snapshot)


def text(snapshot: Snapshot) -> str:
    return generate_latest(Shown(snapshot)).decode()


def values(page: str) -> dict[str, float]:
    """Sample -> value."""
    samples = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_a_page_word_for_word() -> None:
    shown = Snapshot(
        step=20,
        recorded_at=1763640000.5,
        curves={"train/loss": 0.25, "speed/step_ms": 12.5, "communication/sent_bytes": 4e6, "ranks/step_ms/0": 9.0},
        info={"version": "0.1.0", "profile": 'my "best"\\one\n'},
        rank_step_ms={1: 250.0, 0: 9.0},
        rank_age_seconds={0: 1.5, 1: 2.0},
        rank_up={0: True, 1: False},
    )
    assert text(shown) == (
        "# HELP fleet_train_info Always 1; its labels describe the run.\n"
        "# TYPE fleet_train_info gauge\n"
        'fleet_train_info{profile="my \\"best\\"\\\\one\\n",version="0.1.0"} 1.0\n'
        "# HELP fleet_train_steps_total Finished steps, including those before a resume.\n"
        "# TYPE fleet_train_steps_total counter\n"
        "fleet_train_steps_total 20.0\n"
        "# HELP fleet_train_last_record_timestamp_seconds Unix time of the newest record.\n"
        "# TYPE fleet_train_last_record_timestamp_seconds gauge\n"
        "fleet_train_last_record_timestamp_seconds 1.7636400005e+09\n"
        "# HELP fleet_train_loss Loss of rank 0 at the newest record.\n"
        "# TYPE fleet_train_loss gauge\n"
        "fleet_train_loss 0.25\n"
        "# HELP fleet_train_step_seconds Mean time of a step on rank 0.\n"
        "# TYPE fleet_train_step_seconds gauge\n"
        "fleet_train_step_seconds 0.0125\n"
        "# HELP fleet_train_sent_bytes_total Payload that rank 0 has sent in steps.\n"
        "# TYPE fleet_train_sent_bytes_total counter\n"
        "fleet_train_sent_bytes_total 4e+06\n"
        "# HELP fleet_train_ranks Ranks of the job.\n"
        "# TYPE fleet_train_ranks gauge\n"
        "fleet_train_ranks 2.0\n"
        "# HELP fleet_train_rank_up 1: connected to the job's store; 0: has left or is lost.\n"
        "# TYPE fleet_train_rank_up gauge\n"
        'fleet_train_rank_up{rank="0"} 1.0\n'
        'fleet_train_rank_up{rank="1"} 0.0\n'
        "# HELP fleet_train_rank_last_report_age_seconds Time since rank 0 read a report of this rank's step times.\n"
        "# TYPE fleet_train_rank_last_report_age_seconds gauge\n"
        'fleet_train_rank_last_report_age_seconds{rank="0"} 1.5\n'
        'fleet_train_rank_last_report_age_seconds{rank="1"} 2.0\n'
        "# HELP fleet_train_rank_step_seconds The rank's own time of a step, for which others may wait.\n"
        "# TYPE fleet_train_rank_step_seconds gauge\n"
        'fleet_train_rank_step_seconds{rank="0"} 0.009\n'
        'fleet_train_rank_step_seconds{rank="1"} 0.25\n'
    )


def test_values_that_are_no_numbers_and_tags_of_the_users_own() -> None:
    curves = {"train/loss": float("nan"), "test/loss": float("inf"), "my/own-curve": -float("inf")}
    lines = [line for line in text(Snapshot(curves=curves)).splitlines() if not line.startswith("#")]
    assert lines == [
        "fleet_train_info 1.0",
        "fleet_train_loss NaN",
        "fleet_train_test_loss +Inf",
        "fleet_train_my_own_curve -Inf",
    ]


def test_curves_whose_names_become_equal_are_told_apart() -> None:
    curves = {"my/x": 1.0, "my.x": 2.0, "loss": 3.0, "own/loss": 4.0, "train/loss": 5.0, "steps": 6.0, "a\ud800": 7.0}
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
    }
    types = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert len(types) == len(set(types)) == 8


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|milliseconds|mb|percent|share)(_|$)", metric.name), metric.name
        assert metric.meaning.endswith(".")


def test_page_lists_exactly_these_metrics_with_type_and_meaning() -> None:
    listed = re.findall(r"^\| `(fleet_train_\w+)` \| (\w+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((f"{PREFIX}{one.name}", one.kind, one.meaning) for one in METRICS)


def test_every_curve_of_the_page_has_a_metric_or_another_says_it() -> None:
    curves = set(re.findall(r"`((?:train|test|speed|communication|ranks|checkpoint)/[a-z0-9_]+)`", PAGE.read_text()))
    assert curves - OF_CURVES.keys() == {"test/confusion", "test/mistakes"}
    assert metric_of("ranks/step_ms/3") is None


def test_newest_values_are_served_and_a_scrape_says_how_old_the_reports_are(sink: PrometheusSink) -> None:
    assert list(values(get(sink.address))) == ['fleet_train_info{version="0.1.0"}']
    sink.hparams({"profile": "multi_node", "model": "mlp", "lr": 0.1}, [])
    sink.write(10, {"train/loss": 2.0, "speed/step_ms": 20.0})
    sink.ranks([10.0, 12.0, 11.0], [1.0, 0.0, 0.5])
    sink.write(20, {"train/loss": 1.0})
    time.sleep(0.2)
    sink.ranks([10.0, 0.0, 30.0], [1.0, 0.0, 0.5])  # rank 1 has told nothing
    found = values(get(sink.address))
    assert found["fleet_train_loss"] == 1.0
    assert found["fleet_train_step_seconds"] == 0.02
    assert found["fleet_train_steps_total"] == 20
    assert found["fleet_train_ranks"] == 3
    assert found['fleet_train_rank_step_seconds{rank="1"}'] == 0.012
    assert found['fleet_train_rank_step_seconds{rank="2"}'] == 0.03
    ages = [found[f'fleet_train_rank_last_report_age_seconds{{rank="{rank}"}}'] for rank in range(3)]
    assert ages[1] >= ages[0] + 0.2
    assert found['fleet_train_info{model="mlp",profile="multi_node",version="0.1.0"}'] == 1


def test_one_process_reports_itself(sink: PrometheusSink) -> None:
    sink.write(1, {"train/loss": 2.0})
    sink.ranks([0.0], [0.0])
    found = values(get(sink.address))
    assert found['fleet_train_rank_up{rank="0"}'] == 1
    assert 'fleet_train_rank_step_seconds{rank="0"}' not in found


def test_ranks_are_up_at_once_after_a_scrape_that_came_before_their_first_report(sink: PrometheusSink) -> None:
    assert "rank_up" not in get(sink.address)
    sink.ranks([1.0, 1.0], [0.0, 0.0])
    assert values(get(sink.address))['fleet_train_rank_up{rank="1"}'] == 1


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


def test_only_the_page_is_served_and_only_to_names_of_this_machine(sink: PrometheusSink) -> None:
    get(sink.address, Host="localhost")
    for address, host, code in ((sink.address, "evil.example", 403), (sink.address + "/x", "127.0.0.1", 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(address, Host=host)
        assert refused.value.code == code
        refused.value.close()


def test_a_port_in_use_names_its_owner(sink: PrometheusSink) -> None:
    with pytest.raises(
        ClusterError, match=rf"--prometheus_port {sink.port} on 127.0.0.1: the port is in use by process"
    ):
        PrometheusSink(sink.port)


def test_an_address_of_another_machine_is_refused(free_ports: Callable[..., int]) -> None:
    with pytest.raises(ClusterError, match=r"cannot listen there .*--prometheus_host takes an address"):
        PrometheusSink(free_ports(1), "192.0.2.1")


def test_it_closes_twice_frees_its_port_and_leaves_no_thread(sink: PrometheusSink) -> None:
    get(sink.address)
    sink.close()
    sink.close()
    with pytest.raises(urllib.error.URLError):
        get(sink.address)
    assert [each.name for each in threading.enumerate() if "metrics" in each.name] == []
    with closing(PrometheusSink(sink.port)) as again:
        get(again.address)


def test_clients_that_say_nothing_take_no_more_than_four_threads_and_are_sent_away_at_the_end(
    sink: PrometheusSink, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prometheus_sink._Handler, "timeout", 300.0)
    monkeypatch.setattr(dashboard_server, "_LONGEST_SECONDS", 300.0)
    before = set(threading.enumerate())

    def requests() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before]

    silent = [socket.create_connection(("127.0.0.1", sink.port)) for _ in range(12)]
    try:
        wait_until(lambda: len(requests()) == 4)
        time.sleep(0.2)
        assert len(requests()) == 4
    finally:
        began = time.monotonic()
        sink.close()
        for each in silent:
            each.close()
    assert time.monotonic() - began < 60
    wait_until(lambda: requests() == [])
    assert capfd.readouterr() == ("", "")


def test_a_client_that_is_silent_for_too_long_is_sent_away_without_a_word(
    sink: PrometheusSink, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_train.train.prometheus_sink._Handler.timeout", 0.2)
    with socket.create_connection(("127.0.0.1", sink.port), timeout=5) as silent:
        assert silent.recv(1) == b""
    assert capfd.readouterr() == ("", "")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
