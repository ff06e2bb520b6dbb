"""`fleet.resumable` in one process: what a start finds, what ends a loop, and which random states go on."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.errors import CheckpointError, ConversionError, DataError, NotFinite, Preempted
from fleet_train.profile import Profile
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from fleet_train.train.loop.random_states import RandomStates

pytestmark = pytest.mark.usefixtures("one_process")
WIDTH = 4


class Script:
    """What a script has after its startup program: a start of its own."""

    def __init__(self, profile: Profile | None = None, width: int = WIDTH) -> None:
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            paddle.seed(3)
            x = paddle.static.data("x", [None, WIDTH], "float32")
            hidden = paddle.nn.functional.dropout(paddle.nn.Linear(WIDTH, width)(x), 0.5)
            self.loss = paddle.mean((hidden - 1.0) ** 2)
            self.schedule = paddle.optimizer.lr.NaturalExpDecay(0.1, 0.1)
            optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(self.schedule), profile or Profile())
            optimizer.minimize(self.loss, startup)
        self.main, self.startup, self.exe = main, startup, paddle.static.Executor(paddle.CPUPlace())
        self.exe.run(startup)
        self.trained: list[Any] = []

    def train(self, step: Any, x: Any = None) -> None:
        x = np.random.rand(3, WIDTH).astype("float32") if x is None else x
        (loss,) = self.exe.run(self.main, feed={"x": x}, fetch_list=[self.loss])
        self.schedule.step()
        self.trained.append((step, loss.item()))

    def train_all(self, steps: Iterator[int], after: Callable[[int], None] = lambda _: None, nan_at: int = -1) -> None:
        for step in steps:
            self.train(step, np.full((3, WIDTH), np.nan, "float32") if step == nan_at else None)
            after(step)


@contextmanager
def started(profile: Profile | None = None, width: int = WIDTH) -> Iterator[Script]:
    with paddle.static.scope_guard(paddle.static.Scope()):
        np.random.seed(5)
        yield Script(profile, width)


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def run_to(folder: Path, total: int, stop_before: int | None = None, **named: Any) -> list[Any]:
    """One start of a script of ``total`` steps, which an exception ends before a step; what it has trained."""
    with started() as script:
        run = fleet.resumable(folder, script.exe, **named)
        try:
            for step in run.steps(total, save_every=4):
                if step == stop_before:
                    raise InterruptedError
                script.train(step)
        except InterruptedError:
            pass
        Checkpoints(folder).close()
        return script.trained


@pytest.mark.parametrize("stop_before", [0, 1, 4, 7, 9])
def test_a_loop_goes_on_bit_by_bit_after_its_newest_checkpoint(tmp_path: Path, stop_before: int) -> None:
    whole = run_to(tmp_path / "whole", 10)
    broken = run_to(tmp_path / "broken", 10, stop_before)
    assert broken == whole[:stop_before]
    assert kept(tmp_path / "broken") == [step for step in (4, 8) if step <= stop_before]
    assert run_to(tmp_path / "broken", 10) == whole[stop_before // 4 * 4 :]
    assert run_to(tmp_path / "broken", 10) == []
    assert len(run_to(tmp_path / "broken", 12)) == 2, "a longer run goes on"


def test_a_break_saves_nothing_by_itself_and_what_was_trained_is_counted(tmp_path: Path) -> None:
    with started() as script:
        run = fleet.resumable(tmp_path, script.exe)
        for step in run.steps(10, save_every=4):
            script.train(step)
            if step == 5:
                break
        assert (run.step, kept(tmp_path)) == (6, [4])
        for step in run.steps(10, save_every=4):
            assert step == 6
            break  # before anything is trained
        assert run.step == 6
        for step in run.steps(10):
            script.train(step)
            with pytest.raises(CheckpointError, match="within step 6, which has run a program"):
                run.save()
            break
        assert run.step == 7
        run.save()
        assert kept(tmp_path) == [4, 7]
    Checkpoints(tmp_path).close()
    assert [step for step, _ in run_to(tmp_path, 9)] == [7, 8]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_a_notebook_goes_on_in_the_same_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with started() as script:
        run = fleet.resumable(tmp_path, script.exe)
        with pytest.raises(Preempted, match=r"stopped after step 3: .*; resume from"):
            script.train_all(run.steps(10), lambda step: os.kill(os.getpid(), number) if step == 2 else None)
        assert kept(tmp_path) == [3]
        assert signal.getsignal(number) == before
        script.train_all(run.steps(10))
        assert [step for step, _ in script.trained] == list(range(10))
    Checkpoints(tmp_path).close()


def test_a_loop_in_another_thread_than_the_main_one_trains(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(run_to, tmp_path, 3).result()) == 3


def test_with_gradient_merge_saves_and_stops_wait_for_the_end_of_an_update(tmp_path: Path) -> None:
    with started(Profile(accumulate_steps=3)) as script:
        run = fleet.resumable(tmp_path, script.exe, keep=9)
        with pytest.raises(Preempted, match="stopped after step 9"):
            script.train_all(run.steps(20, save_every=4), lambda step: fleet.request_stop("") if step == 6 else None)
        assert kept(tmp_path) == [6, 9]
    Checkpoints(tmp_path).close()


def test_checkpoints_that_are_written_in_the_background_can_be_given_as_the_folder(tmp_path: Path) -> None:
    whole = run_to(tmp_path / "whole", 20)
    with started() as script:
        checkpoints = Checkpoints(tmp_path / "run", keep=3, background=True)
        run = fleet.resumable(checkpoints, script.exe)
        with pytest.raises(Preempted, match=r"stopped after step 19: .*; resume from .*step-00000019"):
            script.train_all(
                run.steps(20, save_every=4), lambda step: fleet.request_stop("asked") if step == 18 else None
            )
        checkpoints.close()
    assert kept(tmp_path / "run") == [12, 16, 19]
    assert run_to(tmp_path / "run", 20) == whole[19:]


def test_another_run_is_refused_with_what_is_different(tmp_path: Path) -> None:
    run_to(tmp_path, 4, description={"data": "first", "classes": [1, 2]})
    Checkpoints(tmp_path).close()
    with pytest.raises(CheckpointError, match="is of another run: its data is 'first', now 'second'"):
        run_to(tmp_path, 4, description={"data": "second", "classes": [1, 2]})
    with pytest.raises(CheckpointError, match=r"states of 0 generators .* now has 1"):
        run_to(tmp_path, 8, description={"data": "first", "classes": (1, 2)}, random=[random.Random(1)])
    with started(width=7) as script, pytest.raises(CheckpointError, match="this program needs"):
        fleet.resumable(tmp_path, script.exe, description={"data": "first", "classes": [1, 2]})
    Checkpoints(tmp_path).close()
    with started() as script:
        other = Checkpoints(tmp_path / "trainer")
        other.save(script.exe, TrainState(1, 4, 4, 1, {}, {}, {}, {}))
        with pytest.raises(CheckpointError, match=r"was not saved by fleet\.resumable"):
            fleet.resumable(other, script.exe)
        other.close()


def test_a_startup_program_after_the_load_is_refused(tmp_path: Path) -> None:
    run_to(tmp_path, 4)
    with started() as script:
        run = fleet.resumable(tmp_path, script.exe)
        script.exe.run(script.startup)
        with pytest.raises(CheckpointError, match=r"call fleet\.resumable after the startup program"):
            next(run.steps(8))
    Checkpoints(tmp_path).close()


def test_nan_is_not_saved(tmp_path: Path) -> None:
    with started(Profile(nonfinite="ignore")) as script:
        run = fleet.resumable(tmp_path, script.exe)
        with pytest.raises(NotFinite, match="after step 4"):
            script.train_all(run.steps(10, save_every=2), nan_at=3)
        assert kept(tmp_path) == [2]
    Checkpoints(tmp_path).close()


def ours() -> BatchLoader:
    return BatchLoader(synthetic(20, (WIDTH,), 3).train, ShardedBatchSampler(20, 4, seed=1))


def numbers() -> Iterator[dict[str, Any]]:
    for row in np.random.permutation(20).reshape(5, 4):
        yield {"features": row[:, None] + np.random.rand(4, WIDTH).astype("float32")}


def epochs_of(folder: Path, loader: Any, stop_before: int | None = None, **named: Any) -> list[Any]:
    with started() as script:
        run = fleet.resumable(folder, script.exe, loader=loader, **named)
        try:
            for epoch in run.epochs(3, save_every=0):
                drawn = np.random.rand()
                for batch in run.batches(save_every=2):
                    if run.step == stop_before:
                        raise InterruptedError
                    script.train((epoch, run.step, drawn), batch["features"].astype("float32"))
        except InterruptedError:
            pass
        Checkpoints(folder).close()
        return script.trained


@pytest.mark.parametrize("make", [ours, lambda: numbers], ids=["ours", "function"])
@pytest.mark.parametrize("stop_before", [5, 6, 7, 11])
def test_epochs_go_on_within_an_epoch_and_begin_it_with_the_same_draws(
    tmp_path: Path, make: Any, stop_before: int
) -> None:
    whole = epochs_of(tmp_path / "whole", make())
    assert [key[:2] for key, _ in whole] == [(step // 5, step) for step in range(15)]
    assert epochs_of(tmp_path / "broken", make(), stop_before) == whole[:stop_before]
    assert epochs_of(tmp_path / "broken", make()) == whole[stop_before // 2 * 2 :]
    assert epochs_of(tmp_path / "broken", make()) == []


@pytest.mark.parametrize("make", [ours, lambda: numbers], ids=["ours", "function"])
def test_a_cell_that_was_interrupted_within_an_epoch_goes_on_in_the_same_process(tmp_path: Path, make: Any) -> None:
    def train_all(folder: Path, interrupted_at: int) -> list[Any]:
        with started() as script:
            run = fleet.resumable(folder, script.exe, loader=make())

            def cell() -> None:
                for step in run.steps(12, save_every=3):
                    script.train(step, run.batch["features"].astype("float32") + np.random.rand())
                    if step == interrupted_at and not folder.with_suffix(".interrupted").exists():
                        folder.with_suffix(".interrupted").touch()
                        os.kill(os.getpid(), signal.SIGINT)

            try:
                cell()
            except Preempted:
                cell()
        Checkpoints(folder).close()
        return script.trained

    assert train_all(tmp_path / "cell", 6) == train_all(tmp_path / "whole", -1)


def test_steps_go_through_the_epochs_of_a_loader(tmp_path: Path) -> None:
    with started() as script:
        run = fleet.resumable(tmp_path, script.exe, loader=ours())
        at = [(step, run.epoch, run.batch["features"].shape[0]) for step in run.steps(7)]
        assert at == [(step, step // 5, 4) for step in range(7)]
    Checkpoints(tmp_path).close()


def test_loaders_that_cannot_be_begun_again_or_have_changed_are_refused(tmp_path: Path) -> None:
    with started() as script, pytest.raises(DataError, match="can be gone through once only; give the function"):
        fleet.resumable(tmp_path / "once", script.exe, loader=numbers())
    with started() as script:
        run = fleet.resumable(tmp_path / "empty", script.exe, loader=[])
        with pytest.raises(DataError, match="no batch in an epoch"):
            next(run.steps(3))
        with pytest.raises(DataError, match="has no loader"):
            next(fleet.resumable(tmp_path / "none", script.exe).batches())
    four = [{"features": np.ones((2, WIDTH))}] * 4
    epochs_of(tmp_path / "shorter", four, stop_before=4)
    with pytest.raises(DataError, match="4 batches of epoch 1 are done, and the loader has only 3"):
        epochs_of(tmp_path / "shorter", four[:3])
    for name in ("once", "empty", "none", "shorter"):
        if (tmp_path / name).exists():
            Checkpoints(tmp_path / name).close()


def test_random_states_continue_through_json_and_begin_anew_from_a_seed() -> None:
    given = [
        np.random.default_rng(1),
        np.random.RandomState(2),
        random.Random(3),
        np.random.Generator(np.random.MT19937()),
    ]

    def draw() -> list[float]:
        values = [random.gauss(0, 1), np.random.randn(), given[0].random(), given[1].randn(), given[2].gauss(0, 1)]
        return [*values, given[3].standard_normal()]

    states = RandomStates(given)
    draw()
    saved = states.read()
    expected = [draw() for _ in range(3)]
    states.write(saved)
    assert [draw() for _ in range(3)] == expected
    states.seed(7)
    first = draw()
    draw()
    states.seed(7)
    assert draw() == first
    assert len({*first}) == len(first)
    with pytest.raises(ConversionError, match="random= was given a int"):
        RandomStates([1])
