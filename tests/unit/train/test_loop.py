"""The trainer on one process: what happens when, what ends it, and what all ranks agree on before it starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import DistributedStrategy, fleet
from fleet_train.cluster import Cluster
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.errors import NotFinite, NotSaved, Preempted, ScheduleMismatch
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.profile import Profile
from fleet_train.train import Checkpoints, Evaluation, Trainer, TrainerSettings, reference
from fleet_train.train.checkpoint import storage
from fleet_train.train.checkpoint.manager import StoredCheckpoint
from fleet_train.train.checkpoint.position import other_choice
from fleet_train.train.config import TrainConfig
from fleet_train.train.evaluation import Outcome
from fleet_train.train.stopping import STOPPING_SIGNALS, listening
from fleet_train.train.trainer import begins_interval, last_reported
from tests.support.agreeing import ThreadRanks
from tests.support.processes import clean_environ, python

pytestmark = pytest.mark.usefixtures("one_process")
SAMPLES, BATCH = 40, 8


class Watched(BatchLoader):
    """Calls ``before(feed, step)`` with each batch, counted over all epochs."""

    def __init__(self, before: Any = None) -> None:
        super().__init__(
            synthetic(SAMPLES, (6,), 3).train, ShardedBatchSampler(SAMPLES, BATCH, seed=1), prefetch_depth=1
        )
        self._before, self.step = before, 0

    def _read(self) -> Iterator[Any]:
        for feed in super()._read():
            if self._before is not None:
                self._before(feed, self.step)
            self.step += 1
            yield feed


class Recorder:
    """A sink of one's own, which the trainer closes."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def write(self, step: int, scalars: Any) -> None:
        self.records.append((step, dict(scalars)))

    def steps_of(self, tag: str) -> list[int]:
        return [step for step, scalars in self.records if tag in scalars]

    def values_of(self, tag: str) -> list[float]:
        return [scalars[tag] for _, scalars in self.records if tag in scalars]


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with paddle.static.scope_guard(paddle.static.Scope()), paddle.utils.unique_name.guard():
        yield


def trainer(loader: Any, settings: TrainerSettings, strategy: Any = None, **parts: Any) -> tuple[Trainer, Recorder]:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        features = paddle.static.data("features", [-1, 6], "float32")
        labels = paddle.static.data("labels", [-1], "int64")
        loss = paddle.nn.functional.cross_entropy(paddle.nn.Linear(6, 3)(features), labels)
        scheduler = paddle.optimizer.lr.LambdaDecay(1.0, lambda update: 1.0 / (1 + update))
        fleet.distributed_optimizer(paddle.optimizer.SGD(scheduler), strategy).minimize(loss, startup)
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(startup)
    sinks = Recorder()
    return Trainer(exe, loss, loader, settings, scheduler=scheduler, sinks=sinks, **parts), sinks


def newest(output: Path) -> StoredCheckpoint:
    found = Checkpoints(output).newest()
    assert found is not None
    return found


def kept(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("*step-*"))


def test_evaluations_and_checkpoints_come_when_they_are_due_and_after_the_last_epoch(tmp_path: Path) -> None:
    evaluated: list[int] = []

    def evaluate(_: Any) -> Evaluation:
        evaluated.append(len(evaluated))
        return Evaluation({"accuracy": 0.5 if len(evaluated) == 1 else 0.25}, 7)

    settings = TrainerSettings(epochs=5, evaluate_every=3, checkpoint_every=2, checkpoint_every_steps=7, log_every=2)
    made, sinks = trainer(Watched(), settings, evaluator=evaluate, checkpoints=Checkpoints(tmp_path, keep=99))
    outcome = made.fit()
    assert (outcome.epochs, outcome.steps, outcome.samples) == (5, 25, 200)
    assert sinks.steps_of("test/accuracy") == [15, 25]
    assert kept(tmp_path) == [7, 10, 14, 20, 21, 25]
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step-00000025"
    assert sinks.steps_of("train/loss") == [2, 4, 7, 9, 12, 14, 17, 19, 22, 24]
    assert sinks.closed == 1


def test_gradient_merge_changes_the_rate_with_each_update_only_also_after_a_resume(tmp_path: Path) -> None:
    strategy = DistributedStrategy()
    strategy.accumulate_steps = 2
    for epochs, rates in ((1, [1 / 2, 1 / 3]), (2, [1 / 4, 1 / 5, 1 / 6])):
        with paddle.static.scope_guard(paddle.static.Scope()), paddle.utils.unique_name.guard():
            settings = TrainerSettings(epochs=2, stop_after_epochs=1, log_every=1)
            made, sinks = trainer(Watched(), settings, strategy, checkpoints=Checkpoints(tmp_path))
            if epochs == 2:
                made.resume(newest(tmp_path))
            assert made.fit().epochs == epochs
        assert sinks.values_of("train/learning_rate") == pytest.approx(rates)
    # Two updates were done; this epoch's first batch completes the third.
    assert sinks.steps_of("train/learning_rate") == [3, 4, 5]


