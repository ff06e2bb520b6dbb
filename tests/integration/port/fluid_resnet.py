"""A small residual network as written for Paddle 1.7: layer functions, reader, feeder, names to fetch."""
import argparse
import os

import numpy as np
import paddle
import paddle.fluid as fluid
import paddle.fluid.incubate.fleet.base.role_maker as role_maker
from paddle.fluid import compiler
from paddle.fluid.incubate.fleet.collective import fleet
from paddle.fluid.param_attr import ParamAttr

flags = argparse.ArgumentParser()
flags.add_argument('--use_gpu', type=int, default=1)
flags.add_argument('--colours', type=int, default=4)
flags.add_argument('--steps', type=int, default=6)
args = flags.parse_args()

trainer_id = int(os.environ.get('PADDLE_TRAINER_ID', 0))


def normed(picture, channels, size, step=1, act=None, tag=''):
    """Convolution and batch norm, with names for everything that is learned."""
    folded = fluid.layers.conv2d(
        picture, channels, size, stride=step, padding=size // 2,
        param_attr=ParamAttr(name='filter.' + tag), bias_attr=False)
    return fluid.layers.batch_norm(
        input=folded,
        act=act,
        momentum=0.8,
        param_attr=ParamAttr(name='scale.' + tag),
        bias_attr=ParamAttr('shift.' + tag),
        moving_mean_name='mean.' + tag,
        moving_variance_name='variance.' + tag)


def residual(picture, channels, step, tag):
    inner = normed(picture, channels, 3, step, act='relu', tag=tag + '1')
    inner = normed(inner, channels, 3, tag=tag + '2')
    if step > 1 or picture.shape[1] != channels:
        picture = normed(picture, channels, 1, step, tag=tag + '0')
    return fluid.layers.elementwise_add(x=picture, y=inner, act='relu')


def network(picture):
    value = normed(picture, 8, 3, act='relu', tag='first')
    value = fluid.layers.pool2d(input=value, pool_size=3, pool_stride=2, pool_padding=1, pool_type='max')
    value = residual(value, 8, 1, 'a')
    value = residual(value, 16, 2, 'b')
    value = fluid.layers.pool2d(input=value, pool_type='avg', global_pooling=True)
    value = fluid.layers.dropout(x=value, dropout_prob=0.1)
    bound = value.shape[1] ** -0.5
    uniform = fluid.initializer.Uniform(-bound, bound)
    return fluid.layers.fc(input=value, size=args.colours, param_attr=ParamAttr(initializer=uniform))


def samples():
    random = np.random.RandomState(trainer_id)
    while True:
        colour = random.randint(0, args.colours)
        yield random.uniform(-1, 1, [3 * 16 * 16]).astype('float32') + colour, colour


train_program, start_program = fluid.Program(), fluid.Program()
start_program.random_seed = 90
with fluid.program_guard(train_program, start_program):
    with fluid.unique_name.guard():
        picture = fluid.layers.data(name='picture', shape=[3, 16, 16], dtype='float32')
        colour = fluid.layers.data(name='colour', shape=[1], dtype='int64')
        each, shares = fluid.layers.softmax_with_cross_entropy(network(picture), colour, return_softmax=True)
        loss = fluid.layers.mean(each)
        hits = fluid.layers.accuracy(input=shares, label=colour, k=1)

        test_program = train_program.clone(for_test=True)
        fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
        optimizer = fluid.optimizer.Momentum(
            learning_rate=0.05, momentum=0.9, regularization=fluid.regularizer.L2Decay(1e-4),
            grad_clip=fluid.clip.GradientClipByGlobalNorm(clip_norm=5.0))
        fleet.distributed_optimizer(optimizer).minimize(loss)
        cloned_late = fleet.main_program.clone(for_test=True)

card = int(os.environ.get('FLAGS_selected_gpus', 0))
place = fluid.CUDAPlace(card) if args.use_gpu else fluid.CPUPlace()
exe = fluid.Executor(place)
exe.run(start_program)
compiled = compiler.CompiledProgram(fleet.main_program).with_data_parallel(loss_name=loss.name)

feeder = fluid.DataFeeder(place=place, feed_list=[picture, colour])
watched = [loss, hits]
for step, batch in enumerate(paddle.batch(samples, batch_size=8)()):
    if step == args.steps:
        break
    now, right = exe.run(compiled, feed=feeder.feed(batch), fetch_list=[value.name for value in watched])
    print("trainer %d step %d loss=%.6f hits=%.3f" % (trainer_id, step, np.mean(now), np.mean(right)))
same = {'picture': np.ones([2, 3, 16, 16], 'float32'), 'colour': np.array([[1], [2]], 'int64')}
for _ in range(2):
    results = exe.run(test_program, feed=same, fetch_list=[loss.name])
    print("tested=%.6f" % results[0][0])
if trainer_id == 0:
    results = exe.run(cloned_late, feed=same, fetch_list=[loss])
    print("tested=%.6f" % results[0][0])
if trainer_id == 0:
    fluid.io.save_persistables(exe, "resnet_out", main_program=fleet._origin_program)
    fluid.io.save_inference_model("resnet_inference", ['picture'], [shares], exe)
