# -*- coding: utf-8 -*-
"""A sentence classifier as written for Paddle 1.8: py_reader inside the program, a second one for testing."""
import os

import numpy as np
import paddle
import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.collective import fleet, DistributedStrategy
from paddle.fluid.incubate.fleet.base import role_maker

STEPS, BATCH, LENGTH, WORDS = 24, 16, 6, 30


def create_model(name):
    reader = fluid.layers.py_reader(
        capacity=8,
        shapes=[[-1, LENGTH], [-1, 1]],
        dtypes=['int64', 'int64'],
        lod_levels=[0, 0],
        name=name,
        use_double_buffer=True)
    words, label = fluid.layers.read_file(reader)
    rows = fluid.embedding(words, size=[WORDS, 8], param_attr=fluid.ParamAttr(name='table'))
    pooled = fluid.layers.reduce_mean(rows, dim=1)
    shares = fluid.layers.fc(
        input=pooled, size=2, act='softmax', param_attr=fluid.ParamAttr(name='out_w'), bias_attr=fluid.ParamAttr('out_b'))
    each = fluid.layers.cross_entropy(input=shares, label=label)
    return reader, fluid.layers.mean(each), fluid.layers.accuracy(input=shares, label=label)


def samples(seed, steps):
    def reader():
        random = np.random.RandomState(seed)
        for _ in range(steps * BATCH):
            words = random.randint(0, WORDS, [LENGTH])
            yield words, [int(words.mean() > WORDS / 2)]

    return reader


def main():
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    train_program, test_program, startup = fluid.Program(), fluid.Program(), fluid.Program()
    with fluid.program_guard(train_program, startup):
        with fluid.unique_name.guard():
            train_reader, loss, acc = create_model('train')
            optimizer = fleet.distributed_optimizer(fluid.optimizer.Adam(0.05), strategy=DistributedStrategy())
            optimizer.minimize(loss)
    with fluid.program_guard(test_program, fluid.Program()):
        with fluid.unique_name.guard():
            test_reader, test_loss, test_acc = create_model('test')

    exe = fluid.Executor(fluid.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0))))
    exe.run(startup)
    train_reader.decorate_paddle_reader(paddle.batch(samples(fleet.worker_index(), STEPS), BATCH))
    test_reader.decorate_paddle_reader(paddle.batch(samples(77, 4), BATCH))
    for epoch in range(2):
        train_reader.start()
        steps = 0
        while True:
            try:
                value, right = exe.run(train_program, fetch_list=[loss.name, acc.name])
                steps += 1
                print("worker %d epoch %d step %d loss=%.6f" % (fleet.worker_index(), epoch, steps, np.mean(value)))
            except fluid.core.EOFException:
                train_reader.reset()
                break
        assert steps == STEPS

        test_reader.start()
        tested = []
        try:
            while True:
                tested.append(np.mean(exe.run(test_program, fetch_list=[test_acc.name])[0]))
        except fluid.core.EOFException:
            test_reader.reset()
        print("worker %d epoch %d tested=%.4f" % (fleet.worker_index(), epoch, np.mean(tested)))
    fleet.save_persistables(exe, 'reader_out')


main()
