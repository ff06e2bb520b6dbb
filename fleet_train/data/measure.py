"""Measures how fast this machine reads its data, describes the data, and advises whether that is enough."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fleet_train.data.decode import UnreadableImage, opened
from fleet_train.data.images import ImageFolder
from fleet_train.data.loader import Loader
from fleet_train.files import open_regular

_HEADERS = 200
_READ_AT_ONCE = 64
_MOST_EPOCHS = 10_000

Progress = Callable[[float], None]
"""Called with the elapsed seconds."""


@dataclass(frozen=True)
class Contents:
    """The content of an image folder; sizes are medians of a sample."""

    num_images: int
    num_classes: int
    smallest_class: tuple[str, int]
    largest_class: tuple[str, int]
    width: int
    height: int
    file_bytes: int


def describe(data: ImageFolder) -> Contents:
    """Counts of all files, sizes of up to 200 distributed over the folder (without unreadable ones)."""
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
    return Contents(
        data.num_samples,
        data.num_classes,
        (data.class_names[least], int(counts[least])),
        (data.class_names[most], int(counts[most])),
        width,
        height,
        file_bytes,
    )


@dataclass(frozen=True)
class Speed:
    samples_per_second: float
    bytes_per_second: float = 0.0
    num_samples: int = 0
    """The files read for this number."""


def disk_speed(data: ImageFolder, threads: int, seconds: float, progress: Progress) -> Speed:
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
            progress(time.perf_counter() - began)
    elapsed = time.perf_counter() - began
    return Speed(done / elapsed, size / elapsed, done)


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


def loader_speed(loader: Loader, seconds: float, progress: Progress, whole: bool = False) -> Speed:
    """Speed of a loader that does nothing else, from its second batch on (the first one starts the workers).

    Epoch after epoch until the time is over; with `whole` exactly one epoch, however long it takes.
    """
    seen, first_batch, first_came = 0, 0, 0.0
    started = time.perf_counter()
    for epoch in range(1 if whole else _MOST_EPOCHS):
        with loader.epoch(epoch) as feeds:
            for feed in feeds:
                now = time.perf_counter()
                progress(now - started)
                seen += len(feed["labels"])
                if not first_batch:
                    first_batch, first_came = seen, now
                elif now - first_came > seconds and not whole:
                    break
        if time.perf_counter() - first_came > seconds:
            break
    if seen == first_batch:  # a single batch: its time includes the start of the workers
        return Speed(seen / (time.perf_counter() - started), num_samples=seen)
    return Speed((seen - first_batch) / (time.perf_counter() - first_came), num_samples=seen)


@dataclass(frozen=True)
class Situation:
    """The inputs of the advice. Speeds are samples per second."""

    wanted: float
    measured: float
    disk: float
    """0 = not measured."""
    workers: int
    cores: int
    image_size: int
    shorter_side: int
    """Of the images in the files."""
    loader: str


def advice(now: Situation) -> list[str]:
    """What to change to reach the requested speed, most effective first; empty if it is reached."""
    if now.measured >= now.wanted:
        return []
    tips = []
    if 0 < now.disk < now.wanted:
        tips.append(
            f"reading the files alone reaches {now.disk:.0f} images/s, so the disk or network is too slow: copy "
            "the data to a local disk, or make the files smaller"
        )
    if now.loader == "workers" and now.workers < now.cores:
        tips.append(_more_workers(now))
    target = round(now.image_size * 256 / 224)
    if now.shorter_side > 1.5 * target:
        tips.append(
            f"resize the files once to a shorter side of {target} pixels (now {now.shorter_side}): reading and "
            "decoding take less in proportion to the pixels"
        )
    if now.loader != "dali":
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
