"""Snippets for Paddle 1.8 whose numbers were recorded with Paddle 1.8.5 on a CPU: ``numbers_1_8.json``.

Ported by `fleet_train.port`, they have to give the same numbers on today's Paddle: `test_compat.py`.
"""

import numpy as np
import paddle

PREAMBLE = """
import numpy as np
import paddle.fluid as fluid
from paddle.fluid.layers import elementwise_add as plus
import paddle.fluid.layers as L
from paddle import fluid as also_fluid


def values(*shape):
    return np.sin(np.arange(np.prod(shape)) * 1.7 + 0.3).reshape(shape).astype("float32")


def fixed(*shape):
    return fluid.ParamAttr(initializer=fluid.initializer.NumpyArrayInitializer(values(*shape)))


def inputs():
    x = fluid.layers.data(name="x", shape=[4, 3], append_batch_size=False, dtype="float32")
    y = fluid.layers.data("y", [3])
    row = fluid.data("row", [3])
    column = fluid.data("column", [4])
    p = fluid.data(name="p", shape=[None, 3], dtype="float32")
    soft = fluid.data("soft", [None, 3], "float32")
    label = fluid.layers.data(name="label", shape=[1], dtype="int64")
    image = fluid.layers.data(name="image", shape=[3, 6, 6], dtype="float32")
    rows = fluid.layers.data(name="rows", shape=[64], dtype="float32")
    ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
    delta = fluid.layers.data(name="delta", shape=[4, 5, 5], dtype="float32")
    x.stop_gradient = False
    return x, y, row, column, p, soft, label, image, rows, ids, delta
"""

