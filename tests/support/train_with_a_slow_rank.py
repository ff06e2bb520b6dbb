"""tools/train.py on a cluster whose rank 1 has a slow processor: each of its steps takes 0.1 s more."""

from __future__ import annotations

import time
from typing import Any

import paddle

from fleet_train import fleet
from fleet_train.cli.train import command

run = paddle.static.Executor.run


def slow_run(self: Any, *args: Any, **kwargs: Any) -> Any:
    if fleet.worker_index() == 1:
        time.sleep(0.1)
    return run(self, *args, **kwargs)


paddle.static.Executor.run = slow_run
command()
