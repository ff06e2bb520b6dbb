"""Every name that --model takes is a network that the installed Paddle has, with one output per class."""

from __future__ import annotations

import re

import paddle
import pytest

from fleet_train.errors import DataError
from fleet_train.train import programs
from fleet_train.train.programs import build_model
from fleet_train.train.settings import MODELS, VISION_MODELS
from tests.support.processes import ROOT

pytestmark = pytest.mark.usefixtures("one_process")

CASES = ["mlp", "cnn", "ResNet18", "MobileNetV1", "MobileNetV2", "MobileNetV3Small", "VGG11", "ShuffleNetV2"]


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


def test_every_name_is_a_network_and_every_network_has_a_name() -> None:
    assert set(MODELS) == {*programs._SMALL, *VISION_MODELS}


def test_each_own_network_has_a_case() -> None:
    assert set(programs._SMALL) - set(CASES) == set()


def test_the_page_names_every_network() -> None:
    """By its family where the name ends with a number: ``ResNet18 to 152``."""
    section = (ROOT / "docs" / "training.md").read_text().partition("\n## Networks\n")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", section))
    families = {re.match(r"[A-Za-z]+", word)[0] for word in words if word[0].isalpha()}  # type: ignore[index]
    unnamed = {name for name in MODELS if name not in words and re.match(r"[A-Za-z]+", name)[0] not in families}  # type: ignore[index]
    assert unnamed == set()


@pytest.mark.parametrize("name", CASES)
def test_small_images_become_logits(name: str) -> None:
    assert shape_of_logits(name, (3, 32, 32), 7) == [-1, 7]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32), (32,)])
def test_data_that_is_no_colour_image_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"--model ResNet18 needs colour images \[3, height, width\]"):
        shape_of_logits("ResNet18", shape, 10)
