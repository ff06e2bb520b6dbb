"""Scripts in the manner of tutorials of 2018 to 2022, ported and run one after the other in this process.

Each checks itself: it trains what it says, and nothing else.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import paddle

from fleet_train.port import port
from tests.support.worker import digest, report

HEAD = """
import numpy as np
import paddle
import paddle.fluid as fluid

def weight(name):
    return np.array(fluid.global_scope().find_var(name).get_tensor()).copy()

def ones(*shape):
    return np.ones(shape, 'float32')
"""

GAN = """
d_program, dg_program = fluid.Program(), fluid.Program()

def generator(z):
    return fluid.layers.fc(z, 3, param_attr='G.w', bias_attr='G.b')

def judged(image):
    return fluid.layers.fc(image, 1, param_attr='D.w', bias_attr='D.b')

def loss_of(x, label):
    return fluid.layers.mean(fluid.layers.sigmoid_cross_entropy_with_logits(x=x, label=label))

with fluid.program_guard(d_program):
    image = fluid.data('image', [None, 3])
    label = fluid.data('label', [None, 1])
    d_loss = loss_of(judged(image), label)
with fluid.program_guard(dg_program):
    noise = fluid.data('noise', [None, 2])
    g_image = generator(noise)
    g_program = dg_program.clone()
    g_program_test = dg_program.clone(for_test=True)
    dg_logit = judged(g_image)
    dg_loss = loss_of(dg_logit, fluid.layers.fill_constant_batch_size_like(
        input=noise, dtype='float32', shape=[-1, 1], value=1.0))
opt = fluid.optimizer.Adam(learning_rate=0.01)
{wrap}
opt.minimize(loss=d_loss)
parameters = [p.name for p in g_program.global_block().all_parameters()]
opt.minimize(loss=dg_loss, parameter_list=parameters)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
feed = {{'image': ones(4, 3) * {times}, 'label': ones(4, 1)}}
before = {{name: weight(name) for name in ('G.w', 'D.w')}}
made = exe.run(g_program, feed={{'noise': ones(4, 2)}}, fetch_list=[g_image])[0]
assert made.shape == (4, 3)
loss = exe.run(d_program, feed=feed, fetch_list=[d_loss])[0]
assert loss[0] > 0
assert (weight('G.w') == before['G.w']).all() and (weight('D.w') != before['D.w']).all()
middle = weight('D.w')
exe.run(dg_program, feed={{'noise': ones(4, 2) * {times}}}, fetch_list=[dg_loss])
assert (weight('G.w') != before['G.w']).all() and (weight('D.w') == middle).all()
again, = exe.run(g_program_test, feed={{'noise': ones(4, 2)}}, fetch_list=[g_image])
assert (again != made).any()
trained = dict((name, weight(name)) for name in ('G.w', 'G.b', 'D.w', 'D.b'))
"""

SCRIPTS: dict[str, str] = {
    "gan": GAN.format(wrap="", times=1),
    "names by a helper": """
def params_of(program, prefix):
    everything = program.global_block().all_parameters()
    return [p.name for p in everything if p.name.startswith(prefix)]
x = fluid.layers.data('x', shape=[2])
loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.fc(x, 3, param_attr='a.w'), 1, param_attr='b.w'))
some = params_of(fluid.default_main_program(), 'a')
fluid.optimizer.SGD(0.1).minimize(loss, parameter_list=some)
exe = fluid.Executor(fluid.CPUPlace()); exe.run(fluid.default_startup_program())
total, before = [0], weight('b.w')
for i in range(2):
    outs = exe.run(feed={'x': ones(4, 2)}, fetch_list=[loss])
    total = [old + new[0] for old, new in zip(total, outs)]
    report = dict(zip(['loss'], outs))
    assert float(report['loss']) == report['loss'][0] == outs[-1][0]
    print('%f %.3f' % (report['loss'], report['loss'][0]))
assert (weight('b.w') == before).all()
fetched = exe.run(feed={'x': ones(4, 2)}, fetch_list=params_of(fluid.default_main_program(), 'b'))
assert (fetched[0] == before).all()
""",
    "moving average": """
data = fluid.data(name='x', shape=[-1, 5], dtype='float32')
hidden = fluid.layers.fc(input=data, size=10)
cost = fluid.layers.mean(hidden)
test_program = fluid.default_main_program().clone(for_test=True)
fluid.optimizer.Adam(learning_rate=0.001).minimize(cost)
global_steps = fluid.layers.autoincreased_step_counter()
ema = fluid.optimizer.ExponentialMovingAverage(0.999, thres_steps=global_steps)
ema.update()
exe = fluid.Executor(fluid.CPUPlace()); exe.run(fluid.default_startup_program())
for step in range(6):
    exe.run(program=fluid.default_main_program(), feed={'x': ones(10, 5)}, fetch_list=[cost.name])
