"""`python -m fleet_train check`: is the data intact, and is it read fast enough? Needs neither Paddle nor a cluster."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from tqdm import tqdm

from fleet_train.cli.options import HELP, Number, WholeNumber, folders
from fleet_train.data import (
    AUGMENTATIONS,
    LOADERS,
    Dataset,
    ImageFolder,
    ImageSettings,
    LoaderSettings,
    make_loader,
    open_splits,
)
from fleet_train.data.images import CorruptImages
from fleet_train.data.measure import Progress, Situation, Speed, advice, describe, disk_speed, loader_speed
from fleet_train.data.open import default_workers
from fleet_train.errors import DataError, printable

EXIT_TOO_SLOW = 1
_DISK_SECONDS = 5.0
_NAMES_SHOWN = 10

_EPILOG = """\b
Examples:
  python -m fleet_train check --data ./ImageNet
  python -m fleet_train check --data ./ImageNet --samples_per_second 1200 --workers 8
  python -m fleet_train check --data ./ImageNet --all        (decode every image once)

\b
Exit codes:
  0   the data is usable and fast enough, or --samples_per_second was not given
  1   the data is usable, but read more slowly than --samples_per_second
  10  the data cannot be used: no such folder, no images, too many corrupt ones

\b
The progress line of training shows how many samples per second it consumes (all ranks
together; divide by the number of machines); measure it on generated data:
  python -m fleet_train train --model ResNet50 --data synthetic:3x224x224x1000
"""


@click.command(epilog=_EPILOG, context_settings=HELP)
@click.option(
    "--data",
    required=True,
    metavar="DIR",
    help="Image folder: train/<class>/, val/<class>/, or lists.",
    shell_complete=folders,
)
@click.option("--samples_per_second", type=Number(), help="What training consumes on this machine, all ranks together.")
@click.option("--workers", type=WholeNumber(), help="Worker processes on this machine. Default: its cores, at most 8.")
@click.option("--batch_size", type=WholeNumber(), default=64, show_default=True, help="Images per batch.")
@click.option(
    "--image_size", type=WholeNumber(), default=224, show_default=True, help="Side of a training image in pixels."
)
@click.option("--augment", type=click.Choice(AUGMENTATIONS), default="auto", show_default=True, help="As in training.")
@click.option("--loader", type=click.Choice(LOADERS), default="auto", show_default=True, help="As in training.")
@click.option("--seconds", type=Number(), default=15.0, show_default=True, help="How long the loader is measured.")
@click.option("--all", "whole", is_flag=True, help="Decode every training image once, however long it takes.")
@click.option("--max_corrupt", type=Number(), default=0.001, show_default=True, help="Allowed share (or number).")
def command(data: str, samples_per_second: float | None, whole: bool, max_corrupt: float, **options: Any) -> None:
    """Count the samples of a data folder, find unreadable images, and measure how fast this machine reads them.

    The measurement runs the input pipeline of training (read, decode, crop, normalise, batch) alone. If it is slower
    than training, training waits: the trainer reports the share of time spent waiting for data.
    """
    settings = LoaderSettings(
        batch_size=options["batch_size"],
        augment=options["augment"],
        loader=options["loader"],
        workers=default_workers(1) if options["workers"] is None else options["workers"],
    )
    images = ImageSettings(image_size=options["image_size"])
    folder = None if data.startswith("synthetic") else data
    # Here every image may be corrupt: the limit is applied to the final count.
    train, test = open_splits(data, folder, images=images, max_corrupt=math.inf)
    _echo(f"data     {train.name}: {train.num_samples} samples in {train.num_classes} classes")
    _echo(f"         {test.name}: {test.num_samples} samples, counted only")
    disk, shorter_side = _measure_files(train, settings)
    speed, corrupt = _measure(train, settings, options["seconds"], whole)
    if corrupt is not None:
        _judge_corrupt(corrupt, train.num_samples, max_corrupt, speed.num_samples)
    if samples_per_second is not None:
        situation = Situation(
            wanted=samples_per_second,
            measured=speed.samples_per_second,
            disk=disk.samples_per_second,
            workers=settings.workers or 1,
            cores=len(os.sched_getaffinity(0)),
            image_size=images.image_size,
            shorter_side=shorter_side,
            loader="workers" if settings.loader == "auto" else settings.loader,
        )
        sys.exit(_judge_speed(situation))


def _measure_files(train: Dataset, settings: LoaderSettings) -> tuple[Speed, int]:
    """Print the inventory and the read speed of the files alone; returns the latter, and the images' shorter side."""
    if not isinstance(train, ImageFolder):
        return Speed(0.0), 0
    inventory = describe(train)
    (least, fewest), (most, largest) = inventory.smallest_class, inventory.largest_class
    _echo(f"classes  from {fewest} images ({least}) to {largest} ({most})")
    _echo(f"files    {inventory.width} x {inventory.height} pixels, {inventory.file_bytes / 1024:.0f} KiB (medians)")
    with _bar("reading", _DISK_SECONDS) as progress:
        disk = disk_speed(train, max(1, settings.workers or 1), _DISK_SECONDS, progress)
    _echo(
        f"disk     {disk.samples_per_second:.0f} files/s, {disk.bytes_per_second / 1e6:.0f} MB/s, "
        f"{disk.num_samples} files read, past the page cache"
    )
    return disk, min(inventory.width, inventory.height)