# Name of the row in the table (and a variant behind a blank) -> what is fetched.
FORWARD = {
    "data": "[x, y, image]",
    "fc": 'L.fc(input=x, size=5, param_attr=fixed(3, 5), bias_attr=fixed(5), act="tanh")',
    "fc positional": "L.fc(x, 5, 1, fixed(3, 5))",
    "fc of images": "L.fc(image, 5, num_flatten_dims=1, param_attr=fixed(108, 5))",
    "fc of two": "L.fc([x, y], 5, param_attr=[fixed(3, 5), fixed(3, 5)])",
    "fc of each": 'L.fc(image, 5, num_flatten_dims=3, act="softmax", param_attr=fixed(6, 5))',
    "conv2d last": 'L.conv2d(L.transpose(image, [0, 2, 3, 1]), 4, 3, param_attr=fixed(4, 3, 3, 3), data_format="NHWC")',
    "conv2d same": 'L.conv2d(image, 4, 3, stride=2, padding="SAME", param_attr=fixed(4, 3, 3, 3))',
    "pool2d last": 'L.pool2d(L.transpose(image, [0, 2, 3, 1]), 2, "avg", 2, data_format="NHWC")',
    "pool2d global last": 'L.pool2d(L.transpose(image, [0, 2, 3, 1]), pool_type="avg", global_pooling=True, data_format="NHWC")',
    "batch_norm last": 'L.batch_norm(L.transpose(image, [0, 2, 3, 1]), data_layout="NHWC", param_attr=fixed(3))',
    "batch_norm global": "L.batch_norm(image, use_global_stats=True, param_attr=fixed(3))",
    "cross_entropy each": "L.cross_entropy(L.softmax(L.reshape(image, [2, 18, 6])), L.cast(L.ones([2, 18, 1], 'float32'), 'int64'))",
    "elementwise_add ones": "L.elementwise_add(image, L.reshape(row, [3, 1]), axis=1)",
    "conv2d": 'L.conv2d(image, 4, 3, 2, 1, param_attr=fixed(4, 3, 3, 3), bias_attr=fixed(4), act="relu")',
    "conv2d groups": "L.conv2d(input=image, num_filters=6, filter_size=3, groups=3, param_attr=fixed(6, 1, 3, 3), bias_attr=False)",
    "conv2d dilated": "L.conv2d(image, 2, [3, 2], dilation=2, padding=[1, 0], param_attr=fixed(2, 3, 3, 2))",
    "conv2d_transpose": "L.conv2d_transpose(image, 4, filter_size=3, stride=2, padding=1, param_attr=fixed(3, 4, 3, 3))",
    "pool2d": "L.pool2d(image, 2)",
    "pool2d max": 'L.pool2d(image, pool_size=3, pool_type="max", pool_stride=2, pool_padding=1)',
    "pool2d avg": 'L.pool2d(image, 3, "avg", 2, 1)',
    "pool2d inclusive": 'L.pool2d(image, 3, "avg", 2, 1, exclusive=False)',
    "pool2d ceil": 'L.pool2d(image, 3, "max", 2, 0, ceil_mode=True)',
    "pool2d global": 'L.pool2d(image, pool_size=7, pool_type="avg", global_pooling=True)',
    "pool2d global max": 'L.pool2d(image, pool_type="max", global_pooling=True)',
    "batch_norm": 'L.batch_norm(image, act="relu", param_attr=fixed(3), bias_attr=fixed(3))',
    "batch_norm of rows": "L.batch_norm(x, momentum=0.5, epsilon=1e-3)",
    "batch_norm test": "L.batch_norm(image, is_test=True, param_attr=fixed(3))",
    "layer_norm": "L.layer_norm(image, begin_norm_axis=1, param_attr=fixed(108), bias_attr=fixed(108))",
    "layer_norm last": "L.layer_norm(image, begin_norm_axis=3, scale=False)",
    "group_norm": "L.group_norm(image, groups=3, param_attr=fixed(3), bias_attr=fixed(3))",
    "lrn": "L.lrn(image, n=3, k=2.0, alpha=0.1, beta=0.75)",
    "embedding": "L.embedding(label, size=[3, 4], param_attr=fixed(3, 4))",
    "embedding padding": "L.embedding(label, [3, 4], padding_idx=-2, param_attr=fixed(3, 4))",
    "embedding fluid": "fluid.embedding(label, size=[3, 4], param_attr=fixed(3, 4))",
    "one_hot": "L.one_hot(input=label, depth=5)",
    "one_hot fluid": "fluid.one_hot(label, 5)",
    "flatten": "L.flatten(image)",
    "flatten axis": "L.flatten(image, axis=2)",
    "mul": "L.mul(x, L.create_parameter([3, 2], 'float32', attr=fixed(3, 2)))",
    "mul dims": "L.mul(image, L.create_parameter([6, 2], 'float32', attr=fixed(6, 2)), x_num_col_dims=3)",
    "create_parameter": "L.create_parameter(shape=[3, 2], dtype='float32', attr=fixed(3, 2))",
    "softmax": "L.softmax(x)",
    "softmax cudnn": "L.softmax(input=x, use_cudnn=True)",
    "softmax axis": "L.softmax(x, axis=0)",
    "exp": "[L.exp(x), L.log(L.square(x)), L.abs(x), L.sqrt(L.abs(x)), L.rsqrt(L.square(x))]",
    "floor": "[L.floor(x), L.ceil(x), L.sin(x), L.cos(x), L.tanh(x=x), L.reciprocal(x), L.sign(x)]",
    "relu": "[L.relu(x), L.sigmoid(x=x), L.softplus(x), L.softsign(x), L.logsigmoid(x)]",
    "gelu": "[L.gelu(x), L.gelu(x, True)]",
    "relu6": "L.relu6(L.scale(x, 10.0))",
    "relu6 given": "L.relu6(L.scale(x, scale=10.0), threshold=6.0)",
    "leaky_relu": "L.leaky_relu(x)",
    "leaky_relu alpha": "L.leaky_relu(x, alpha=0.1)",
    "elu": "L.elu(x, alpha=0.5)",
    "swish": "L.swish(x)",
    "hard_sigmoid": "L.hard_sigmoid(L.scale(x, 4.0))",
    "hard_sigmoid given": "L.hard_sigmoid(L.scale(x, 4.0), slope=0.3, offset=0.4)",
    "hard_swish": "L.hard_swish(L.scale(x, 4.0))",
    "pow": "[L.pow(x), L.pow(x, 2.0), L.pow(x, factor=3.0)]",
    "scale": "[L.scale(x, scale=2.0, bias=1.0), L.scale(x, 2.0, 1.0, False), L.scale(x, 2.0, act='relu')]",
    "clip": "L.clip(x, min=-0.5, max=0.25)",
    "cast": "L.cast(x, 'int64')",
    "elementwise_add": "[L.elementwise_add(x, y), L.elementwise_add(x=x, y=row, act='relu'), plus(x, column, axis=0)]",
    "elementwise_sub": "[L.elementwise_sub(x, y), L.elementwise_sub(x, column, axis=0, act='tanh')]",
    "elementwise_mul": "[L.elementwise_mul(x, y), L.elementwise_mul(x, column, 0), L.elementwise_mul(image, row, axis=1)]",
    "elementwise_div": "[L.elementwise_div(x, y), L.elementwise_div(x, column, axis=0)]",
    "elementwise_max": "[L.elementwise_max(x, y), L.elementwise_min(x, y), L.elementwise_max(x, column, axis=0)]",
    "elementwise_min": "L.elementwise_min(x, column, axis=0)",
    "elementwise_pow": "L.elementwise_pow(L.abs(x), y)",
    "matmul": "L.matmul(x, y, transpose_y=True)",
    "matmul alpha": "L.matmul(x, y, transpose_x=True, alpha=1.0)",
    "sum": "[L.sum([x, y]), L.sums([x, y, x]), L.sums(input=[x, y])]",
    "mean": "[L.mean(x), L.mean(x=image)]",
    "reduce_mean": "[L.reduce_mean(x), L.reduce_mean(x, dim=0), L.reduce_mean(x, [1], True)]",
    "reduce_sum": "[L.reduce_sum(x), L.reduce_sum(input=x, dim=-1, keep_dim=True), L.reduce_sum(image, [2, 3])]",
    "reduce_max": "[L.reduce_max(x), L.reduce_min(x, 1), L.reduce_prod(x, dim=1), L.reduce_max(x, dim=[0])]",
    "reduce_min": "L.reduce_min(x, keep_dim=True)",
    "reduce_prod": "L.reduce_prod(x, 0)",
    "reduce_all": "[L.reduce_all(L.less_than(x, y)), L.reduce_any(L.less_than(x, y), dim=1)]",
    "less_than": "[L.less_than(x, y), L.equal(x, x), L.not_equal(x, y), L.less_equal(x, y), L.greater_than(x, y)]",
    "greater_equal": "L.greater_equal(x=x, y=y)",
    "logical_and": "L.logical_and(L.less_than(x, y), L.logical_not(L.equal(x, x)))",
    "logical_or": "L.logical_or(L.less_than(x, y), L.equal(x, x))",
    "transpose": "[L.transpose(image, perm=[0, 2, 3, 1]), L.transpose(x, [1, 0])]",
    "reshape": "[L.reshape(image, [-1, 108]), L.reshape(x=image, shape=[0, -1]), L.reshape(x, [-1], act='relu')]",
    "squeeze": "[L.squeeze(label, axes=[1]), L.squeeze(label, [-1]), L.squeeze(label, [])]",
    "unsqueeze": "[L.unsqueeze(x, axes=[1]), L.unsqueeze(input=x, axes=[0, 3])]",
    "concat": "[L.concat([x, y], axis=1), L.concat(input=[x, y]), L.concat([x, y], -1)]",
    "split": "L.split(x, 3)",
    "split dim": "L.split(x, num_or_sections=[1, 3], dim=0)",
    "stack": "[L.stack([x, L.exp(x)]), L.stack([x, L.exp(x)], axis=1)]",
    "unstack": "L.unstack(x, axis=1)",
    "expand": "L.expand(x, expand_times=[2, 3])",
    "gather": "L.gather(x, L.cast(L.reshape(label, [-1]), 'int32'))",
    "gather column": "L.gather(input=x, index=label)",
    "gather_nd": "L.gather_nd(x, label)",
    "slice": "L.slice(x, axes=[0, 1], starts=[1, 0], ends=[3, -1])",
    "shape": "L.shape(x)",
    "argmax": "[L.argmax(x), L.argmax(x, axis=1), L.argmin(x), L.argmin(x, 1)]",
    "argmin": "L.argmin(x, axis=-1)",
    "topk": "L.topk(x, k=2)",
    "fill_constant": "[L.fill_constant([2, 3], 'float32', 1.5), L.fill_constant(shape=[1], value=2, dtype='int64')]",
    "zeros": "[L.zeros([2], 'float32'), L.ones(shape=[2, 2], dtype='int64'), L.zeros_like(x), L.ones_like(x)]",
    "ones": "L.ones([3], 'float32', force_cpu=True)",
    "zeros_like": "L.zeros_like(x=x)",
    "ones_like": "L.ones_like(label)",
    "assign": "[L.assign(x), L.assign(input=values(2, 2))]",
    "range": "L.range(0, 10, 2, 'int64')",
    "linspace": "L.linspace(0.0, 1.0, 5, 'float32')",
    "cross_entropy": "[L.cross_entropy(p, label), L.cross_entropy(input=p, label=label), L.mean(L.cross_entropy(p, label))]",
    "cross_entropy soft": "L.cross_entropy(input=p, label=soft, soft_label=True)",
    "cross_entropy ignored": "[L.cross_entropy(p, label, ignore_index=1), L.mean(L.cross_entropy(p, label, False, 1))]",
    "softmax_with_cross_entropy": "L.softmax_with_cross_entropy(x, label)",
    "softmax_with_cross_entropy both": "L.softmax_with_cross_entropy(logits=x, label=label, return_softmax=True)",
    "softmax_with_cross_entropy soft": "L.softmax_with_cross_entropy(x, soft, soft_label=True)",
    "sigmoid_cross_entropy_with_logits": "L.sigmoid_cross_entropy_with_logits(x, soft)",
    "square_error_cost": "L.square_error_cost(input=x, label=y)",
    "mse_loss": "L.mse_loss(x, y)",
    "log_loss": "L.log_loss(L.clip(L.slice(p, [1], [0], [1]), 0.0, 1.0), L.cast(L.less_than(label, label), 'float32'))",
    "label_smooth": "[L.label_smooth(label=soft, epsilon=0.2, dtype='float32'), L.label_smooth(soft)]",
    "accuracy": "[L.accuracy(p, label), L.accuracy(input=p, label=label, k=2)]",
    "dropout test": "L.dropout(x, 0.5, is_test=True)",
    "dropout scaled": "L.dropout(x, dropout_prob=0.5, is_test=True, dropout_implementation='upscale_in_train')",
    "dropout zero": "L.dropout(x, 0.0)",
    "cond": "L.cond(L.less_than(L.reduce_sum(x), L.reduce_sum(y)), lambda: L.scale(x, 2.0), lambda: y)",
    "case": "L.case([(L.less_than(L.reduce_sum(x), L.reduce_sum(y)), lambda: L.scale(x, 2.0))], lambda: y)",
    "switch_case": "L.switch_case(L.fill_constant([1], 'int32', 1), {0: lambda: x, 1: lambda: y})",
    "while_loop": "L.while_loop(lambda v: L.less_than(v, L.fill_constant([1], 'float32', 9.0)), lambda v: [L.scale(v, 2.0)], [L.fill_constant([1], 'float32', 1.0)])",
    "cos_sim": "[L.cos_sim(x, y), L.cos_sim(X=x, Y=L.unsqueeze(row, [0]))]",
    "sequence_mask": "[L.sequence_mask(L.reshape(label, [-1]), 5), L.sequence_mask(label, dtype='float32')]",
    "sequence_mask value": "L.sequence_mask(L.reshape(label, [-1]), maxlen=L.fill_constant([1], 'int32', 4))",
    "array_write": "L.array_read(L.array_write(x, L.fill_constant([1], 'int64', 0)), L.fill_constant([1], 'int64', 0))",
    "array_length": "L.array_length(L.array_write(x, L.fill_constant([1], 'int64', 1), L.create_array('float32')))",
    "utils": "[L.utils.map_structure(L.exp, [x, [y]])[1][0], L.utils.flatten([x, [y]])[1]]",
    "group_norm without": "L.group_norm(image, groups=3)",
    "nets.simple_img_conv_pool": "fluid.nets.simple_img_conv_pool(image, 4, 3, 2, 2, act='relu', param_attr=fixed(4, 3, 3, 3))",
    "nets.img_conv_group": "fluid.nets.img_conv_group(image, [4, 4], 2, conv_act='relu', pool_stride=2, param_attr=fluid.ParamAttr(initializer=fluid.initializer.Constant(0.1)))",
    "nets.glu": "fluid.nets.glu(L.concat([x, y], axis=1), dim=1)",
}

