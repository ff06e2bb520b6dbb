"""One contestant's turn of tools/bench_data.py, in its own process: read an image folder and report the rate.

    python -m tools.benchmarks.data_turn ours|dali|paddle FOLDER WORKERS BATCH_SIZE IMAGE_SIZE EPOCHS

The last line of the output is a JSON object. The first epoch starts workers and fills the page cache, untimed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

Epoch = Callable[[int], Iterator[Any]]
"""Number of an epoch -> its batches of images, float32 [batch, 3, size, size]."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def ours(kind: str, folder: Path, workers: int, batch_size: int, image_size: int, stack: ExitStack) -> Epoch:
    """`--loader workers` or `--loader dali`."""
    from fleet_train.data import ImageSettings, LoaderSettings, make_loader, open_splits

    settings = LoaderSettings(batch_size, augment="crop_flip", loader=kind, workers=workers, last_batch="keep")
    train = open_splits(data_dir=folder, images=ImageSettings(image_size)).train
    loader = make_loader(train, settings)
    stack.callback(loader.close)

    def epoch(number: int) -> Iterator[Any]:
        with loader.epoch(number) as feeds:
            for feed in feeds:
                yield feed["features"]

    return epoch


def paddle_loader(folder: Path, workers: int, batch_size: int, image_size: int) -> Epoch:
    """A plain paddle.io.DataLoader with paddle.vision's transforms, its workers kept between epochs."""
    from paddle.io import DataLoader
    from paddle.vision import datasets, transforms

    steps = transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size),
            transforms.RandomHorizontalFlip(),
            transforms.Transpose(),
            transforms.Normalize([255 * value for value in MEAN], [255 * value for value in STD]),
        ]
    )
    loader = DataLoader(
        datasets.DatasetFolder(str(folder / "train"), transform=steps),
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda _: (images for images, _ in loader)


def cpu_seconds() -> float:
    """CPU seconds of this process and its living children."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def measure(epoch: Epoch, epochs: int) -> dict[str, float]:
    """Images per second of wall time, and milliseconds of processor time per image, over all processes."""
    means = [float(np.asarray(images).mean()) for images in epoch(0)]
    images, cpu, began = 0, cpu_seconds(), time.perf_counter()
    for number in range(1, 1 + epochs):
        images += sum(len(batch) for batch in epoch(number))
    seconds = time.perf_counter() - began
    return {
        "images": images,
        "images_per_second": images / seconds,
        "cpu_ms_per_image": 1000 * (cpu_seconds() - cpu) / images,
        "mean_of_values": float(np.mean(means)),
    }


def main() -> None:
    kind, folder, *numbers = sys.argv[1:]
    workers, batch_size, image_size, epochs = map(int, numbers)
    with ExitStack() as stack:
        if kind == "paddle":
            epoch = paddle_loader(Path(folder), workers, batch_size, image_size)
        else:
            kind = "workers" if kind == "ours" else kind
            epoch = ours(kind, Path(folder), workers, batch_size, image_size, stack)
        print(json.dumps(measure(epoch, epochs)))


if __name__ == "__main__":
    main()
