"""A run of two real ranks on VisualDL's pages, in a real browser: every curve is drawn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image

from tests.integration.train.conftest import Watched
from tests.support.browser import Browser, browser
from tests.support.ports import free_ports
from tests.support.processes import Job, clean_environ, python

pytestmark = pytest.mark.browser

# The pixels of a canvas that are as blue as VisualDL's first curve; axes and labels are grey.
_BLUE_PIXELS = """
return [...document.querySelectorAll('.echarts canvas')].map(canvas => {
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let blue = 0;
    for (let i = 0; i < data.length; i += 4) blue += data[i + 3] > 100 && data[i + 2] - data[i] > 60;
    return blue;
})"""


@pytest.fixture
def page(slowed: Watched, tmp_path: Path) -> Iterator[tuple[Browser, str]]:
    """A browser, and the address of the monitor."""
    port = free_ports(1)
    with Job(tmp_path / "job") as job:
        command = python("-m", "fleet_train", "monitor", "--logdir", "runs/slow", f"--port={port}")
        monitor = job.start("monitor", command, clean_environ({"HOME": str(tmp_path)}), cwd=slowed.folder)
        job.wait_until(lambda: "/app/scalar" in monitor.output, 60, "the monitor's page answers")
        with browser(tmp_path / "browser") as window:
            yield window, f"http://127.0.0.1:{port}/app"


def curves(run: Path) -> set[str]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {tag for line in lines if "kind" not in line for tag in line if "/" in tag}


def colours(path: Path) -> int:
    return len(np.unique(np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3), axis=0))


def test_every_curve_is_on_the_page_and_drawn(page: tuple[Browser, str], slowed: Watched, tmp_path: Path) -> None:
    window, address = page
    tags = curves(slowed.run)
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
    window.save_screenshot(tmp_path / "scalars.png")
    assert colours(tmp_path / "scalars.png") > 50


def test_settings_texts_and_confusion_are_on_their_pages(page: tuple[Browser, str], tmp_path: Path) -> None:
    window, address = page
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
    window.save_screenshot(tmp_path / "confusion.png")
    assert colours(tmp_path / "confusion.png") > 50
