"""Evaluation shared out over the ranks: exact sums, each sample counted once, whatever the shard sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fleet_train import fleet
from fleet_train.data import Dataset, evaluation_batches
from fleet_train.train.programs import Programs


class Evaluation(NamedTuple):
    loss: float
    accuracy: float
    num_samples: int


def evaluate(exe: Any, programs: Programs, data: Dataset, batch_size: int) -> Evaluation:
    """Mean loss and accuracy over the whole dataset, equal on every rank.

    The evaluation program has no collectives inside, so ranks may have different numbers of batches, or none.
    """
    correct, loss_sum, count = 0, 0.0, 0
    for indices in evaluation_batches(data.num_samples, batch_size, fleet.worker_index(), fleet.worker_num()):
        fetched = exe.run(programs.evaluation, feed=data.arrays(indices), fetch_list=programs.evaluation_fetches)
        correct += int(fetched[0].item())
        loss_sum += float(fetched[1].item())
        count += len(indices)
    # float64 holds counts exactly up to 2**53.
    totals = fleet.all_reduce(np.array([correct, loss_sum, count], dtype=np.float64), op="sum")
    return Evaluation(float(totals[1] / totals[2]), float(totals[0] / totals[2]), int(totals[2]))
