"""Image folders: `train/<class>/*.jpg` and `val/<class>/*.jpg`, or lists `train.txt` and `val.txt` of "path label"."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.datasets import Arrays, Draws, Indices, Splits
from fleet_train.data.decode import ImageDecoder, ImageSettings, UnreadableImage
from fleet_train.errors import DataError, printable
from fleet_train.files import open_regular

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
DEFAULT_MAX_CORRUPT = 0.001
_MOST_UNNAMED_CLASSES = 100_000
_MOST_DIGITS = 18
_MOST_SHOWN = 200
_NAMES_SHOWN = 10
_log = logging.getLogger(__name__)
Image = TypeVar("Image")


@dataclass(frozen=True)
class ImageFolder:
    """Images that are decoded when they are read; `features` are float32 [batch, 3, size, size]."""

    name: str
    root: Path
    paths: tuple[str, ...]
    """The paths of the images, relative to the root."""
    labels: Indices
    """The labels of the images, int64 [num_samples]."""
    class_names: tuple[str, ...]
    settings: ImageSettings = field(default_factory=ImageSettings)
    max_corrupt: float = DEFAULT_MAX_CORRUPT

    @property
    def num_samples(self) -> int:
        return len(self.paths)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.settings.shape

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.paths[index])

    def corrupt_images(self) -> CorruptImages:
        """A new counter of this dataset's unreadable files."""
        return CorruptImages(self.num_samples, self.max_corrupt, self.name)

    def fingerprint(self) -> str:
        """A digest that is equal on machines with the same files and labels (contents are not compared)."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return _digest(f"{path}\0{label}" for path, label in zip(self.paths, self.labels.tolist(), strict=True))

    def classes_digest(self) -> str:
        """A digest that is equal on machines on which equal labels mean equal classes."""
        return _digest(self.class_names)

    def arrays(self, indices: Indices) -> Arrays:
        """Images decoded for evaluation in this thread; the loaders do it with worker processes."""
        return self.augmented(Draws(0, 0, indices), "none", self.corrupt_images())

    def augmented(self, draws: Draws, augment: str, corrupt: CorruptImages) -> Arrays:
        """Images decoded in this thread with the named augmentation; unreadable ones are replaced."""
        decoder = ImageDecoder(self.settings, augment, draws.seed)
        features = np.empty((len(draws.indices), *self.sample_shape), np.float32)
        taken = np.array(draws.indices)
        for row, wanted in enumerate(draws.indices.tolist()):

            def read(index: int, out: NDArray[np.float32] = features[row]) -> None:
                decoder.decode(self.path(index), index, draws.epoch, out)

            taken[row], _ = self.first_readable(wanted, corrupt, read)
        return {"features": features, "labels": self.labels[taken]}

    def first_readable(self, index: int, corrupt: CorruptImages, read: Callable[[int], Image]) -> tuple[int, Image]:
        """The sample, or the one that replaces it as long as `read` cannot read it, and what `read` returned."""
        index = corrupt.skip(index)
        while True:
            try:
                return index, read(index)
            except UnreadableImage as error:
                index = corrupt.replacement(index, self.paths[index], str(error))


def image_splits(root: Path, settings: ImageSettings | None = None, max_corrupt: float = DEFAULT_MAX_CORRUPT) -> Splits:
    """The training and evaluation images below `root`.

    If both exist, lists are used instead of folders. Classes are numbered in the order of `classes.txt` (a name per
    line) or, without it, of the sorted folder names of `train/`.
    """
    settings = settings or ImageSettings()
    if not root.is_dir():
        raise DataError(f"image folder {root}: this folder does not exist on this machine")
    read = _read_lists if (root / "train.txt").is_file() else _read_folders
    class_names, parts = read(root)
    train, test = (
        ImageFolder(
            f"{root}/{part}", root, tuple(paths), np.array(labels, np.int64), class_names, settings, max_corrupt
        )
        for part, (paths, labels) in parts.items()
    )
    return Splits(train, test)


_Part = tuple[list[str], list[int]]


def _read_folders(root: Path) -> tuple[tuple[str, ...], dict[str, _Part]]:
    missing = [part for part in ("train", "val") if not (root / part).is_dir()]
    if missing:
        raise DataError(
            f"image folder {root}: no folder {' and no folder '.join(missing)} in it; needed are train/<class>/*.jpg "
            'and val/<class>/*.jpg, or the lists train.txt and val.txt with a line "path label" per image'
        )
    names = _declared_classes(root) or tuple(sorted(entry.name for entry in _folders(root / "train")))
    numbers = {name: number for number, name in enumerate(names)}
    parts: dict[str, _Part] = {}
    for part in ("train", "val"):
        paths: list[str] = []
        labels: list[int] = []
        for folder in sorted(_folders(root / part), key=lambda entry: entry.name):
            if folder.name not in numbers:
                raise DataError(
                    f"{root}/{part}/{folder.name}: this class is not among the {len(names)} of "
                    f"{'classes.txt' if (root / 'classes.txt').is_file() else 'train/'}; remove it or list it there"
                )
            files = sorted(_images(folder))
            paths += [f"{part}/{folder.name}/{file}" for file in files]
            labels += [numbers[folder.name]] * len(files)
        parts[part] = _not_empty(root / part, paths, labels)
    return names, parts


def _read_lists(root: Path) -> tuple[tuple[str, ...], dict[str, _Part]]:
    names = _declared_classes(root)
    parts = {part: _read_list(root / f"{part}.txt", len(names)) for part in ("train", "val")}
    highest = max(max(labels) for _, labels in parts.values())
    return names or tuple(str(label) for label in range(highest + 1)), parts


def _read_list(file: Path, classes: int) -> _Part:
    """``classes``: how many classes.txt names; 0: there is none, and a label may be as high as there are images."""
    paths: list[str] = []
    labels: list[int] = []
    try:
        with open_regular(file) as content:
            lines = content.read().decode("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"{file} cannot be read: {why}; train.txt and val.txt are both needed") from error
    most = classes or max(_MOST_UNNAMED_CLASSES, len(lines))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        path, _, label = line.strip().rpartition(" ")
        if not path or not label.isdecimal():
            raise DataError(f'{file}:{number}: {line!r} is not "path label" with a label from 0 on')
        if len(label) > _MOST_DIGITS or int(label) >= most:
            rule = (
                f"classes.txt names {classes} classes (0 to {classes - 1})"
                if classes
                else f"without a classes.txt it must be below {most}: each label up to the highest is a class"
            )
            raise DataError(f"{file}:{number}: a label is {label[:_MOST_DIGITS]}, {rule}")
        paths.append(path.strip())
        labels.append(int(label))
    return _not_empty(file, paths, labels)


def _not_empty(where: Path, paths: list[str], labels: list[int]) -> _Part:
    if not paths:
        raise DataError(f"{where} has no images; known are {', '.join(IMAGE_SUFFIXES)}")
    return paths, labels


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _declared_classes(root: Path) -> tuple[str, ...]:
    file = root / "classes.txt"
    if not file.is_file():
        return ()
    names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(set(names)) != len(names):
        raise DataError(f"{file}: {next(name for name in names if names.count(name) > 1)!r} is listed twice")
    return tuple(names)


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if _is_folder(entry)]


def _images(folder: os.DirEntry[str]) -> Iterator[str]:
    """Names below the folder, recursively, relative to it. Raises DataError, also for links that lead in a circle."""
    waiting = [(folder, "", frozenset[tuple[int, int]]())]
    while waiting:
        inside, prefix, above = waiting.pop()
        with _named(inside.path):
            status = inside.stat()
        if (status.st_dev, status.st_ino) in above:
            raise DataError(f"{inside.path}: a link in this path leads back to a folder of the path; remove that link")
        for entry in _entries(inside.path):
            if _is_folder(entry):
                waiting.append((entry, f"{prefix}{entry.name}/", above | {(status.st_dev, status.st_ino)}))
            elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                yield prefix + entry.name


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """The entries of a folder that are not hidden. Raises DataError."""
    with _named(str(folder)), os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


@contextmanager
def _named(folder: str) -> Iterator[None]:
    """An OSError becomes a DataError with the folder's name: no permission, a path that is too long."""
    try:
        yield
    except OSError as error:
        shown = folder if len(folder) <= _MOST_SHOWN else f"{folder[:_MOST_SHOWN]}... ({len(folder)} characters)"
        raise DataError(f"the folder {shown} cannot be read: {error.strerror}") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


