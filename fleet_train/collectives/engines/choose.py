"""Chooses a job's engine by its device and its communication backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from fleet_train.collectives.engines.device import GpuDevice
from fleet_train.collectives.engines.engine import Engine, Place
from fleet_train.collectives.engines.stream import StreamEngine
from fleet_train.collectives.engines.thread import AttributeFailure, ThreadEngine
from fleet_train.collectives.engines.watchdog import Watchdog


def make_engine(
    device_place: Any,
    attribute_failure: AttributeFailure,
    is_hopeless: Callable[[], bool],
    on_stuck: Callable[[Place, float], None],
) -> Engine:
    """The stream engine on a GPU, whose collectives are enqueued; the thread engine on a CPU."""
    if isinstance(device_place, paddle.CPUPlace):
        return ThreadEngine(device_place, attribute_failure)
    return StreamEngine(GpuDevice(device_place), attribute_failure, Watchdog(on_stuck, is_hopeless))
