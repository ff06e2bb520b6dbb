"""Datasets, samplers and loaders: everything between the disk and a feed dictionary, without Paddle but for GPUs."""

from fleet_train.data.augment import AUGMENTATIONS, augmentation
from fleet_train.data.datasets import DATASETS, ArrayDataset, Dataset, Splits, digits, load_splits, synthetic
from fleet_train.data.device import device_copy
from fleet_train.data.draws import Draws
from fleet_train.data.image_folder import ImageFolder, image_splits
from fleet_train.data.image_settings import ImageSettings
from fleet_train.data.loader import BatchLoader, Loader
from fleet_train.data.open import (
    LOADERS,
    SHARDINGS,
    LoaderSettings,
    Seat,
    make_evaluation_loader,
    make_loader,
    open_splits,
)
from fleet_train.data.prefetch import Prefetcher
from fleet_train.data.sampler import (
    LAST_BATCHES,
    BatchSampler,
    EvaluationSampler,
    ShardedBatchSampler,
    evaluation_batches,
)
from fleet_train.data.settle import settle
from fleet_train.data.uneven import UNEVEN_POLICIES, OwnDataSampler, agree_steps
from fleet_train.data.worker_loader import WorkerLoader

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
    "Dataset",
    "Draws",
    "EvaluationSampler",
    "ImageFolder",
    "ImageSettings",
    "Loader",
    "LoaderSettings",
    "OwnDataSampler",
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
