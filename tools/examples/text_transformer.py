"""Text classification: a transformer encoder with AdamW and warm-up tells glad sentences from sad ones.

Sentences are made by a rule: words are good, bad, or say nothing, and a "not" turns the next one around. The label is
what prevails. Words alone do not tell: half of the good and bad ones stand behind a "not".

python -m fleet_train launch --nproc_per_node=2 tools/examples/text_transformer.py
"""

import argparse
from typing import Any

import numpy as np
import paddle
from paddle import nn
from sklearn.linear_model import LogisticRegression

from fleet_train import fleet, role_maker

STEPS, JOINT_BATCH, WORDS, LENGTH, WIDTH = 300, 64, 40, 12, 32
PADDING, NOT, GOOD, BAD = 0, 1, range(2, 12), range(12, 22)  # words from 22 on say nothing

flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
flags.add_argument("--output_dir", default="output/text_transformer")
args = flags.parse_args()


def sentences(count: int, seed: int) -> tuple[Any, Any]:
    """``count`` sentences of up to LENGTH words, int64 [count, LENGTH] with PADDING behind; labels [count, 1]."""
    random, words, labels = np.random.default_rng(seed), np.zeros((count, LENGTH), "int64"), np.zeros(count, "int64")
    for sentence in range(count):
        verdict = 0
        while verdict == 0:  # a draw has no label: another sentence
            text: list[int] = []
            for word in random.integers(2, WORDS, size=random.integers(3, 7)):
                value = (word in GOOD) - (word in BAD)
                turned = random.random() < 0.5 and value != 0
                verdict += -value if turned else value
                text += [NOT, int(word)] if turned else [int(word)]
        words[sentence, : len(text)], labels[sentence] = text, verdict > 0
    return words, labels[:, None]


def class_scores(words: Any) -> Any:
    """[sentences, 2] of [sentences, LENGTH]. The fresh name guard: each program reads the same parameters."""
    with paddle.utils.unique_name.guard():
        places = nn.Embedding(LENGTH, WIDTH)(paddle.arange(LENGTH))
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, activation="gelu")
        there = (words != PADDING).astype("float32")
        mask = (there.unsqueeze([1, 2]) - 1) * 1e9  # added to what each word asks of the others
        hidden = nn.TransformerEncoder(layer, 2)(nn.Embedding(WORDS, WIDTH)(words) + places, mask)
        weights = there / there.sum(axis=1, keepdim=True)
        return nn.Linear(WIDTH, 2)((hidden * weights.unsqueeze(2)).sum(axis=1))


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

paddle.seed(1)
training, startup, evaluation = (paddle.static.Program() for _ in range(3))
with paddle.static.program_guard(training, startup):
    words, labels = (
        paddle.static.data(name, [None, size], "int64") for name, size in (("words", LENGTH), ("labels", 1))
    )
    loss = nn.functional.cross_entropy(class_scores(words), labels)
    falling = paddle.optimizer.lr.PolynomialDecay(0.005, decay_steps=STEPS)
    schedule = paddle.optimizer.lr.LinearWarmup(falling, warmup_steps=40, start_lr=0.0, end_lr=0.005)
    clip = nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(schedule, weight_decay=0.01, grad_clip=clip)
    optimizer = fleet.distributed_optimizer(optimizer)  # the strategy is the launcher's
    optimizer.minimize(loss, startup)
with paddle.static.program_guard(evaluation, paddle.static.Program()):  # this startup program is never run
    classes = class_scores(paddle.static.data("words", [None, LENGTH], "int64")).argmax(axis=1)
exe = paddle.static.Executor(fleet.place())
exe.run(startup)

rank, ranks = fleet.worker_index(), fleet.worker_num()
texts, targets = sentences(STEPS * JOINT_BATCH, seed=1)
for step in range(STEPS):
    mine = slice(step * JOINT_BATCH + rank, (step + 1) * JOINT_BATCH, ranks)
    (loss_now,) = exe.run(training, feed={"words": texts[mine], "labels": targets[mine]}, fetch_list=[loss])
    schedule.step()
    if fleet.is_first_worker() and (step + 1) % 50 == 0:
        print(f"step {step + 1} loss={loss_now.item():.4f}")

new_texts, truth = sentences(1000, seed=2)
(found,) = exe.run(evaluation, feed={"words": new_texts[rank::ranks]}, fetch_list=[classes])
correct, seen = fleet.all_reduce(np.array([(found == truth[rank::ranks, 0]).sum(), len(found)]))
if fleet.is_first_worker():
    counts = [np.stack([np.bincount(text, minlength=WORDS) for text in some]) for some in (texts[:5000], new_texts)]
    without_order = LogisticRegression(max_iter=1000).fit(counts[0], targets[:5000, 0]).score(counts[1], truth[:, 0])
    print(f"held-out accuracy {correct / seen:.4f} on {ranks} rank(s); by counting words {without_order:.4f}")
fleet.save_persistables(exe, args.output_dir, training)
