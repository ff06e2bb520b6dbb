"""The benchmark of embeddings: what its batches and its ideal bytes are, and what its page says of raw figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from tools.benchmarks import embeddings, embeddings_rank
from tools.benchmarks.embeddings import DENSE_SIDE, ROWS_SIDE, page, summarised
from tools.benchmarks.embeddings_rank import (
    DEEPFM,
    MODELS,
    ROWS,
    WIDE_DEEP,
    Assignment,
    PaddleKit,
    batch_of,
    ideal_bytes,
    network,
    shapes,
)
from tools.benchmarks.record import FOLDER
from tools.lab import Lab

RECORDS = sorted(FOLDER.glob("*-embeddings.json"))


def test_ranks_have_batches_of_their_own_with_rows_that_repeat() -> None:
    ids, dense, clicks = batch_of(3, 1, 7, 512)
    again = batch_of(3, 1, 7, 512)
    assert all((one == other).all() for one, other in zip((ids, dense, clicks), again, strict=True))
    assert (ids.shape, dense.shape, clicks.shape) == ((512, 26), (512, 13), (512, 1))
    assert ids.min() >= 1, "row 0 is the padding"
    assert ids.max() < ROWS
    touched = len(np.unique(ids))
    assert 0.2 * ids.size < touched < 0.6 * ids.size
    for other in (batch_of(4, 1, 7, 512), batch_of(3, 0, 7, 512), batch_of(3, 1, 8, 512)):
        assert not (ids == other[0]).all()
    assert 0.05 < clicks.mean() < 0.95


def test_ideal_bytes_are_those_of_ids_and_rows_to_every_other_rank_and_of_an_allreduce() -> None:
    others = 13 + 1 + 429 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128 + 128 * 32 + 32 + 32 + 1
    assert ideal_bytes(WIDE_DEEP, 1000, 2) == (1000 * (4 + 64), 4 * others)
    assert ideal_bytes(DEEPFM, 1000, 4)[0] == 3 * 1000 * (4 + 64 + 4 + 4)
    assert ideal_bytes(WIDE_DEEP, 0, 4) == (0, 1.5 * 4 * others)


@pytest.mark.parametrize("model", MODELS)
def test_start_values_fit_the_parameters_of_the_network(model: str) -> None:
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    try:
        with paddle.static.program_guard(main, startup):
            found = [tuple(one.shape) for one in network(model, PaddleKit()).tensors()]
    finally:
        paddle.disable_static()
    assert found == [shape for shape, _ in shapes(model)]


def ranks_of(milliseconds: list[float], sent: list[int], digests: str) -> list[dict[str, Any]]:
    """Records of two ranks whose steps take this long; the first has sent 1,000 bytes before it begins."""
    return [
        {
            "step_seconds": [each / 1e3 for each in milliseconds],
            "sent_after": [1000 + value for value in sent],
            "touched_rows": [10] * len(sent),
            "digest": digest,
            "peak_memory_mb": 100.4,
        }
        for digest in digests
    ]


def assigned(side: str) -> Assignment:
    return Assignment(WIDE_DEEP, "sgd", side, "nowhere", 2, 512, 7, 0, 1.0)


def test_figures_of_a_job_leave_the_warm_up_out() -> None:
    found = summarised(ranks_of([900, 800, 700, 600, 30, 50, 40], [5, 6, 7, 8, 18, 28, 38], "ab"), assigned(ROWS_SIDE))
    assert found["step_ms"] == pytest.approx(40)
    assert found["sent_bytes"] == 10
    assert not found["replicas_equal"]
    assert found["ideal_row_bytes"] == 10 * 68


def turn(side: str, number: int, milliseconds: float, relative: float) -> dict[str, Any]:
    setting = {"round": number, "model": WIDE_DEEP, "optimizer": "sgd", "ranks": 2, "side": side}
    sent = [round(sum(ideal_bytes(WIDE_DEEP, 10, 2))) * step for step in range(7)]
    figures = summarised(ranks_of([milliseconds] * 7, sent, "aa"), assigned(side))
    off = {"absolute": relative, "relative": relative, "least_moved": 0.1}
    return {**setting, "load_average_before": 0.5, **figures, "difference": off}


def page_of(*turns: dict[str, Any]) -> str:
    at: dict[str, Any] = {
        "date": "2026-11-28T10:00:00+00:00", "commit": "0123456789abcdef", "uncommitted_changes": False, "command": "x",
        "versions": {"python": "3.11"}, "processor": "a CPU", "processors": 2, "kernel": "6.1",
        "load_average_before": [0.1, 0.1, 0.1],
    }  # fmt: skip
    benchmark = embeddings.Benchmark([DENSE_SIDE, ROWS_SIDE], 512, 7, "1gbit", 1.0, ["A note."])
    benchmark.results += turns
    return "\n".join(page(benchmark.record(at)))


def test_a_page_says_what_holds_by_the_median_of_ratios_within_rounds() -> None:
    dense = [turn(DENSE_SIDE, number, milliseconds, 0.0) for number, milliseconds in ((1, 1000), (2, 2000), (3, 1000))]
    fast = [turn(ROWS_SIDE, number, milliseconds, 1e-7) for number, milliseconds in ((1, 90), (2, 190), (3, 500))]
    said = page_of(*dense, *fast)
    assert "- holds: a step of 0.095 of that with whole tables; asked for: 0.1" in said
    assert "- holds: 1.000 of the ideal bytes (1.00 of ids and rows); asked for: 1.05" in said
    assert "- holds: parameters to 1.0e-07; asked for: 1e-06" in said
    assert "- A note." in said
    slow = [turn(ROWS_SIDE, 1, 101, 2e-6)]
    said = page_of(*dense, *slow)
    assert "- does not hold: a step of 0.101 of that with whole tables; asked for: 0.1" in said
    assert "- does not hold: parameters to 2.0e-06; asked for: 1e-06" in said


def test_ours_is_launched_with_the_choice_of_its_side_and_rivals_with_what_torchrun_sets(tmp_path: Path) -> None:
    place = embeddings.Place(Lab(2), 1, 6600)
    for side, choice in ((DENSE_SIDE, "false"), (ROWS_SIDE, "true"), ("ours:auto", "auto")):
        commands = embeddings.commands_of(Assignment(DEEPFM, "sgd", side, str(tmp_path), 2, 512, 7, 0, 1.0), place)
        assert [f"--strategy={tmp_path / 'profile.yaml'}" in command for command, _ in commands] == [True, True]
        assert f"sparse_embeddings: {choice}\n" in (tmp_path / "profile.yaml").read_text()
    rival = Assignment(DEEPFM, "sgd", "torch:sparse", str(tmp_path), 2, 512, 7, 0, 1.0)
    commands = embeddings.commands_of(rival, place)
    assert [(added["RANK"], added["WORLD_SIZE"], command[-1]) for command, added in commands] == [
        ("0", "2", "0"),
        ("1", "2", "1"),
    ]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_records_page_is_what_its_turns_give(path: Path) -> None:
    assert "\n".join([*page(json.loads(path.read_text())), ""]) == path.with_suffix(".md").read_text()


def test_the_fields_are_those_of_criteo() -> None:
    assert len(embeddings_rank.VALUES_OF_FIELDS) == embeddings_rank.FIELDS
