"""From options to loaders, and what all ranks agree on before the first epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_train.data import (
    BatchLoader,
    ImageSettings,
    Loader,
    LoaderSettings,
    Participant,
    WorkerLoader,
    load_splits,
    make_evaluation_loader,
    make_loader,
    open_splits,
    settle,
    synthetic,
)
from fleet_train.errors import DataError
from tests.support.images import write_image, write_image_folder

SMALL = ImageSettings(image_size=16)


def settled(loaders: list[Loader]) -> list[int | str]:
    """What `settle` answers on each rank: the steps, or the error's message."""
    told: list[Any] = []
    for loader in loaders:
        with pytest.raises(InterruptedError):
            settle(loader, lambda value: _collect(told, value))
    answers: list[int | str] = []
    for loader in loaders:
        try:
            answers.append(settle(loader, lambda _: told))
        except DataError as error:
            answers.append(str(error))
    return answers


def _collect(told: list[Any], value: Any) -> list[Any]:
    told.append(value)
    raise InterruptedError


def test_participant_is_found_among_the_endpoints() -> None:
    endpoints = ["10.0.0.1:6170", "10.0.0.1:6171", "10.0.0.2:6170", "10.0.0.1:6172"]
    assert Participant.of(3, endpoints) == Participant(rank=3, world_size=4, local_rank=2, local_size=3)
    assert Participant.of(2, endpoints) == Participant(rank=2, world_size=4, local_rank=0, local_size=1)


def test_data_in_memory_is_read_by_a_thread_and_images_by_processes(tmp_path: Path) -> None:
    images = open_splits(data_dir=write_image_folder(tmp_path), images=SMALL).train
    assert isinstance(make_loader(synthetic(8).train, LoaderSettings()), BatchLoader)
    assert isinstance(make_loader(images, LoaderSettings(workers=0)), BatchLoader)
    assert isinstance(make_loader(images, LoaderSettings(loader="thread")), BatchLoader)
    loader = make_loader(images, LoaderSettings(workers=3))
    assert isinstance(loader, WorkerLoader)
    assert loader.workers == 3


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match="--loader 'dall' is unknown; use one of auto, thread, workers"):
        LoaderSettings(loader="dall")
    with pytest.raises(DataError, match="--workers -1"):
        LoaderSettings(workers=-1)
    with pytest.raises(DataError, match="--loader workers decodes image files"):
        make_loader(synthetic(8).train, LoaderSettings(loader="workers"))
    with pytest.raises(DataError, match="--augment crop_flip needs images in files"):
        make_loader(synthetic(8).train, LoaderSettings(augment="crop_flip"))


def test_augment_shift_is_refused_for_images(tmp_path: Path) -> None:
    images = open_splits(data_dir=write_image_folder(tmp_path), images=SMALL).train
    with pytest.raises(DataError, match="--augment shift is for data in memory; images take none, crop_flip"):
        make_loader(images, LoaderSettings(augment="shift"))


def test_evaluation_reads_each_image_once_over_all_ranks(tmp_path: Path) -> None:
    images = open_splits(data_dir=write_image_folder(tmp_path, val_per_class=3), images=SMALL).test
    labels: list[int] = []
    for rank in range(4):
        loader = make_evaluation_loader(images, LoaderSettings(batch_size=2, workers=1), Participant(rank, 4))
        with loader.epoch(0) as feeds:
            labels += [label for feed in feeds for label in feed["labels"].tolist()]
    assert sorted(labels) == [0, 0, 0, 1, 1, 1]


def test_ranks_with_the_same_data_settle_on_its_steps() -> None:
    loaders = [
        make_loader(synthetic(20).train, LoaderSettings(batch_size=4), Participant(rank, 2)) for rank in range(2)
    ]
    assert settled(loaders) == [3, 3]


