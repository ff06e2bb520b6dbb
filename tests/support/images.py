"""Small image folders, of classes that a network can learn, and exported programs in Paddle's inference."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.processes import clean_environ, python


def write_image(path: Path, width: int = 48, height: int = 36, color: tuple[int, int, int] = (90, 120, 40)) -> None:
    """A JPEG (or what the suffix says): the colour with a gradient from left to right and one from top to bottom."""
    columns, rows = np.meshgrid(np.linspace(-60, 60, width), np.linspace(-60, 60, height))
    pixels = np.array(color, np.float64) + np.stack([columns, rows, (columns + rows) / 2], axis=-1)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=95)


def write_image_folder(root: Path, per_class: int = 6, classes: int = 2, val_per_class: int = 2) -> Path:
    """`train/` and `val/` with that many images per class; class 0 is red, class 1 green, class 2 blue."""
    generator = np.random.default_rng(0)
    base = [(200, 60, 60), (60, 200, 60), (60, 60, 200), (200, 200, 60), (60, 200, 200)]
    for part, count in (("train", per_class), ("val", val_per_class)):
        for label in range(classes):
            for number in range(count):
                color = tuple(int(value) for value in np.array(base[label]) + generator.integers(-30, 30, 3))
                size = (int(generator.integers(40, 64)), int(generator.integers(40, 64)))
                write_image(root / part / f"class{label}" / f"{number}.jpg", *size, color=color)  # type: ignore[arg-type]
    return root


_INFER = """
import sys
import numpy as np
from paddle import inference

model, given, gives = sys.argv[1:]
config = inference.Config(f"{model}/model.json", f"{model}/model.pdiparams")
config.disable_glog_info()
predictor = inference.create_predictor(config)
predictor.get_input_handle(predictor.get_input_names()[0]).copy_from_cpu(np.load(given))
predictor.run()
np.save(gives, predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu())
assert not [name for name in sys.modules if name.startswith("fleet_train")]
"""


def infer(model: str | Path, features: np.ndarray[Any, Any], folder: Path) -> np.ndarray[Any, Any]:
    """The first output of the program in ``model`` for its first input; ``folder`` is for files on the way."""
    given, gives = folder / "given.npy", folder / "gives.npy"
    np.save(given, features)
    environ = {name: value for name, value in clean_environ().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        python("-c", _INFER, str(model), str(given), str(gives)),
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: np.ndarray[Any, Any] = np.load(gives)
    return found
