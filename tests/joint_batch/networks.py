"""Networks in the shape of public programs, small. Imports Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from tests.joint_batch import case
from tests.joint_batch.batches import Samples
from tests.joint_batch.builder import Builder

_MERGE = {"merge": "no sum over samples"}
WORDS, LONGEST, HIDDEN = 9, 6, 8


def _encoded(token: Any) -> Any:
    """[batch, time, hidden] by one layer of attention."""
    hidden = nn.Embedding(WORDS, HIDDEN)(token)
    layer = nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.0)
    return layer(hidden)


@case
def bert_masked_words(g: Builder) -> Any:
    """BERT: the mean over masked positions, which are gathered from all words of the batch."""
    hidden = _encoded(g.tokens(WORDS, LONGEST)).reshape([-1, HIDDEN])
    label = g.labels(WORDS, LONGEST, ignore=-1).flatten()
    places = paddle.nonzero(label != -1).flatten()
    logits = nn.Linear(HIDDEN, WORDS)(paddle.gather(hidden, places))
    return F.cross_entropy(logits, paddle.gather(label, places))


@case(said=_MERGE)
def bert_two_heads(g: Builder) -> Any:
    """The masked words' mean by weights, and the next sentence's over samples."""
    hidden = _encoded(g.tokens(WORDS, LONGEST))
    each = F.cross_entropy(
        nn.Linear(HIDDEN, WORDS)(hidden), g.labels(WORDS, LONGEST).unsqueeze(-1), reduction="none"
    ).squeeze(-1)
    weight = g.mask(LONGEST)
    words = (each * weight).sum() / (weight.sum() + 1e-5)
    return words + F.cross_entropy(nn.Linear(HIDDEN, 2)(hidden[:, 0]), g.positives())


@case
def translation(g: Builder) -> Any:
    """A recurrent encoder and decoder; the sum of costs over the number of words."""
    source, target = g.tokens(WORDS, LONGEST), g.labels(WORDS, LONGEST, name="target")
    _, state = nn.GRU(HIDDEN, HIDDEN)(nn.Embedding(WORDS, HIDDEN)(source))
    decoded, _ = nn.GRU(HIDDEN, HIDDEN)(nn.Embedding(WORDS, HIDDEN)(target), state)
    cost = F.cross_entropy(nn.Linear(HIDDEN, WORDS)(decoded), target.unsqueeze(-1), soft_label=False, reduction="none")
    mask = F.sequence_mask(g.lengths(LONGEST), maxlen=LONGEST, dtype=g.dtype)
    masked = cost.squeeze(-1) * mask
    return masked.sum() / mask.sum()


@case
def segmentation(g: Builder) -> Any:
    """Pixels of no class are left out: the mean over the others."""
    image = g.floats(2, 4, 4, name="image")
    logits = nn.Conv2D(4, 3, 1)(F.relu(nn.Conv2D(2, 4, 3, padding=1)(image)))
    label = g.labels(3, 4, 4, ignore=255)
    return F.cross_entropy(logits.transpose([0, 2, 3, 1]), label.unsqueeze(-1), ignore_index=255, axis=-1)


@case
def segmentation_by_hand(g: Builder) -> Any:
    """The mean of masked pixels over the mean of the mask and a small number, as a public library has it."""
    image = g.floats(2, 4, 4, name="image")
    logits = nn.Conv2D(4, 3, 1)(F.relu(nn.Conv2D(2, 4, 3, padding=1)(image)))
    label = g.labels(3, 4, 4, ignore=255)
    mask = (label != 255).astype(g.dtype)
    each = F.cross_entropy(
        logits.transpose([0, 2, 3, 1]), label.unsqueeze(-1), ignore_index=255, reduction="none", axis=-1
    ).squeeze(-1)
    return (each * mask).mean() / (mask.mean() + 1e-5)


@case(said=_MERGE)
def proposals(g: Builder) -> Any:
    """Anchors of a proposal network: classes of valid ones, boxes of positive ones; a rank may have none."""
    hidden = F.relu(nn.Linear(4, HIDDEN)(g.floats(5, 4, name="anchor")))
    label = g.labels(2, 5, ignore=-1)
    score, box = nn.Linear(HIDDEN, 1)(hidden).flatten(), nn.Linear(HIDDEN, 4)(hidden).reshape([-1, 4])
    flat = label.flatten()
    valid = paddle.nonzero(flat >= 0).flatten()
    scores = F.binary_cross_entropy_with_logits(
        paddle.gather(score, valid), paddle.gather(flat, valid).astype(g.dtype), reduction="mean"
    )
    positive = paddle.nonzero(flat == 1).flatten()
    goal = g.floats(5, 4).reshape([-1, 4])
    boxes = F.smooth_l1_loss(paddle.gather(box, positive), paddle.gather(goal, positive), reduction="sum")
    return scores + boxes / paddle.shape(valid)[0].astype(g.dtype)


@case
def single_shot(g: Builder) -> Any:
    """Focal loss and boxes, both by the number of positive anchors, at least 1."""
    hidden = F.relu(nn.Linear(4, HIDDEN)(g.floats(5, 4, name="anchor")))
    goal = g.positives(5).astype(g.dtype)
    count = goal.sum().clip(min=1.0)
    scores = F.sigmoid_focal_loss(nn.Linear(HIDDEN, 1)(hidden).squeeze(-1), goal, reduction="sum") / count
    boxes = (nn.Linear(HIDDEN, 4)(hidden) - g.floats(5, 4)).abs().sum(axis=-1) * goal
    return scores + boxes.sum() / count


@case
def speech(g: Builder) -> Any:
    """CTC: each sample's loss by its own length, the mean over samples."""
    hidden = nn.Linear(4, 5)(g.floats(8, 4, name="frame"))
    label = g.data("text", (3,), "int32", lambda samples: samples.random.integers(1, 5, (samples.number, 3)), False)
    frames = g.data("frames", (), "int64", lambda samples: 7 + (samples.rising > 0.5), False)
    letters = g.data("letters", (), "int64", lambda samples: 1 + (2.9 * samples.rising).astype("int64"), False)
    each = F.ctc_loss(hidden.transpose([1, 0, 2]), label, frames, letters, blank=0, reduction="none")
    return (each.flatten() / letters.astype(g.dtype)).mean()