def machines(folder: Path, sizes: list[int], **settings: Any) -> list[Loader]:
    """One rank on each machine; machine i has sizes[i] images per class of its own."""
    made: list[Loader] = []
    for rank, size in enumerate(sizes):
        root = write_image_folder(folder / f"machine{rank}", per_class=size)
        images = open_splits(data_dir=root, images=SMALL).train
        made.append(
            make_loader(images, LoaderSettings(batch_size=2, workers=1, **settings), Participant(rank, len(sizes)))
        )
    return made


def test_own_folders_settle_on_the_steps_of_the_policy(tmp_path: Path) -> None:
    assert settled(machines(tmp_path / "a", [5, 3], shard_by="folder")) == [3, 3]
    assert settled(machines(tmp_path / "b", [5, 3], shard_by="folder", uneven="pad")) == [5, 5]
    told = settled(machines(tmp_path / "c", [5, 3], shard_by="folder", uneven="error"))
    assert told[0] == told[1]
    assert "steps per epoch by rank: 5, 3; with --uneven error" in str(told[0])


def test_machines_with_different_files_are_distinguished(tmp_path: Path) -> None:
    told = settled(machines(tmp_path, [5, 3]))
    assert told[0] == told[1]
    assert str(told[0]) == (
        "the training data differs between ranks in its number of samples: 10 on rank 0, 6 on rank 1; copy the data "
        "again, or use --shard_by folder if each machine has its own data"
    )


def test_machines_with_renamed_files_are_distinguished(tmp_path: Path) -> None:
    loaders = machines(tmp_path, [3, 3])
    (tmp_path / "machine1/train/class0/0.jpg").rename(tmp_path / "machine1/train/class0/9.jpg")
    images = open_splits(data_dir=tmp_path / "machine1", images=SMALL).train
    loaders[1] = make_loader(images, LoaderSettings(batch_size=2), Participant(1, 2))
    assert "differs between ranks in its file names and labels" in str(settled(loaders)[0])


def test_machines_whose_labels_mean_other_classes_are_distinguished(tmp_path: Path) -> None:
    loaders = machines(tmp_path, [3, 3], shard_by="folder")
    for part in ("train", "val"):
        (tmp_path / "machine1" / part / "class1").rename(tmp_path / "machine1" / part / "another")
    images = open_splits(data_dir=tmp_path / "machine1", images=SMALL).train
    loaders[1] = make_loader(images, LoaderSettings(batch_size=2, shard_by="folder"), Participant(1, 2))
    told = str(settled(loaders)[0])
    assert "differs between ranks in its class names" in told
    assert "classes.txt" in told


def test_too_few_samples_for_a_step_are_refused_on_every_rank(tmp_path: Path) -> None:
    write_image(tmp_path / "train/a/1.jpg")
    write_image(tmp_path / "val/a/1.jpg")
    images = open_splits(data_dir=tmp_path, images=SMALL).train
    settings = LoaderSettings(batch_size=2, shard_by="folder")
    told = settled([make_loader(images, settings, Participant(rank, 2)) for rank in range(2)])
    assert all("rank(s) 0, 1 have too few samples for one step" in str(answer) for answer in told)


def test_shaped_synthetic_data_has_the_shapes_it_is_named_by() -> None:
    train, test = load_splits("synthetic:3x32x24x100x640")
    assert (train.num_samples, test.num_samples, train.sample_shape, train.num_classes) == (640, 64, (3, 32, 24), 100)
    with make_loader(train, LoaderSettings(batch_size=64)).epoch(0) as feeds:
        batches = list(feeds)
    assert [batch["features"].shape for batch in batches] == [(64, 3, 32, 24)] * 10
    labels = sorted({label for batch in batches for label in batch["labels"].tolist()})
    assert labels == list(range(100))
    assert load_splits("synthetic:3x224x224x1000").train.num_samples == 10240


@pytest.mark.parametrize("name", ["synthetic:3x224x224", "synthetic:3x0x4x10", "synthetic:axbxcxd", "synthetic:"])
def test_malformed_shapes_are_refused_with_an_example(name: str) -> None:
    with pytest.raises(DataError, match="such as synthetic:3x224x224x1000"):
        load_splits(name)