def test_the_rate_follows_the_steps_that_are_left_where_an_epoch_has_another_number_of_them(tmp_path: Path) -> None:
    for batch_size in (8, 16):
        with paddle.static.scope_guard(paddle.static.Scope()), paddle.utils.unique_name.guard():
            settings = TrainerSettings(epochs=2, stop_after_epochs=1, checkpoint_every_steps=3, log_every=1)
            loader = BatchLoader(synthetic(SAMPLES, (6,), 3).train, ShardedBatchSampler(SAMPLES, batch_size, seed=1))
            made, sinks = trainer(loader, settings, checkpoints=Checkpoints(tmp_path, keep=9))
            if batch_size == 16:
                # The one of step 3 is left: 3 of 5 steps, 24 of 40 samples.
                shutil.rmtree(tmp_path / "checkpoints" / "step-00000005")
                made.resume(newest(tmp_path))
            made.fit()
    # The last 16 samples are step 3 of 3; 3 of 5 steps would be 1 of 3.
    assert sinks.steps_of("train/learning_rate") == [4]  # after the three updates of the checkpoint
    assert sinks.values_of("train/learning_rate") == pytest.approx([1 / 4])


def test_a_stop_is_obeyed_after_the_step_and_the_next_call_trains_what_is_left(tmp_path: Path) -> None:
    stop = lambda _, step: fleet.request_stop("the power goes") if step == 7 else None  # noqa: E731
    made, _ = trainer(Watched(stop), TrainerSettings(epochs=3), checkpoints=Checkpoints(tmp_path))
    with pytest.raises(Preempted, match=r"stopped after step [678]: rank 0 .*: the power goes; resume from"):
        made.fit()
    found = newest(tmp_path)
    assert (found.state.epoch, found.state.consumed_samples) == (1, (found.state.step - 5) * BATCH)


def test_nothing_of_a_loss_that_is_not_finite_is_saved(tmp_path: Path) -> None:
    def spoil(feed: Any, step: int) -> None:
        if step == 8:
            feed["features"][3, 0] = np.nan

    settings = TrainerSettings(epochs=3, checkpoint_every=0, checkpoint_every_steps=4)
    made, sinks = trainer(Watched(spoil), settings, checkpoints=Checkpoints(tmp_path))
    said = "rank 0 is nan at step 9; its batch: samples .*'features' itself is not finite"
    with pytest.raises(NotFinite, match=said):
        made.fit()
    assert (kept(tmp_path), sinks.closed) == ([4, 8], 1)


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("frequency", [1, 2, 4])
def test_a_run_that_was_stopped_reports_the_steps_of_one_that_was_not(every: int, frequency: int) -> None:
    def is_looked_at(step: int) -> bool:
        return (step - 1) % frequency == 0

    def reports(begun: int) -> list[int]:
        """In steps ``begun + 1`` to 40, by the rule of the loop."""
        found, reported = [], last_reported(begun, every, is_looked_at)
        for step in range(begun + 1, 41):
            if is_looked_at(step) and begins_interval(step, reported, every):
                found.append(step)
                reported = step
        return found

    whole = reports(0)
    for stopped in range(40):
        assert reports(stopped) == [step for step in whole if step > stopped], f"stopped after step {stopped}"
    looked_at = [last_reported(inside, 10, lambda step: step % 2 == 1) for inside in (0, 9, 10, 11, 20, 21)]
    assert looked_at == [0, 0, 0, 11, 11, 21], "the first fetched step of each interval"


def test_another_choice_of_buckets_is_said_where_it_changes_bits() -> None:
    gradients = [TensorSpec(f"w{index}", (640, 640), "float32") for index in range(4)]
    three, two = (build_plan(gradients, Cluster.imagined(ranks, 1), Profile()) for ranks in (3, 2))
    saved = "nccl_comm_num: 4, fuse_grad_size_in_MB: 64, last_comm_group_size_MB: 64"
    assert three.chosen.startswith("nccl_comm_num: ")
    note = other_choice(saved, three, 3)
    assert f"set by {saved} and now by {three.chosen}" in note
    assert "write the former into the profile to continue bit by bit" in note
    # The scales of few bits are those of blocks, which lie elsewhere in other buckets.
    few_bits = build_plan(gradients, Cluster.imagined(2, 1), Profile(compression="int8"))
    assert other_choice(saved, few_bits, 2)
    # The same; the sum of two is one sum; other ranks have other sums anyway; saved with numbers that were given.
    silent = [(three.chosen, three, 3), (saved, two, 2), (saved, three, 4), ("", three, 3), (saved, None, 1)]
    assert [other_choice(*each) for each in silent] == [""] * 5


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_last_state_that_is_not_saved_is_a_failure_and_an_earlier_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, stopped: bool
) -> None:
    begin, first_lost, said = storage.begin, 10 if stopped else 15, list[str]()

    def begin_or_fail(checkpoints: Path, step: int) -> Path:
        if stopped and step == first_lost:
            fleet.request_stop("SIGTERM")
        if step == 1 or step >= first_lost:
            raise OSError(27, "File too large")
        return begin(checkpoints, step)

    monkeypatch.setattr(storage, "begin", begin_or_fail)
    checkpoints = Checkpoints(tmp_path, background=background, say=said.append)
    made, _ = trainer(Watched(), TrainerSettings(epochs=3, checkpoint_every_steps=1), checkpoints=checkpoints)
    why = r"the checkpoint of step 1\d could not be written: .*File too large, and nothing was saved after it; "
    newest = rf"the newest one is .*/step-000000{first_lost - 1:02d}: resume from it"
    with pytest.raises(NotSaved, match=(r"^stopped after step 1\d: .*SIGTERM; " if stopped else "^") + why + newest):
        made.fit()
    assert said[0].startswith("the checkpoint of step 1 could not be written: ")
    assert all(one.endswith("; training goes on, the checkpoints before it are as they were") for one in said)


