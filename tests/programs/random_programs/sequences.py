"""Blocks that take a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from tests.programs.random_programs.blocks import SEQUENCE, VECTOR, Builder, block, width


@block(SEQUENCE)
def gru(g: Builder, h: Any) -> Any:
    return nn.GRU(width(h), g.pick(4, 5))(h)[0]


@block(SEQUENCE)
def lstm(g: Builder, h: Any) -> Any:
    return nn.LSTM(width(h), 4, direction=g.pick("forward", "bidirect"))(h)[0]


@block(SEQUENCE)
def simple_recurrence(g: Builder, h: Any) -> Any:
    return nn.SimpleRNN(width(h), 5, num_layers=g.pick(1, 2))(h)[0]


@block(SEQUENCE)
def cell_by_hand(g: Builder, h: Any) -> Any:
    cell, state = nn.GRUCell(width(h), g.pick(3, 4)), None
    found = []
    for step in range(int(h.shape[1])):
        out, state = cell(h[:, step], state) if state is not None else cell(h[:, step])
        found.append(out)
    return paddle.stack(found, axis=1)


@block(SEQUENCE)
def attention(g: Builder, h: Any) -> Any:
    n = width(h)
    query, key, value = (g.linear(n, n, bias_attr=False)(h) for _ in range(3))
    return h + paddle.matmul(F.softmax(paddle.matmul(query, key, transpose_y=True) / np.sqrt(n)), value)


@block(SEQUENCE)
def causal_attention(g: Builder, h: Any) -> Any:
    n, steps = width(h), int(h.shape[1])
    query, key, value = paddle.split(g.linear(n, 3 * n, bias_attr=False)(h), 3, axis=-1)
    mask = paddle.to_tensor(np.triu(np.full((steps, steps), -1e4, g.dtype), 1))
    return paddle.matmul(F.softmax(paddle.matmul(query, key, transpose_y=True) + mask), value)


@block(SEQUENCE)
def many_heads(g: Builder, h: Any) -> Any:
    wide = nn.Sequential(g.linear(width(h), 4))(h)
    return nn.MultiHeadAttention(4, 2, dropout=0.0, bias_attr=g.bias)(wide, wide, wide)


@block(SEQUENCE)
def transformer_layer(g: Builder, h: Any) -> Any:
    wide = g.linear(width(h), 4)(h)
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, bias_attr=g.bias, normalize_before=g.pick(True, False))(
        wide
    )


@block(SEQUENCE)
def convolution_over_steps(g: Builder, h: Any) -> Any:
    layer = nn.Conv1D(width(h), 5, 3, padding=1, bias_attr=g.bias)
    return paddle.tanh(layer(h.transpose([0, 2, 1]))).transpose([0, 2, 1])


@block(SEQUENCE)
def positions(g: Builder, h: Any) -> Any:
    return h + g.parameter([1, int(h.shape[1]), width(h)])


@block(SEQUENCE)
def tokens_mixed(g: Builder, h: Any) -> Any:
    steps = int(h.shape[1])
    return h + g.linear(steps, steps)(h.transpose([0, 2, 1])).transpose([0, 2, 1])


@block(SEQUENCE)
def norm_of_steps(g: Builder, h: Any) -> Any:
    return nn.LayerNorm(width(h), epsilon=g.pick(1e-5, 1e-3))(h)


@block(SEQUENCE)
def reversed_steps(g: Builder, h: Any) -> Any:
    return paddle.concat([h, paddle.flip(h, axis=[1])], axis=2) * g.parameter([2 * width(h)], 0.8)


@block(SEQUENCE)
def mean_of_steps(g: Builder, h: Any) -> Any:
    return g.linear(width(h), 6)(h).mean(axis=1)


@block(SEQUENCE)
def largest_of_steps(g: Builder, h: Any) -> Any:
    return g.linear(width(h), 6)(h).max(axis=1)


@block(SEQUENCE)
def last_step(g: Builder, h: Any) -> Any:
    return g.linear(width(h), 6)(h[:, -1])


@block(SEQUENCE)
def pooled_by_attention(g: Builder, h: Any) -> Any:
    weights = F.softmax(g.linear(width(h), 1, bias_attr=False)(h), axis=1)
    return (weights * h).sum(axis=1)


@block(SEQUENCE)
def all_steps_in_a_row(g: Builder, h: Any) -> Any:
    return paddle.tanh(g.linear(int(h.shape[1]) * width(h), 6)(h.flatten(1)))


LEADS_TO = dict.fromkeys(
    ("mean_of_steps", "largest_of_steps", "last_step", "pooled_by_attention", "all_steps_in_a_row"), VECTOR
)