def _measure(
    train: Dataset, settings: LoaderSettings, seconds: float, whole: bool
) -> tuple[Speed, CorruptImages | None]:
    """Run the loader without a consumer and print its speed."""
    loader = make_loader(train, settings)
    try:
        with _bar("decoding", seconds) as progress:
            speed = loader_speed(loader, seconds, progress, whole)
    finally:
        loader.close()
    how = f"{settings.workers} worker(s)" if isinstance(train, ImageFolder) else "memory"
    _echo(f"loader   {speed.samples_per_second:.0f} samples/s by {how}, batches of {settings.batch_size}")
    return speed, loader.corrupt


def _judge_corrupt(corrupt: CorruptImages, num_samples: int, max_corrupt: float, num_decoded: int) -> None:
    shown = ", ".join(corrupt.names[:_NAMES_SHOWN]) + (", ..." if len(corrupt) > _NAMES_SHOWN else "")
    colon = ": " if shown else ""
    _echo(f"corrupt  {len(corrupt)} of {min(num_decoded, num_samples)} images looked at{colon}{shown}")
    limit = CorruptImages(num_samples, max_corrupt, "").allowed
    if len(corrupt) > limit:
        raise DataError(
            f"{len(corrupt)} image(s) cannot be read, --max_corrupt {max_corrupt:g} allows {limit} of {num_samples}: "
            f"{shown}. Repair or delete them, or allow more"
        )


def _judge_speed(now: Situation) -> int:
    """Print whether the loader keeps up, and if not, what to do; returns the exit code."""
    share = now.measured / now.wanted
    if share >= 1:
        _echo(f"feeds    {now.wanted:g} samples/s: yes, {share:.1f} times")
        return 0
    _echo(f"feeds    {now.wanted:g} samples/s: no, {share:.0%}; training would wait {1 - share:.0%} of its time")
    for tip in advice(now):
        _echo(f"  - {tip}")
    return EXIT_TOO_SLOW


def _echo(text: str) -> None:
    """Names of files and classes come with the data: they cannot control this terminal."""
    click.echo(printable(text))


@contextmanager
def _bar(what: str, seconds: float) -> Iterator[Progress]:
    """Elapsed seconds on a terminal; nothing where the output is not a terminal."""
    form = "{desc} {bar} {n:.0f} s"
    with tqdm(total=seconds, desc=what, leave=False, disable=None, bar_format=form) as bar:

        def show(elapsed: float) -> None:
            bar.update(max(0.0, min(elapsed, seconds) - bar.n))

        yield show