trained = exe.run(program=test_program, feed={'x': ones(10, 5)}, fetch_list=[hidden.name])[0]
with ema.apply(exe):
    averaged = exe.run(program=test_program, feed={'x': ones(10, 5)}, fetch_list=[hidden.name])[0]
with ema.apply(exe, need_restore=False):
    pass
ema.restore(exe)
assert (averaged != trained).any()
assert (exe.run(test_program, feed={'x': ones(10, 5)}, fetch_list=[hidden.name])[0] == trained).all()
""",
    "image classification": """
def network(image, label=None):
    conv = fluid.nets.simple_img_conv_pool(image, filter_size=3, num_filters=4, pool_size=2, pool_stride=2, act='relu')
    prediction = fluid.layers.fc(fluid.layers.dropout(conv, 0.5), 10, act='softmax')
    if not label:
        return prediction
    cost = fluid.layers.cross_entropy(input=prediction, label=label)
    return fluid.layers.mean(cost), fluid.layers.accuracy(input=prediction, label=label)
main, startup = fluid.Program(), fluid.Program()
with fluid.program_guard(main, startup):
    image = fluid.layers.data(name='pixel', shape=[1, 8, 8], dtype='float32')
    label = fluid.layers.data(name='label', shape=[1], dtype='int64')
    avg_cost, acc = network(image, label)
    test_program = main.clone(for_test=True)
fluid.optimizer.Adam(learning_rate=0.01).minimize(avg_cost, startup)
exe = fluid.Executor(fluid.CPUPlace()); exe.run(startup)
feeder = fluid.DataFeeder(feed_list=[image, label], place=fluid.CPUPlace())
batch = [(np.random.RandomState(i).rand(64), i % 10) for i in range(20)]
names = ['cost', 'acc']
for epoch in range(3):
    results = exe.run(main, feed=feeder.feed(batch), fetch_list=[avg_cost, acc])
    cost, accuracy = [result[0] for result in results]
tested = [exe.run(test_program, feed=feeder.feed(batch), fetch_list=[avg_cost.name, acc.name]) for _ in range(2)]
assert tested[0][0][0] == tested[1][0][0], 'dropout is off'
for name, value in zip(names, tested[0]):
    print(name, value[0], float(value))
""",
    "word2vec": """
words = [fluid.layers.data(name='w%d' % i, shape=[1], dtype='int64') for i in range(4)]
nextw = fluid.layers.data(name='next', shape=[1], dtype='int64')
embedded = [fluid.layers.embedding(input=w, size=[30, 8], param_attr='shared_w') for w in words]
concat = fluid.layers.concat(input=embedded, axis=1)
hidden = fluid.layers.fc(input=concat, size=16, act='sigmoid')
predict = fluid.layers.fc(input=hidden, size=30, act='softmax')
avg_cost = fluid.layers.mean(fluid.layers.cross_entropy(input=predict, label=nextw))
fluid.optimizer.SGD(learning_rate=0.5).minimize(avg_cost)
exe = fluid.Executor(fluid.CPUPlace()); exe.run(fluid.default_startup_program())
feed = {'w%d' % i: np.arange(8).reshape(8, 1) + i for i in range(4)}
feed['next'] = np.arange(8).reshape(8, 1) + 4
losses = [np.array(exe.run(feed=feed, fetch_list=[avg_cost])[0])[0] for _ in range(30)]
assert losses[-1] < losses[0]
""",
    "recommender": """
usr = fluid.layers.data(name='user_id', shape=[1], dtype='int64')
movie = fluid.layers.data(name='movie_id', shape=[1], dtype='int64')
score = fluid.layers.data(name='score', shape=[1], dtype='float32')
usr_fc = fluid.layers.fc(input=fluid.layers.embedding(input=usr, size=[10, 16], param_attr='usr'), size=8)
mov_fc = fluid.layers.fc(input=fluid.layers.embedding(input=movie, size=[10, 16], param_attr='mov'), size=8)
inference = fluid.layers.scale(x=fluid.layers.cos_sim(X=usr_fc, Y=mov_fc), scale=5.0)
cost = fluid.layers.mean(fluid.layers.square_error_cost(input=inference, label=score))
test_program = fluid.default_main_program().clone(for_test=True)
fluid.optimizer.SGD(learning_rate=0.2).minimize(cost)
exe = fluid.Executor(fluid.CPUPlace()); exe.run(fluid.default_startup_program())
feed = {'user_id': np.arange(8).reshape(8, 1), 'movie_id': np.arange(8)[::-1].reshape(8, 1), 'score': ones(8, 1) * 4}
losses = [exe.run(feed=feed, fetch_list=[cost])[0][0] for _ in range(20)]
assert losses[-1] < losses[0]
avg = np.mean([out[0] for out in exe.run(test_program, feed=feed, fetch_list=[cost])])
assert abs(avg - losses[-1]) < 1
""",
    "several optimizers": """
