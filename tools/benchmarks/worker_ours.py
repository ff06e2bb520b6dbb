"""A rank of fleet_train: a static program and the changed lines. argv: assignment, and the rank when it runs alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.cluster import Cluster
from fleet_train.plan.pricing import traffic
from tools.benchmarks.loop import Assignment, run
from tools.benchmarks.paddle_network import network, start_feed
from tools.benchmarks.task import Weights


class OurTrainee:
    def __init__(self, assignment: Assignment) -> None:
        task = assignment.task
        features = paddle.static.data("features", [None, *task.sample_shape], "float32")
        labels = paddle.static.data("labels", [None], "int64")
        self._cluster = Cluster.imagined(assignment.node_num, assignment.ranks_per_node)
        self._network = network(task)
        self._loss = paddle.nn.functional.cross_entropy(self._network(features), labels)
        optimizer = paddle.optimizer.Momentum(task.learning_rate, task.momentum)
        # The profile is the launcher's --strategy.
        fleet.distributed_optimizer(optimizer).minimize(self._loss)
        self._executor = paddle.static.Executor(fleet.place())
        self._executor.run(fleet.startup_program, feed=start_feed(task, fleet.startup_program))

    def step(self, features: Any, labels: Any) -> float:
        feed = {"features": features, "labels": labels}
        (loss,) = self._executor.run(fleet.main_program, feed=feed, fetch_list=[self._loss])
        return float(loss.item())

    def weights(self) -> Weights:
        scope = paddle.static.global_scope()
        names = [parameter.name for parameter in self._network.parameters()]
        return [np.array(scope.find_var(name).get_tensor()) for name in names]

    def facts(self) -> dict[str, Any]:
        plan = fleet.plan()
        profile = fleet.profile()
        facts = {
            "paddle": paddle.__version__,
            "profile": profile.model_dump(mode="json", include=set(profile.explicit)),
            **rhythm(profile.model_dump(mode="json")),
        }
        if plan is None:
            return facts
        return facts | {
            "predicted_bytes_per_step": plan.sent_bytes_per_step,
            "predicted_link_bytes_per_step": fmean(traffic(plan, self._cluster).leaving),
            "collectives_per_step": plan.collectives_per_step,
            "gradient_bytes": plan.gradient_bytes,
            "gradients": [[g.name, g.shape, g.dtype] for bucket in plan.buckets for g in bucket.gradients],
        }


def rhythm(profile: Mapping[str, Any]) -> dict[str, int]:
    """Warm-up steps of a profile, and the period with which its steps repeat after them."""
    if profile["use_local_sgd"]:
        is_constant = profile["local_sgd_schedule"] == "constant"
        return {
            "settles_after": profile["local_sgd_is_warm_steps"],
            "period_steps": profile["local_sgd_steps"] if is_constant else profile["local_sgd_max_steps"],
        }
    settles = {"powersgd": profile["powersgd_start_step"]}
    settles["dgc"] = profile["dgc_rampup_begin_step"] + profile["dgc_rampup_steps"]
    return {"settles_after": settles.get(profile["compression"], 0), "period_steps": profile["accumulate_steps"]}


def main() -> None:
    assignment = Assignment.read(Path(sys.argv[1]))
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    rank = int(sys.argv[2]) if len(sys.argv) > 2 else fleet.worker_index()
    run(OurTrainee(assignment), assignment, rank)


if __name__ == "__main__":
    main()
