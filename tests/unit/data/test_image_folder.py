"""Image folders and lists: which files and labels, what a decoded and changed image is, and how broken files end."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fleet_train.data import Draws, ImageFolder, ImageSettings, LoaderSettings, image_splits, make_loader
from fleet_train.data.decode import DRAWS_PER_IMAGE, center_box, change_colors, random_box, random_changes
from fleet_train.data.images import CorruptImages
from fleet_train.errors import DataError
from tests.support.images import write_image, write_image_folder

SMALL = ImageSettings(image_size=16)


def test_folders_are_classes_in_sorted_order(tmp_path: Path) -> None:
    write_image(tmp_path / "train" / "b" / "2.jpg")
    write_image(tmp_path / "train" / "a" / "deeper" / "1.PNG")
    write_image(tmp_path / "val" / "b" / "3.jpeg")
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    train, val = image_splits(tmp_path, SMALL)
    assert isinstance(train, ImageFolder)
    assert isinstance(val, ImageFolder)
    assert train.class_names == val.class_names == ("a", "b")
    assert train.paths == ("train/a/deeper/1.PNG", "train/b/2.jpg")
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 1], [1])
    assert (train.num_samples, train.num_classes, train.sample_shape) == (2, 2, (3, 16, 16))


def test_lists_name_files_and_labels_and_a_classes_file_numbers_those_of_folders(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("pictures/a cat.jpg 3\n\npictures/dog.jpg 0\n")
    (tmp_path / "val.txt").write_text("pictures/a cat.jpg 1\n")
    train, val = image_splits(tmp_path, SMALL)
    assert isinstance(train, ImageFolder)
    assert train.paths == ("pictures/a cat.jpg", "pictures/dog.jpg")
    assert (train.labels.tolist(), val.num_samples, train.num_classes) == ([3, 0], 1, 4)
    write_image(tmp_path / "folders" / "train" / "b" / "1.jpg")
    write_image(tmp_path / "folders" / "val" / "c" / "2.jpg")
    (tmp_path / "folders" / "classes.txt").write_text("c\na\nb\n")  # a has no images
    train, val = image_splits(tmp_path / "folders", SMALL)
    assert [each.arrays(np.array([0]))["labels"].tolist() for each in (train, val)] == [[2], [0]]
    assert train.num_classes == 3


TWO_LISTS = {"train.txt": "a.jpg 0\n", "val.txt": "a.jpg 0\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no folder train and no folder val in it; needed are train/<class>"),
        ({"train/a/1.jpg": None}, "no folder val in it"),
        ({"train/a/x.txt": "", "val/a/1.jpg": None}, "train has no images; known are .jpg"),
        ({"train/a/1.jpg": None, "val/b/1.jpg": None}, "val/b: this class is not among the 1 of train/"),
        ({"train.txt": "a.jpg 0\n"}, "val.txt cannot be read"),
        (TWO_LISTS | {"train.txt": "a.jpg zero\n"}, "train.txt:1: 'a.jpg zero' is not"),
        (TWO_LISTS | {"train.txt": "a.jpg 2\n", "classes.txt": "x\ny\n"}, "a label is 2, classes.txt names 2"),
        ({"train/a/1.jpg": None, "val/a/1.jpg": None, "classes.txt": "a\na\n"}, "'a' is listed twice"),
    ],
)
def test_unusable_folders_are_refused_with_the_fix(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            write_image(tmp_path / name)
        else:
            (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        image_splits(tmp_path, SMALL)
    with pytest.raises(DataError, match=r"image folder .*/nowhere: this folder does not exist on this machine"):
        image_splits(tmp_path / "nowhere")


def test_a_list_cannot_ask_for_more_classes_than_it_may(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("a.jpg 0\n")
    for label in ("999999999", "9" * 5000):
        (tmp_path / "train.txt").write_text(f"a.jpg 1\nb.jpg {label}\n")
        said = r"train.txt:2: a label is 9{9,18}, without a classes.txt it must be below 1"
        with pytest.raises(DataError, match=said):
            image_splits(tmp_path)
    (tmp_path / "train.txt").write_text("a.jpg 99999\n")
    assert image_splits(tmp_path)[0].num_classes == 100_000
    (tmp_path / "val.txt").unlink()
    os.mkfifo(tmp_path / "val.txt")
    with pytest.raises(DataError, match=r"val.txt cannot be read: is not a regular file"):
        image_splits(tmp_path)


def test_links_are_followed_and_those_that_lead_in_a_circle_are_named(tmp_path: Path) -> None:
    root, elsewhere = write_image_folder(tmp_path / "images", per_class=1), tmp_path / "elsewhere"
    write_image(elsewhere / "deeper" / "x.jpg")
    for name in ("one", "two"):
        (root / "train" / "class0" / name).symlink_to(elsewhere)
    (root / "train" / "class0" / "itself.jpg").symlink_to("itself.jpg")  # no folder: an image that cannot be read
    (root / "train" / "itself").symlink_to("itself")
    train, _ = image_splits(root, SMALL)
    assert isinstance(train, ImageFolder)
    names = ["0.jpg", "itself.jpg", "one/deeper/x.jpg", "two/deeper/x.jpg"]
    assert train.paths == (*(f"train/class0/{name}" for name in names), "train/class1/0.jpg")
    (elsewhere / "loop").symlink_to(root / "train")
    with pytest.raises(DataError, match=r"/loop/class0: a link in this path leads back to a folder of the path"):
        image_splits(root, SMALL)


def test_a_tree_that_is_too_deep_is_named(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path, per_class=1)
    inside = os.open(root / "train" / "class0", os.O_RDONLY)
    for _ in range(2100):  # below the limit of recursion's and of a path's length
        os.mkdir("d", dir_fd=inside)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inside)
        os.close(inside)
        inside = deeper
    os.close(inside)
    try:
        with pytest.raises(DataError, match=r"folder .*/class0/d/d.*\.\.\. \(\d+ characters\) cannot be read: File"):
            image_splits(root, SMALL)
    finally:
        subprocess.run(["rm", "-r", str(root / "train")], check=True)  # too deep for pytest


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_image_starts_no_program_and_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    root = write_image_folder(tmp_path / "images")
    bad = [root / "train" / "class0" / f"{number}.jpg" for number in range(4)]
    for path in bad:
        path.unlink()
    bad[0].write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    os.mkfifo(bad[1])
    bad[2].symlink_to("/dev/zero")
    monkeypatch.chdir(bad[3].parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(bad[3].name)
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    train, _ = image_splits(root, SMALL, max_corrupt=4)
    loader = make_loader(train, LoaderSettings(batch_size=12, workers=workers))
    try:
        with loader.epoch(0) as feeds:
            assert len(list(feeds)) == 1
        assert loader.corrupt is not None
        assert loader.corrupt.names == [f"train/class0/{path.name}" for path in bad]
    finally:
        loader.close()
    assert not (tmp_path / "started").exists()


def one_image(tmp_path: Path, name: str, settings: ImageSettings) -> ImageFolder:
    return ImageFolder("one", tmp_path, (name,), np.array([0]), ("only",), settings)


def plain(size: int) -> ImageSettings:
    return ImageSettings(image_size=size, mean=(0, 0, 0), std=(1, 1, 1))


def first_of(data: ImageFolder) -> np.ndarray:
    return data.arrays(np.array([0]))["features"][0]


def test_decoded_image_is_normalised_per_channel_with_channels_first(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), (255, 0, 51)).save(tmp_path / "flat.png")
    data = one_image(tmp_path, "flat.png", ImageSettings(image_size=8, mean=(0.5, 0.5, 0.1), std=(0.5, 0.25, 0.1)))
    features = data.arrays(np.array([0]))["features"]
    assert (features.shape, features.dtype) == ((1, 3, 8, 8), np.float32)
    np.testing.assert_allclose(features[0].mean(axis=(1, 2)), [1.0, -2.0, 1.0], atol=1e-5)


@pytest.mark.parametrize("size", [(640, 480), (200, 300)])
def test_evaluation_image_is_resized_and_its_middle_cut_out(tmp_path: Path, size: tuple[int, int]) -> None:
    write_image(tmp_path / "image.png", *size)
    image, scale = Image.open(tmp_path / "image.png"), 64 / min(size)
    resized = image.resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.BILINEAR)
    left, top = (resized.width - 56) // 2, (resized.height - 56) // 2
    expected = np.asarray(resized.crop((left, top, left + 56, top + 56))).transpose(2, 0, 1) / 255
    # One pixel of the gradient: the middle may lie between two pixels.
    assert abs(first_of(one_image(tmp_path, "image.png", plain(56))) - expected).max() < 0.02


def test_large_jpeg_decoded_at_a_fraction_is_the_same_picture(tmp_path: Path) -> None:
    write_image(tmp_path / "large.jpg", 1600, 1200)
    Image.open(tmp_path / "large.jpg").save(tmp_path / "large.png")
    fast, exact = (one_image(tmp_path, f"large.{kind}", plain(64)) for kind in ("jpg", "png"))
    assert abs(first_of(fast) - first_of(exact)).max() < 0.02


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_colour_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    name = f"white.{'jpg' if mode == 'CMYK' else 'png'}"
    Image.new("RGB", (20, 20), (255, 255, 255)).convert(mode).save(tmp_path / name)
    assert first_of(one_image(tmp_path, name, plain(8))).min() > 0.99


def test_augmented_images_depend_on_seed_and_epoch_colours_on_the_name_and_half_are_mirrored(tmp_path: Path) -> None:
    train, _ = image_splits(write_image_folder(tmp_path), SMALL)
    assert isinstance(train, ImageFolder)

    def look(seed: int, epoch: int, augment: str) -> bytes:
        draws = Draws(seed, epoch, np.arange(4))
        return train.augmented(draws, augment, train.corrupt_images())["features"].tobytes()

    assert look(0, 0, "crop_flip") == look(0, 0, "crop_flip")
    cases = [(0, 0, "crop_flip"), (1, 0, "crop_flip"), (0, 1, "crop_flip"), (0, 0, "crop_flip_color")]
    assert len({look(*case) for case in cases}) == 4
    assert look(0, 0, "none") == look(3, 4, "none")
    write_image(tmp_path / "image.png", 64, 64)  # red grows from left to right
    data, mirrored = one_image(tmp_path, "image.png", SMALL), 0
    for epoch in range(40):
        red = data.augmented(Draws(0, epoch, np.array([0])), "crop_flip", data.corrupt_images())["features"][0, 0]
        mirrored += int(red[:, 0].mean() > red[:, -1].mean())
    assert 10 <= mirrored <= 30


def test_unreadable_images_are_replaced_by_the_next_readable_and_more_than_allowed_are_an_error(tmp_path: Path) -> None:
    cut, text = (write_image_folder(tmp_path) / "train" / "class0" / f"{number}.jpg" for number in (1, 2))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    text.write_text("no image at all")
    train, _ = image_splits(tmp_path, SMALL, max_corrupt=2)
    assert isinstance(train, ImageFolder)
    corrupt = train.corrupt_images()
    arrays = train.augmented(Draws(0, 0, np.arange(12)), "crop_flip", corrupt)
    assert (len(corrupt), corrupt.names) == (2, ["train/class0/1.jpg", "train/class0/2.jpg"])
    third = train.augmented(Draws(0, 0, np.array([3])), "crop_flip", corrupt)["features"][0]
    assert (arrays["features"][1:3] == third).all()
    assert arrays["labels"].tolist() == [0] * 6 + [1] * 6

    train, _ = image_splits(tmp_path, SMALL, max_corrupt=0.1)
    message = (
        r"2 image\(s\) of .*train cannot be read, --max_corrupt allows 1 of 12: train/class0/1.jpg \(OSError: .*\), "
    )
    with pytest.raises(DataError, match=message + r"train/class0/2.jpg \(UnidentifiedImageError"):
        train.arrays(np.arange(12))


def test_limit_of_unreadable_images_is_a_share_below_one_and_a_number_from_one_on() -> None:
    assert [CorruptImages(1000, limit, "x").allowed for limit in (0, 0.001, 0.25, 1, 30)] == [0, 1, 250, 1, 30]
    for limit in (-1, 1.5):
        with pytest.raises(DataError, match=f"--max_corrupt {limit}"):
            CorruptImages(10, limit, "x")


def test_a_name_cannot_control_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    corrupt = CorruptImages(9, 1, "x")
    corrupt.replacement(0, "\x1b[2J.jpg", "\x9b31m")
    assert caplog.messages == ["cannot read \\x1b[2J.jpg (\\x9b31m); another image replaces it"]
    with pytest.raises(DataError, match=r": \\x1b\[2J.jpg \(\\x9b31m\), b"):
        corrupt.replacement(1, "b", "c")


def draws(count: int) -> list[list[float]]:
    return np.random.default_rng(0).random((count, DRAWS_PER_IMAGE)).tolist()


def test_evaluation_takes_the_middle_of_the_shorter_side_and_so_does_an_image_too_narrow_for_any_crop() -> None:
    assert ImageSettings().shorter_side == 256
    assert center_box(512, 256, ImageSettings()) == (144.0, 16.0, 368.0, 240.0)
    assert center_box(100, 200, ImageSettings(image_size=64, resize_size=64)) == (0.0, 50.0, 100.0, 150.0)
    assert random_box(1000, 10, ImageSettings(min_area=1.0), draws(1)[0]) == (493, 0, 506, 10)
    assert random_box(10, 1000, ImageSettings(min_area=1.0), draws(1)[0]) == (0, 493, 10, 506)


def test_training_crops_lie_inside_half_are_mirrored_and_all_is_in_its_range() -> None:
    boxes = np.array([random_box(400, 300, ImageSettings(), numbers) for numbers in draws(2000)])
    left, top, right, bottom = boxes.T
    assert (left.min(), top.min(), right.max(), bottom.max()) == (0, 0, 400, 300)
    shares = (right - left) * (bottom - top) / (400 * 300)
    assert 0.075 < shares.min() < 0.1
    assert 0.9 < shares.max() <= 1.0
    ratios = (right - left) / (bottom - top)
    assert 0.74 <= ratios.min() <= ratios.max() <= 1.35
    assert 0.4 < shares.mean() < 0.48  # below the middle of 0.08 and 1: large crops often do not fit
    changed = [random_changes(ImageSettings(color_jitter=0.2), numbers) for numbers in draws(2000)]
    assert abs(sum(change.flip for change in changed) / 2000 - 0.5) < 0.05
    factors = np.array([change[1:] for change in changed])
    assert 0.8 <= factors.min() < 0.81
    assert 1.19 < factors.max() <= 1.2


def test_colour_factors_of_one_change_nothing_and_saturation_zero_is_grey() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.float32)
    np.testing.assert_allclose(change_colors(pixels, 1.0, 1.0, 1.0), pixels, atol=1e-4)
    gray = change_colors(pixels, 1.0, 1.0, 0.0)
    np.testing.assert_allclose(gray, np.repeat(pixels @ [0.299, 0.587, 0.114], 3).reshape(4, 5, 3), atol=1e-3)
    np.testing.assert_allclose(change_colors(pixels, 0.5, 1.0, 1.0), pixels / 2, atol=1e-4)
    assert np.ptp(change_colors(pixels, 1.0, 0.0, 1.0)) < 1e-3  # no contrast: one grey


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 224, "resize_size": 200}, "image_size=224, resize_size=200"),
        ({"image_size": 0}, "image_size=0"),
        ({"min_area": 0.0}, "min_area=0.0"),
        ({"color_jitter": 1.0}, "color_jitter=1.0"),
    ],
)
def test_senseless_settings_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageSettings(**values)  # type: ignore[arg-type]
