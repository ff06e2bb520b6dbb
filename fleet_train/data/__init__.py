"""Datasets, sharding samplers and prefetch: everything between the disk and a feed dictionary. No Paddle in here."""

from fleet_train.data.augment import AUGMENTATIONS, augmentation
from fleet_train.data.datasets import DATASETS, ArrayDataset, Dataset, Splits, digits, load_splits, synthetic
from fleet_train.data.draws import Draws
from fleet_train.data.loader import BatchLoader
from fleet_train.data.prefetch import Prefetcher
from fleet_train.data.sampler import (
    LAST_BATCHES,
    BatchSampler,
    EvaluationSampler,
    ShardedBatchSampler,
    evaluation_batches,
)
from fleet_train.data.uneven import UNEVEN_POLICIES, OwnDataSampler, agree_steps

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "LAST_BATCHES",
    "UNEVEN_POLICIES",
    "ArrayDataset",
    "BatchLoader",
    "BatchSampler",
    "Dataset",
    "Draws",
    "EvaluationSampler",
    "OwnDataSampler",
    "Prefetcher",
    "ShardedBatchSampler",
    "Splits",
    "agree_steps",
    "augmentation",
    "digits",
    "evaluation_batches",
    "load_splits",
    "synthetic",
]
