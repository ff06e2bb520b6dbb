"""A convolutional network as written for Paddle 2.0 to 2.4: paddle.distributed.fleet, a loader from a generator."""
import os

import numpy as np
import paddle
from paddle.distributed import fleet

STEPS, BATCH = 8, 8


def net(image, words):
    conv = paddle.static.nn.conv2d(image, num_filters=8, filter_size=3, padding=1, bias_attr=False)
    conv = paddle.static.nn.batch_norm(conv, act='relu')
    conv = paddle.nn.functional.max_pool2d(conv, 2)
    rows = paddle.static.nn.embedding(words, size=[20, 8])
    both = paddle.concat([paddle.flatten(conv, 1), paddle.mean(rows, axis=1)], axis=1)
    return paddle.static.nn.fc(both, 3)


def samples():
    random = np.random.RandomState(fleet.worker_index())
    for _ in range(STEPS * BATCH):
        label = random.randint(0, 3)
        yield random.uniform(-1, 1, [1, 8, 8]).astype('float32') + label, random.randint(0, 20, [5]), [label]


def train():
    paddle.enable_static()
    strategy = fleet.DistributedStrategy()
    strategy.fuse_all_reduce_ops = True
    strategy.fuse_grad_size_in_MB = 16
    fleet.init(is_collective=True, strategy=strategy)
    place = paddle.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))

    image = paddle.static.data(name='image', shape=[None, 1, 8, 8], dtype='float32')
    words = paddle.static.data(name='words', shape=[None, 5], dtype='int64')
    label = paddle.static.data(name='label', shape=[None, 1], dtype='int64')
    out = net(image, words)
    loss = paddle.nn.functional.cross_entropy(input=out, label=label)
    acc = paddle.metric.accuracy(input=paddle.nn.functional.softmax(out), label=label)

    optimizer = paddle.optimizer.Momentum(learning_rate=0.05, weight_decay=paddle.regularizer.L2Decay(1e-4))
    optimizer = fleet.distributed_optimizer(optimizer)
    optimizer.minimize(loss)

    loader = paddle.io.DataLoader.from_generator(feed_list=[image, words, label], capacity=16, iterable=True)
    loader.set_sample_generator(samples, batch_size=BATCH, places=place)
    exe = paddle.static.Executor(place)
    exe.run(paddle.static.default_startup_program())
    for step, data in enumerate(loader()):
        values = exe.run(paddle.static.default_main_program(), feed=data, fetch_list=[loss.name, acc.name])
        print("rank %d step %d loss=%.6f acc=%.3f" % (fleet.worker_index(), step, values[0], values[1]))
    if fleet.is_first_worker():
        fleet.save_persistables(executor=exe, dirname='model_2x')


train()
