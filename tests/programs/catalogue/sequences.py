"""Recurrent networks and transformers."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import Adam, AdamW, Momentum

from tests.programs.catalogue.entry import program
from tests.programs.feeds import classes, floats, tokens
from tests.programs.script import Script


@program("A two-layer LSTM over embedded words.", simulated=True)
def lstm(script: Script) -> None:
    words, label = script.inputs(words=tokens(20, 5), label=classes(4))
    states, _ = nn.LSTM(6, 8, num_layers=2)(nn.Embedding(20, 6)(words))
    loss = F.cross_entropy(nn.Linear(8, 4)(states[:, -1]), label)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("A GRU in both directions, with a clip.")
def bidirectional_gru(script: Script) -> None:
    series, value = script.inputs(series=floats(6, 3), value=floats(1))
    states, _ = nn.GRU(3, 5, direction="bidirect")(series)
    loss = F.mse_loss(nn.Linear(10, 1)(states.mean(axis=1)), value)
    script.minimize(Adam(0.01, epsilon=1e-3, grad_clip=nn.ClipGradByGlobalNorm(0.5)), loss)
    script.train(loss)


@program("A plain recurrent network.")
def simple_rnn(script: Script) -> None:
    series, value = script.inputs(series=floats(6, 3), value=floats(1))
    states, _ = nn.SimpleRNN(3, 5)(series)
    loss = F.smooth_l1_loss(nn.Linear(5, 1)(states[:, -1]), value)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("nn.RNN drives an LSTM cell.")
def rnn_of_a_cell(script: Script) -> None:
    series, value = script.inputs(series=floats(4, 3), value=floats(1))
    states, _ = nn.RNN(nn.LSTMCell(3, 5))(series)
    loss = F.mse_loss(nn.Linear(5, 1)(states[:, -1]), value)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("A transformer encoder over embedded words, AdamW, warm-up.", noise=r"linear_1\.b_0")
def transformer(script: Script) -> None:
    words, label = script.inputs(words=tokens(20, 6), label=classes(4))
    positions = paddle.static.create_parameter([1, 6, 8], "float32", name="positions")
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu")
    hidden = nn.TransformerEncoder(layer, 1)(nn.Embedding(20, 8)(words) + positions)
    loss = F.cross_entropy(nn.Linear(8, 4)(hidden.mean(axis=1)), label)
    schedule = paddle.optimizer.lr.LinearWarmup(0.01, 3, 0.001, 0.01)
    script.minimize(AdamW(schedule, epsilon=1e-3, weight_decay=0.01), loss)
    script.train(loss, scheduler=schedule)


@program("A transformer encoder with dropout in every layer.", random=True, simulated=True, noise=r"linear_1\.b_0")
def transformer_with_dropout(script: Script) -> None:
    words, label = script.inputs(words=tokens(20, 6), label=classes(4))
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
    hidden = nn.TransformerEncoder(layer, 1)(nn.Embedding(20, 8)(words))
    loss = F.cross_entropy(nn.Linear(8, 4)(hidden.mean(axis=1)), label)
    script.minimize(Momentum(0.05, 0.9), loss)
    script.train(loss)


@program(
    "Encoder and decoder with cross attention and a causal mask.",
    noise=r"linear_(1|7|11)\.b_0",
    only=("multi_node", "merge"),
    reason="it is large",
)
def translation(script: Script) -> None:
    source, target, label = script.inputs(source=tokens(20, 5), target=tokens(20, 4), label=tokens(20, 4))
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
    vectors = nn.Embedding(20, 8)
    mask = paddle.tensor.triu(paddle.full([4, 4], -1e9), 1)
    hidden = model(vectors(source), vectors(target), tgt_mask=mask)
    loss = F.cross_entropy(nn.Linear(8, 20)(hidden), label.unsqueeze(2))
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("A linear-chain tagger trained with CTC.")
def ctc(script: Script) -> None:
    series, labels = script.inputs(series=floats(6, 4), labels=tokens(4, 2))
    scores = nn.Linear(4, 5)(F.tanh(nn.Linear(4, 4)(series))).transpose([1, 0, 2])
    lengths = paddle.full_like(labels[:, 0], 6)
    losses = F.ctc_loss(scores, (labels + 1).cast("int32"), lengths, paddle.full_like(lengths, 2), reduction="none")
    loss = losses.mean()
    script.minimize(Momentum(0.01, 0.9), loss)
    script.train(loss)