# Trained for four steps; the loss of each is fetched. What minimizes is the last line of a snippet.
_NET = 'loss = L.mean(L.square_error_cost(L.fc(x, 3, param_attr=fixed(3, 3), act="tanh"), soft))\n'
TRAINED = {
    name: _NET + f"fluid.optimizer.{optimizer}.minimize(loss)"
    for name, optimizer in {
        "optimizer.SGD": "SGD(0.5)",
        "optimizer.SGD decay": "SGDOptimizer(learning_rate=0.5, regularization=fluid.regularizer.L2Decay(0.1))",
        "optimizer.SGD L1": "SGD(0.5, regularization=fluid.regularizer.L1DecayRegularizer(regularization_coeff=0.1))",
        "optimizer.Momentum": "Momentum(0.1, 0.9)",
        "optimizer.Momentum all": "MomentumOptimizer(learning_rate=0.1, momentum=0.9, use_nesterov=True, regularization=fluid.regularizer.L2DecayRegularizer(0.1), grad_clip=fluid.clip.GradientClipByGlobalNorm(clip_norm=0.1))",
        "optimizer.Adam": "Adam(0.1, 0.8, 0.99, 1e-8)",
        "optimizer.Adam defaults": "AdamOptimizer(learning_rate=0.1)",
        "optimizer.Adam decay": "Adam(0.1, regularization=fluid.regularizer.L2Decay(0.5))",
        "optimizer.RMSProp decay": "RMSPropOptimizer(0.01, regularization=fluid.regularizer.L2Decay(0.5))",
        "optimizer.Adamax": "Adamax(learning_rate=0.1)",
        "optimizer.Adagrad": "AdagradOptimizer(0.1, initial_accumulator_value=0.1)",
        "optimizer.RMSProp": "RMSProp(0.01, 0.9, 1e-3, 0.5, centered=True)",
        "optimizer.LarsMomentum": "LarsMomentum(0.5, 0.9, lars_coeff=0.1)",
        "clip.GradientClipByNorm": "SGD(0.5, grad_clip=fluid.clip.GradientClipByNorm(0.05))",
    }.items()
} | {
    "ParamAttr regularizer": (
        "attr = fixed(3, 3)\n"
        "attr.regularizer = fluid.regularizer.L2Decay(0.5)\n"
        "loss = L.mean(L.square_error_cost(L.fc(x, 3, param_attr=attr), soft))\n"
        "fluid.optimizer.SGD(0.1, regularization=fluid.regularizer.L2Decay(0.1)).minimize(loss)"
    ),
    "ParamAttr": (
        "attr = fixed(3, 3)\n"
        "attr.learning_rate = 0.5\n"
        "loss = L.mean(L.square_error_cost(L.fc(x, 3, param_attr=attr, bias_attr=fluid.ParamAttr(name='b', trainable=False, initializer=fluid.initializer.Constant(0.5))), soft))\n"
        "fluid.optimizer.SGD(0.5).minimize(loss, parameter_list=None)"
    ),
    "cross_entropy gradient": (
        "loss = L.mean(L.cross_entropy(L.fc(x, 3, param_attr=fixed(3, 3), act='softmax'), label))\n"
        "fluid.optimizer.SGD(0.5).minimize(loss)"
    ),
    "batch_norm statistics": (
        "h = L.batch_norm(x, momentum=0.5)\n"
        "loss = L.mean(L.fc(h, 1, param_attr=fixed(3, 1)))\n"
        "fluid.optimizer.SGD(0.5).minimize(loss)"
    ),
    "softmax_with_cross_entropy gradient": (
        "loss = L.mean(L.softmax_with_cross_entropy(L.fc(x, 3, param_attr=fixed(3, 3)), label))\n"
        "fluid.optimizer.SGD(0.5).minimize(loss)"
    ),
}

