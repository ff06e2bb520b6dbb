"""Worker processes, and DALI's pipeline: the same batches as without them, and a clear error when one fails.

DALI's CPU pipeline is run where DALI is installed; the GPU's is the same graph.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fleet_train.data import (
    BatchLoader,
    ImageFolder,
    ImageSettings,
    Loader,
    LoaderSettings,
    Participant,
    ShardedBatchSampler,
    WorkerLoader,
    augmentation,
    image_splits,
    make_loader,
)
from fleet_train.data.dali import DaliLoader
from fleet_train.data.workers import batches_ahead
from fleet_train.errors import DataError, DataWorkersLost
from fleet_train.launch.attempts import FAILS_AGAIN
from tests.support.images import write_image_folder
from tests.support.processes import clean_environ

NUM_SAMPLES = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("images"), per_class=15)


def images(folder: Path, max_corrupt: float = 0) -> ImageFolder:
    train, _ = image_splits(folder, ImageSettings(image_size=16), max_corrupt)
    assert isinstance(train, ImageFolder)
    return train


@pytest.fixture
def loaders() -> Iterator[list[WorkerLoader]]:
    opened: list[WorkerLoader] = []
    yield opened
    for loader in opened:
        loader.close()


def contents(feeds: Iterable[Any]) -> list[tuple[bytes, list[int]]]:
    """(images, labels) of each batch."""
    return [(feed["features"].tobytes(), feed["labels"].tolist()) for feed in feeds]


def epochs(loader: Loader, *numbers: int, consumed: int = 0) -> list[tuple[bytes, list[int]]]:
    seen = []
    for number in numbers:
        with loader.epoch(number, consumed_samples=consumed) as feeds:
            seen += contents(feeds)
    return seen


def test_batches_are_those_of_this_process_with_any_number_of_workers(
    folder: Path, loaders: list[WorkerLoader]
) -> None:
    data, sampler = images(folder), ShardedBatchSampler(NUM_SAMPLES, 4, 1, 2, seed=3)
    expected = epochs(BatchLoader(data, sampler, augmentation("crop_flip_color", data)), 0, 1)
    assert len(expected) == 8
    assert [batch for batch, _ in expected[:4]] != [batch for batch, _ in expected[4:]]
    for workers, depth in ((1, 1), (2, 2), (3, 4)):
        loaders.append(WorkerLoader(data, sampler, "crop_flip_color", workers, depth))
        assert epochs(loaders[-1], 0, 1) == expected
    assert epochs(loaders[0], 1, consumed=16) == expected[6:]
    assert len(loaders[0]) == 2


def test_batches_that_are_kept_are_not_overwritten(folder: Path, loaders: list[WorkerLoader]) -> None:
    data = images(folder)
    loaders.append(WorkerLoader(data, ShardedBatchSampler(NUM_SAMPLES, 4, shuffle=False), "none", 2))
    with loaders[0].epoch(0) as feeds:
        kept = [feed["features"][:2] for feed in feeds]  # views: they hold the memory of their batch
    again = [data.arrays(np.arange(start, start + 2))["features"] for start in range(0, NUM_SAMPLES, 4)]
    assert all((one == other).all() for one, other in zip(kept, again, strict=True))


def test_all_workers_have_work_whatever_the_batch_size() -> None:
    # Tasks of up to 8 images, two per worker, and one batch that waits for its last task.
    ahead = [[batches_ahead(workers, size) for size in (2, 8, 32, 256)] for workers in (2, 16)]
    assert ahead == [[5, 5, 2, 2], [33, 33, 9, 2]]


def test_an_epoch_left_early_ends_at_once_and_the_next_one_is_whole(folder: Path, loaders: list[WorkerLoader]) -> None:
    sampler = ShardedBatchSampler(NUM_SAMPLES, 2, seed=3)
    loaders += [WorkerLoader(images(folder), sampler, "crop_flip", workers) for workers in (2, 1)]
    for _ in range(5):
        with loaders[0].epoch(0) as feeds:
            next(feeds)
    assert len(epochs(loaders[0], 1)) == 15
    assert len(loaders[0]._slots._slots) <= 10  # what epochs left behind is used again; five are with the workers
    with loaders[1].epoch(0) as feeds:
        next(feeds)
        stuck = pids(loaders[1])[0]
        os.kill(stuck, signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 30  # far from the two minutes after which the worker would be reported
    assert not psutil.pid_exists(stuck)
    assert len(epochs(loaders[1], 1)) == 15


def pids(loader: WorkerLoader) -> list[int]:
    assert loader._pool is not None
    return loader._pool.pids


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, r"was killed by SIGKILL while reading .*; memory was probably short \(fewer --workers"),
        (signal.SIGSEGV, r"was killed by SIGSEGV while reading .*; its own message is above, or one of these files cr"),
        (signal.SIGSTOP, r"has not responded for \d+ s while reading .*jpg.*; is the disk or network file system"),
    ],
)
def test_a_lost_worker_is_replaced_and_its_batches_are_the_same(
    folder: Path,
    loaders: list[WorkerLoader],
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
    reason: str,
) -> None:
    sampler = ShardedBatchSampler(NUM_SAMPLES, 2, seed=3)
    loaders += [WorkerLoader(images(folder), sampler, "crop_flip_color", 2, 1) for _ in range(2)]
    expected = epochs(loaders[0], 0, 1)
    seen = []
    with loaders[1].epoch(0) as feeds:
        seen.append(next(feeds))
        victim = pids(loaders[1])[1]
        if number == signal.SIGSTOP:  # the other two are known by their end, however slow the machine is
            loaders[1]._pool._task_seconds = 5.0  # type: ignore[union-attr]  # starting may take longer
        os.kill(victim, number)
        seen += feeds
    assert contents(seen) == expected[:15]
    assert epochs(loaders[1], 1) == expected[15:]
    (line,) = caplog.messages
    assert re.fullmatch(rf"data worker 1 of 2 \(process {victim}\) {reason}.*; a new worker reads them", line)
    assert not psutil.pid_exists(victim)
    assert victim not in pids(loaders[1])


def test_workers_that_keep_dying_end_the_rank_with_a_code_that_is_restarted(
    folder: Path, loaders: list[WorkerLoader], caplog: pytest.LogCaptureFixture
) -> None:
    loaders.append(WorkerLoader(images(folder), ShardedBatchSampler(NUM_SAMPLES, 2), "crop_flip", 2, 1))
    ended = threading.Event()

    def kill_all() -> None:
        while not ended.wait(0.01):
            # Workers that start take far longer than this pause.
            for pid in pids(loaders[0]) if loaders[0]._pool is not None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    with loaders[0].epoch(0) as feeds:
        next(feeds)
        for pid in pids(loaders[0]):
            os.kill(pid, signal.SIGKILL)
        killer = threading.Thread(target=kill_all)
        killer.start()
        try:
            with pytest.raises(DataWorkersLost, match=r"was killed by SIGKILL .* 10 workers of this rank have") as info:
                list(feeds)
        finally:
            ended.set()
            killer.join()
    assert info.value.exit_code not in FAILS_AGAIN
    assert len(caplog.messages) == 10
    assert len(epochs(loaders[0], 1)) == 15  # with new workers


def test_workers_end_on_close_and_between_epochs_if_requested(folder: Path, loaders: list[WorkerLoader]) -> None:
    data, sampler = images(folder), ShardedBatchSampler(NUM_SAMPLES, 8)
    loaders += [WorkerLoader(data, sampler, "none", 2, keep_workers=keep) for keep in (True, False)]
    for loader in loaders:
        epochs(loader, 0)
    kept = pids(loaders[0])
    assert loaders[1]._pool is None
    loaders[0].close()
    assert not any(psutil.pid_exists(pid) for pid in kept)


TRAINING = """
    import os, sys, time
    from pathlib import Path
    from fleet_train.data import ImageSettings, ShardedBatchSampler, WorkerLoader, image_splits

    print("script", flush=True)  # printed twice if a worker imported this script
    train, _ = image_splits(Path(sys.argv[1]), ImageSettings(image_size=16))
    loader = WorkerLoader(train, ShardedBatchSampler(train.num_samples, 2), "crop_flip", 2)
    with loader.epoch(0) as feeds:
        next(feeds)
        print("workers", *loader._pool.pids, flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_worker_outlives_a_training_that_is_killed_or_interrupted(folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(folder)]
    with subprocess.Popen(
        command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "script\n"
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()[1:]]
        assert len(workers) == 2
        os.killpg(process.pid, number)
        _, alive = psutil.wait_procs(workers, timeout=60)
        output, errors = process.communicate(timeout=120)
    assert alive == []
    assert output == ""
    interrupted = 1 if number == signal.SIGINT else 0
    assert errors.count("KeyboardInterrupt") == errors.count("Traceback") == interrupted  # of no worker
    assert process.returncode == -number


def test_workers_start_without_paddle() -> None:
    code = "import sys, fleet_train.data.decode_worker; print(sorted(m for m in sys.modules if 'paddle' in m))"
    done = subprocess.run([sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_unreadable_images_are_replaced_like_without_workers_and_too_many_are_an_error(
    tmp_path: Path, loaders: list[WorkerLoader]
) -> None:
    write_image_folder(tmp_path)
    for number in (1, 2, 5):
        (tmp_path / f"train/class0/{number}.jpg").write_bytes(b"broken")
    sampler = ShardedBatchSampler(12, 12, shuffle=False)
    loaders += [WorkerLoader(images(tmp_path, most), sampler, "crop_flip", 1) for most in (3, 0)]
    for epoch in range(2):
        with loaders[0].epoch(epoch) as feeds:
            [feed] = list(feeds)
        assert feed["labels"].tolist() == [0] * 5 + [1] * 7  # 5 is replaced by the first of the next class
        assert (feed["features"][1] == feed["features"][3]).all()
    assert loaders[0].corrupt.names == [f"train/class0/{number}.jpg" for number in (1, 2, 5)]
    with pytest.raises(DataError, match=r"1 image\(s\) .* allows 0 of 12: train/class0/1.jpg \(UnidentifiedImageError"):
        epochs(loaders[1], 0)


HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="DALI (1.1 GB) is not installed: requirements-dali.txt")


@pytest.mark.skipif(HAS_DALI, reason="DALI is installed")
def test_missing_dali_says_what_to_install(tmp_path: Path) -> None:
    data = images(write_image_folder(tmp_path))
    with pytest.raises(DataError, match=r"pip install -r requirements-dali\.txt, or use --loader workers"):
        make_loader(data, LoaderSettings(loader="dali"))


@needs_dali
@pytest.mark.parametrize(("augment", "consumed"), [("none", 0), ("crop_flip", 0), ("crop_flip", 8)])
def test_dali_gives_the_same_pictures_as_the_workers(tmp_path: Path, augment: str, consumed: int) -> None:
    data = images(write_image_folder(tmp_path))
    batches = []
    for loader in ("dali", "workers"):
        settings = LoaderSettings(batch_size=4, seed=5, augment=augment, loader=loader, workers=2)
        made = make_loader(data, settings, Participant(1, 2))
        with made.epoch(3, consumed_samples=consumed) as feeds:
            batches.append(list(feeds))
        made.close()
    assert [len(feed["labels"]) for feed in batches[0]] == [4, 2][consumed // 8 :]
    for ours, theirs in zip(*batches, strict=True):
        assert ours["features"].dtype == np.float32
        assert ours["labels"].tolist() == theirs["labels"].tolist()
        # In units of the channels' standard deviation; a wrong part or a missing flip is off by more than 1.
        assert abs(ours["features"] - theirs["features"]).mean() < 0.1


@needs_dali
def test_unreadable_images_are_replaced_and_counted(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    whole = (tmp_path / "train/class0/1.jpg").read_bytes()
    (tmp_path / "train/class0/1.jpg").write_bytes(whole[:40])  # its header is broken
    (tmp_path / "train/class1/1.jpg").write_bytes(whole[: len(whole) // 2] + b"\xff\xd9")
    data = images(tmp_path, max_corrupt=2)
    loader = DaliLoader(data, ShardedBatchSampler(12, 12, shuffle=False), "crop_flip")
    with loader.epoch(0) as feeds:
        [feed] = list(feeds)
    assert "train/class0/1.jpg" in loader.corrupt.names
    assert feed["labels"].tolist() == [0] * 6 + [1] * 6
    assert (feed["features"][1] == feed["features"][2]).all()
    with pytest.raises(DataError, match=r"allows 0 of 12: train/class./1\.jpg"):
        list(DaliLoader(images(tmp_path), ShardedBatchSampler(12, 12), "none").epoch(0))
