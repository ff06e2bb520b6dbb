"""The metrics of jobs of two real ranks: which rank is slow, VisualDL's pages, Prometheus' page, sinks of one's own."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from fleet_train.train.prometheus_sink import PREFIX, metric_of
from tests.support.browser import Browser, browser
from tests.support.ports import free_ports
from tests.support.processes import Job, clean_environ, python
from tests.support.ranks import RanksResult, run_ranks, stock_environs

RUN = "runs/slow"
# The trainer on a cluster whose rank 1 has a slow processor: each of its steps takes 0.1 s more.
SLOW_RANK = """
import time
import paddle
from fleet_train import fleet
from fleet_train.cli.train import command

run = paddle.static.Executor.run
def slow_run(*args, **kwargs):
    time.sleep(0.1 * fleet.worker_index())
    return run(*args, **kwargs)
paddle.static.Executor.run = slow_run
command()
"""


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    """Two ranks on two nodes that have learnt the digits, in runs/slow; rank 1 has a slow processor."""
    folder = tmp_path_factory.mktemp("slowed")
    args = ["--model=mlp", "--data=digits", "--epochs=3", "--log_every=5", "--gradient_norm"]
    args.append(f"--output_dir={folder / RUN}")
    return run_ranks(SLOW_RANK, 2, folder=folder, nodes=2, args=args)


def records(output: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind") == kind]


def test_the_slow_rank_is_named_once_on_rank_0_and_its_curves_show_who_waits(slowed: RanksResult) -> None:
    zero, one = (rank.output for rank in slowed.ranks)
    named = re.findall(
        r"^rank 1 \(\S+:\d+\) takes (\d+\.\d)x the median step of the others; they waited (\d+) % of their time for it",
        zero,
        re.MULTILINE,
    )
    assert len(named) == 1, zero
    assert float(named[0][0]) > 1.5
    assert int(named[0][1]) > 20
    assert "median step" not in one
    found = [record for record in records(slowed.folder / RUN) if "ranks/step_ms/1" in record]
    assert len(found) > 10
    typical = {tag: median(record[tag] for record in found) for tag in found[0] if tag.startswith("ranks/")}
    assert typical["ranks/step_ms/1"] > 100
    assert typical["ranks/slowest_step_ms"] == typical["ranks/step_ms/1"]
    assert typical["ranks/wait_ms/0"] > 10 * typical["ranks/wait_ms/1"]


def test_settings_texts_and_confusion_are_reported(slowed: RanksResult) -> None:
    output = slowed.folder / RUN
    (settings,) = records(output, "hparams")
    assert (settings["hparams"]["ranks"], settings["hparams"]["profile"]) == (2, "multi_node")
    assert (settings["hparams"]["model"], settings["hparams"]["nccl_comm_num"]) == ("mlp", 1)  # chosen
    assert "output_dir" not in settings["hparams"]
    texts = {record["tag"]: record["text"] for record in records(output, "text")}
    assert "nccl_comm_num: 1" in texts["profile/settings"]
    assert "bucket  gradients" in texts["plan/table"]
    images = {(record["tag"], record["file"]) for record in records(output, "image")}
    assert images == {(f"test/{name}", f"images/test_{name}.png") for name in ("confusion", "mistakes")}
    assert all(np.asarray(Image.open(output / file)).std() > 20 for _, file in images)
    names = sorted(str(path.relative_to(output)) for path in [*output.glob("*.*"), *output.glob("[iv]*/*")])
    pictures = ["images/test_confusion.png", "images/test_mistakes.png"]
    assert names == [*pictures, "metrics.jsonl", "summary.json", "visualdl/vdlrecords.train.log"]


# The pixels of a canvas that are as blue as VisualDL's first curve; axes and labels are grey.
_BLUE_PIXELS = """
return [...document.querySelectorAll('.echarts canvas')].map(canvas => {
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let blue = 0;
    for (let i = 0; i < data.length; i += 4) blue += data[i + 3] > 100 && data[i + 2] - data[i] > 60;
    return blue;
})"""


def curves(run: Path) -> set[str]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {tag for line in lines if "kind" not in line for tag in line if "/" in tag}


@pytest.mark.browser
def test_every_curve_setting_text_and_picture_is_on_visualdls_pages(slowed: RanksResult, tmp_path: Path) -> None:
    port = free_ports(1)
    address = f"http://127.0.0.1:{port}/app"
    with Job(tmp_path / "job") as job:
        command = python("-m", "fleet_train", "monitor", "--logdir", RUN, f"--port={port}")
        monitor = job.start("monitor", command, clean_environ({"HOME": str(tmp_path)}), cwd=slowed.folder)
        job.wait_until(lambda: "/app/scalar" in monitor.output, 60, "the monitor's page answers")
        with browser(tmp_path / "browser") as window:
            look_at_curves(window, address, slowed.folder / RUN)
            look_at_the_rest(window, address)


def look_at_curves(window: Browser, address: str, run: Path) -> None:
    tags = curves(run)
    assert {"train/loss", "speed/exposed_communication_ms", "ranks/step_ms/1"} <= tags
    window.open(f"{address}/scalar")
    groups = Counter(tag.split("/")[0] for tag in tags)
    titles = [f"{name}\n{count}" for name, count in sorted(groups.items())]
    window.wait_for(lambda: all(title in window.text() for title in titles), f"the groups {groups}")
    # The first group is open; the others open at a click.
    window.run("[...document.querySelectorAll('h3')].slice(1).forEach(title => title.click())")

    def all_drawn() -> bool:
        window.run("document.documentElement.scrollTop = (document.documentElement.scrollTop + 600) % 4000")
        return len(drawn := window.run(_BLUE_PIXELS)) == len(tags) and min(drawn) > 50

    window.wait_for(all_drawn, f"{len(tags)} charts with a curve in each")
    requests = [urlsplit(url) for url in window.requests()]
    asked = {parse_qs(each.query)["tag"][0] for each in requests if each.path.endswith("/scalar/list")}
    assert asked == tags
    assert {each.hostname for each in requests} == {"127.0.0.1"}


def look_at_the_rest(window: Browser, address: str) -> None:
    window.open(f"{address}/hyper-parameter")
    window.wait_for(lambda: "multi_node" in window.text(), "the profile among the hyper parameters")
    words = window.text().split("\n")
    assert {"ranks", "peak_learning_rate", "test/accuracy", "speed/samples_per_second"} <= set(words)

    window.open(f"{address}/sample/text")
    window.wait_for(lambda: "plan/table" in window.text(), "the plan's title")
    window.wait_for(lambda: "bucket" in window.text(), "the plan's text")
    rows = window.run(
        "const text = [...document.querySelectorAll('.text')].find(each => each.innerText.includes('bucket'));"
        "return Math.round(text.getBoundingClientRect().height / parseFloat(getComputedStyle(text).lineHeight))"
    )
    assert rows > 5, "the lines of the plan stand one below the other"

    window.open(f"{address}/sample/image")
    loaded = "return [...document.querySelectorAll('img')].some(image => image.naturalWidth === 712)"
    window.wait_for(lambda: window.run(loaded), "the confusion matrix")
    assert "test/mistakes" in window.text()


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


@pytest.mark.long
def test_a_training_is_scraped_while_it_runs(tmp_path: Path) -> None:
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
    known = {metric.name: value / metric.divisor for tag, value in newest.items() if (metric := metric_of(tag))}
    assert len(known) > 15
    assert {name: page[f"{PREFIX}{name}"] for name in known} == pytest.approx(known)
    assert {"loss", "samples_per_second", "step_exposed_communication_ratio", "sent_bytes_total"} <= known.keys()
    assert page["fleet_train_ranks"] == 2
    for rank in (0, 1):
        assert page[f'fleet_train_rank_up{{rank="{rank}"}}'] == 1
        assert 0 <= page[f'fleet_train_rank_last_report_age_seconds{{rank="{rank}"}}'] < 30
        told = newest[f"ranks/step_ms/{rank}"] / 1000
        assert page[f'fleet_train_rank_step_seconds{{rank="{rank}"}}'] == pytest.approx(told)
    sent = [record["communication/sent_bytes"] for record in recorded if "communication/sent_bytes" in record]
    assert sent == sorted(sent)
    assert sent[-1] > sent[0] > 0


OWN_SINKS = """
import time
import numpy as np
import paddle
from fleet_train import fleet, role_maker
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.train import Trainer, TrainerSettings

