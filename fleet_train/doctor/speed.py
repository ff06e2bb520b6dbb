"""``python -m fleet_train.doctor.speed``: the speed of one processor, and the share that a busy thread gets.

The speed is the best of many short products, which other programs do not affect; they reduce the share.
"""

from __future__ import annotations

import json
import time

import numpy as np

from fleet_train import timeouts

_SIZE = 256


def measure(seconds: float = timeouts.DOCTOR_SPEED_SECONDS) -> tuple[float, float]:
    """(gigaflops, share of a processor from 0 to 1)."""
    left = np.full((_SIZE, _SIZE), 0.5, np.float32)
    right, out = left.copy(), np.empty_like(left)
    np.matmul(left, right, out=out)
    best, began, used = float("inf"), time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        np.matmul(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    wall = time.perf_counter() - began
    return 2 * _SIZE**3 / best / 1e9, min(1.0, (time.process_time() - used) / wall)


if __name__ == "__main__":
    print(json.dumps(measure()))
