"""The monitor and the demo as real processes: the page answers on this machine, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from visualdl import LogReader

from fleet_train.train.metrics import open_sinks
from tests.support.ports import free_ports
from tests.support.processes import ROOT, Job, Started, clean_environ, every_python_runs, python

# Notes every connection that the server would make, and makes none but to this machine.
_NO_INTERNET = """
import os, socket
connect = socket.socket.connect
def guarded(self, address):
    if self.family != socket.AF_UNIX and not str(address[0]).startswith("127."):
        with open(os.environ["CONNECTIONS"], "a") as file:
            print(address, file=file)
        raise OSError("this test has no internet")
    return connect(self, address)
socket.socket.connect = guarded
lookup = socket.getaddrinfo
def named(host, *args, **kwargs):
    if host not in (None, "127.0.0.1", "localhost"):
        with open(os.environ["CONNECTIONS"], "a") as file:
            print("lookup", host, file=file)
    return lookup(host, *args, **kwargs)
socket.getaddrinfo = named
"""


@pytest.fixture
def run(tmp_path: Path) -> None:
    """A run with two curves: runs/demo."""
    sink = open_sinks(tmp_path / "runs" / "demo", reporting=True)
    for step in range(0, 100, 10):
        sink.write(step, {"train/loss": math.exp(-step / 30), "speed/samples_per_second": 100.0 + step})
    sink.close()


@contextmanager
def monitor(folder: Path, *flags: str, **environ: str) -> Iterator[tuple[Job, Started]]:
    with Job(folder) as job:
        environment = clean_environ({"HOME": str(folder), **environ})
        yield job, job.start("monitor", python("-m", "fleet_train", "monitor", *flags), environment, cwd=folder)


def address_of(job: Job, started: Started) -> str:
    job.wait_until(lambda: "/app/scalar" in started.output, 100, "the address is printed")
    (line,) = [line for line in started.output.splitlines() if line.startswith("http://")]
    return line.removesuffix("/app/scalar")


def fetch(url: str, data: bytes | None = None, **headers: str) -> str:
    request = urllib.request.Request(url, data, headers={"Accept-Language": "en", **headers})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
        return str(answer.read().decode())


def ends_without_a_trace(job: Job) -> None:
    (ended,) = job.wait(timeout_seconds=60)
    assert (ended.exit_code, ended.killed) == (0, False), ended.output
    assert [process.cmdline() for process in job.orphans()] == []


@pytest.mark.usefixtures("run")
def test_the_page_answers_once_the_address_is_printed_and_loads_nothing_else(tmp_path: Path) -> None:
    connections = tmp_path / "connections"
    flags = ("--logdir", "runs/demo")
    environ = every_python_runs(_NO_INTERNET, tmp_path / "site") | {"CONNECTIONS": str(connections)}
    with monitor(tmp_path, *flags, **environ) as (job, started), ExitStack() as stack:
        address = address_of(job, started)
        assert address.startswith("http://127.0.0.1:")
        assert "<title>VisualDL</title>" in fetch(f"{address}/app/scalar")
        assert json.loads(fetch(f"{address}/app/api/runs"))["data"] == ["runs/demo/visualdl"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(f"{address}/app/api/runs", Host="evil.example")
        assert refused.value.code == 403
        assert "'evil.example' is not a name of this page, which has 127.0.0.1" in refused.value.read().decode()
        # Clients that send nothing, or half a request, delay nobody; a page of another site changes nothing.
        place = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        post = b"POST /app/api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"
        for begun in (b"", b"GET / HT", post):
            stack.enter_context(socket.create_connection(place)).sendall(begun)
        began = time.monotonic()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetch(f"{address}/app/api/runs", b"", Origin="http://evil.example")
        assert json.loads(fetch(f"{address}/app/api/runs", b"", Origin=address))["data"] == ["runs/demo/visualdl"]
        assert time.monotonic() - began < 60, "it waits for clients that say nothing"
        points = json.loads(fetch(f"{address}/app/api/scalar/list?run=runs/demo/visualdl&tag=train/loss"))["data"]
        assert [step for _, step, _ in points] == list(range(0, 100, 10))
        started.process.send_signal(signal.SIGINT)
        ends_without_a_trace(job)
    assert not connections.exists(), connections.read_text()


@pytest.mark.usefixtures("run")
def test_a_port_that_was_asked_for_is_not_replaced_and_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    port = free_ports(1)
    with socket.create_server(("127.0.0.1", port)), monitor(tmp_path, "--port", str(port)) as (job, _):
        (tmp_path / "empty").mkdir()
        empty = python("-m", "fleet_train", "monitor", "--logdir", "empty")
        job.start("empty", empty, clean_environ({"HOME": str(tmp_path)}), cwd=tmp_path)
        taken, refused = job.wait(timeout_seconds=60)
    assert (taken.exit_code, refused.exit_code) == (1, 1)
    assert f"--port {port}: in use on 127.0.0.1 by " in taken.output
    assert "is free" in taken.output
    assert "--logdir empty: no run below it" in refused.output


@pytest.mark.usefixtures("run")
def test_several_runs_are_shown_at_a_free_port_and_the_server_does_not_outlive_a_killed_monitor(tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "runs" / "demo", tmp_path / "runs" / "other\x1b[2J")
    with ExitStack() as stack:
        with contextlib.suppress(OSError):  # then somebody else holds the default port, which is as good
            stack.enter_context(socket.create_server(("127.0.0.1", 8040)))
        job, started = stack.enter_context(monitor(tmp_path, "--logdir", "runs"))
        address = address_of(job, started)
        assert "port 8040 is in use" in started.output
        assert int(address.rsplit(":", 1)[1]) > 8040
        shown = json.loads(fetch(f"{address}/app/api/runs"))["data"]
        assert sorted(shown) == ["runs/demo/visualdl", "runs/other\x1b[2J/visualdl"]
        assert "fleet_train: run runs/other\\x1b[2J\n" in started.output
        assert "\x1b" not in started.output
        started.process.kill()
        started.process.wait()
        assert [process.cmdline() for process in job.orphans()] == []


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "broken", ["raise ImportError('incompatible protobuf')", "import sys; sys.exit('no templates')", None]
)
def test_without_a_working_visualdl_or_where_asked_for_the_numbers_are_shown_here(
    tmp_path: Path, broken: str | None
) -> None:
    if broken is not None:
        (tmp_path / "site" / "visualdl").mkdir(parents=True)
        (tmp_path / "site" / "visualdl" / "__init__.py").write_text(broken)
    flags = () if broken else ("--text", "--logdir", "runs/demo/visualdl")
    with monitor(tmp_path, *flags, PYTHONPATH=f"{tmp_path / 'site'}:{ROOT}") as (job, _):
        (ended,) = job.wait(timeout_seconds=60)
    assert ended.exit_code == 0, ended.output
    assert ("VisualDL does not start: " in ended.output) == (broken is not None)
    assert ("showing metrics.jsonl instead" in ended.output) == (broken is not None)
    assert "runs/demo, step 90" in ended.output
    assert "speed/samples_per_second         190         100         190" in ended.output


DEMO = ROOT / "tools" / "demo.py"


def test_demo_learns_the_digits_and_says_where_everything_is(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start("demo", python(str(DEMO), "--timeout=400"), clean_environ())
        (ended,) = job.wait(timeout_seconds=150)
        assert ended.exit_code == 0, ended.output
        assert job.orphans() == []

    output = tmp_path / "runs" / "demo"
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["world_size"], summary["num_nodes"], summary["steps"]) == (2, 2, 460)
    assert (summary["model"], summary["data"], summary["profile"]) == ("cnn", "digits", "multi_node")
    assert summary["test_accuracy"] >= 0.97
    assert summary["train_loss"] < 0.5
    assert summary["samples_per_second"] > 0

    for place in (summary["checkpoint"], "runs/demo/log", "runs/demo/metrics.jsonl"):
        assert place in ended.output
        assert (tmp_path / place).exists()
    (command,) = re.findall(r"^See the curves:  (.*)$", ended.output, re.MULTILINE)
    assert command.endswith("fleet_train monitor --logdir runs/demo")
    with Job(tmp_path / "monitor") as job:
        started = job.start("monitor", command.split(), clean_environ(), cwd=tmp_path)
        address_of(job, started)
        started.process.send_signal(signal.SIGINT)
        ends_without_a_trace(job)
    for node in ("node0", "node1"):
        assert (output / "log" / node / "workerlog.0").stat().st_size > 0

    curve = LogReader(file_path=str(output / "visualdl" / "vdlrecords.train.log")).get_data("scalar", "test/accuracy")
    assert [point.id for point in curve] == [23 * epoch for epoch in range(1, 21)]
    assert round(curve[-1].value, 4) == round(summary["test_accuracy"], 4)