# The names of the parameters are compared.
NAMED = {
    "names fc": "[L.fc(x, 3), L.fc(x, 3, name='head'), L.fc(x, 3, name='head'), L.fc([x, y], 3, name=None)]",
    "names fc given": "[L.fc([x, y], 3, param_attr=['a', fluid.ParamAttr(name='b')]), L.fc([x, y], 3, param_attr='c')]",
    "names fc one": "[L.fc(x, 3, param_attr=['one'], bias_attr='two'), L.fc(x, 3, param_attr=True, bias_attr=True)]",
    "names fc kinds": "L.fc(x, 3, param_attr=fluid.regularizer.L2Decay(0.1), bias_attr=fluid.initializer.Constant(0.5))",
    "names embedding": "[L.embedding(label, [3, 4]), L.embedding(label, [3, 4], param_attr='table'), fluid.embedding(label, [3, 4])]",
    "names embedding kinds": "[L.embedding(label, [3, 4], param_attr=fluid.initializer.Constant(0.5)), L.embedding(label, [3, 4], param_attr=fluid.regularizer.L2Decay(0.1))]",
    "names group_norm": "[L.group_norm(image, 3), L.group_norm(image, 3, param_attr=True, bias_attr='b'), L.group_norm(image, 3, 1e-5, True, True, name='g')]",
    "names create_parameter": "[L.create_parameter([3], 'float32'), L.create_parameter([3], 'float32', name='n'), L.create_parameter([3], 'float32', 'n', fluid.ParamAttr()), L.create_parameter([3], 'float32', is_bias=True)]",
    "names conv2d": "[L.conv2d(image, 3, 3), L.conv2d(image, 3, 3, groups=3, use_cudnn=False), L.conv2d(image, 3, 3, name='c', param_attr=fluid.initializer.Constant(0.5), bias_attr=False)]",
    "names conv2d_transpose": "[L.conv2d_transpose(image, 3, filter_size=3), L.conv2d_transpose(image, 3, filter_size=3, name='c', bias_attr='d')]",
    "names batch_norm": "[L.batch_norm(image), L.batch_norm(image, name='b', moving_mean_name='m', moving_variance_name='v'), L.batch_norm(image, param_attr='s', bias_attr=fluid.initializer.Constant(0.5))]",
    "names layer_norm": "[L.layer_norm(x), L.layer_norm(x, name='l', param_attr='q'), L.layer_norm(x, scale=False, shift=False)]",
    "names nets": "[fluid.nets.img_conv_group(image, [3, 3], 2, conv_with_batchnorm=True), fluid.nets.simple_img_conv_pool(image, 3, 3, 2, 2)]",
}