main = fluid.default_main_program()
x = fluid.layers.data('x', shape=[4])
a = fluid.layers.fc(x, 3, param_attr='one.w', bias_attr=False)
b = fluid.layers.fc(a, 1, param_attr='two.w', bias_attr=False)
first, second = fluid.layers.mean(a), fluid.layers.mean(b)
snapshot = main.clone()
names = {p.name for p in snapshot.global_block().all_parameters()}
fluid.optimizer.SGD(0.1).minimize(first, parameter_list=[n for n in names if n.startswith('one')])
fluid.optimizer.Momentum(0.1, 0.9).minimize(second, no_grad_set=set(['one.w']))
exe = fluid.Executor(fluid.CPUPlace()); exe.run(fluid.default_startup_program())
one, two = weight('one.w'), weight('two.w')
value = exe.run(snapshot, feed={'x': ones(2, 4)}, fetch_list=[first, second])
assert (weight('one.w') == one).all() and value[0].shape == (1,)
exe.run(main, feed={'x': ones(2, 4)}, fetch_list=[first])
assert np.allclose(weight('one.w'), one - 0.1 / 3) and (weight('two.w') != two).all()
""",
    "gradients by hand": """
def names_of(program):
    return [p.name for p in program.global_block().all_parameters() if not p.name.endswith('.b')]
x = fluid.layers.data('x', shape=[4])
loss = fluid.layers.mean(fluid.layers.fc(x, 3, param_attr='one.w', bias_attr='one.b'))
copy = fluid.default_main_program().clone()
opt = fluid.optimizer.SGD(0.1)
pairs = opt.backward(loss, parameter_list=names_of(copy))
opt.apply_gradients(pairs)
more = fluid.append_backward(loss, parameter_list=names_of(copy))
exe = fluid.Executor(fluid.CPUPlace()); exe.run(fluid.default_startup_program())
w, b = weight('one.w'), weight('one.b')
fetched = exe.run(feed={'x': ones(2, 4)}, fetch_list=[pairs[0][1], more[0][1]])
assert np.allclose(weight('one.w'), w - 0.1 / 3) and (weight('one.b') == b).all()
assert len(pairs) == len(more) == 1 and np.allclose(fetched[0], fetched[1])
""",
    "translation": """
def encoder(src, mask=None):
    embedded = fluid.layers.embedding(src, size=[20, 8], param_attr='src_emb')
    hidden = fluid.layers.fc(embedded, 8, num_flatten_dims=2, act='tanh')
    if mask:
        hidden = fluid.layers.elementwise_mul(hidden, mask, axis=0)
    return fluid.layers.reduce_mean(hidden, dim=1)
src = fluid.data(name='src', shape=[None, 5, 1], dtype='int64')
mask = fluid.data(name='mask', shape=[None, 5], dtype='float32')
trg = fluid.data(name='trg', shape=[None, 1], dtype='int64')
state = encoder(src, mask)
logits = fluid.layers.fc(state, 20)
loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(logits, trg))
clip = fluid.clip.GradientClipByGlobalNorm(clip_norm=5.0)
fluid.optimizer.Adam(learning_rate=0.05, grad_clip=clip).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace()); exe.run(fluid.default_startup_program())
feed = {'src': np.arange(20).reshape(4, 5, 1), 'mask': ones(4, 5), 'trg': np.arange(4).reshape(4, 1)}
ppl = [np.exp(exe.run(feed=feed, fetch_list=[loss.name])[0][0]) for _ in range(20)]
assert ppl[-1] < ppl[0]
""",
    "gan with fleet": GAN.format(
        wrap="from paddle.fluid.incubate.fleet.collective import fleet\n"
        "from paddle.fluid.incubate.fleet.base import role_maker\n"
        "fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))\n"
        "opt = fleet.distributed_optimizer(opt)",
        times="(1 + fleet.worker_index())",
    ),
}


def run(text: str) -> dict[str, Any]:
    """What a script trained, if it says so. It is run in programs, names and a scope of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard(),
        paddle.static.scope_guard(paddle.static.Scope()),
    ):
        exec(compile(text, "ported.py", "exec"), names)
    return names["trained"] if "G.w" in names.get("trained", ()) else {}


def main() -> None:
    paddle.enable_static()
    outcomes, digests = {}, {}
    for name in sys.argv[1:] or SCRIPTS:
        paddle.seed(1)
        np.random.seed(1)
        once = port((HEAD + SCRIPTS[name]).encode(), "ported.py")
        outcome = [f"to do: {mark}" for mark in once.marks]
        outcome += ["a second run changes it"] if port(once.new, "ported.py").changed else []
        try:
            digests[name] = digest(run(once.new.decode()))
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")
        outcomes[name] = outcome
    report(outcomes=outcomes, digests=digests)


if __name__ == "__main__":
    main()
