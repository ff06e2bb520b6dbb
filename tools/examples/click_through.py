"""Click-through prediction: DeepFM on embeddings of users, ads and sites, as static graphs are used for most.

The table of clicks is made by a rule: each user, ad and site has an appeal of its own, users and ads have tastes that
match or do not, and a click is drawn with the probability that follows. No feature tells them: a model must learn a
vector per id. The measure is the AUC on new impressions; that of the true probabilities is the best there is.

python -m fleet_train launch --nproc_per_node=2 tools/examples/click_through.py
"""

import argparse
from typing import Any

import numpy as np
import paddle
from paddle import nn
from sklearn.metrics import roc_auc_score

from fleet_train import fleet, role_maker

IDS_OF_FIELDS = (400, 100, 30)  # users, ads, sites
ROWS, WIDTH, IMPRESSIONS, EPOCHS, JOINT_BATCH = sum(IDS_OF_FIELDS), 8, 80_000, 3, 512

flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
flags.add_argument("--output_dir", default="output/click_through")
args = flags.parse_args()


def impressions(count: int, seed: int) -> tuple[Any, Any, Any]:
    """Rows of the table as int64 [count, 3], clicks as float32 [count, 1], the probabilities behind them [count]."""
    rule, random = np.random.default_rng(0), np.random.default_rng(seed)
    appeal, tastes = rule.normal(0, 1, ROWS), rule.normal(0, 0.8, (ROWS, 2))
    # Some ids are seen a lot and many are rare, as in real tables.
    ids = [random.beta(0.7, 1.5, count) * size for size in IDS_OF_FIELDS]
    rows = np.stack(ids, axis=1).astype("int64") + np.cumsum((0, *IDS_OF_FIELDS[:-1]))
    match = (tastes[rows[:, 0]] * tastes[rows[:, 1]]).sum(axis=1)
    probability = 1 / (1 + np.exp(1.5 - appeal[rows].sum(axis=1) - match))
    clicks = random.random(count) < probability
    return rows, clicks.astype("float32")[:, None], probability


def logits(rows: Any) -> Any:
    """[impressions, 1] of [impressions, 3]. The fresh name guard: each program reads the same parameters."""
    with paddle.utils.unique_name.guard():
        start = paddle.ParamAttr(initializer=nn.initializer.Normal(0.0, 0.05))
        appeals = nn.Embedding(ROWS, 1, weight_attr=start)(rows).sum(axis=1)
        vectors = nn.Embedding(ROWS, WIDTH, sparse=True, weight_attr=start)(rows)
        pairs = (vectors.sum(axis=1).square() - vectors.square().sum(axis=1)).sum(axis=1, keepdim=True) / 2
        deep = nn.Sequential(nn.Linear(len(IDS_OF_FIELDS) * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        return appeals + pairs + deep(vectors.flatten(1))


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))

paddle.seed(1)
training, startup, evaluation = (paddle.static.Program() for _ in range(3))
with paddle.static.program_guard(training, startup):
    rows = paddle.static.data("rows", [None, len(IDS_OF_FIELDS)], "int64")
    clicks = paddle.static.data("clicks", [None, 1], "float32")
    loss = nn.functional.binary_cross_entropy_with_logits(logits(rows), clicks)
    optimizer = paddle.optimizer.Adam(0.01)
    optimizer = fleet.distributed_optimizer(optimizer)  # the strategy is the launcher's
    optimizer.minimize(loss, startup)
with paddle.static.program_guard(evaluation, paddle.static.Program()):  # this startup program is never run
    scores = logits(paddle.static.data("rows", [None, len(IDS_OF_FIELDS)], "int64"))
exe = paddle.static.Executor(fleet.place())
exe.run(startup)

rank, ranks = fleet.worker_index(), fleet.worker_num()
table, clicked, _ = impressions(IMPRESSIONS, seed=1)
for epoch in range(EPOCHS):
    order = np.random.default_rng(epoch).permutation(IMPRESSIONS)  # the same on all ranks
    for first in range(0, IMPRESSIONS - JOINT_BATCH + 1, JOINT_BATCH):
        mine = order[first : first + JOINT_BATCH][rank::ranks]
        (loss_now,) = exe.run(training, feed={"rows": table[mine], "clicks": clicked[mine]}, fetch_list=[loss])
    if fleet.is_first_worker():
        print(f"epoch {epoch + 1} loss={loss_now.item():.4f}")

if fleet.is_first_worker():  # an evaluation program does not communicate: one rank may run it alone
    new_table, new_clicks, truth = impressions(20_000, seed=2)
    (found,) = exe.run(evaluation, feed={"rows": new_table}, fetch_list=[scores])
    reached, best = (roc_auc_score(new_clicks[:, 0], each) for each in (found[:, 0], truth))
    print(f"held-out AUC {reached:.4f} on {ranks} rank(s); the true probabilities have {best:.4f}")
fleet.save_persistables(exe, args.output_dir, training)
