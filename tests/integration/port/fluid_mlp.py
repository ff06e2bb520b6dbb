# -*- coding: utf-8 -*-
"""A classifier of noise as written for Paddle 1.8: Fleet's collective mode, one process per card."""
from __future__ import print_function

import os

import numpy as np
import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.collective import fleet, DistributedStrategy
from paddle.fluid.incubate.fleet.base import role_maker

STEPS = 20


def classify(features, target):
    value = features
    for width in (64, 48):
        value = fluid.layers.fc(input=value, size=width, act='tanh')  # a hidden layer
    shares = fluid.layers.fc(input=[value], size=2, act='softmax')
    each = fluid.layers.cross_entropy(input=shares, label=target)
    return fluid.layers.mean(x=each), fluid.layers.accuracy(input=shares, label=target)


def batch(random):
    features = random.standard_normal((32, 20)).astype('float32')
    return {"features": features, "target": (features.sum(axis=1, keepdims=True) > 0).astype('int64')}


def main():
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

    # the network
    features = fluid.layers.data(name="features", shape=[20], dtype='float32')
    target = fluid.layers.data(name="target", shape=[1], dtype='int64')
    cost, hits = classify(features, target)

    threads = fluid.ExecutionStrategy()
    threads.num_threads = 3
    strategy = DistributedStrategy()
    strategy.nccl_comm_num = 2
    strategy.exec_strategy = threads
    optimizer = fluid.optimizer.MomentumOptimizer(
        learning_rate=0.05,
        momentum=0.9,
        regularization=fluid.regularizer.L2Decay(regularization_coeff=1e-4))
    optimizer = fleet.distributed_optimizer(optimizer, strategy=strategy)
    optimizer.minimize(cost, fluid.default_startup_program())

    # one process per card
    place = fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))
    exe = fluid.Executor(place)
    exe.run(fluid.default_startup_program())

    random = np.random.RandomState(fleet.worker_index())
    wanted = [cost.name]
    wanted.append(hits.name)
    for step in range(STEPS):
        now, right = exe.run(fleet.main_program, feed=batch(random), fetch_list=wanted)
        print("worker %d step %d cost=%.6f hits=%.3f" % (fleet.worker_index(), step, np.mean(now), np.mean(right)))

    if fleet.worker_index() == 0:
        fluid.io.save_persistables(exe, "mlp_out", main_program=fleet._origin_program)


if __name__ == '__main__':
    main()
