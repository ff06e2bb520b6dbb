"""From options to datasets, loaders and feeds, and what all ranks agree on before the first epoch."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_train.data import (
    ArrayDataset,
    BatchLoader,
    Draws,
    ImageSettings,
    Loader,
    LoaderSettings,
    Participant,
    Prefetcher,
    ShardedBatchSampler,
    WorkerLoader,
    augmentation,
    digits,
    load_splits,
    make_loader,
    open_splits,
    settle,
    synthetic,
)
from fleet_train.errors import DataError
from tests.support.agreeing import ThreadRanks
from tests.support.images import write_image_folder

SMALL = ImageSettings(image_size=16)


def settled(loaders: list[Loader]) -> list[int | DataError]:
    """What `settle` answers on each rank: the steps, or the error."""
    ranks = ThreadRanks(len(loaders))
    return ranks.run(lambda rank: settle(loaders[rank], ranks.gather))


def test_participant_is_found_among_the_endpoints() -> None:
    endpoints = ["10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170", "10.0.0.1:6172"]
    assert Participant.of(3, endpoints) == Participant(rank=3, world_size=4, local_rank=2, local_size=3)
    assert Participant.of(2, endpoints) == Participant(rank=2, world_size=4, local_rank=0, local_size=1)


def test_data_in_memory_is_read_by_a_thread_and_images_by_processes(tmp_path: Path) -> None:
    images = open_splits(data_dir=write_image_folder(tmp_path), images=SMALL).train
    assert isinstance(make_loader(SYNTHETIC, LoaderSettings()), BatchLoader)
    for settings in (LoaderSettings(workers=0), LoaderSettings(loader="thread")):
        assert isinstance(make_loader(images, settings), BatchLoader)
    loader = make_loader(images, LoaderSettings(workers=3))
    assert isinstance(loader, WorkerLoader)
    assert loader.workers == 3
    with pytest.raises(DataError, match="--augment shift is for data in memory; images take none, crop_flip"):
        make_loader(images, LoaderSettings(augment="shift"))


SYNTHETIC = synthetic(8).train
ROWS = ArrayDataset("rows", np.zeros((2, 3), np.float32), np.zeros(2, np.int64), num_classes=1)


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda: LoaderSettings(loader="dall"), "--loader 'dall' is unknown; use one of auto, thread, workers"),
        (lambda: LoaderSettings(workers=-1), "--workers -1"),
        (lambda: make_loader(SYNTHETIC, LoaderSettings(loader="workers")), "--loader workers decodes image files"),
        (lambda: make_loader(SYNTHETIC, LoaderSettings(augment="crop_flip")), "--augment crop_flip needs images in"),
        (lambda: augmentation("flip", SYNTHETIC), "unknown augmentation 'flip'; known: auto, none, shift"),
        (lambda: augmentation("shift", ROWS)(ROWS, Draws(0, 0, np.arange(2))), "--augment none"),
        (lambda: load_splits("imagenet"), "unknown data 'imagenet'; known: digits, synthetic, synthetic:<ch"),
        *(
            (lambda shape=shape: load_splits(f"synthetic:{shape}"), "such as synthetic:3x224x224x1000")
            for shape in ("3x224x224", "3x0x4x10", "axbxcxd", "")
        ),
        (lambda: ArrayDataset("own", np.zeros((3, 2), np.float32), np.zeros(2, np.int64), 5), "3 samples but 2 labels"),
        (lambda: ArrayDataset("own", np.zeros((2, 2), np.float64), np.zeros(2, np.int64), 5), "float64"),
        (lambda: ArrayDataset("own", np.zeros((2, 2), np.float32), np.array([0, 5]), 5), "allows 0 to 4"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(do: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        do()


def machines(folder: Path, sizes: list[int], **settings: Any) -> list[Loader]:
    """One rank on each machine; machine i has sizes[i] images per class of its own."""
    made: list[Loader] = []
    for rank, size in enumerate(sizes):
        images = open_splits(data_dir=write_image_folder(folder / f"machine{rank}", per_class=size), images=SMALL).train
        given = LoaderSettings(**{"batch_size": 2, "workers": 1, **settings})
        made.append(make_loader(images, given, Participant(rank, len(sizes))))
    return made


def test_own_folders_settle_on_the_steps_of_the_policy(tmp_path: Path) -> None:
    same = [make_loader(synthetic(20).train, LoaderSettings(batch_size=4), Participant(rank, 2)) for rank in range(2)]
    assert settled(same) == [3, 3], "ranks with the same data"
    assert settled(machines(tmp_path / "a", [5, 3], shard_by="folder")) == [3, 3]
    assert settled(machines(tmp_path / "b", [5, 3], shard_by="folder", uneven="pad")) == [5, 5]
    for sizes, uneven, said in (
        ([5, 3], "error", "steps per epoch by rank: 5, 3; with --uneven error"),
        ([1, 1], "truncate", "rank(s) 0, 1 have too few samples for one step"),
    ):
        batch = 2 if uneven == "error" else 4
        told = settled(machines(tmp_path / uneven, sizes, shard_by="folder", uneven=uneven, batch_size=batch))
        assert [said in str(each) for each in told] == [True, True]


def test_machines_with_other_files_names_or_classes_are_distinguished(tmp_path: Path) -> None:
    said = "the training data differs between ranks in its number of samples: 10 on rank 0, 6 on rank 1; copy the data"
    told = settled(machines(tmp_path / "counts", [5, 3]))
    assert [str(each).startswith(said) for each in told] == [True, True]
    for shard_by, moved, said in (
        ("sample", [("train/class0/0.jpg", "train/class0/9.jpg")], "in its file names and labels"),
        ("folder", [(f"{part}/class1", f"{part}/another") for part in ("train", "val")], "in its class names.*classes"),
    ):
        loaders, root = machines(tmp_path / shard_by, [3, 3], shard_by=shard_by), tmp_path / shard_by / "machine1"
        for old, new in moved:
            (root / old).rename(root / new)
        images = open_splits(data_dir=root, images=SMALL).train
        loaders[1] = make_loader(images, LoaderSettings(batch_size=2, shard_by=shard_by), Participant(1, 2))
        assert re.search(f"differs between ranks {said}", str(settled(loaders)[0]))


def test_synthetic_data_has_the_shapes_and_sizes_it_is_named_by_and_differs_by_seed_alone() -> None:
    train, test = synthetic(num_samples=40, sample_shape=(3, 4, 4), num_classes=7)
    assert (train.num_samples, test.num_samples, train.sample_shape, train.num_classes) == (40, 10, (3, 4, 4), 7)
    train, test = load_splits("synthetic:3x32x24x100x640")
    assert (train.num_samples, test.num_samples, train.sample_shape, train.num_classes) == (640, 64, (3, 32, 24), 100)
    with make_loader(train, LoaderSettings(batch_size=64)).epoch(0) as feeds:
        batches = list(feeds)
    assert [batch["features"].shape for batch in batches] == [(64, 3, 32, 24)] * 10
    labels = sorted({label for batch in batches for label in batch["labels"].tolist()})
    assert labels == list(range(100))
    assert load_splits("synthetic:3x224x224x1000").train.num_samples == 10240
    first = [synthetic(8, seed=seed).train.arrays(np.arange(8))["features"].tobytes() for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]


def test_digits_have_a_fixed_stratified_split_and_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = digits()
    assert (train.num_samples, test.num_samples, train.sample_shape, train.num_classes) == (1438, 359, (1, 8, 8), 10)
    ours, theirs = (part.arrays(np.arange(part.num_samples)) for part in (train, test))
    assert np.bincount(theirs["labels"]).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert (ours["features"].dtype, ours["labels"].dtype) == (np.float32, np.int64)
    assert (ours["features"].min(), ours["features"].max()) == (0.0, 1.0)
    assert not {each.tobytes() for each in ours["features"]} & {each.tobytes() for each in theirs["features"]}
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        digits()


def test_loader_gives_the_samplers_batches_and_their_indices() -> None:
    train = synthetic(num_samples=20).train
    loader = BatchLoader(train, ShardedBatchSampler(20, 4, 0, 2, seed=9))
    assert len(loader) == 3
    with loader.epoch(2, consumed_samples=8) as feeds:
        labels = [feed["labels"].tolist() for feed in feeds]
    assert len(loader) == 2
    assert [loader.consumed_after(steps) for steps in (0, 1, 2)] == [8, 16, 20]
    sampler = ShardedBatchSampler(20, 4, 0, 2, seed=9)
    sampler.set_epoch(2)
    assert labels == [train.arrays(sampler.batch(step))["labels"].tolist() for step in (1, 2)]
    assert [loader.indices(step).tolist() for step in (0, 1)] == [sampler.batch(step).tolist() for step in (1, 2)]


def test_shift_moves_each_image_by_at_most_one_pixel_and_fills_with_zeros() -> None:
    image = np.zeros((1, 1, 5, 5), np.float32)
    image[0, 0, 2, 2] = 1.0
    points = ArrayDataset("points", np.repeat(image, 200, axis=0), np.zeros(200, np.int64), num_classes=1)
    shifted = augmentation("shift", points)(points, Draws(0, 0, np.arange(200)))["features"]
    assert shifted.shape == (200, 1, 5, 5)
    places = {(int(y), int(x)) for y, x in zip(*np.nonzero(shifted[:, 0])[1:], strict=True)}
    assert places == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}
    assert shifted.sum() == 200.0


def test_a_sample_is_augmented_alike_on_every_rank_and_differently_in_each_epoch() -> None:
    data = synthetic(num_samples=8).train

    def images(rank: int, world_size: int, epoch: int) -> dict[int, bytes]:
        sampler = ShardedBatchSampler(8, 4, rank, world_size, seed=1)
        loader = BatchLoader(data, sampler, augmentation("shift", data))
        with loader.epoch(epoch) as feeds:
            pairs = [(loader.indices(step), feed["features"]) for step, feed in enumerate(feeds)]
        return {int(i): image.tobytes() for indices, batch in pairs for i, image in zip(indices, batch, strict=True)}

    alone = images(0, 1, epoch=3)
    assert alone == {**images(0, 2, epoch=3), **images(1, 2, epoch=3)}
    assert sorted(alone) == list(range(8))
    assert alone != images(0, 1, epoch=4)


def test_draws_are_uniform_and_depend_on_seed_epoch_and_sample() -> None:
    numbers = Draws(1, 2, np.arange(20_000)).uniform(3)
    assert numbers.shape == (20_000, 3)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    histogram = np.array([np.histogram(column, bins=10, range=(0, 1))[0] for column in numbers.T])
    assert abs(histogram - 2000).max() < 200  # 4.7 standard deviations
    assert abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
    one = Draws(1, 2, np.array([7])).uniform(3)
    assert one.tolist() == numbers[7:8].tolist()
    others = [Draws(2, 2, np.array([7])), Draws(1, 3, np.array([7])), Draws(2, 1, np.array([7]))]
    assert len({one.tobytes(), *(other.uniform(3).tobytes() for other in others)}) == 4


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "prefetch" in thread.name]


def test_items_come_in_order_an_exception_behind_them_and_the_thread_ends() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    items = Prefetcher(source())
    assert next(items) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(items)
    whole = Prefetcher(range(5))
    assert list(whole) == [0, 1, 2, 3, 4]
    assert (threads(), list(whole)) == ([], []), "it stays exhausted"
    with pytest.raises(ValueError, match="depth=0"):
        Prefetcher([1], depth=0)


def test_the_next_items_are_read_while_one_is_used_and_closing_stops_a_source_that_never_ends() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        while True:
            read.append(len(read))
            yield read[-1]

    with Prefetcher(source(), depth=2) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 5
        while len(read) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        # One in use, two in the queue, one in the thread's hands: never the whole source.
        assert read == [0, 1, 2, 3]
    assert threads() == []
    with pytest.raises(StopIteration):
        next(items)
