"""A rank under test: ``python -m fleet_train.selftest.subject JOB REPORTS OPTIONS``.

It joins the subjects' cluster through the facade, as any training script does, and reports one JSON object per line.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import paddle

from fleet_train import fleet, role_maker
from fleet_train.collectives.engines import CALC, OWN
from fleet_train.collectives.job import Job
from fleet_train.convert.session import current
from fleet_train.selftest import check_collectives, check_memory, check_profiles, training
from fleet_train.selftest.options import MEMORY_OF, TOGETHER, Result, SelftestOptions

Check = Callable[[Job, SelftestOptions], Iterator[Result]]


CHECKS: dict[str, Check] = {
    "devices": check_collectives.check_devices,
    "collectives": check_collectives.check_collectives,
    "profiles": check_profiles.check,
}


def ladder(folder: Path) -> dict[str, list[Check]]:
    """The checks of each step that is not a fault. ``folder``: of what one step keeps for the next."""
    checks: dict[str, list[Check]] = {
        "devices": [check_collectives.check_devices, check_collectives.check_place],
        "dtypes": [lambda job, _: iter([check_collectives.check_kind(job, "all_reduce sum")])],
    }
    for stream in (CALC, OWN):
        checks[stream] = [partial(check_profiles.check_stream, stream=stream, folder=folder)]
    checks[f"{MEMORY_OF}{OWN}"] = [partial(check_memory.check, stream=OWN)]
    return checks


def examine(job: Job, options: SelftestOptions, reports: Path, checks: Mapping[str, Sequence[Check]]) -> None:
    """Every check, on all ranks; rank 0 writes the results."""
    for name, several in checks.items():
        write_report(reports, begins=name)
        for result in itertools.chain.from_iterable(check(job, options) for check in several):
            if job.cluster.rank == 0:
                write_report(reports, result=result.to_json())
    write_report(reports, begins="")


def write_report(path: Path, **report: Any) -> None:
    """For the supervisor, which reads the file meanwhile."""
    with path.open("a") as file:
        file.write(json.dumps(report) + "\n")


def main(name: str, reports_path: str, options_text: str) -> None:
    options, reports = SelftestOptions.from_json(json.loads(options_text)), Path(reports_path)
    if options.ladder:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    job = current().job
    steps = ladder(reports.parent)
    if name == TOGETHER:
        examine(job, options, reports, {group: [check] for group, check in CHECKS.items() if group in options.groups})
    elif name in steps:
        examine(job, options, reports, {name: steps[name]})
    else:
        saved = reports.with_suffix(".saved")
        training.train_and_fail(name, job, options, lambda: write_report(reports, fault=name), saved)
    fleet.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
