"""The metrics of a job of two real ranks: the tags of docs/watching.md, and which rank is slow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.integration.train.conftest import Watched
from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "watching.md"
# Of float16 mixed precision, which no CPU can run; of --checkpoint_copies (test_copies.py).
NOT_HERE = {"train/loss_scale", "checkpoint/copies", "checkpoint/copies_failed"}


def records(output: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind") == kind]


@pytest.mark.long
def test_the_slow_rank_is_named_once_on_rank_0(slowed: Watched) -> None:
    zero, one = (rank.output for rank in slowed.job.ranks)
    named = re.findall(
        r"^rank 1 \(\S+:\d+\) takes (\d+\.\d)x the median step of the others; they waited (\d+) % of their time for it",
        zero,
        re.MULTILINE,
    )
    assert len(named) == 1, zero
    assert float(named[0][0]) > 1.5
    assert int(named[0][1]) > 20
    assert "median step" not in one


def test_per_rank_curves_show_who_is_slow_and_who_waits(slowed: Watched) -> None:
    found = [record for record in records(slowed.run) if "ranks/step_ms/1" in record]
    assert len(found) > 10
    typical = {tag: median(record[tag] for record in found) for tag in found[0] if tag.startswith("ranks/")}
    assert typical["ranks/step_ms/1"] > 100
    assert typical["ranks/slowest_step_ms"] == typical["ranks/step_ms/1"]
    assert typical["ranks/wait_ms/0"] > 10 * typical["ranks/wait_ms/1"]


def test_time_of_a_step_is_split_without_a_rest(slowed: Watched) -> None:
    for record in records(slowed.run):
        if "speed/step_ms" in record:
            parts = [record[f"speed/{part}_ms"] for part in ("data", "compute", "exposed_communication")]
            assert sum(parts) == pytest.approx(record["speed/step_ms"])
            shares = [record[f"speed/{part}_share"] for part in ("data_wait", "compute", "exposed_communication")]
            assert sum(shares) == pytest.approx(1.0)
            assert min(parts) >= 0


def test_page_explains_exactly_the_tags_that_are_written(slowed: Watched) -> None:
    written = {tag for record in records(slowed.run) for tag in record if "/" in tag}
    written |= {record["tag"] for kind in ("text", "image") for record in records(slowed.run, kind)}
    generic = {re.sub(r"/\d+$", "/N", tag) for tag in written}
    explained = set(re.findall(r"`([a-z_]+/[a-z0-9_]+(?:/N)?)`", PAGE.read_text()))
    assert explained - NOT_HERE == generic


def test_settings_texts_and_confusion_are_reported(slowed: Watched) -> None:
    output = slowed.run
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
