"""NVIDIA DALI's CPU pipeline; the GPU's is the same graph. Skipped where DALI is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import paddle
import pytest

from fleet_train.data import (
    ImageFolder,
    ImageSettings,
    LoaderSettings,
    Participant,
    ShardedBatchSampler,
    image_splits,
    make_evaluation_loader,
    make_loader,
)
from fleet_train.data.dali import DaliLoader, copy_to_paddle
from fleet_train.errors import DataError
from tests.support.images import write_image_folder

HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="DALI (1.1 GB) is not installed: requirements-dali.txt")


def images(folder: Path, max_corrupt: float = 0) -> ImageFolder:
    train, _ = image_splits(folder, ImageSettings(image_size=32), max_corrupt)
    assert isinstance(train, ImageFolder)
    return train


@pytest.mark.skipif(HAS_DALI, reason="DALI is installed")
def test_missing_dali_says_what_to_install(tmp_path: Path) -> None:
    data = images(write_image_folder(tmp_path))
    with pytest.raises(DataError, match=r"pip install -r requirements-dali\.txt, or use --loader workers"):
        make_loader(data, LoaderSettings(loader="dali"))


@needs_dali
@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_dali_gives_the_same_pictures_as_the_workers(tmp_path: Path, augment: str) -> None:
    data = images(write_image_folder(tmp_path))
    batches = []
    for loader in ("dali", "workers"):
        settings = LoaderSettings(batch_size=4, seed=5, augment=augment, loader=loader, workers=2)
        made = make_loader(data, settings, Participant(1, 2))
        with made.epoch(3) as feeds:
            batches.append(list(feeds))
        made.close()
    assert [len(feed["labels"]) for feed in batches[0]] == [4, 2]
    for ours, theirs in zip(*batches, strict=True):
        assert ours["features"].dtype == np.float32
        assert ours["labels"].tolist() == theirs["labels"].tolist()
        # In units of the channels' standard deviation; a wrong part or a missing flip is off by more than 1.
        assert abs(ours["features"] - theirs["features"]).mean() < 0.1


@needs_dali
def test_colours_change_and_epochs_repeat(tmp_path: Path) -> None:
    data = images(write_image_folder(tmp_path))

    def first(augment: str, epoch: int) -> bytes:
        loader = DaliLoader(data, ShardedBatchSampler(12, 4), augment)
        with loader.epoch(epoch) as feeds:
            return next(feeds)["features"].tobytes()

    plain = first("crop_flip", 0)
    assert first("crop_flip", 0) == plain
    assert plain not in (first("crop_flip", 1), first("crop_flip_color", 0))


@needs_dali
def test_rest_of_an_epoch_and_evaluation(tmp_path: Path) -> None:
    data = images(write_image_folder(tmp_path))
    loader = DaliLoader(data, ShardedBatchSampler(12, 3, seed=2), "crop_flip")
    with loader.epoch(1) as feeds:
        whole = [feed["features"].tobytes() for feed in feeds]
    with loader.epoch(1, consumed_samples=6) as feeds:
        assert [feed["features"].tobytes() for feed in feeds] == whole[2:]
    settings = LoaderSettings(batch_size=8, loader="dali")
    with make_evaluation_loader(data, settings, Participant(0, 5)).epoch(0) as feeds:
        assert [len(feed["labels"]) for feed in feeds] == [3]


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


@needs_dali
def test_batch_is_copied_into_a_tensor_that_paddle_can_be_fed_with() -> None:
    from nvidia.dali import Pipeline, fn

    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    pipeline = Pipeline(batch_size=2, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(fn.external_source(lambda: values, batch=True))
    pipeline.build()
    tensor = copy_to_paddle(pipeline.run()[0], paddle.CPUPlace())
    assert len(tensor) == 2
    assert (np.array(tensor) == values).all()
