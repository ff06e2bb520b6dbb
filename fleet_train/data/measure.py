"""How fast this machine reads an image folder, what is in it, and whether that is enough for training: `doctor --data`.

``python -m fleet_train.data.measure FOLDER NEEDS IMAGE_SIZE WORKERS`` is a process of its own, so that a hanging disk
cannot harm the doctor; it prints what was found as JSON. Neither Paddle nor a cluster is needed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from fleet_train import timeouts
from fleet_train.data.decode import ImageSettings, UnreadableImage, opened
from fleet_train.data.images import DEFAULT_MAX_CORRUPT, CorruptImages, ImageFolder
from fleet_train.data.loader import Loader
from fleet_train.data.open import LoaderSettings, default_workers, make_loader, open_splits
from fleet_train.errors import DataError
from fleet_train.files import open_regular

_HEADERS = 200
_READ_AT_ONCE = 64
_MOST_EPOCHS = 10_000
_BATCH_SIZE = 32
_STEADY = 0.1
"""The share of their speed by which two windows in a row differ at most once the start-up is over."""
_TOO_SLOW, _ENOUGH = 0.9, 1.1
"""Shares of the speed that training needs: too slow below, enough above; between, a second measurement might differ."""
_NAMES_SHOWN = 10


@dataclass(frozen=True)
class Found:
    """What is found of a folder: the fields of the doctor's finding of the same names."""

    id: str
    level: str
    measured: str
    threshold: str
    fix: str = ""


def describe(data: ImageFolder) -> tuple[str, int]:
    """The contents of an image folder in words, and the shorter side of its images; sizes are medians of up to 200
    files distributed over the folder (without unreadable ones)."""
    counts = np.bincount(data.labels, minlength=data.num_classes)
    least, most = int(counts.argmin()), int(counts.argmax())
    sizes = []
    for index in np.linspace(0, data.num_samples - 1, min(_HEADERS, data.num_samples)).astype(int).tolist():
        try:
            with opened(data.path(index)) as header:
                sizes.append((*header.size, os.path.getsize(data.path(index))))
        except UnreadableImage:
            continue
    width, height, file_bytes = (int(value) for value in np.median(sizes or [(0, 0, 0)], axis=0))
    words = (
        f"{data.num_samples} images in {data.num_classes} classes, from {counts[least]} ({data.class_names[least]}) to "
        f"{counts[most]} ({data.class_names[most]}); {width} x {height} pixels, {file_bytes / 1024:.0f} KiB (medians)"
    )
    return words, min(width, height)


@dataclass(frozen=True)
class ReadingSpeed:
    samples_per_second: float
    bytes_per_second: float = 0.0
    num_samples: int = 0
    """All samples that were read, also those that are not counted."""


def disk_speed(data: ImageFolder, threads: int, seconds: float) -> ReadingSpeed:
    """Speed of reading whole files in random order with this many threads, none of them from the page cache.

    The files' pages are dropped first (posix_fadvise), which works for files that are not being written.
    """
    order = np.random.default_rng(1).permutation(data.num_samples).tolist()
    began, done, size = time.perf_counter(), 0, 0
    with ThreadPoolExecutor(threads) as readers:
        while done < len(order) and time.perf_counter() - began < seconds:
            some = order[done : done + _READ_AT_ONCE]
            size += sum(readers.map(_read_cold, [data.path(index) for index in some]))
            done += len(some)
    elapsed = time.perf_counter() - began
    return ReadingSpeed(done / elapsed, size / elapsed, done)


def _read_cold(path: str) -> int:
    """Bytes of the file; 0 if it cannot be read (the decoders count those)."""
    try:
        with open_regular(path) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = 0
            while piece := os.read(file.fileno(), 1 << 20):
                size += len(piece)
            return size
    except OSError:
        return 0


def loader_speed(loader: Loader, window: float, seconds: float) -> ReadingSpeed:
    """Speed of a loader that does nothing else, in a steady state: epoch after epoch, in windows of ``window`` seconds,
    until two in a row agree, or ``seconds`` are over. The first window is never counted: workers start in it.
    """
    seen = total = 0
    rates: list[float] = []
    began = start = 0.0
    for size in _batches(loader):
        now = time.perf_counter()
        total += size
        if total == size:
            began = start = now
            continue
        seen += size
        if now - start < window:
            continue
        rates.append(seen / (now - start))
        seen, start = 0, now
        if now - began > seconds or (len(rates) > 2 and abs(rates[-1] - rates[-2]) <= _STEADY * rates[-1]):
            break
    return ReadingSpeed(statistics.mean(rates[1:][-2:] or rates or [0.0]), num_samples=total)


def _batches(loader: Loader) -> Iterator[int]:
    """The sizes of the batches as they come."""
    for epoch in range(_MOST_EPOCHS):
        with loader.epoch(epoch) as feeds:
            yield from (len(feed["labels"]) for feed in feeds)


@dataclass(frozen=True)
class Situation:
    """What was measured, in samples per second, and with what."""

    wanted: float
    """What training needs; 0 = unknown."""
    measured: float
    workers: int
    cores: int
    image_size: int
    shorter_side: int
    """The smaller one of the images' median width and height, in pixels."""


