"""Functions of Paddle 1.x that today's Paddle has no equivalent for, on programs of Paddle 3 (PIR).

Each takes the arguments of its namesake in ``paddle.fluid.layers`` 1.8, in the same order with the same defaults, and
returns the same numbers with the same default initial values; `fleet_train port` writes calls of them where a
plain renaming would change what a script computes. ``use_cudnn`` and ``in_place`` chose a kernel and are ignored.
Parameters are named as in 1.8: `parameters`. New programs should use ``paddle.nn``.
"""

from paddle.distributed.fleet import MultiSlotDataGenerator, MultiSlotStringDataGenerator

from fleet_train.compat.datasets import (
    DatasetFactory,
    InMemoryDataset,
    QueueDataset,
    infer_from_dataset,
    train_from_dataset,
)
from fleet_train.compat.layers import (
    batch_norm,
    conv2d,
    conv2d_transpose,
    cos_sim,
    elementwise_add,
    elementwise_div,
    elementwise_max,
    elementwise_min,
    elementwise_mul,
    elementwise_pow,
    elementwise_sub,
    fill_constant_batch_size_like,
    flatten,
    group_norm,
    img_conv_group,
    layer_norm,
    lrn,
    mul,
    pool2d,
    simple_img_conv_pool,
)
from fleet_train.compat.parameters import create_parameter, dropout, embedding, embedding_v2, fc, one_hot
from fleet_train.compat.programs import (
    DataFeeder,
    clone,
    clone_for_test,
    create_py_reader_by_data,
    data,
    from_generator,
    py_reader,
    read_file,
)
from fleet_train.compat.training import Executor, append_backward, backward, minimize
from fleet_train.convert.moving_average import ExponentialMovingAverage, autoincreased_step_counter

__all__ = [
    "DataFeeder",
    "DatasetFactory",
    "Executor",
    "ExponentialMovingAverage",
    "InMemoryDataset",
    "MultiSlotDataGenerator",
    "MultiSlotStringDataGenerator",
    "QueueDataset",
    "append_backward",
    "autoincreased_step_counter",
    "backward",
    "batch_norm",
    "clone",
    "clone_for_test",
    "conv2d",
    "conv2d_transpose",
    "cos_sim",
    "create_parameter",
    "create_py_reader_by_data",
    "data",
    "dropout",
    "elementwise_add",
    "elementwise_div",
    "elementwise_max",
    "elementwise_min",
    "elementwise_mul",
    "elementwise_pow",
    "elementwise_sub",
    "embedding",
    "embedding_v2",
    "fc",
    "fill_constant_batch_size_like",
    "flatten",
    "from_generator",
    "group_norm",
    "img_conv_group",
    "infer_from_dataset",
    "layer_norm",
    "lrn",
    "minimize",
    "mul",
    "one_hot",
    "pool2d",
    "py_reader",
    "read_file",
    "simple_img_conv_pool",
    "train_from_dataset",
]