# Start values: (standard deviation, largest) of what is fetched are compared.
RANDOM = {
    "fc start": "L.fc(rows, 64, bias_attr=False)",
    "conv2d start": "L.conv2d(delta, 64, 3, padding=1)",
    "conv2d groups start": "L.conv2d(delta, 64, 3, padding=1, groups=2)",
    "conv2d_transpose start": "L.conv2d_transpose(delta, 64, filter_size=3, padding=1)",
    "embedding start": "L.embedding(ids, [64, 64])",
    "initializer.Uniform": "L.create_parameter([64, 64], 'float32', default_initializer=fluid.initializer.Uniform())",
    "initializer.Uniform given": "L.create_parameter([64, 64], 'float32', default_initializer=fluid.initializer.UniformInitializer(-0.5, 0.5))",
    "initializer.Normal": "L.create_parameter([64, 64], 'float32', default_initializer=fluid.initializer.Normal(loc=1.0, scale=0.5))",
    "initializer.TruncatedNormal": "L.create_parameter([64, 64], 'float32', default_initializer=fluid.initializer.TruncatedNormal(scale=0.5))",
    "initializer.TruncatedNormal moved": "L.create_parameter([64, 64], 'float32', default_initializer=fluid.initializer.TruncatedNormalInitializer(3.0, 2.0))",
    "initializer.Xavier": "L.create_parameter([64, 32], 'float32', default_initializer=fluid.initializer.Xavier())",
    "initializer.Xavier normal": "L.create_parameter([64, 32], 'float32', default_initializer=fluid.initializer.XavierInitializer(uniform=False))",
    "initializer.Xavier fan": "L.create_parameter([64, 32], 'float32', default_initializer=fluid.initializer.Xavier(fan_in=8, fan_out=4))",
    "initializer.MSRA": "L.create_parameter([64, 32], 'float32', default_initializer=fluid.initializer.MSRA())",
    "initializer.MSRA normal": "L.create_parameter([64, 32], 'float32', default_initializer=fluid.initializer.MSRAInitializer(uniform=False, fan_in=16))",
    "initializer.Constant": "L.create_parameter([64, 32], 'float32', default_initializer=fluid.initializer.ConstantInitializer(0.25))",
    "dropout": "L.dropout(rows, 0.25)",
    "dropout upscale": 'L.dropout(rows, dropout_prob=0.25, dropout_implementation="upscale_in_train")',
}


