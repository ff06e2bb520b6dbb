"""Blocks that take a vector, and those that lead from one to sequences and images."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.regularizer import L1Decay, L2Decay

from tests.programs.random_programs.blocks import IMAGE, SEQUENCE, VECTOR, Builder, block, width


@block(VECTOR)
def tanh_layer(g: Builder, h: Any) -> Any:
    return paddle.tanh(g.linear(width(h), g.pick(4, 6, 9))(h))


@block(VECTOR)
def relu_layers(g: Builder, h: Any) -> Any:
    wide = g.pick(8, 16)
    return nn.Sequential(g.linear(width(h), wide), nn.ReLU(), g.linear(wide, width(h)))(h)


@block(VECTOR)
def smooth_activations(g: Builder, h: Any) -> Any:
    for activation in (F.gelu, F.silu, F.softplus, F.mish, F.elu):
        if g.random.random() < 0.4:
            h = activation(h)
    return g.linear(width(h), 6)(h)


@block(VECTOR)
def without_bias(g: Builder, h: Any) -> Any:
    return F.leaky_relu(g.linear(width(h), 8, bias_attr=False)(h), 0.1)


@block(VECTOR)
def gate(g: Builder, h: Any) -> Any:
    n = width(h)
    return F.sigmoid(g.linear(n, n)(h)) * g.linear(n, n)(h)


@block(VECTOR)
def gated_unit(g: Builder, h: Any) -> Any:
    return F.glu(g.linear(width(h), 2 * width(h))(h), axis=-1)


@block(VECTOR)
def highway(g: Builder, h: Any) -> Any:
    n = width(h)
    open_part = F.sigmoid(g.linear(n, n)(h))
    return open_part * paddle.tanh(g.linear(n, n)(h)) + (1 - open_part) * h


@block(VECTOR)
def product_and_square(g: Builder, h: Any) -> Any:
    one, other = g.linear(width(h), 5)(h), g.linear(width(h), 5)(h)
    return paddle.concat([one * other, one**2, (one - other).abs()], axis=1)


@block(VECTOR)
def residual(g: Builder, h: Any) -> Any:
    return h + paddle.tanh(g.linear(width(h), width(h))(h))


@block(VECTOR)
def dense_connection(g: Builder, h: Any) -> Any:
    return paddle.concat([h, paddle.tanh(g.linear(width(h), 4)(h))], axis=1)


@block(VECTOR)
def layer_norm(g: Builder, h: Any) -> Any:
    return nn.LayerNorm(width(h))(g.linear(width(h), width(h))(h))


@block(VECTOR)
def root_mean_square_norm(g: Builder, h: Any) -> Any:
    return h * paddle.rsqrt((h * h).mean(axis=-1, keepdim=True) + 1e-3) * g.parameter([width(h)], 1.0)


@block(VECTOR)
def unit_length(g: Builder, h: Any) -> Any:
    return 2 * F.normalize(g.linear(width(h), 6)(h) + 0.1, axis=1)


@block(VECTOR, "sync")
def batch_norm_of_features(g: Builder, h: Any) -> Any:
    return nn.BatchNorm1D(width(h), momentum=g.pick(0.5, 0.9))(h)


@block(VECTOR)
def dropout_that_is_off(g: Builder, h: Any) -> Any:
    layer = nn.Dropout(0.5)
    layer.eval()
    return layer(F.dropout(h, 0.0)) + g.parameter([width(h)], 0.1)


@block(VECTOR)
def one_layer_twice(g: Builder, h: Any) -> Any:
    layer = g.linear(width(h), width(h))
    return paddle.tanh(layer(paddle.tanh(layer(h))))


@block(VECTOR)
def siamese_towers(g: Builder, h: Any) -> Any:
    tower = nn.Sequential(g.linear(width(h), 6), nn.Tanh(), g.linear(6, 5))
    one, other = tower(h), tower(g.floats(width(h)))
    return paddle.concat([one * other, paddle.abs(one - other)], axis=1)


@block(VECTOR, "named")
def one_name_twice(g: Builder, h: Any) -> Any:
    attr = paddle.ParamAttr(name=g.name("shared"), learning_rate=g.pick(1.0, 0.5))
    one, other = (g.linear(width(h), width(h), weight_attr=attr) for _ in range(2))
    return paddle.tanh(other(paddle.tanh(one(h))))


@block(VECTOR)
def transposed_weight(g: Builder, h: Any) -> Any:
    layer = g.linear(width(h), 7)
    return paddle.matmul(paddle.tanh(layer(h)), layer.weight, transpose_y=True)


@block(VECTOR)
def weight_of_own_norm(g: Builder, h: Any) -> Any:
    direction, size = g.parameter([width(h), 6]), g.parameter([6], 1.0)
    return paddle.matmul(h, direction * (size / direction.square().sum(axis=0).sqrt()))


@block(VECTOR)
def low_rank_weight(g: Builder, h: Any) -> Any:
    weight = paddle.matmul(g.parameter([width(h), 2]), g.parameter([2, 6]))
    return h.matmul(weight) + g.parameter([], 0.1)


@block(VECTOR)
def parts(g: Builder, h: Any) -> Any:
    h = g.linear(width(h), 6)(h)
    first, second, third = paddle.split(h, [1, 2, -1], axis=1)
    return paddle.concat([third, paddle.tanh(second), first * g.parameter([1], 0.7)], axis=1)


@block(VECTOR)
def halves(g: Builder, h: Any) -> Any:
    one, other = paddle.chunk(g.linear(width(h), 8)(h), 2, axis=1)
    return one * F.softmax(other, axis=1)


@block(VECTOR)
def stacked(g: Builder, h: Any) -> Any:
    rows = paddle.unstack(paddle.stack([g.linear(width(h), 5)(h) for _ in range(3)], axis=1), axis=1)
    return rows[0] * rows[1] - rows[2]


@block(VECTOR)
def detached(g: Builder, h: Any) -> Any:
    """The value itself is not used beside its detached copy, whose memory Paddle may reuse."""
    return paddle.tanh(g.linear(width(h), 6)((h + 0.5).detach())) + g.linear(width(h), 6)(h)


@block(VECTOR)
def detached_twice(g: Builder, h: Any) -> Any:
    h = paddle.tanh(g.linear(width(h), width(h))(h))
    return g.detach(h) + g.linear(width(h), width(h))(g.detach(h))


@block(VECTOR)
def another_shape_of_itself(g: Builder, h: Any) -> Any:
    h = g.linear(width(h), 6)(h)
    other = h.reshape([-1, 2, 3])
    return h + paddle.tanh(other).flatten(1) + other.unsqueeze(1).squeeze(1).transpose([0, 2, 1]).reshape([-1, 6])


@block(VECTOR)
def assigned(g: Builder, h: Any) -> Any:
    copy = paddle.assign(h)
    return paddle.tanh(g.linear(width(h), width(h))(copy)) + copy


@block(VECTOR)
def chosen_features(g: Builder, h: Any) -> Any:
    order = paddle.to_tensor(g.random.permutation(width(h)).astype("int64"))
    return paddle.index_select(h, order, axis=1) * g.parameter([width(h)], 0.9)


@block(VECTOR)
def largest_features(g: Builder, h: Any) -> Any:
    values, _ = paddle.topk(g.linear(width(h), 8)(h), 5, axis=1)
    return values


@block(VECTOR)
def condition(g: Builder, h: Any) -> Any:
    """A layer before, after and inside the branches; which one runs follows from a parameter, equal on all ranks."""
    layer, sign = g.linear(width(h), width(h)), g.parameter([1], g.pick(0.3, -0.3), learning_rate=0.0)
    h = layer(h)
    return paddle.static.nn.cond(sign.sum() > 0, lambda: paddle.tanh(layer(h)), lambda: F.sigmoid(h) * 0.5)


@block(VECTOR)
def loop(g: Builder, h: Any) -> Any:
    """Begins with a product: plain Paddle 3.3.1 finds no memory where a loop begins with what tanh has made."""
    layer, start = g.linear(width(h), width(h)), paddle.full([1], 0, "int64")
    times = g.pick(1, 2, 3)
    _, found = paddle.static.nn.while_loop(
        lambda index, _: (index < times).all(),
        lambda index, value: [index + 1, paddle.tanh(layer(value))],
        [start, h * 0.9],
    )
    return found


@block(VECTOR)
def maxout(g: Builder, h: Any) -> Any:
    return g.linear(width(h), 12)(h).reshape([-1, 6, 2]).max(axis=2)


@block(VECTOR)
def experts(g: Builder, h: Any) -> Any:
    weights = F.softmax(g.linear(width(h), 3)(h), axis=1)
    found = paddle.stack([paddle.tanh(g.linear(width(h), 6)(h)) for _ in range(3)], axis=1)
    return (weights.unsqueeze(2) * found).sum(axis=1)


@block(VECTOR)
def cross_layer(g: Builder, h: Any) -> Any:
    start = h
    for _ in range(g.pick(1, 2)):
        h = start * paddle.matmul(h, g.parameter([width(h), 1])) + h
    return paddle.tanh(h)


@block(VECTOR)
def learned_slope(g: Builder, h: Any) -> Any:
    return nn.PReLU(num_parameters=1)(g.linear(width(h), 6)(h))


@block(VECTOR)
def clipped(g: Builder, h: Any) -> Any:
    h = g.linear(width(h), 6)(h)
    return paddle.where(h > 0.1, paddle.clip(h, -0.8, 0.8), 0.3 * h)


@block(VECTOR)
def log_of_sums(g: Builder, h: Any) -> Any:
    h = g.linear(width(h), 6)(h)
    return paddle.concat([h, paddle.logsumexp(h, axis=1, keepdim=True)], axis=1)


@block(VECTOR)
def bilinear(g: Builder, h: Any) -> Any:
    return nn.Bilinear(width(h), 4, 5, bias_attr=g.bias)(h, g.floats(4))


@block(VECTOR)
def another_rate(g: Builder, h: Any) -> Any:
    attr = paddle.ParamAttr(learning_rate=g.pick(0.1, 0.5, 2.0))
    return paddle.tanh(g.linear(width(h), 6, weight_attr=attr)(h))


@block(VECTOR)
def own_decay(g: Builder, h: Any) -> Any:
    attr = paddle.ParamAttr(regularizer=g.pick(L2Decay(0.1), L1Decay(0.01)))
    return paddle.tanh(g.linear(width(h), 6, weight_attr=attr)(h))


@block(VECTOR)
def not_clipped(g: Builder, h: Any) -> Any:
    return paddle.tanh(g.linear(width(h), 6, weight_attr=paddle.ParamAttr(need_clip=False))(h))


@block(VECTOR)
def frozen(g: Builder, h: Any) -> Any:
    return paddle.tanh(g.linear(width(h), 7, weight_attr=paddle.ParamAttr(trainable=False))(h))


@block(VECTOR)
def unused(g: Builder, h: Any) -> Any:
    g.linear(width(h), 3)(h)
    g.parameter([4, 4])
    return h * g.parameter([1, width(h)], 1.1)


@block(VECTOR)
def scalars(g: Builder, h: Any) -> Any:
    return paddle.tanh(h * g.parameter([], 0.8) + g.parameter([1], 0.1) * g.parameter([1, 1], 0.5))


@block(VECTOR)
def sum_of_products(g: Builder, h: Any) -> Any:
    return paddle.einsum("bi,ijk,bj->bk", h, g.parameter([width(h), width(h), 5]), paddle.tanh(h))


@block(VECTOR)
def running_sum(g: Builder, h: Any) -> Any:
    return paddle.cumsum(g.linear(width(h), 6)(h), axis=1) * 0.5


@block(VECTOR)
def gram(g: Builder, h: Any) -> Any:
    h = g.linear(width(h), 3)(h)
    return paddle.matmul(h.unsqueeze(2), h.unsqueeze(1)).flatten(1)


@block(VECTOR)
def moved_features(g: Builder, h: Any) -> Any:
    return paddle.roll(paddle.flip(h, axis=[1]), 1, axis=1) + g.parameter([width(h)], 0.0)


@block(VECTOR)
def padded(g: Builder, h: Any) -> Any:
    return F.pad(h.unsqueeze(1), [1, 2], value=0.5, data_format="NCL").squeeze(1) * g.parameter([width(h) + 3], 1.0)


@block(VECTOR)
def repeated(g: Builder, h: Any) -> Any:
    h = g.linear(width(h), 2)(h)
    return paddle.tile(h, [1, 3]) * paddle.repeat_interleave(h, 3, axis=1)


@block(VECTOR)
def part_that_is_set(g: Builder, h: Any) -> Any:
    h = g.linear(width(h), 6)(h)
    return paddle.static.setitem(h, (slice(None), slice(0, 2)), h[:, 2:4] * 0.5)


@block(VECTOR)
def wide_table(g: Builder, h: Any) -> Any:
    table = nn.Embedding(50, 4, sparse=g.pick(True, False))
    return paddle.concat([h, table(g.tokens(50, 3)).sum(axis=1)], axis=1)


@block(VECTOR)
def factorisation_machine(g: Builder, h: Any) -> Any:
    ids = g.tokens(40, 4)
    found = nn.Embedding(40, 3, sparse=True)(ids)
    pairs = found.sum(axis=1) ** 2 - (found**2).sum(axis=1)
    return paddle.concat([h, pairs, nn.Embedding(40, 1, sparse=True)(ids).sum(axis=1)], axis=1)


@block(VECTOR)
def table_of_two_inputs(g: Builder, h: Any) -> Any:
    table = nn.Embedding(30, 4, sparse=g.pick(True, False))
    return paddle.concat([h, table(g.tokens(30, 2)).mean(axis=1) * table(g.tokens(30, 3)).mean(axis=1)], axis=1)


@block(VECTOR)
def words(g: Builder, h: Any) -> Any:
    """A sequence of tokens, beside what was there."""
    length, wide = g.pick(3, 5), 4
    table = nn.Embedding(20, wide, padding_idx=g.pick(None, 0), sparse=g.pick(True, False))
    return table(g.tokens(20, length)) + g.linear(width(h), wide)(h).unsqueeze(1)


@block(VECTOR)
def to_steps(g: Builder, h: Any) -> Any:
    return g.linear(width(h), 12)(h).reshape([-1, 4, 3])


@block(VECTOR)
def picture(g: Builder, h: Any) -> Any:
    image = g.floats(2, 6, 6)
    return image + g.linear(width(h), 2)(h).reshape([-1, 2, 1, 1])


LEADS_TO = {"words": SEQUENCE, "to_steps": SEQUENCE, "picture": IMAGE}
