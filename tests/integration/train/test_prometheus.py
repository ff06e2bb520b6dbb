"""Real trainings of two ranks, scraped while they run and compared with their records."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet_train.train.prometheus_sink import PREFIX, metric_of
from tests.support.processes import Job, clean_environ, python
from tests.support.ranks import run_ranks, stock_environs

COMMAND = ["-m", "fleet_train", "train", "--model=mlp", "--data=digits", "--epochs=2000", "--log_every=2"]


def scrape(port: int) -> dict[str, float] | None:
    """Sample with its labels -> value, as Prometheus' own client reads the page; None while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            page = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return None
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        assert family.type in ("gauge", "counter"), family
        assert family.documentation.endswith("."), family
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{f'{{{labels}}}' if labels else ''}"] = sample.value
    return found


def records(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "kind" not in line]


@pytest.mark.long
def test_a_training_is_scraped_while_it_runs(tmp_path: Path, free_ports: Callable[..., int]) -> None:
    port, output = free_ports(1), tmp_path / "run"
    pages: list[dict[str, float]] = []

    def steps_are_recorded() -> bool:
        page = scrape(port)
        return page is not None and page.get("fleet_train_steps_total", 0) > 100

    def nothing_moves() -> bool:
        """No record came in a second: what is shown and what is recorded are the same."""
        time.sleep(1)
        pages.append(scrape(port) or {})
        return len(pages) > 1 and all(
            value == pages[-2].get(name) for name, value in pages[-1].items() if "age_seconds" not in name
        )

    command = python(*COMMAND, f"--output_dir={output}", f"--prometheus_port={port}")
    with Job(tmp_path / "job") as job:
        for rank, environ in enumerate(stock_environs([1, 1])):
            job.start(f"rank{rank}", command, clean_environ(environ))
        job.wait_until(steps_are_recorded, 90, "a hundred steps are recorded")
        job.started[1].process.send_signal(signal.SIGSTOP)  # rank 0 waits for it in its next step, and is scraped there
        job.wait_until(nothing_moves, 20, "rank 0 stands still")
        recorded = records(output)
        job.started[1].process.send_signal(signal.SIGCONT)
        job.started[1].process.send_signal(signal.SIGTERM)
        ended = job.wait(timeout_seconds=60)
        assert job.orphans() == []
    assert [one.exit_code for one in ended] == [12, 12], job.report()
    assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics" in ended[0].output
    assert "Prometheus" not in ended[1].output
    assert scrape(port) is None

    page = pages[-1]
    step = page["fleet_train_steps_total"]
    newest: dict[str, float] = {}
    for record in recorded:
        newest |= {tag: value for tag, value in record.items() if "/" in tag}
    assert recorded[-1]["step"] == step
    compared = 0
    for tag, value in newest.items():
        metric = metric_of(tag)
        if metric is not None:
            assert page[f"{PREFIX}{metric.name}"] == pytest.approx(value / metric.divisor), tag
            compared += 1
    assert compared > 15
    for wanted in (
        "loss",
        "step_seconds",
        "samples_per_second",
        "step_exposed_communication_ratio",
        "sent_bytes_total",
    ):
        assert f"{PREFIX}{wanted}" in page
    assert page["fleet_train_ranks"] == 2
    for rank in (0, 1):
        assert page[f'fleet_train_rank_up{{rank="{rank}"}}'] == 1
        assert 0 <= page[f'fleet_train_rank_last_report_age_seconds{{rank="{rank}"}}'] < 30
        told = newest[f"ranks/step_ms/{rank}"] / 1000
        assert page[f'fleet_train_rank_step_seconds{{rank="{rank}"}}'] == pytest.approx(told)
    sent = [record["communication/sent_bytes"] for record in recorded if "communication/sent_bytes" in record]
    assert sent == sorted(sent)
    assert sent[-1] > sent[0] > 0


@pytest.mark.long
def test_a_port_in_use_ends_every_rank_before_anything_is_trained(
    tmp_path: Path, free_ports: Callable[..., int]
) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1))) as holder:
        port = holder.getsockname()[1]
        command = python(*COMMAND, f"--output_dir={tmp_path}/run", f"--prometheus_port={port}")
        with Job(tmp_path / "job") as job:
            for rank, environ in enumerate(stock_environs([1, 1])):
                job.start(f"rank{rank}", command, clean_environ(environ))
            ended = job.wait(timeout_seconds=90)
    assert [one.exit_code for one in ended] == [5, 5], job.report()
    for one in ended:
        assert f"--prometheus_port {port} on 127.0.0.1: the port is in use by process" in one.output
        assert "epoch" not in one.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


LEAVING = """
import time
import paddle
from fleet_train import fleet, role_maker
paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
print("at first", fleet.gone_workers())
fleet.barrier_worker()
if fleet.worker_index() == 0:
    deadline = time.monotonic() + 30
    while not fleet.gone_workers() and time.monotonic() < deadline:
        time.sleep(0.05)
    print("then", fleet.gone_workers())
fleet.shutdown()
"""


@pytest.mark.long
def test_a_rank_that_has_left_is_known(tmp_path: Path) -> None:
    zero, one = (rank.output for rank in run_ranks(LEAVING, 2, folder=tmp_path).ranks)
    assert "at first {}" in zero
    assert "at first {}" in one
    assert "then {1: 'left'}" in zero
