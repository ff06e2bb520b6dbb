"""Datasets, sharding samplers and prefetch: everything between the disk and a feed dictionary. No Paddle in here."""

from fleet_train.data.augment import AUGMENTATIONS, augmentation
from fleet_train.data.datasets import DATASETS, ArrayDataset, Dataset, Splits, digits, load_splits, synthetic
from fleet_train.data.loader import BatchLoader
from fleet_train.data.prefetch import Prefetcher
from fleet_train.data.sampler import ShardedBatchSampler, evaluation_batches

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "ArrayDataset",
    "BatchLoader",
    "Dataset",
    "Prefetcher",
    "ShardedBatchSampler",
    "Splits",
    "augmentation",
    "digits",
    "evaluation_batches",
    "load_splits",
    "synthetic",
]
