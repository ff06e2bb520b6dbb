"""Datasets, samplers and loaders: everything between the disk and a feed dictionary, without Paddle except for GPUs."""

from fleet_train.data.core.datasets import (
    DATASETS,
    ArrayDataset,
    DataIdentity,
    Dataset,
    Splits,
    digits,
    load_splits,
    synthetic,
)
from fleet_train.data.core.prefetch import Prefetcher
from fleet_train.data.core.rng import Draws
from fleet_train.data.core.sampler import (
    LAST_BATCHES,
    BatchSampler,
    EvaluationSampler,
    ShardedBatchSampler,
    evaluation_batches,
)
from fleet_train.data.core.shards import UNEVEN_POLICIES, OwnDataSampler, agree_steps
from fleet_train.data.images.augment import AUGMENTATIONS, augmentation
from fleet_train.data.images.folder import ImageFolder, image_splits
from fleet_train.data.images.geometry import ImageSettings
from fleet_train.data.loaders.device import device_copy
from fleet_train.data.loaders.threads import BatchLoader, Loader
from fleet_train.data.loaders.workers import WorkerLoader
from fleet_train.data.open import (
    LOADERS,
    SHARDINGS,
    LoaderSettings,
    Participant,
    make_evaluation_loader,
    make_loader,
    open_splits,
)
from fleet_train.data.settle import settle

Seat = Participant
"""The former name."""

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
    "device_copy",
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