@pytest.mark.parametrize(("epoch", "step", "evaluated_at"), [(1, 10, [10, 15]), (3, 15, [15])])
def test_a_call_makes_up_for_the_evaluation_that_a_stop_has_left(
    epoch: int, step: int, evaluated_at: list[int]
) -> None:
    """After the last epoch, it does nothing else."""
    evaluated: list[int] = []

    def evaluate(_: Any) -> Evaluation:
        evaluated.append(made.position.step)
        return Evaluation({"loss": 1.0}, 1)

    made, _ = trainer(Watched(), TrainerSettings(epochs=3), evaluator=evaluate)
    made.position.epoch, made.position.step = epoch, step
    made.position.consumed_samples = SAMPLES if epoch == 1 else 0
    outcome = made.fit()
    assert (outcome.steps, outcome.test_loss, evaluated) == (15, 1.0, evaluated_at)


def test_a_signal_becomes_one_request_with_its_name_and_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in STOPPING_SIGNALS]
    for number in STOPPING_SIGNALS:
        asked: list[str] = []
        with listening(asked.append):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        assert asked == ["Ctrl-C" if number == signal.SIGINT else number.name]
    assert [signal.getsignal(number) for number in STOPPING_SIGNALS] == before


def test_a_later_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal\nfrom fleet_train import timeouts\nfrom fleet_train.train import stopping as signals\n"
        "timeouts.SAME_STOP_SECONDS = 0.0\n"
        "with signals.listening(print):\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('not reached')"
    )
    done = subprocess.run(python("-c", code), env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout.splitlines() == ["SIGUSR1", "still here"]


def test_a_second_ctrl_c_ends_the_process_at_once_and_one_that_is_ignored_stays_ignored() -> None:
    code = (
        "import os, signal, time\nfrom fleet_train.train.stopping import listening\n"
        "with listening(print):\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.3)\n    print('still here', flush=True)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.3)\n    print('not reached')"
    )
    line = python("-c", code)
    done = subprocess.run(line, env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout.splitlines() == ["Ctrl-C", "still here"]
    assert "a second one ends it at once" in done.stderr
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *line]
    done = subprocess.run(background, env=clean_environ(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["still here", "not reached"])


def test_another_thread_than_the_main_one_listens_to_nothing() -> None:
    def look() -> Any:
        with listening([].append):
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(look).result() == signal.getsignal(signal.SIGTERM)


CONFIG = TrainConfig(data_dir="/data", workers=2, batch_size=8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 64}, r"--batch_size is 8 on rank 0 \(127.0.0.2:6170\) and 64 on rank 2 \(127.0.0.4:6170\)"),
        ({"learning_rate": 0.5}, "--lr is None on rank 0 .* and 0.5 on rank 2"),
        ({"resume": True}, "--resume is False on rank 0 .* and True on rank 2"),
        ({"data_dir": "/mnt/data", "output_dir": "/tmp/other", "workers": 8, "loader": "thread", "strategy": "x"}, ""),
    ],
)
def test_a_flag_that_differs_is_named_with_both_machines_unless_it_is_each_machines_own(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    ranks = ThreadRanks(3)
    monkeypatch.setattr(reference, "fleet", ranks)
    configs = [CONFIG, CONFIG, replace(CONFIG, **change)]
    for error in ranks.run(lambda rank: reference.agree_on_flags(configs[rank])):
        assert isinstance(error, ScheduleMismatch) == bool(said)
        assert re.match(said, str(error))


def test_the_global_batch_is_that_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("profile", Profile(accumulate_steps=2)), ("worker_num", 3), ("node_num", 1)):
        monkeypatch.setattr(fleet, name, lambda value=value: value)
    assert "global batch 48," in reference.headline(CONFIG, 5)
    found = reference.summarize(CONFIG, Outcome(), 0, 1.0)
    assert (found["batch_size_per_rank"], found["global_batch_size"]) == (8, 48)