def feed():
    """One batch for every input."""
    x = np.cos(np.arange(12) * 0.9).reshape(4, 3).astype("float32")
    y = np.sin(np.arange(12) * 0.7 + 0.1).reshape(4, 3).astype("float32")
    exponentials = np.exp(x)
    soft = np.exp(y) / np.exp(y).sum(axis=1, keepdims=True)
    delta = np.zeros((4, 4, 5, 5), "float32")
    for channel in range(4):
        delta[channel, channel, 2, 2] = 1.0
    return {
        "x": x,
        "y": y,
        "row": np.array([0.5, -1.0, 2.0], "float32"),
        "column": np.array([0.5, -1.0, 2.0, 3.0], "float32"),
        "p": exponentials / exponentials.sum(axis=1, keepdims=True),
        "soft": soft.astype("float32"),
        "label": np.array([[0], [2], [1], [1]], "int64"),
        "image": np.sin(np.arange(216) * 0.37).reshape(2, 3, 6, 6).astype("float32"),
        "rows": np.eye(64, dtype="float32"),
        "ids": np.arange(64, dtype="int64").reshape(64, 1),
        "delta": delta,
    }


def cases():
    """Each case with its number of steps."""
    return [(name, 4 if name in TRAINED else 1) for name in [*FORWARD, *RANDOM, *NAMED, *TRAINED]]


