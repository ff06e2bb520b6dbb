"""A script for Paddle 1.8 that trains one network in one program and tests it in another, which share their parameters.

``python fluid_two_programs.py OUT.json`` below a Paddle 1.8 records what `test_compat.py` has; ported, it has to give
the same today. What is dropped is fetched and not learned: numbers must not hang on a random mask.
"""

import json
import sys

import numpy as np
import paddle.fluid as fluid


def fixed(*shape, name=None):
    values = np.sin(np.arange(np.prod(shape)) * 1.7 + 0.3).reshape(shape).astype("float32")
    return fluid.ParamAttr(initializer=fluid.initializer.NumpyArrayInitializer(values), name=name)


def network(is_test):
    x = fluid.data(name="x", shape=[None, 4])
    word = fluid.layers.data(name="word", shape=[1], dtype="int64")
    y = fluid.data(name="y", shape=[None, 1])
    hidden = fluid.layers.fc(input=x, size=6, act="tanh", param_attr=fixed(4, 6))
    hidden = fluid.layers.batch_norm(hidden, is_test=is_test, momentum=0.5)
    hidden = hidden + fluid.layers.embedding(word, size=[5, 6], param_attr=fixed(5, 6, name="table"))
    hidden = fluid.layers.reshape(hidden, shape=[-1, 6, 1, 1])
    hidden = fluid.layers.group_norm(hidden, groups=2, param_attr=True, bias_attr=True)
    hidden = fluid.layers.reshape(hidden, shape=[-1, 6])
    last = fluid.layers.create_parameter([6, 1], "float32", attr=fixed(6, 1))
    loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.mul(hidden, last), y))
    dropped = fluid.layers.reduce_sum(fluid.layers.dropout(hidden, dropout_prob=0.4, is_test=is_test))
    return loss, dropped


def built_twice(train, startup):
    """The recipe of 1.x for two programs."""
    test = fluid.Program()
    with fluid.program_guard(train, startup), fluid.unique_name.guard():
        loss, _ = network(is_test=False)
        fluid.optimizer.Momentum(learning_rate=0.05, momentum=0.9).minimize(loss)
    with fluid.program_guard(test, fluid.Program()), fluid.unique_name.guard():
        test_fetches = network(is_test=True)
    return loss, test, list(test_fetches)


def cloned(train, startup):
    """The other one."""
    with fluid.program_guard(train, startup), fluid.unique_name.guard():
        loss, dropped = network(is_test=False)
        test = train.clone(for_test=True)
        fluid.optimizer.Momentum(learning_rate=0.05, momentum=0.9).minimize(loss)
    return loss, test, [loss, dropped]


def cloned_late(train, startup):
    """From a program that learns already."""
    with fluid.program_guard(train, startup), fluid.unique_name.guard():
        loss, dropped = network(is_test=False)
        fluid.optimizer.Momentum(learning_rate=0.05, momentum=0.9).minimize(loss)
    return loss, train.clone(for_test=True), [loss, dropped]


def batch(step):
    x = np.cos(np.arange(32) * 0.9 + step).reshape(8, 4).astype("float32")
    word = (np.arange(8).reshape(8, 1) + step) % 5
    return {"x": x, "word": word.astype("int64"), "y": x.sum(axis=1, keepdims=True)}


def trained(build):
    train, startup = fluid.Program(), fluid.Program()
    loss, test, test_fetches = build(train, startup)
    exe = fluid.Executor(fluid.CPUPlace())
    figures = []
    with fluid.scope_guard(fluid.core.Scope()):
        exe.run(startup)
        for step in range(5):
            ret = exe.run(train, feed=batch(step), fetch_list=[loss])
            tested = exe.run(program=test, feed=batch(9), fetch_list=test_fetches)
            figures += [float(ret[0][0]), float(tested[0][0]), float(np.sum(tested[1]))]
        names = ["fc_0.w_0", "batch_norm_0.w_1", "table", "group_norm_0.w_0", "create_parameter_0.w_0"]
        values = [np.array(fluid.global_scope().find_var(name).get_tensor()) for name in names]
    return figures + [float(value.sum()) for value in values]


with open(sys.argv[1], "w") as sink:
    recipes = {
        "built twice below unique_name.guard": built_twice,
        "cloned": cloned,
        "cloned behind minimize": cloned_late,
    }
    json.dump({name: trained(build) for name, build in recipes.items()}, sink)
