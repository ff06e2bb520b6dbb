"""Before the first epoch: checks that the data of all ranks is consistent, and agrees on the number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet_train.data.core.datasets import identity_of
from fleet_train.data.core.shards import OwnDataSampler
from fleet_train.data.images.folder import ImageFolder
from fleet_train.data.loaders.threads import Loader
from fleet_train.errors import DataError

_CLASSES_FILE = "list all classes, one per line, in a classes.txt that is the same on every machine"
_COPY_AGAIN = "copy the data again, or use --shard_by folder if each machine has its own data"
# What must be equal on all ranks, and the fix if it is not; the second part only if all read the same files.
_LABELS = {"number of classes": _CLASSES_FILE, "class names": _CLASSES_FILE}
_FILES = {"number of samples": _COPY_AGAIN, "file names and labels": _COPY_AGAIN, "contents": _COPY_AGAIN}


def settle(loader: Loader, gather: Callable[[Any], list[Any]]) -> int:
    """Agree with all ranks on the steps per epoch and return them; DataError on all ranks if the data is inconsistent.

    gather: returns the JSON values of all ranks, by rank: `fleet.gather`. Called once, by every rank.
    """
    sampler = loader.sampler
    own_data = isinstance(sampler, OwnDataSampler)
    everybody = gather(_about(loader))
    for name, fix in {**_LABELS, **({} if own_data else _FILES)}.items():
        _must_be_equal(name, [answer[name] for answer in everybody], fix)
    counts = [answer["steps"] for answer in everybody]
    if isinstance(sampler, OwnDataSampler):
        return sampler.agree(counts)
    if min(counts) < 1:
        dataset = loader.dataset
        raise DataError(f"{dataset.name} has {dataset.num_samples} samples, too few for one step on each rank")
    return int(counts[0])


def _about(loader: Loader) -> dict[str, Any]:
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


def _must_be_equal(name: str, values: list[Any], fix: str) -> None:
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if others:
        shown = ", ".join(f"{values[rank]} on rank {rank}" for rank in (0, *others[:3]))
        raise DataError(f"the training data differs between ranks in its {name}: {shown}; {fix}")
