"""Run as several ranks: rank 1 differs from the others in one respect after another. Reports each rank's error."""

from __future__ import annotations

from typing import Any

import paddle

from fleet_train import fleet, role_maker
from fleet_train.errors import ScheduleMismatch
from fleet_train.profile import Profile
from tests.support.worker import report

LOCAL = {"use_local_sgd": True, "local_sgd_momentum": "average"}


def convert(
    settings: dict[str, Any] | None = None, dtype: str = "float32", channels: int = 0, make: Any = paddle.optimizer.SGD
) -> None:
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        hidden = paddle.static.nn.fc(paddle.static.data("x", [None, 4], dtype), 8)
        if channels:
            hidden = paddle.nn.BatchNorm1D(8, use_global_stats=channels > 1)(hidden)
        fleet.distributed_optimizer(make(0.1), Profile(**settings or {})).minimize(hidden.mean())


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    differs = fleet.worker_index() == 1
    cases: dict[str, Any] = {
        "same": lambda: convert(),
        "dtype": lambda: convert(dtype="float64" if differs else "float32"),
        "knob outside the plan": lambda: convert({"divergence_check_steps": 50 if differs else 100}),
        "variable": lambda: convert({"environment": {"NCCL_DEBUG": "INFO" if differs else "secret"}}),
        "variable on one rank": lambda: convert({"environment": {"NCCL_DEBUG": "INFO"} if differs else {}}),
        "optimizer's state": lambda: convert(
            LOCAL, make=paddle.optimizer.Adam if differs else paddle.optimizer.Momentum
        ),
        "batch norm": lambda: convert({"sync_batch_norm": True}, channels=2 if differs else 1),
        "steps per epoch": lambda: fleet.agree("steps per epoch", 100 + fleet.worker_index()),
        "agreed": lambda: fleet.agree("steps per epoch", 100),
    }
    told = {}
    for name, case in cases.items():
        try:
            case()
            told[name] = ""
        except ScheduleMismatch as error:
            told[name] = str(error)
    report(fleet.worker_index(), told=told)


if __name__ == "__main__":
    main()
