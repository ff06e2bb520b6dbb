"""tools/train.py on a cluster whose rank 0 has faulty memory: after step 7 one bit of a weight is another one.

The variable FLIPPED_AFTER gives another step; 0 = never.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.cli.train import command

run = paddle.static.Executor.run
steps = 0


def run_and_flip(self: Any, *args: Any, **kwargs: Any) -> Any:
    global steps
    fetched = run(self, *args, **kwargs)
    steps += bool(kwargs.get("feed"))
    if fleet.worker_index() == 0 and kwargs.get("feed") and steps == int(os.environ.get("FLIPPED_AFTER", "7")):
        weight = paddle.static.global_scope().find_var("linear_1.w_0").get_tensor()
        values = np.array(weight)
        values.view("uint32").reshape(-1)[5] ^= 1 << 20
        weight.set(values, fleet.place())
    return fetched


paddle.static.Executor.run = run_and_flip
command()