@case(said=_MERGE)
def adversaries(g: Builder) -> Any:
    """A discriminator's means over real and made samples, joined and divided again."""
    made = F.tanh(nn.Linear(4, 3)(g.floats(4, name="noise")))
    network = nn.Sequential(nn.Linear(3, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1))
    real, fake = paddle.split(network(paddle.concat([g.floats(3, name="real"), made])), 2)
    return F.relu(1.0 - real).mean() + F.relu(1.0 + fake).mean()


@case
def teacher(g: Builder) -> Any:
    """Distillation: the KL of softened outputs beside a cross entropy, whose mean is over all where -1 is left out."""
    logits, label = g.features(5), g.labels(5, ignore=-1)
    goal = F.softmax(g.floats(5, name="teacher") / 2.0)
    soft = F.kl_div(F.log_softmax(logits / 2.0), goal, reduction="none").sum(axis=-1).mean() * 4.0
    return 0.7 * soft + 0.3 * F.cross_entropy(logits, label, ignore_index=-1)


@case
def autoencoder(g: Builder) -> Any:
    """A variational one, with its noise fed: both terms are means over samples."""
    out = g.features(8)
    middle, spread = out[:, :4], out[:, 4:]
    code = middle + paddle.exp(0.5 * spread) * g.floats(4, name="noise")
    error = ((nn.Linear(4, 3)(code) - g.floats(3)) ** 2).sum(axis=1).mean()
    return error - 0.5 * (1 + spread - middle**2 - paddle.exp(spread)).sum(axis=1).mean()


@case(said=_MERGE)
def policy(g: Builder) -> Any:
    """A clipped policy gradient whose fed advantages are normalised over the batch, with a bonus of entropy."""
    logits, action = g.features(4), g.labels(4).flatten()
    advantage = g.floats(1, name="advantage").flatten()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log = F.log_softmax(logits)
    chosen = (log * F.one_hot(action, 4).astype(g.dtype)).sum(axis=1)
    ratio = paddle.exp(chosen - g.data("before", (), g.dtype, _logs, False))
    gain = paddle.minimum(ratio * advantage, paddle.clip(ratio, 0.8, 1.2) * advantage).mean()
    return -gain + 0.01 * (F.softmax(logits) * log).sum(axis=1).mean()


def _logs(samples: Samples) -> Any:
    return -1.4 + 0.3 * samples.random.standard_normal(samples.number)


@case(said={"default": "samples meet each other"})
def contrastive(g: Builder) -> Any:
    """Negatives of the batch: samples meet, and the line is named."""
    first, second = F.normalize(g.features(4)), F.normalize(nn.Linear(3, 4)(g.floats(3, name="view")))
    logits = paddle.matmul(first, second, transpose_y=True) / 0.2
    return F.cross_entropy(logits, paddle.arange(0, paddle.shape(logits)[0], dtype="int64").unsqueeze(-1))
