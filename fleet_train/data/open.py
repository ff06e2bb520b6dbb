"""Turns the trainer's flags into data and loaders; `settle` agrees with the other ranks before the first epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_train.data.dali import DaliLoader
from fleet_train.data.datasets import Dataset, Splits, identity_of, load_splits
from fleet_train.data.decode import ImageSettings
from fleet_train.data.images import DEFAULT_MAX_CORRUPT, ImageFolder, image_splits
from fleet_train.data.loader import BatchLoader, Loader, augmentation, image_augmentation_name
from fleet_train.data.sampler import (
    LAST_BATCHES,
    UNEVEN_POLICIES,
    BatchSampler,
    EvaluationSampler,
    OwnDataSampler,
    ShardedBatchSampler,
)
from fleet_train.data.workers import WorkerLoader
from fleet_train.errors import DataError

LOADERS = ("auto", "thread", "workers", "dali")
SHARDINGS = ("sample", "folder")
_MOST_WORKERS = 8
_CLASSES_FILE = "list all classes, one per line, in a classes.txt that is the same on every machine"
_COPY_AGAIN = "copy the data again, or use --shard_by folder if each machine has its own data"
# What must be equal on all ranks, and the fix if it is not; the second part only if all read the same files.
_LABELS = {"number of classes": _CLASSES_FILE, "class names": _CLASSES_FILE}
_FILES = {"number of samples": _COPY_AGAIN, "file names and labels": _COPY_AGAIN, "contents": _COPY_AGAIN}


@dataclass(frozen=True)
class Participant:
    """This process's rank among the readers: in the job, and on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def of(cls, rank: int, endpoints: Sequence[str]) -> Participant:
        """The participant from `fleet.worker_index()` and `fleet.worker_endpoints()` ("host:port" by rank)."""
        hosts = [endpoint.rpartition(":")[0] for endpoint in endpoints]
        neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        return cls(rank, len(hosts), neighbours.index(rank), len(neighbours))


ALONE = Participant()


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of one rank's batches. Sizes are per rank."""

    batch_size: int = 32
    seed: int = 0
    augment: str = "auto"
    """One of AUGMENTATIONS, for training batches."""
    loader: str = "auto"
    """What reads the data. auto = worker processes for image folders, a thread for data in memory."""
    workers: int | None = None
    """Worker processes per rank. 0 = decode in a thread of the trainer. None = the cores of this rank, at most 8."""
    prefetch_depth: int = 2
    """Batches prefetched while a step runs."""
    shard_by: str = "sample"
    """How data is divided. sample = all machines have the same files and divide them; folder = every machine reads all
    of its own files."""
    uneven: str = "truncate"
    """How to handle machines with different amounts of data, with shard_by folder."""
    last_batch: str = "merge"
    """How to handle a last batch of one sample per rank."""

    def __post_init__(self) -> None:
        for flag, value, known in (
            ("loader", self.loader, LOADERS),
            ("shard_by", self.shard_by, SHARDINGS),
            ("uneven", self.uneven, UNEVEN_POLICIES),
            ("last_batch", self.last_batch, LAST_BATCHES),
        ):
            if value not in known:
                raise DataError(f"--{flag} {value!r} is unknown; use one of {', '.join(known)}")
        if self.workers is not None and self.workers < 0:
            raise DataError(f"--workers {self.workers}: give 0 (no processes) or more")


def open_splits(
    data: str = "digits",
    data_dir: str | Path | None = None,
    *,
    images: ImageSettings | None = None,
    max_corrupt: float = DEFAULT_MAX_CORRUPT,
) -> Splits:
    """Training and evaluation data: the image folder `data_dir` if given, else the data named `data`."""
    if data_dir is None:
        return load_splits(data)
    return image_splits(Path(data_dir), images, max_corrupt)


