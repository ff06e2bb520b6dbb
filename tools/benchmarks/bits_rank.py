"""What one rank of ``before-and-after`` does: all profiles one after the other, each with a program of its own.

argv: profiles, folder for the values, folder of the other checkout's or nothing. Public names only: fleet_train is that
of PYTHONPATH, which may be another checkout's.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import DistributedStrategy, fleet, role_maker

STEPS, MORE_STEPS = 14, 6
_LOCAL_STEPS = {"local_sgd_is_warm_steps": 2, "local_sgd_steps": 3}
_STREAMING = {"local_sgd_steps": 6, "local_sgd_overlap_steps": 1}
# What a profile does after hundreds of steps has to happen within 14; a measured link must not decide what is sent.
SHORTENED: dict[str, dict[str, Any]] = {
    "dgc": {"dgc_rampup_begin_step": 2, "dgc_rampup_steps": 4, "dgc_min_elements": 200},
    "hierarchical": {"hierarchical_allreduce_inter_nranks": 2},
    "powersgd": {"powersgd_start_step": 2},
    "int8_compression": {"compression_declines": False},
    "int4_compression": {"compression_declines": False},
    **dict.fromkeys(("local_sgd", "local_sgd_adaptive", "diloco", "slowmo"), _LOCAL_STEPS),
    **dict.fromkeys(("streaming_diloco", "ethernet_1g"), _STREAMING),
}


def train(profiles: Sequence[str], folder: Path, other: Path | None) -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    for profile, case in itertools.product(profiles, (0, 1)):
        with (
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            paddle.utils.unique_name.guard(f"case{case}_"),
        ):
            _train_and_resume(_Program(profile, case), folder, other)
        fleet.barrier_worker()


class _Program:
    """The network in the default programs, trained under ``profile``; ``case`` 1: with Adam, a clip, small buckets."""

    def __init__(self, profile: str, case: int) -> None:
        self.profile, self.case, self.rank = profile, case, fleet.worker_index()
        paddle.seed(2020 + case)
        self._loss = _loss_of_network()
        fleet.distributed_optimizer(_optimizer(profile, case), _strategy(profile, case)).minimize(self._loss)
        self.executor = paddle.static.Executor(paddle.CPUPlace())
        self._main = paddle.static.default_main_program()
        self._startup = paddle.static.default_startup_program()

    def begin(self) -> None:
        """Set every value to its start."""
        self.executor.run(self._startup)

    def run(self, first: int, count: int) -> None:
        """Steps ``first`` and on."""
        for step in range(first, first + count):
            random = np.random.default_rng([self.case, step, self.rank])
            feed = {
                "words": random.integers(0, 300, (16, 4)),
                "image": random.standard_normal((16, 1, 8, 8), dtype=np.float32),
                "label": random.integers(0, 10, 16),
            }
            self.executor.run(self._main, feed=feed, fetch_list=[self._loss])

    def keep(self, folder: Path, part: str) -> None:
        """Write every value that outlives a step."""
        scope, held = paddle.static.global_scope(), dict[str, Any]()
        for variable in self._main.list_vars():
            found = scope.find_var(variable.name) if variable.persistable else None
            if found is not None and found.get_tensor()._is_initialized():
                held[variable.name] = np.asarray(found.get_tensor())
        np.savez(folder / f"{self.profile}-{self.case}-{part}-{self.rank}.npz", **held)


def _loss_of_network() -> Any:
    words = paddle.static.data("words", [None, 4], "int64")
    image = paddle.static.data("image", [None, 1, 8, 8], "float32")
    label = paddle.static.data("label", [None], "int64")
    seen = paddle.nn.BatchNorm2D(6)(paddle.nn.Conv2D(1, 6, 3)(image))
    seen = paddle.nn.functional.relu(seen).flatten(1)
    read = paddle.nn.Embedding(300, 16)(words).flatten(1)
    hidden = paddle.concat([seen, read], axis=1)
    for width in (96, 48):
        hidden = paddle.nn.functional.tanh(paddle.nn.Linear(hidden.shape[1], width)(hidden))
    return paddle.nn.functional.cross_entropy(paddle.nn.Linear(48, 10)(hidden), label)


def _optimizer(profile: str, case: int) -> Any:
    if case and profile != "dgc":  # which works without a clip, and with SGD and Momentum only
        return paddle.optimizer.Adam(0.01, grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0))
    return paddle.optimizer.SGD(0.05) if case else paddle.optimizer.Momentum(0.05, 0.9)


def _strategy(profile: str, case: int) -> Any:
    strategy = DistributedStrategy.from_profile(profile)
    for name, value in SHORTENED.get(profile, {}).items():
        setattr(strategy, name, value)
    if case and profile != "unfused":
        strategy.fuse_parameter_groups_size = 4
    return strategy


def _train_and_resume(program: _Program, folder: Path, other: Path | None) -> None:
    saved = f"saved-{program.profile}-{program.case}"
    program.begin()
    program.run(0, STEPS)
    program.keep(folder, "trained")
    fleet.save_persistables(program.executor, str(folder / saved))
    fleet.barrier_worker()
    program.keep(folder, "saved")
    for part, there in (("resumed", folder), ("taken_over", other)):
        if there is not None:
            program.begin()
            fleet.load_persistables(program.executor, str(there / saved))
            program.run(STEPS, MORE_STEPS)
            program.keep(folder, part)


if __name__ == "__main__":
    names, values, *before = sys.argv[1:]
    train(names.split(","), Path(values), Path(before[0]) if before else None)
