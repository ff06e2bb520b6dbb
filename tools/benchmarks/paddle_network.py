"""The task's network in Paddle, for static and dynamic mode."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from tools.benchmarks.task import Task, start_weights


class Network(nn.Layer):  # type: ignore[misc]
    """Start values come through initializers, so that whatever a strategy keeps of the start state is right too."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task
        start = start_weights(task)
        self.layers = nn.LayerList(
            nn.Linear(*start[2 * index].shape, *(_starting_at(value) for value in start[2 * index : 2 * index + 2]))
            for index in range(len(start) // 2)
        )

    def forward(self, hidden: Any) -> Any:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            out = layer(hidden) if index == last else nn.functional.relu(layer(hidden))
            hidden = hidden + out if self._task.is_skipped(index) else out
        return hidden


def _starting_at(value: Any) -> Any:
    return paddle.ParamAttr(initializer=nn.initializer.Assign(value))
