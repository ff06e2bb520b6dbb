"""A rank under test: ``python -m fleet_train.selftest.subject JOB REPORTS OPTIONS``.

It joins the subjects' cluster through the facade, as any training script does, and reports one JSON object per line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle

from fleet_train import fleet, role_maker
from fleet_train.collectives.job import Job
from fleet_train.convert.session import current
from fleet_train.selftest import check_collectives, check_overlap, check_profiles, training
from fleet_train.selftest.options import TOGETHER, Options, Result

Check = Callable[[Job, Options], Iterator[Result]]


CHECKS: dict[str, Check] = {
    "devices": check_collectives.check_devices,
    "collectives": check_collectives.check_collectives,
    "profiles": check_profiles.check,
    "overlap": check_overlap.check,
}


def examine(job: Job, options: Options, reports: Path) -> None:
    """Every requested check, on all ranks; rank 0 writes the results."""
    for group, check in CHECKS.items():
        if group not in options.groups:
            continue
        write_report(reports, begins=group)
        for result in check(job, options):
            if job.cluster.rank == 0:
                write_report(reports, result=result.to_json())
    write_report(reports, begins="")


def write_report(path: Path, **report: Any) -> None:
    """For the supervisor, which reads the file meanwhile."""
    with path.open("a") as file:
        file.write(json.dumps(report) + "\n")


def main(name: str, reports_path: str, options_text: str) -> None:
    options, reports = Options.from_json(json.loads(options_text)), Path(reports_path)
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    job = current().job
    if name == TOGETHER:
        examine(job, options, reports)
    else:
        training.train_and_fail(name, job, options, lambda: write_report(reports, fault=name))
    fleet.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
