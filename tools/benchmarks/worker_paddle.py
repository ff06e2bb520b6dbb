"""A rank of stock Paddle: dygraph DataParallel, or alone. argv: assignment, rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import paddle

from tools.benchmarks.contestants import ALONE, parse
from tools.benchmarks.loop import Assignment, run
from tools.benchmarks.paddle_network import network
from tools.benchmarks.task import Weights


class PaddleTrainee:
    def __init__(self, assignment: Assignment) -> None:
        task = assignment.task
        self._network = network(task)
        is_alone = parse(assignment.contestant).kind == ALONE
        self._model = self._network if is_alone else paddle.DataParallel(self._network)
        self._optimizer = paddle.optimizer.Momentum(
            task.learning_rate, task.momentum, parameters=self._network.parameters()
        )

    def step(self, features: Any, labels: Any) -> float:
        logits = self._model(paddle.to_tensor(features))
        loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(labels))
        loss.backward()
        self._optimizer.step()
        self._optimizer.clear_grad()
        return float(loss.item())

    def weights(self) -> Weights:
        return [np.array(parameter.numpy()) for parameter in self._network.parameters()]

    def facts(self) -> dict[str, Any]:
        return {"paddle": paddle.__version__}


def main() -> None:
    assignment, rank = Assignment.read(Path(sys.argv[1])), int(sys.argv[2])
    if parse(assignment.contestant).kind != ALONE:
        paddle.distributed.init_parallel_env()  # PADDLE_TRAINER_ID, PADDLE_TRAINER_ENDPOINTS, ...
    run(PaddleTrainee(assignment), assignment, rank)


if __name__ == "__main__":
    main()