def make_loader(
    dataset: Dataset, settings: LoaderSettings, participant: Participant = ALONE, place: Any = None
) -> Loader:
    """This rank's training batches. Call `settle` on all ranks before the first epoch, and `close` at the end.

    place: `fleet.place()`. DALI decodes on a GPU; all other batches are arrays.
    """
    sampler: BatchSampler
    if settings.shard_by == "folder":
        sampler = OwnDataSampler(
            dataset.num_samples,
            settings.batch_size,
            participant.local_rank,
            participant.local_size,
            total_ranks=participant.world_size,
            seed=settings.seed,
            policy=settings.uneven,
        )
    else:
        sampler = ShardedBatchSampler(
            dataset.num_samples,
            settings.batch_size,
            participant.rank,
            participant.world_size,
            seed=settings.seed,
            last_batch=settings.last_batch,
        )
    return _loader(dataset, sampler, settings, participant, place, training=True)


def make_evaluation_loader(
    dataset: Dataset, settings: LoaderSettings, participant: Participant = ALONE, place: Any = None
) -> Loader:
    """This rank's share of an evaluation, without augmentations: each sample once over all ranks."""
    rank, world_size = (
        (participant.local_rank, participant.local_size)
        if settings.shard_by == "folder"
        else (participant.rank, participant.world_size)
    )
    sampler = EvaluationSampler(dataset.num_samples, settings.batch_size, rank, world_size)
    return _loader(dataset, sampler, settings, participant, place, training=False)


def default_workers(local_size: int) -> int:
    """Worker processes per rank: the cores of each rank on this machine, 1 to 8."""
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // local_size))


def _loader(
    dataset: Dataset,
    sampler: BatchSampler,
    settings: LoaderSettings,
    participant: Participant,
    place: Any,
    training: bool,
) -> Loader:
    augment = settings.augment if training else "none"
    workers = default_workers(participant.local_size) if settings.workers is None else settings.workers
    depth = settings.prefetch_depth
    if not isinstance(dataset, ImageFolder):
        if settings.loader in ("workers", "dali"):
            raise DataError(f"--loader {settings.loader} decodes image files (--data_dir); {dataset.name} is in memory")
        return BatchLoader(dataset, sampler, augmentation(augment, dataset), depth)
    name = image_augmentation_name(augment)
    if settings.loader == "dali":
        return DaliLoader(dataset, sampler, name, max(1, workers), depth, place=place)
    if settings.loader == "thread" or workers == 0:
        return BatchLoader(dataset, sampler, augmentation(name, dataset), depth)
    return WorkerLoader(dataset, sampler, name, workers, depth, keep_workers=training)


def settle(loader: Loader, gather: Callable[[Any], list[Any]]) -> int:
    """Agree with all ranks on the steps per epoch and return them; DataError on all ranks if the data is inconsistent.

    gather: returns the JSON values of all ranks, by rank: `fleet.gather`. Called once, by every rank.
    """
    sampler = loader.sampler
    own_data = isinstance(sampler, OwnDataSampler)
    answers = gather(_facts_of(loader))
    for name, fix in {**_LABELS, **({} if own_data else _FILES)}.items():
        values = [answer[name] for answer in answers]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            shown = ", ".join(f"{values[rank]} on rank {rank}" for rank in (0, *others[:3]))
            raise DataError(f"the training data differs between ranks in its {name}: {shown}; {fix}")
    counts = [answer["steps"] for answer in answers]
    if isinstance(sampler, OwnDataSampler):
        return sampler.agree(counts)
    if min(counts) < 1:
        dataset = loader.dataset
        raise DataError(f"{dataset.name} has {dataset.num_samples} samples, too few for one step on each rank")
    return int(counts[0])


def _facts_of(loader: Loader) -> dict[str, Any]:
    dataset, sampler = loader.dataset, loader.sampler
    images = dataset if isinstance(dataset, ImageFolder) else None
    identity = identity_of(dataset)  # a loader of one's own need not have data_identity()
    digest = None if identity is None else identity.digest
    return {
        "number of classes": dataset.num_classes,
        "class names": None if images is None else images.classes_digest(),
        "number of samples": dataset.num_samples,
        "file names and labels": None if images is None else digest,
        "contents": digest if images is None else None,
        "steps": sampler.proposed_steps if isinstance(sampler, OwnDataSampler) else len(sampler),
    }
