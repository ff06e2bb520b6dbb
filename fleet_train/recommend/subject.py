"""A rank of a trial: ``python -m fleet_train.recommend.subject JOB REPORTS TASK``, started by a supervisor."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import paddle

from fleet_train import fleet
from fleet_train.collectives.job.link_probe import probe
from fleet_train.convert.session import current
from fleet_train.profile import Profile
from fleet_train.recommend.calibrate import calibrate
from fleet_train.recommend.candidates import network_of
from fleet_train.recommend.trial import Again, Steps, memory_bytes, run_script
from fleet_train.selftest.subjects.subject import Reports

COMPUTING = "computing"


def main(job: str, reports_path: str, task_text: str) -> None:
    task: dict[str, Any] = json.loads(task_text)
    reports = Reports(Path(reports_path))

    def tried(steps: list[float], _: Again) -> None:
        told = fleet.communication()
        reports.write(steps=steps, exposed_ms=told.exposed_ms, bytes_sent=told.bytes_sent, memory=memory_bytes())

    def computed(steps: list[float], again: Again) -> None:
        plan = fleet.plan()
        assert plan is not None
        found = probe(current().job, float(task["measure_seconds"]), lambda _: None)
        links = {where: asdict(measured) for where, measured in found.items()}
        network = network_of(links)
        gradients = [gradient for bucket in plan.buckets for gradient in bucket.gradients]
        costs, further_steps = calibrate(current().job, gradients, network, again)
        reports.write(
            steps=steps + further_steps,
            plan=plan.to_json(),
            links=links,
            costs=asdict(costs),
            memory=memory_bytes(),
            is_gloo=isinstance(fleet.place(), paddle.CPUPlace),
        )

    steps = Steps(
        int(task["steps"]), float(task["longest_seconds"]), job != COMPUTING, computed if job == COMPUTING else tried
    )
    reports.write(begins=job)
    run_script(Path(task["script"]), tuple(task["arguments"]), Profile(**task["profile"]), steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
