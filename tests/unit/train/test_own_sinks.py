"""Sinks of the user's own: two methods, called on rank 0, never in the way of the training."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.errors import FleetTrainError, NotFinite
from fleet_train.train import Trainer, TrainerSettings
from fleet_train.train.metrics import NullSink, UserSinks, open_sinks, sinks_of
from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT


class Kept:
    """What a user writes."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, step: int, scalars: Any) -> None:
        self.records.append((step, dict(scalars)))

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def write(self, step: int, scalars: Any) -> None:
        super().write(step, scalars)
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        super().close()
        raise ValueError("closed badly")


@pytest.fixture
def train(one_process: None) -> Any:
    """`train(sinks)`: 10 steps with a record at each, by the real loop."""
    del one_process

    def run(sinks: Any, feature: float = 0.0) -> None:
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            features = paddle.static.data("features", [-1, 6], "float32")
            labels = paddle.static.data("labels", [-1], "int64")
            loss = paddle.nn.functional.cross_entropy(paddle.nn.Linear(6, 3)(features + feature), labels)
            fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss, startup)
        with paddle.static.scope_guard(paddle.static.Scope()):
            exe = paddle.static.Executor(paddle.CPUPlace())
            exe.run(startup)
            loader = BatchLoader(synthetic(40, (6,), 3).train, ShardedBatchSampler(40, 8, seed=1))
            Trainer(exe, loss, loader, TrainerSettings(epochs=2, log_every=1), sinks=sinks).fit()

    return run


def documented() -> str:
    """The example of docs/watching.md."""
    (code,) = fenced_blocks((ROOT / "docs" / "watching.md").read_text(), "python")
    return code


def test_example_of_the_page_writes_the_losses_and_is_short(train: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(documented(), names)
    kept = Kept()
    train([names["CsvSink"](tmp_path / "loss.csv"), kept])
    with (tmp_path / "loss.csv").open(newline="") as file:
        rows = [(int(step), float(loss)) for step, loss in csv.reader(file)]
    losses = [(step, scalars["train/loss"]) for step, scalars in kept.records if "train/loss" in scalars]
    assert rows == losses
    assert len(rows) == 10
    assert len([line for line in documented().splitlines() if line.strip()]) <= 15


def test_a_list_is_closed_when_fit_ends_and_one_object_is_a_list_of_one(train: Any) -> None:
    one, two, alone = Kept(), Kept(), Kept()
    train([one, two])
    train(alone)
    assert [sink.closed for sink in (one, two, alone)] == [1, 1, 1]
    assert [step for step, _ in one.records] == [step for step, _ in alone.records] != []


def test_a_list_is_closed_when_training_fails(train: Any) -> None:
    kept = Kept()
    with pytest.raises(NotFinite):
        train([kept], feature=float("nan"))
    assert kept.closed == 1


def test_an_exception_is_said_once_and_stops_neither_training_nor_the_other_sinks(
    train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, kept = Broken(), Kept()
    train([broken, kept])
    assert (len(broken.records), broken.closed) == (1, 1)
    assert len(kept.records) == 10
    said = [line for line in capsys.readouterr().err.splitlines() if "Broken" in line]
    assert said == [
        "fleet_train: Broken.write: OSError: [Errno 28] No space left on device; it is no longer called, "
        "training goes on"
    ]


def test_ranks_that_do_not_report_call_nothing() -> None:
    kept = Kept()
    sinks = sinks_of([kept], reporting=False)
    assert isinstance(sinks, NullSink)
    sinks.write(1, {"train/loss": 1.0})
    sinks.close()
    assert (kept.records, kept.closed) == ([], 0)


def test_whole_sinks_go_into_a_list_as_well(tmp_path: Path) -> None:
    kept = Kept()
    sinks = sinks_of([open_sinks(tmp_path, reporting=True), kept], reporting=True)
    sinks.hparams({"lr": 0.1}, [])
    sinks.text(0, "plan/table", "nothing")
    sinks.image(0, "test/confusion", np.zeros((8, 8, 3), np.uint8))
    sinks.write(3, {"train/loss": 0.5})
    sinks.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4
    assert kept.records == [(3, {"train/loss": 0.5})]


def test_a_single_whole_sink_stays_the_callers() -> None:
    whole = NullSink()
    assert sinks_of(whole, reporting=True) is whole
    assert isinstance(sinks_of(None, reporting=True), NullSink)


@pytest.mark.parametrize("wrong", [[3], [Kept], ["metrics.jsonl"], [object()], 3])
def test_what_is_no_sink_is_refused_before_training(wrong: Any) -> None:
    with pytest.raises(FleetTrainError, match=r"is not a sink: it takes an object with write\(step, scalars\) and"):
        sinks_of(wrong, reporting=False)


def test_optional_methods_are_called_where_they_are() -> None:
    class WithText(Kept):
        def text(self, step: int, tag: str, text: str) -> None:
            self.records.append((step, {tag: float(len(text))}))

    sink = WithText()
    guarded = UserSinks([sink])
    guarded.text(2, "plan/table", "abc")
    guarded.image(2, "test/confusion", np.zeros((1, 1, 3), np.uint8))
    assert sink.records == [(2, {"plan/table": 3.0})]
