"""Lines for logs: one per epoch, one per interval in long epochs, none on ranks that do not report."""

from __future__ import annotations

import pytest

from fleet_train.train.progress import BarProgress, LineProgress, make_progress


def test_short_epoch_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress(interval_seconds=10.0, clock=lambda: 0.0)
    progress.begin(0, 12, steps=3, done=0)
    for _ in range(3):
        progress.step(0.5, 8)
    progress.end("train loss 0.5")
    assert capsys.readouterr().out == "epoch  1/12  train loss 0.5\n"


def test_long_epoch_has_a_line_per_interval_with_the_last_fetched_loss(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = LineProgress(interval_seconds=10.0, clock=lambda: now)
    progress.begin(1, 4, steps=40, done=10)
    for loss in (0.75, None, None, None):
        now += 4.0
        progress.step(loss, samples=64)
    # 27 of this epoch's steps and 80 of the next two are left, 4 s each; 64 samples in 4 s.
    expected = "epoch 2/4  step 13/40  loss 0.7500  16 samples/s, 0:07:08 left\n"
    assert capsys.readouterr().out == expected


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = make_progress(reporting=False)
    progress.begin(0, 1, 1, 0)
    progress.step(1.0, 8)
    progress.end("x")
    progress.say("y")
    assert capsys.readouterr() == ("", "")


def test_what_is_said_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = BarProgress()
    bar.begin(0, 1, steps=1, done=0)
    bar.say("curve \x1b]0;bar\x07")
    bar.end("")
    LineProgress().say("resumed from \x1b[2Jrun\u202e")
    assert capsys.readouterr().out.splitlines() == [
        "curve \\x1b]0;bar\\x07",
        "epoch 1/1  ",
        "resumed from \\x1b[2Jrun\\u202e",
    ]


def test_bar_leaves_the_epochs_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = BarProgress()
    progress.begin(0, 1, steps=2, done=0)
    progress.step(1.0, 8)
    progress.say("rank 3 is slow")
    progress.step(None, 8)
    progress.end("train loss 1.0")
    assert capsys.readouterr().out == "rank 3 is slow\nepoch 1/1  train loss 1.0\n"
