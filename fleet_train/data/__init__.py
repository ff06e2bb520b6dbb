"""Datasets, samplers and loaders: everything between the disk and a feed dictionary, without Paddle except for GPUs."""

from fleet_train.data.datasets import (
    DATASETS,
    ArrayDataset,
    DataIdentity,
    Dataset,
    Draws,
    Splits,
    digits,
    load_splits,
    synthetic,
)
from fleet_train.data.decode import ImageSettings
from fleet_train.data.images import ImageFolder, image_splits
from fleet_train.data.loader import AUGMENTATIONS, BatchLoader, Loader, Prefetcher, augmentation
from fleet_train.data.open import (
    LOADERS,
    SHARDINGS,
    LoaderSettings,
    Participant,
    make_evaluation_loader,
    make_loader,
    open_splits,
    settle,
)
from fleet_train.data.sampler import (
    LAST_BATCHES,
    UNEVEN_POLICIES,
    BatchSampler,
    EvaluationSampler,
    OwnDataSampler,
    ShardedBatchSampler,
    agree_steps,
    evaluation_batches,
)
from fleet_train.data.workers import WorkerLoader

Seat = Participant
"""The former name of `Participant`."""

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "LAST_BATCHES",
    "LOADERS",
    "SHARDINGS",
    "UNEVEN_POLICIES",
    "ArrayDataset",
    "BatchLoader",
    "BatchSampler",
    "DataIdentity",
    "Dataset",
    "Draws",
    "EvaluationSampler",
    "ImageFolder",
    "ImageSettings",
    "Loader",
    "LoaderSettings",
    "OwnDataSampler",
    "Participant",
    "Prefetcher",
    "Seat",
    "ShardedBatchSampler",
    "Splits",
    "WorkerLoader",
    "agree_steps",
    "augmentation",
    "digits",
    "evaluation_batches",
    "image_splits",
    "load_splits",
    "make_evaluation_loader",
    "make_loader",
    "open_splits",
    "settle",
    "synthetic",
]
