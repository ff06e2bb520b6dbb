"""Sequences of unlike lengths. Imports Paddle."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from tests.joint_batch import case
from tests.joint_batch.builder import Builder

LONGEST, WORDS, CLASSES = 6, 9, 4


def _logits(token: Any, classes: int = CLASSES) -> Any:
    """[batch, time, classes], of each word and the one before it."""
    embedded = nn.Embedding(WORDS, 8)(token)
    before = F.pad(embedded, [1, 0], data_format="NLC")[:, :-1]
    return nn.Linear(8, classes)(F.tanh(nn.Linear(8, 8)(embedded) + nn.Linear(8, 8)(before)))


@case
def sequence_mask(g: Builder) -> Any:
    """The mean over all valid steps of all samples."""
    token, mask = g.tokens(WORDS, LONGEST), g.mask(LONGEST)
    each = F.cross_entropy(_logits(token), g.labels(CLASSES, LONGEST).unsqueeze(-1), reduction="none").squeeze(-1)
    return (each * mask).sum() / mask.sum()


@case
def sequence_per_sample(g: Builder) -> Any:
    """The mean over each sample's own steps, then over samples."""
    token, mask = g.tokens(WORDS, LONGEST), g.mask(LONGEST)
    each = F.cross_entropy(_logits(token), g.labels(CLASSES, LONGEST).unsqueeze(-1), reduction="none").squeeze(-1)
    return ((each * mask).sum(axis=1) / (mask.sum(axis=1) + 1e-6)).mean()


@case
def padded_sequence(g: Builder) -> Any:
    """Each rank pads to its own longest sample; the mean is over the words."""
    token, length = g.tokens(WORDS, LONGEST, padded=True), g.lengths(LONGEST)
    goal = g.tokens(CLASSES, LONGEST, name="goal", padded=True)
    mask = F.sequence_mask(length, maxlen=paddle.shape(token)[1], dtype=g.dtype)
    each = F.cross_entropy(_logits(token), goal.unsqueeze(-1), reduction="none").squeeze(-1)
    return (each * mask).sum() / mask.sum()


@case
def padded_per_sample(g: Builder) -> Any:
    """Each rank pads to its own longest sample; each sample weighs the same."""
    token, length = g.tokens(WORDS, LONGEST, padded=True), g.lengths(LONGEST)
    goal = g.tokens(CLASSES, LONGEST, name="goal", padded=True)
    mask = F.sequence_mask(length, maxlen=paddle.shape(token)[1], dtype=g.dtype)
    each = F.cross_entropy(_logits(token), goal.unsqueeze(-1), reduction="none").squeeze(-1)
    return ((each * mask).sum(axis=1) / length.astype(g.dtype).clip(min=1.0)).mean()


@case
def over_sum_of_lengths(g: Builder) -> Any:
    """The divisor is the sum of a fed column of lengths."""
    token, length = g.tokens(WORDS, LONGEST, padded=True), g.lengths(LONGEST)
    goal = g.tokens(CLASSES, LONGEST, name="goal", padded=True)
    mask = F.sequence_mask(length, maxlen=paddle.shape(token)[1], dtype=g.dtype)
    each = F.cross_entropy(_logits(token), goal.unsqueeze(-1), reduction="none").squeeze(-1)
    return (each * mask).sum() / length.sum().astype(g.dtype)


@case
def labels_of_words_ignored(g: Builder) -> Any:
    """Labels [batch, time] flattened, padding left out by ``ignore_index``."""
    label = g.labels(CLASSES, LONGEST, ignore=-1)
    return F.cross_entropy(_logits(g.tokens(WORDS, LONGEST)).reshape([-1, CLASSES]), label.flatten(), ignore_index=-1)


@case
def words_selected(g: Builder) -> Any:
    """The valid words are selected from [batch, time, classes] before the loss."""
    mask = g.mask(LONGEST) > 0
    logits, label = _logits(g.tokens(WORDS, LONGEST)), g.labels(CLASSES, LONGEST)
    return F.cross_entropy(logits[mask], label[mask])