def module():
    """The text of a script for Paddle 1.8 with a function for the inputs and one for each case."""
    bodies = [["return " + expression] for expression in [*FORWARD.values(), *RANDOM.values(), *NAMED.values()]]
    bodies += [statements.split("\n") + ["return loss"] for statements in TRAINED.values()]
    text = PREAMBLE
    for number, body in enumerate(bodies):
        text += "\n\ndef case_%d(INPUTS):\n    " % number + "\n    ".join(body) + "\n"
    return text.replace("INPUTS", "x, y, row, column, p, soft, label, image, rows, ids, delta")


def run_all(text):
    """Figures of each case of a script; the error's text where one failed."""
    names, found = {}, {}
    exec(text, names)
    for number, (name, steps) in enumerate(cases()):
        with paddle.utils.unique_name.guard():
            try:
                case = names["case_%d" % number]
                found[name] = summary(name, run(name, names["inputs"], case, steps))
            except Exception as error:
                found[name] = type(error).__name__ + ": " + str(error)
    return found


def run(name, inputs, case, steps):
    """Fetched arrays of every step, or names of parameters."""
    static = paddle.static
    main, startup = static.Program(), static.Program()
    main.random_seed = startup.random_seed = 7
    with static.program_guard(main, startup):
        out = case(*inputs())
        out = list(out) if isinstance(out, (list, tuple)) else [out]
    if name in NAMED:
        return sorted({one.name for one in main.global_block().all_parameters()})
    with static.scope_guard(static.Scope()):
        exe = static.Executor(paddle.CPUPlace())
        exe.run(startup)
        return [one for _ in range(steps) for one in exe.run(main, feed=feed(), fetch_list=out)]


def summary(name, arrays):
    """What is compared: all values, two figures of random ones, or names."""
    if name in NAMED:
        return arrays
    if name in RANDOM:
        parts = [np.asarray(one) for one in arrays]
        parts = [one[one != 0] if one.size > one.shape[-1] * 64 or "start" in name else one for one in parts]
        return [[float(one.std()), float(np.abs(one).max())] for one in parts]
    return [[list(np.shape(one)), np.asarray(one, "float64").reshape(-1).round(7).tolist()] for one in arrays]