class CorruptImages:
    """The unreadable files that this rank has found so far: each is replaced by the next readable one and counted.

    Args:
        num_samples: of the dataset.
        max_corrupt: how many may be unreadable; a share of the dataset below 1, otherwise a number. 0 = none.
    """

    def __init__(self, num_samples: int, max_corrupt: float, where: str) -> None:
        if max_corrupt < 0 or (max_corrupt >= 1 and math.isfinite(max_corrupt) and max_corrupt != int(max_corrupt)):
            raise DataError(
                f"--max_corrupt {max_corrupt:g}: give a share of the images (0.01 = 1 of 100) or a whole number"
            )
        self._num_samples = num_samples
        self._where = where
        allowed = max_corrupt if max_corrupt >= 1 else max_corrupt * num_samples
        self.allowed = int(min(allowed, num_samples - 1))  # at least one must remain as a replacement
        self._reasons: dict[int, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def names(self) -> list[str]:
        """The unreadable files, in the order of the dataset."""
        return [self._reasons[index][0] for index in sorted(self._reasons)]

    def replacement(self, index: int, name: str, reason: str) -> int:
        """Count the file and return the sample that replaces it: the next one of the dataset, the same on every
        rank."""
        self._reasons[index] = (name, reason)
        if len(self._reasons) <= _NAMES_SHOWN:
            _log.warning("cannot read %s (%s); another image replaces it", printable(name), printable(reason))
        if len(self._reasons) > self.allowed:
            raise DataError(self._message())
        return self.skip((index + 1) % self._num_samples)

    def skip(self, index: int) -> int:
        """The first sample from this one on that is not known to be unreadable."""
        while index in self._reasons:
            index = (index + 1) % self._num_samples
        return index

    def _message(self) -> str:
        shown = [f"{name} ({reason})" for name, reason in (self._reasons[i] for i in sorted(self._reasons))]
        more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
        return (
            f"{len(shown)} image(s) of {self._where} cannot be read, --max_corrupt allows {self.allowed} of "
            f"{self._num_samples}: {', '.join(shown[:_NAMES_SHOWN])}{more}. "
            "Repair or delete them, or raise --max_corrupt"
        )
