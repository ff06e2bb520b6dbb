"""Image classification: a small convolutional network reads scikit-learn's 1797 handwritten digits (8 x 8 pixels).

fleet_train launch --nproc_per_node=2 tools/examples/image_classification.py
"""

import argparse
from typing import Any

import numpy as np
import paddle
from paddle import nn
from sklearn.datasets import load_digits

from fleet_train import fleet, role_maker

EPOCHS, JOINT_BATCH, TRAINING_SAMPLES = 12, 64, 1437

flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
flags.add_argument("--output_dir", default="output/image_classification")
args = flags.parse_args()


def class_scores(images: Any) -> Any:
    """[samples, 10] of [samples, 1, 8, 8]. With a fresh name guard every program uses the same parameters."""
    with paddle.utils.unique_name.guard():
        features = nn.Sequential(
            *(nn.Conv2D(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2)),
            *(nn.Conv2D(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2)),
        )
        return nn.Linear(32 * 2 * 2, 10)(paddle.flatten(features(images), 1))


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

paddle.seed(1)
training, startup, evaluation = (paddle.static.Program() for _ in range(3))
with paddle.static.program_guard(training, startup):
    images = paddle.static.data("images", [None, 1, 8, 8], "float32")
    labels = paddle.static.data("labels", [None, 1], "int64")
    loss = nn.functional.cross_entropy(class_scores(images), labels)
    steps_per_epoch = TRAINING_SAMPLES // JOINT_BATCH
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.05, T_max=EPOCHS * steps_per_epoch)
    optimizer = paddle.optimizer.Momentum(schedule, momentum=0.9, weight_decay=1e-4)
    optimizer = fleet.distributed_optimizer(optimizer)  # the launcher sets the strategy
    optimizer.minimize(loss, startup)
with paddle.static.program_guard(evaluation, paddle.static.Program()):  # its startup program is never run
    classes = class_scores(paddle.static.data("images", [None, 1, 8, 8], "float32")).argmax(axis=1)
exe = paddle.static.Executor(fleet.place())
exe.run(startup)

rank, ranks = fleet.worker_index(), fleet.worker_num()
digits = load_digits()
shuffled = np.random.default_rng(0).permutation(len(digits.images))  # the first 1437 train, the others are held out
pixels = (digits.images[shuffled] / 16).astype("float32")[:, None]
targets = digits.target[shuffled].astype("int64")[:, None]
for epoch in range(EPOCHS):
    order = np.random.default_rng(epoch).permutation(TRAINING_SAMPLES)  # the same on all ranks
    for step in range(steps_per_epoch):
        mine = order[step * JOINT_BATCH : (step + 1) * JOINT_BATCH][rank::ranks]
        (loss_now,) = exe.run(training, feed={"images": pixels[mine], "labels": targets[mine]}, fetch_list=[loss])
        schedule.step()
    if fleet.is_first_worker():
        print(f"epoch {epoch + 1} loss={loss_now.item():.4f}")

# Every rank evaluates its share of the held-out samples; the counts are added up.
held_out = np.arange(TRAINING_SAMPLES, len(pixels))[rank::ranks]
(found,) = exe.run(evaluation, feed={"images": pixels[held_out]}, fetch_list=[classes])
correct, seen = fleet.all_reduce(np.array([(found == targets[held_out, 0]).sum(), len(held_out)]))
if fleet.is_first_worker():
    print(f"held-out accuracy {correct / seen:.4f} over {seen} images on {ranks} rank(s)")
fleet.save_persistables(exe, args.output_dir, training)
