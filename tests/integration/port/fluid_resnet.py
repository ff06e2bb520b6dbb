"""A small residual network as it was written for Paddle 1.7: functions of layers, reader, feeder, names to fetch."""
import argparse
import math
import os

import numpy as np
import paddle
import paddle.fluid as fluid
import paddle.fluid.incubate.fleet.base.role_maker as role_maker
from paddle.fluid import compiler
from paddle.fluid.incubate.fleet.collective import fleet
from paddle.fluid.param_attr import ParamAttr

parser = argparse.ArgumentParser()
parser.add_argument('--use_gpu', type=int, default=1)
parser.add_argument('--class_dim', type=int, default=4)
parser.add_argument('--steps', type=int, default=6)
args = parser.parse_args()

trainer_id = int(os.environ.get('PADDLE_TRAINER_ID', 0))


def conv_bn_layer(input, num_filters, filter_size, stride=1, groups=1, act=None, name=None):
    conv = fluid.layers.conv2d(
        input=input,
        num_filters=num_filters,
        filter_size=filter_size,
        stride=stride,
        padding=(filter_size - 1) // 2,
        groups=groups,
        act=None,
        param_attr=ParamAttr(name=name + "_weights"),
        bias_attr=False,
        name=name + '.conv2d.output.1')
    return fluid.layers.batch_norm(
        input=conv,
        act=act,
        param_attr=ParamAttr(name='bn_' + name + '_scale'),
        bias_attr=ParamAttr('bn_' + name + '_offset'),
        moving_mean_name='bn_' + name + '_mean',
        moving_variance_name='bn_' + name + '_variance')


def basic_block(input, num_filters, stride, name):
    conv0 = conv_bn_layer(input, num_filters, 3, stride, act='relu', name=name + "_a")
    conv1 = conv_bn_layer(conv0, num_filters, 3, name=name + "_b")
    short = input
    if input.shape[1] != num_filters or stride != 1:
        short = conv_bn_layer(input, num_filters, 1, stride, name=name + "_s")
    return fluid.layers.elementwise_add(x=short, y=conv1, act='relu')


def resnet(input, class_dim):
    conv = conv_bn_layer(input, 8, 3, act='relu', name='stem')
    conv = fluid.layers.pool2d(input=conv, pool_size=3, pool_stride=2, pool_padding=1, pool_type='max')
    for i, filters in enumerate([8, 16]):
        conv = basic_block(conv, filters, 1 if i == 0 else 2, 'res%d' % i)
    pool = fluid.layers.pool2d(input=conv, pool_size=7, pool_type='avg', global_pooling=True)
    stdv = 1.0 / math.sqrt(pool.shape[1] * 1.0)
    drop = fluid.layers.dropout(x=pool, dropout_prob=0.1)
    return fluid.layers.fc(
        input=drop,
        size=class_dim,
        param_attr=fluid.param_attr.ParamAttr(initializer=fluid.initializer.Uniform(-stdv, stdv)))


def reader():
    random = np.random.RandomState(trainer_id)
    while True:
        label = random.randint(0, args.class_dim)
        yield random.uniform(-1, 1, [3 * 16 * 16]).astype('float32') + label, label


def main():
    train_prog, startup_prog = fluid.Program(), fluid.Program()
    startup_prog.random_seed = 90
    with fluid.program_guard(train_prog, startup_prog):
        with fluid.unique_name.guard():
            image = fluid.layers.data(name='image', shape=[3, 16, 16], dtype='float32')
            label = fluid.layers.data(name='label', shape=[1], dtype='int64')
            out = resnet(image, args.class_dim)
            cost, prob = fluid.layers.softmax_with_cross_entropy(out, label, return_softmax=True)
            avg_cost = fluid.layers.mean(cost)
            acc_top1 = fluid.layers.accuracy(input=prob, label=label, k=1)

            fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
            optimizer = fluid.optimizer.Momentum(
                learning_rate=0.05, momentum=0.9, regularization=fluid.regularizer.L2Decay(1e-4),
                grad_clip=fluid.clip.GradientClipByGlobalNorm(clip_norm=5.0))
            optimizer = fleet.distributed_optimizer(optimizer)
            optimizer.minimize(avg_cost)

    gpu_id = int(os.environ.get('FLAGS_selected_gpus', 0))
    place = fluid.CUDAPlace(gpu_id) if args.use_gpu else fluid.CPUPlace()
    exe = fluid.Executor(place)
    exe.run(startup_prog)
    train_prog = compiler.CompiledProgram(fleet.main_program).with_data_parallel(loss_name=avg_cost.name)

    feeder = fluid.DataFeeder(place=place, feed_list=[image, label])
    batches = paddle.batch(reader, batch_size=8)
    fetch_vars = [avg_cost, acc_top1]
    for step, data in enumerate(batches()):
        if step == args.steps:
            break
        loss, acc = exe.run(train_prog, feed=feeder.feed(data), fetch_list=[v.name for v in fetch_vars])
        print("trainer %d step %d loss=%.6f acc=%.3f" % (trainer_id, step, np.mean(loss), np.mean(acc)))
    if trainer_id == 0:
        fluid.io.save_persistables(exe, "resnet_out", main_program=fleet._origin_program)
        fluid.io.save_inference_model("resnet_inference", ['image'], [prob], exe)


main()
