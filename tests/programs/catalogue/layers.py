"""Layers, networks and sequences."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, AdamW, Momentum

from tests.programs.catalogue import classes, floats, network, program, tokens
from tests.programs.script import Script

_BATCH_NORM = ("sync batch norm", "sync batch norm, recompute", "sync batch norm, amp")
_OWN_STATISTICS = "without sync_batch_norm, each rank normalises by its own share of the batch, as Fleet does"


@network(
    "Convolutions, pooling and a linear layer, with Momentum.", simulated=True, image=floats(1, 8, 8), label=classes(5)
)
def convolutions(image, label):
    hidden = F.max_pool2d(F.relu(nn.Conv2D(1, 4, 3, padding=1)(image)), 2)
    hidden = F.avg_pool2d(F.relu(nn.Conv2D(4, 6, 3, stride=1)(hidden)), 2)
    return F.cross_entropy(nn.Linear(6, 5)(hidden.flatten(1)), label), Momentum(0.05, 0.9)


@program("Convolutions that oneDNN computes by paddle.set_flags, which several ranks switch off.", simulated=True)
def onednn(script: Script) -> None:
    paddle.set_flags({"FLAGS_use_mkldnn": True})
    try:
        image, label = script.inputs(image=floats(3, 6, 6), label=classes(5))
        hidden = F.tanh(nn.Conv2D(16, 16, 3, padding=1)(F.tanh(nn.Conv2D(3, 16, 3)(image))))
        loss = F.cross_entropy(nn.Linear(16, 5)(hidden.mean(axis=[2, 3])), label)
        script.minimize(Momentum(0.05, 0.9), loss)
        script.train(loss)
    finally:
        paddle.set_flags({"FLAGS_use_mkldnn": False})


@network(
    "Batch norm, synchronised: parameters and running statistics.",
    only=_BATCH_NORM,
    reason=_OWN_STATISTICS,
    image=floats(2, 5, 5),
    label=classes(5),
)
def batch_norm(image, label):
    hidden = F.relu(nn.BatchNorm2D(4)(nn.Conv2D(2, 4, 3, bias_attr=False)(image)))
    return F.cross_entropy(nn.Linear(4, 5)(hidden.mean(axis=[2, 3])), label), Momentum(0.05, 0.9)


@program(
    "Batch norm in two programs: one trains, the other evaluates with running statistics.",
    only=("sync batch norm",),
    reason=_OWN_STATISTICS,
)
def batch_norm_and_evaluation(script: Script) -> None:
    def network():
        return nn.Sequential(nn.Linear(8, 6, bias_attr=False), nn.BatchNorm1D(6), nn.ReLU(), nn.Linear(6, 5))

    with paddle.utils.unique_name.guard():
        x, y = script.inputs(x=floats(8), y=classes(5))
        layers = network()
        loss = F.cross_entropy(layers(x), y)
        script.minimize(Adam(0.01, epsilon=1e-3), loss)
    judging = paddle.static.Program()
    with paddle.static.program_guard(judging, paddle.static.Program()), paddle.utils.unique_name.guard():
        x, y = script.inputs(x=floats(8), y=classes(5))
        layers = network()
        layers.eval()
        judged = F.cross_entropy(layers(x), y)
    script.start()
    for step, batch in enumerate(script.batches()):
        script.run(batch, [loss])
        script.evaluate(script.batch(100 + step, judging), [judged], judging)


@network(
    "An embedding with sparse=True: its gradients are dense in today's programs, of which rows are sent.",
    words=tokens(30, 6),
    label=classes(5),
)
def sparse_embedding(words, label):
    vectors = nn.Embedding(30, 8, sparse=True)(words)
    return F.cross_entropy(nn.Linear(8, 5)(vectors.mean(axis=1)), label), SGD(0.1)


@network("Dropout between layers, with different random numbers on each rank.", random=True, simulated=True)
def dropout(x, y):
    hidden = F.dropout(F.tanh(nn.Linear(8, 16)(x)), 0.3)
    return F.cross_entropy(nn.Linear(16, 5)(hidden), y), Momentum(0.1, 0.9)


@network("A two-layer LSTM over embedded words.", simulated=True, words=tokens(20, 5), label=classes(4))
def lstm(words, label):
    states, _ = nn.LSTM(6, 8, num_layers=2)(nn.Embedding(20, 6)(words))
    return F.cross_entropy(nn.Linear(8, 4)(states[:, -1]), label), Momentum(0.1, 0.9)


@network(
    "A transformer encoder over embedded words, AdamW, warm-up.",
    noise=r"linear_1\.b_0",
    words=tokens(20, 6),
    label=classes(4),
)
def transformer(words, label):
    positions = paddle.static.create_parameter([1, 6, 8], "float32", name="positions")
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu")
    hidden = nn.TransformerEncoder(layer, 1)(nn.Embedding(20, 8)(words) + positions)
    loss = F.cross_entropy(nn.Linear(8, 4)(hidden.mean(axis=1)), label)
    schedule = paddle.optimizer.lr.LinearWarmup(0.01, 3, 0.001, 0.01)
    return loss, AdamW(schedule, epsilon=1e-3, weight_decay=0.01)


@network("Batch norm with fixed statistics; scale and shift are trained.")
def frozen_batch_norm(x, y):
    hidden = F.relu(nn.BatchNorm1D(12, use_global_stats=True)(nn.Linear(8, 12)(x)))
    return F.cross_entropy(nn.Linear(12, 5)(hidden), y), Momentum(0.1, 0.9)


@network(
    "A transformer encoder with dropout in every layer.",
    random=True,
    simulated=True,
    noise=r"linear_1\.b_0",
    words=tokens(20, 6),
    label=classes(4),
)
def transformer_with_dropout(words, label):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2)
    hidden = nn.TransformerEncoder(layer, 1)(nn.Embedding(20, 8)(words))
    return F.cross_entropy(nn.Linear(8, 4)(hidden.mean(axis=1)), label), Momentum(0.05, 0.9)