class Said:
    def write(self, step, scalars):
        print("written", step, "train/loss" in scalars)
    def close(self):
        print("closed")

class Broken(Said):
    def write(self, step, scalars):
        raise RuntimeError("the database is away")

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
x = paddle.static.data("features", [-1, 6], "float32")
y = paddle.static.data("labels", [-1], "int64")
loss = paddle.nn.functional.cross_entropy(paddle.nn.Linear(6, 3)(x), y)
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(paddle.static.default_startup_program())
sampler = ShardedBatchSampler(40, 4, fleet.worker_index(), fleet.worker_num())
loader = BatchLoader(synthetic(40, (6,), 3).train, sampler)
outcome = Trainer(exe, loss, loader, TrainerSettings(epochs=2, log_every=1), sinks=[Broken(), Said()]).fit()
print("steps", outcome.steps)
print("at first", fleet.gone_workers())
fleet.barrier_worker()
if fleet.worker_index() == 0:
    while not fleet.gone_workers():
        time.sleep(0.05)
    print("then", fleet.gone_workers())
fleet.shutdown()
"""


def test_only_rank_0_calls_sinks_of_ones_own_a_broken_one_ends_nothing_and_who_has_left_is_known(
    tmp_path: Path,
) -> None:
    zero, one = (rank.output for rank in run_ranks(OWN_SINKS, 2, folder=tmp_path).ranks)
    for said, times in (("written", 10), ("closed", 2), ("Broken.write: RuntimeError: the database is away", 1)):
        assert (zero.count(said), one.count(said)) == (times, 0)
    for output in (zero, one):
        assert "steps 10\nat first {}\n" in output
    assert "then {1: 'left'}" in zero
