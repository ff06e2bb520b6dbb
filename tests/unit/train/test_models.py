"""Every name that --model takes is a network that the installed Paddle has, with one output per class."""

from __future__ import annotations

import paddle
import pytest

from fleet_train.errors import DataError
from fleet_train.train.reference.model_names import MODELS, VISION_MODELS
from fleet_train.train.reference.models import build_model

pytestmark = pytest.mark.usefixtures("one_process")


def shape_of_logits(name: str, shape: tuple[int, ...], classes: int) -> list[int]:
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        logits = build_model(name, shape, classes)(paddle.static.data("features", [-1, *shape], "float32"))
        return list(logits.shape)  # read before the program is gone


def test_all_vision_models_exist_in_paddle() -> None:
    assert [name for name in VISION_MODELS.values() if not callable(getattr(paddle.vision.models, name, None))] == []
    assert {"ResNet18", "ResNet50", "MobileNetV1", "MobileNetV3Large", "VGG16"} <= set(MODELS)


@pytest.mark.parametrize(
    "name", ["ResNet18", "MobileNetV1", "MobileNetV2", "MobileNetV3Small", "VGG11", "ShuffleNetV2"]
)
def test_small_images_become_logits(name: str) -> None:
    assert shape_of_logits(name, (3, 32, 32), 7) == [-1, 7]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32), (32,)])
def test_data_that_is_no_colour_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"--model ResNet18 needs colour images \[3, height, width\]"):
        shape_of_logits("ResNet18", shape, 10)
