# -*- coding: utf-8 -*-
"""A quick start as it was written for Paddle 1.8: an MLP, Fleet's collective mode, one process per card."""
from __future__ import print_function

import os

import numpy as np
import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.collective import fleet, DistributedStrategy
from paddle.fluid.incubate.fleet.base import role_maker

STEPS = 20


def mlp(input_x, input_y, hid_dim=64, label_dim=2):
    fc_1 = fluid.layers.fc(input=input_x, size=hid_dim, act='tanh')  # first hidden layer
    fc_2 = fluid.layers.fc(input=fc_1, size=hid_dim, act='tanh')
    prediction = fluid.layers.fc(input=[fc_2], size=label_dim, act='softmax')
    cost = fluid.layers.cross_entropy(input=prediction, label=input_y)
    acc = fluid.layers.accuracy(input=prediction, label=input_y)
    return fluid.layers.mean(x=cost), acc


def gen_data(random):
    x = random.standard_normal((32, 32)).astype('float32')
    return {"x": x, "y": (x.sum(axis=1, keepdims=True) > 0).astype('int64')}


def train():
    role = role_maker.PaddleCloudRoleMaker(is_collective=True)
    fleet.init(role)

    # the network
    input_x = fluid.layers.data(name="x", shape=[32], dtype='float32')
    input_y = fluid.layers.data(name="y", shape=[1], dtype='int64')
    cost, acc = mlp(input_x, input_y)

    exec_strategy = fluid.ExecutionStrategy()
    exec_strategy.num_threads = 3
    strategy = DistributedStrategy()
    strategy.nccl_comm_num = 2
    strategy.exec_strategy = exec_strategy
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
    fetch_list = [cost.name]
    fetch_list.append(acc.name)
    for step in range(STEPS):
        cost_val, acc_val = exe.run(fleet.main_program, feed=gen_data(random), fetch_list=fetch_list)
        print("worker %d step %d cost=%.6f acc=%.3f" % (fleet.worker_index(), step, np.mean(cost_val), np.mean(acc_val)))

    if fleet.worker_index() == 0:
        fluid.io.save_persistables(exe, "mlp_out", main_program=fleet._origin_program)


if __name__ == '__main__':
    train()
