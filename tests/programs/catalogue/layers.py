"""Layers and networks."""

from __future__ import annotations

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import SGD, Adam, Momentum

from tests.programs.catalogue.entry import DGC_AND_DECAY, program
from tests.programs.feeds import classes, floats, tokens
from tests.programs.script import Script

_BATCH_NORM = ("sync batch norm", "sync batch norm, recompute", "sync batch norm, amp")
_OWN_STATISTICS = "without sync_batch_norm, each rank normalises by its own share of the batch, as Fleet does"


@program("Layers of static.nn: fc with its activation.")
def static_fc(script: Script) -> None:
    x, y = script.inputs(x=floats(2, 4), y=classes(5))
    hidden = paddle.static.nn.fc(x, 12, num_flatten_dims=1, activation="relu")
    loss = F.cross_entropy(paddle.static.nn.fc(hidden, 5), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("Convolutions, pooling and a linear layer, with Momentum.", simulated=True)
def convolutions(script: Script) -> None:
    image, label = script.inputs(image=floats(1, 8, 8), label=classes(5))
    hidden = F.max_pool2d(F.relu(nn.Conv2D(1, 4, 3, padding=1)(image)), 2)
    hidden = F.avg_pool2d(F.relu(nn.Conv2D(4, 6, 3, stride=1)(hidden)), 2)
    loss = F.cross_entropy(nn.Linear(6, 5)(hidden.flatten(1)), label)
    script.minimize(Momentum(0.05, 0.9), loss)
    script.train(loss)


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


@program("Residual blocks with group norm.", without=DGC_AND_DECAY)
def residual_group_norm(script: Script) -> None:
    image, label = script.inputs(image=floats(3, 6, 6), label=classes(5))
    hidden = nn.Conv2D(3, 4, 1)(image)
    for _ in range(2):
        branch = F.relu(nn.GroupNorm(2, 4)(nn.Conv2D(4, 4, 3, padding=1, bias_attr=False)(hidden)))
        hidden = hidden + nn.Conv2D(4, 4, 3, padding=1)(branch)
    loss = F.cross_entropy(nn.Linear(4, 5)(hidden.mean(axis=[2, 3])), label)
    script.minimize(Momentum(0.05, 0.9, weight_decay=1e-4), loss)
    script.train(loss)


@program("Layer norm and GELU.")
def layer_norm(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    hidden = F.gelu(nn.LayerNorm(12)(nn.Linear(8, 12)(x)))
    loss = F.cross_entropy(nn.Linear(12, 5)(hidden), y)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("Instance norm, PReLU and a transposed convolution: an autoencoder.")
def autoencoder(script: Script) -> None:
    (image,) = script.inputs(image=floats(2, 6, 6))
    code = nn.PReLU(4)(nn.InstanceNorm2D(4)(nn.Conv2D(2, 4, 3, stride=2, padding=1, bias_attr=False)(image)))
    loss = F.mse_loss(nn.Conv2DTranspose(4, 2, 4, stride=2, padding=1)(code), image)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("Depthwise and pointwise convolutions.")
def separable_convolutions(script: Script) -> None:
    image, label = script.inputs(image=floats(4, 6, 6), label=classes(5))
    hidden = F.relu6(nn.Conv2D(4, 4, 3, groups=4, padding=1)(image))
    hidden = F.hardswish(nn.Conv2D(4, 8, 1)(hidden)).mean(axis=[2, 3])
    loss = F.cross_entropy(nn.Linear(8, 5)(hidden), label)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("Batch norm, synchronised: parameters and running statistics.", only=_BATCH_NORM, reason=_OWN_STATISTICS)
def batch_norm(script: Script) -> None:
    image, label = script.inputs(image=floats(2, 5, 5), label=classes(5))
    hidden = F.relu(nn.BatchNorm2D(4)(nn.Conv2D(2, 4, 3, bias_attr=False)(image)))
    loss = F.cross_entropy(nn.Linear(4, 5)(hidden.mean(axis=[2, 3])), label)
    script.minimize(Momentum(0.05, 0.9), loss)
    script.train(loss)


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


@program("Batch norm with fixed statistics; scale and shift are trained.")
def frozen_batch_norm(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    hidden = F.relu(nn.BatchNorm1D(12, use_global_stats=True)(nn.Linear(8, 12)(x)))
    loss = F.cross_entropy(nn.Linear(12, 5)(hidden), y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("A dense embedding with a padding word, and Adam.")
def embedding(script: Script) -> None:
    words, label = script.inputs(words=tokens(30, 6), label=classes(5))
    vectors = nn.Embedding(30, 8, padding_idx=0)(words)
    loss = F.cross_entropy(nn.Linear(8, 5)(vectors.mean(axis=1)), label)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("An embedding with sparse=True: its gradients are dense in today's programs.")
def sparse_embedding(script: Script) -> None:
    words, label = script.inputs(words=tokens(30, 6), label=classes(5))
    vectors = nn.Embedding(30, 8, sparse=True)(words)
    loss = F.cross_entropy(nn.Linear(8, 5)(vectors.mean(axis=1)), label)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("Weight normalisation and spectral normalisation of a layer's weight.")
def normalised_weights(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    first = nn.utils.weight_norm(nn.Linear(8, 8), dim=1)
    loss = F.cross_entropy(nn.Linear(8, 5)(F.tanh(first(x))), y)
    script.minimize(SGD(0.1), loss)
    script.train(loss)


@program("A bilinear layer and a cosine embedding loss.")
def bilinear(script: Script) -> None:
    left, right, same = script.inputs(left=floats(5), right=floats(6), same=classes(2))
    hidden = nn.Bilinear(5, 6, 4)(left, right)
    loss = F.cosine_embedding_loss(hidden, nn.Linear(6, 4)(right), same.flatten() * 2 - 1, margin=0.2)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("Label smoothing, class weights and a fetched accuracy.")
def smoothed_labels(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    logits = nn.Linear(8, 5)(x)
    soft = F.label_smooth(F.one_hot(y.flatten(), 5), epsilon=0.1)
    loss = F.cross_entropy(logits, soft, soft_label=True)
    accuracy = paddle.metric.accuracy(F.softmax(logits), y)
    script.minimize(SGD(0.1), loss)
    script.start()
    for batch in script.batches():
        script.run(batch, [loss, accuracy])


@program("Dropout between layers, with different random numbers on each rank.", random=True, simulated=True)
def dropout(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    hidden = F.dropout(F.tanh(nn.Linear(8, 16)(x)), 0.3)
    loss = F.cross_entropy(nn.Linear(16, 5)(hidden), y)
    script.minimize(Momentum(0.1, 0.9), loss)
    script.train(loss)


@program("A variational autoencoder: the program draws the noise.", random=True, simulated=True)
def variational_autoencoder(script: Script) -> None:
    (x,) = script.inputs(x=floats(8))
    mean, log_variance = paddle.split(nn.Linear(8, 6)(x), 2, axis=1)
    code = mean + paddle.exp(0.5 * log_variance) * paddle.randn(paddle.shape(mean))
    apart = -0.5 * (1 + log_variance - mean**2 - paddle.exp(log_variance)).sum(axis=1).mean()
    loss = F.mse_loss(nn.Linear(3, 8)(code), x) + 0.1 * apart
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)


@program("A mixture of experts: a softmax gate weighs four small networks.")
def mixture_of_experts(script: Script) -> None:
    x, y = script.inputs(x=floats(8), y=classes(5))
    gate = F.softmax(nn.Linear(8, 4)(x))
    experts = paddle.stack([nn.Linear(8, 5)(x) for _ in range(4)], axis=1)
    loss = F.cross_entropy((gate.unsqueeze(2) * experts).sum(axis=1), y)
    script.minimize(Adam(0.01, epsilon=1e-3), loss)
    script.train(loss)
