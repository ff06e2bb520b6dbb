"""From the command to ranks: started by us through our launcher, or by a launcher that has started this process."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import click

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.correction import launch_environment, parent_command
from fleet_train.cluster.environment import DEFAULT_STARTED_PORT, cluster_from_environ
from fleet_train.cluster.hosts import parse_hosts
from fleet_train.errors import ClusterError
from fleet_train.launch.machine import look_around
from fleet_train.launch.prepare import prepare
from fleet_train.launch.request import LaunchRequest
from fleet_train.launch.run import run
from fleet_train.selftest.options import Options
from fleet_train.selftest.results import Result, exit_code, verdict

_DEFAULT_PROCESSES = 2


def start(
    options: Options,
    *,
    nproc: int | None,
    ips: str | None,
    node_ip: str | None,
    started_port: int | None,
    record: Path,
    as_json: bool,
    outcome: Path | None,
) -> int:
    """Carry the selftest out; returns the exit code."""
    if "PADDLE_TRAINER_ENDPOINTS" in os.environ or outcome is not None:
        if nproc is not None or ips is not None:
            raise ClusterError("--nproc and --ips start ranks, and this process was started as one by a launcher")
        return supervise(options, record, as_json, outcome)
    return launch(options, nproc, ips, node_ip, started_port, record, as_json)


def launch(
    options: Options,
    nproc: int | None,
    ips: str | None,
    node_ip: str | None,
    started_port: int | None,
    record: Path,
    as_json: bool,
) -> int:
    with tempfile.TemporaryDirectory(prefix="fleet_train-selftest-") as private:
        told = Path(private) / "outcome.json"
        program = ["fleet_train", "selftest", "--outcome", str(told), "--record", str(record.absolute())]
        program += [word for group in options.groups for word in ("--only", group)]
        if options.steps != Options.steps:
            program.append("--quick")
        if nproc is None and not look_around(os.environ).gpus:
            nproc = _DEFAULT_PROCESSES
        request = LaunchRequest(
            command=tuple(program),
            is_module=True,
            hosts=parse_hosts(ips) if ips else None,
            node_host=node_ip,
            started_port=started_port or DEFAULT_STARTED_PORT,
            processes_per_node=nproc,
            log_dir=record / "log",
        )
        code = run(prepare(request, os.environ), os.environ)
        if not told.exists():
            return code or 1
        result = json.loads(told.read_text())
        if as_json:
            print(json.dumps(result, indent=1))
        return int(result["exit_code"])


def supervise(options: Options, folder: Path, as_json: bool, outcome: Path | None) -> int:
    import time

    from fleet_train.selftest.supervisor import Supervisor

    cluster: Cluster = cluster_from_environ(launch_environment(), parent_command())
    began = time.monotonic()

    def say(result: Result) -> None:
        click.echo(result.line, err=as_json)

    results = Supervisor(cluster, options, folder, say).run()
    code = exit_code(results)
    if cluster.rank == 0:
        click.echo(verdict(results, time.monotonic() - began), err=as_json)
    if outcome is not None and cluster.local_rank == 0:
        outcome.write_text(json.dumps({"exit_code": code, "results": [r.to_json() for r in results]}))
        return 0
    return code if outcome is None else 0


if __name__ == "__main__":
    sys.exit(0)