def examine(folder: str, needs: float, image_size: int, workers: int) -> list[Found]:
    """All that is found of an image folder; ``needs``: samples per second, 0 = unknown; ``workers``: 0 = default."""
    try:
        # Here every image may be unreadable: the limit is applied to the final count.
        settings = ImageSettings(image_size=image_size)
        train, _ = open_splits(data_dir=folder, images=settings, max_corrupt=math.inf)
        assert isinstance(train, ImageFolder)
        contents, shorter_side = describe(train)
        workers = workers or default_workers(1)
        disk = disk_speed(train, workers, timeouts.DATA_DISK_SECONDS)
        loader = make_loader(train, LoaderSettings(batch_size=_BATCH_SIZE, workers=workers))
        try:
            speed = loader_speed(loader, timeouts.DATA_WINDOW_SECONDS, timeouts.DATA_LOADER_SECONDS)
        finally:
            loader.close()
    except DataError as error:
        return [Found("data", "FAIL", str(error), "can be read", "docs/data.md says what such a folder has")]
    assert loader.corrupt is not None
    cores = len(os.sched_getaffinity(0))
    now = Situation(needs, speed.samples_per_second, workers, cores, image_size, shorter_side)
    return [
        Found("data", "PASS", f"{folder}: {contents}", "can be read"),
        of_unreadable(loader.corrupt, train.num_samples, speed.num_samples),
        of_disk(disk, now),
        of_speed(now),
    ]


def of_unreadable(corrupt: CorruptImages, num_images: int, num_decoded: int) -> Found:
    """The images that could not be decoded, and whether training would end at so many."""
    limit = CorruptImages(num_images, DEFAULT_MAX_CORRUPT, "").allowed
    shown = ", ".join(corrupt.names[:_NAMES_SHOWN]) + (", ..." if len(corrupt) > _NAMES_SHOWN else "")
    return Found(
        "unreadable",
        "FAIL" if len(corrupt) > limit else "WARN" if len(corrupt) else "PASS",
        f"{len(corrupt)} of {min(num_decoded, num_images)} images looked at{': ' if shown else ''}{shown}",
        f"{limit} of {num_images}, as training allows",
        "repair or delete them, or allow more in training: --max_corrupt",
    )


def of_disk(disk: ReadingSpeed, now: Situation) -> Found:
    """The files alone, past the page cache: training reads so in its first epoch, and in all if memory is short."""
    return Found(
        "data_disk",
        "WARN" if disk.samples_per_second < now.wanted else "PASS",
        f"{disk.samples_per_second:.0f} files/s, {disk.bytes_per_second / 1e6:.0f} MB/s past the page cache, "
        f"{disk.num_samples} files read",
        _needs(now),
        "copy the data to a local disk, or make the files smaller",
    )


def of_speed(now: Situation) -> Found:
    """Whether read, decoded and cropped images come as fast as training needs them."""
    measured = f"{now.measured:.0f} images/s by {now.workers} worker(s), {now.image_size} pixels wide"
    if not now.wanted:
        known = "give --needs, as the progress line of training says with --data synthetic:3x224x224x1000"
        return Found("data_speed", "PASS", f"{measured}; whether that is enough is unknown: {known}", _needs(now))
    share = now.measured / now.wanted
    waits = f"; training would wait {1 - share:.0%} of its time" if share < 1 else f", {share:.1f} times that"
    level = "FAIL" if share < _TOO_SLOW else "WARN" if share < _ENOUGH else "PASS"
    return Found("data_speed", level, measured + waits, _needs(now), "; or ".join(advice(now)))


def _needs(now: Situation) -> str:
    return f"training needs {now.wanted:g}/s" if now.wanted else ""


def advice(now: Situation) -> list[str]:
    """What to change to read faster, most effective first."""
    tips = [_more_workers(now)] if now.workers < now.cores else []
    target = round(now.image_size * 256 / 224)
    if now.shorter_side > 1.5 * target:
        tips.append(
            f"resize the files once to a shorter side of {target} pixels (now {now.shorter_side}): reading and "
            "decoding take less in proportion to the pixels"
        )
    tips.append("--loader dali decodes on the GPU, for machines that have one (requirements-dali.txt)")
    tips.append(f"a smaller --image_size (now {now.image_size}) takes less time per image")
    return tips


def _more_workers(now: Situation) -> str:
    needed = math.ceil(now.workers * now.wanted / max(now.measured, 1e-9))
    done = f"{now.workers} did {now.measured:.0f} images/s and this machine has {now.cores} cores"
    if needed <= now.cores:
        return f"--workers {needed}: {done}"
    most = now.measured * now.cores / now.workers
    return f"--workers {now.cores}: {done}, which would make about {most:.0f}: not enough by itself"


if __name__ == "__main__":
    where, wanted, size, processes = sys.argv[1:]
    print(json.dumps([asdict(found) for found in examine(where, float(wanted), int(size), int(processes))]))
