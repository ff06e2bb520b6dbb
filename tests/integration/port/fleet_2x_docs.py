"""A residual network in the form of Paddle 2.x's guide to collective training of static programs."""
import os

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from paddle.io import DataLoader, Dataset, DistributedBatchSampler

base_lr = 0.05
momentum_rate = 0.9
l2_decay = 1e-4
epoch = 2
batch_size = 8
class_dim = 4


class RandomDataset(Dataset):
    def __init__(self, num_samples):
        random = np.random.RandomState(0)
        self.labels = random.randint(0, class_dim, [num_samples, 1])
        self.images = random.uniform(-1, 1, [num_samples, 3, 16, 16]).astype('float32')
        self.images += self.labels[:, :, None, None]

    def __getitem__(self, idx):
        return self.images[idx], self.labels[idx].astype('int64')

    def __len__(self):
        return len(self.labels)


class Block(paddle.nn.Layer):
    def __init__(self, channels):
        super().__init__()
        self.conv = paddle.nn.Conv2D(channels, channels, 3, padding=1, bias_attr=False)
        self.norm = paddle.nn.BatchNorm2D(channels)

    def forward(self, value):
        return paddle.nn.functional.relu(value + self.norm(self.conv(value)))


def optimizer_setting(parameter_list=None):
    return paddle.optimizer.Momentum(
        learning_rate=base_lr,
        momentum=momentum_rate,
        weight_decay=paddle.regularizer.L2Decay(l2_decay),
        parameters=parameter_list)


def train_resnet():
    paddle.enable_static()
    paddle.seed(2022)

    fleet.init(is_collective=True)
    strategy = fleet.DistributedStrategy()
    strategy.nccl_comm_num = 1

    image = paddle.static.data(name="x", shape=[None, 3, 16, 16], dtype='float32')
    label = paddle.static.data(name="y", shape=[None, 1], dtype='int64')
    model = paddle.nn.Sequential(
        paddle.nn.Conv2D(3, 8, 3, stride=2, padding=1), Block(8), Block(8), paddle.nn.AdaptiveAvgPool2D(1),
        paddle.nn.Flatten(), paddle.nn.Linear(8, class_dim))
    out = model(image)
    avg_cost = paddle.nn.functional.cross_entropy(input=out, label=label)
    acc_top1 = paddle.metric.accuracy(input=paddle.nn.functional.softmax(out), label=label, k=1)

    place = paddle.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0))) \
        if paddle.is_compiled_with_cuda() else paddle.CPUPlace()

    optimizer = optimizer_setting()
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    optimizer.minimize(avg_cost)

    exe = paddle.static.Executor(place)
    exe.run(paddle.static.default_startup_program())

    train_dataset = RandomDataset(num_samples=96)
    sampler = DistributedBatchSampler(
        train_dataset, batch_size=batch_size, num_replicas=fleet.worker_num(), rank=fleet.worker_index(), drop_last=True)
    loader = DataLoader(train_dataset, feed_list=[image, label], batch_sampler=sampler, return_list=False)
    for eop in range(epoch):
        for batch_id, data in enumerate(loader()):
            loss, acc = exe.run(paddle.static.default_main_program(), feed=data, fetch_list=[avg_cost, acc_top1])
            print("[rank %d epoch %d, batch %d] loss=%.5f acc=%.3f" % (
                fleet.worker_index(), eop, batch_id, np.mean(loss), np.mean(acc)))
    fleet.save_persistables(exe, 'docs_out')


if __name__ == '__main__':
    train_resnet()
