"""From the command to ranks: started through our launcher, or this process is one, started by any launcher."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fleet_train.cluster.hosts import parse_hosts
from fleet_train.errors import ClusterError, printable
from fleet_train.launch.agent.agent import run
from fleet_train.launch.agent.prepare import prepare
from fleet_train.launch.report.terminal import beside_stdout
from fleet_train.launch.spec.machine import look_around
from fleet_train.launch.spec.request import LaunchRequest
from fleet_train.selftest import record
from fleet_train.selftest.options import GROUPS, Options
from fleet_train.selftest.peers import Peers
from fleet_train.selftest.results import Result, verdict
from fleet_train.selftest.supervisor import Supervisor

_PROCESSES_WITHOUT_GPUS = 2


@dataclass(frozen=True)
class Where:
    """The ranks to start; None: not given."""

    nproc: int | None = None
    ips: str | None = None
    node_ip: str | None = None
    started_port: int | None = None

    @property
    def is_said(self) -> bool:
        return any(value is not None for value in (self.nproc, self.ips, self.node_ip, self.started_port))


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as one of its ranks. PaddleCloud also tells a pod about others."""
    if "PADDLE_LOCAL_RANK" in environ or "PADDLE_RANK_IN_NODE" in environ:
        return True
    return "PADDLE_TRAINER_ENDPOINTS" in environ and "PADDLE_TRAINERS" not in environ


def start(options: Options, where: Where, folder: Path, as_json: bool, outcome: Path | None) -> int:
    """Run the selftest; returns the exit code. ``outcome``: given to ranks that were started from here."""
    if not is_rank(os.environ):
        return launch_ranks(options, where, folder, as_json)
    if where.is_said:
        raise ClusterError(
            "--nproc, --ips, --node_ip and --started_port start ranks, but a launcher has started this process as one: "
            "give them to the launcher"
        )
    return supervise(options, folder, as_json, outcome)


def launch_ranks(options: Options, where: Where, folder: Path, as_json: bool) -> int:
    """This machine's ranks, through our launcher; they write their outcome into a file."""
    outcome = outcome_in(folder)
    return run_ranks(request_of(options, where, folder, outcome), outcome, as_json)


def outcome_in(folder: Path) -> Path:
    """A file of this command only, into which ranks write their outcome."""
    return (folder / "log" / f".outcome-{secrets.token_hex(8)}.json").absolute()


def run_ranks(request: LaunchRequest, outcome: Path, as_json: bool) -> int:
    """Run ``request`` to its end; returns the exit code that its ranks wrote into ``outcome``, or their own.

    ``as_json``: print what they wrote.
    """
    launch = prepare(request, os.environ)
    try:
        with beside_stdout() if as_json else contextlib.nullcontext():
            code = run(launch, os.environ)
        if code or not outcome.exists():
            return code or 1
        made: dict[str, Any] = json.loads(outcome.read_text())
    finally:
        outcome.unlink(missing_ok=True)
    if as_json:
        click.echo(json.dumps(made, indent=1))
    return int(made["exit_code"])


def request_of(options: Options, where: Where, folder: Path, outcome: Path) -> LaunchRequest:
    command = ["fleet_train", "selftest", "--outcome", str(outcome), "--record", str(folder.absolute())]
    command += [word for group in GROUPS if group not in options.groups for word in ("--skip", group)]
    command += ["--quick"] if options.is_quick else []
    return request_for(command, where, folder, options.join_timeout_seconds)


def request_for(command: Sequence[str], where: Where, folder: Path, join_timeout_seconds: float) -> LaunchRequest:
    """This machine's ranks of ``python -m command``: every GPU, or two by default."""
    nproc = where.nproc
    if nproc is None and look_around(os.environ).gpus is None:
        nproc = _PROCESSES_WITHOUT_GPUS
    return LaunchRequest(
        command=tuple(command),
        is_module=True,
        hosts=parse_hosts(where.ips, "--ips") if where.ips is not None else None,
        node_host=where.node_ip,
        started_port=where.started_port,
        processes_per_node=nproc,
        log_dir=folder / "log",
        join_timeout_seconds=join_timeout_seconds,
    )


def supervise(options: Options, folder: Path, as_json: bool, outcome: Path | None) -> int:
    """As one rank: every check; rank 0 prints, and writes the record."""
    began = time.monotonic()
    peers = Peers.join(options.join_timeout_seconds)
    cluster = peers.cluster
    is_first = cluster.rank == 0

    def say(text: str) -> None:
        if is_first:
            click.echo(printable(text), err=as_json)  # of other machines, too

    def found(result: Result) -> None:
        say(result.line)

    supervisor = Supervisor(peers, options, folder, found)
    with supervisor.peers.leaving_together():
        results, machines = supervisor.run()
        seconds = time.monotonic() - began
        made = supervisor.shared(record.make(cluster, options, machines, results, seconds) if is_first else None)
        if is_first:
            path = record.write(folder, made)
            say(verdict(results, seconds))
            say(f"record: {path} (and .md); logs: {folder / 'log'}")
    if outcome is not None:
        if cluster.local_rank == 0:
            outcome.write_text(json.dumps(made))
        return 0  # the selftest has run: the process that started us evaluates the result
    if as_json and is_first:
        click.echo(json.dumps(made, indent=1))
    return int(made["exit_code"])
