"""Which part of an image is used, and how it is changed."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_train.data import ImageSettings
from fleet_train.data.decode import DRAWS_PER_IMAGE, center_box, change_colors, random_box, random_changes
from fleet_train.errors import DataError


def draws(count: int) -> list[list[float]]:
    return np.random.default_rng(0).random((count, DRAWS_PER_IMAGE)).tolist()


def test_evaluation_takes_the_middle_of_the_shorter_side() -> None:
    assert ImageSettings().shorter_side == 256
    assert center_box(512, 256, ImageSettings()) == (144.0, 16.0, 368.0, 240.0)
    assert center_box(100, 200, ImageSettings(image_size=64, resize_size=64)) == (0.0, 50.0, 100.0, 150.0)


def test_training_crops_lie_inside_with_areas_and_aspect_ratios_in_range() -> None:
    boxes = np.array([random_box(400, 300, ImageSettings(), numbers) for numbers in draws(2000)])
    left, top, right, bottom = boxes.T
    assert (left.min(), top.min(), right.max(), bottom.max()) == (0, 0, 400, 300)
    shares = (right - left) * (bottom - top) / (400 * 300)
    assert 0.075 < shares.min() < 0.1
    assert 0.9 < shares.max() <= 1.0
    ratios = (right - left) / (bottom - top)
    assert ratios.min() >= 0.74
    assert ratios.max() <= 1.35
    assert 0.4 < shares.mean() < 0.48  # below the middle of 0.08 and 1: large crops often do not fit


def test_an_image_too_narrow_for_any_crop_gives_its_middle() -> None:
    assert random_box(1000, 10, ImageSettings(min_area=1.0), draws(1)[0]) == (493, 0, 506, 10)
    assert random_box(10, 1000, ImageSettings(min_area=1.0), draws(1)[0]) == (0, 493, 10, 506)


def test_half_of_the_images_are_mirrored_and_colours_stay_in_range() -> None:
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
