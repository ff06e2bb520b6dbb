"""From the command to the verdict."""

from __future__ import annotations

import json
import time

import click

from fleet_train.doctor import report
from fleet_train.doctor.examine import Examiner
from fleet_train.doctor.facts import Examination
from fleet_train.doctor.judge.everything import judge
from fleet_train.doctor.judge.finding import PASS, Finding, exit_code, verdict
from fleet_train.doctor.options import Options
from fleet_train.doctor.participants import Participants, find
from fleet_train.errors import printable
from fleet_train.launch.workers.signals import StopRequested, request_name, stopping_signals
from fleet_train.selftest.start import Where


def start(options: Options, where: Where, as_json: bool) -> int:
    """Examine; returns the exit code. Raises FleetTrainError for flags that describe no cluster."""
    began = time.monotonic()
    participants = find(where, options.join_timeout_seconds)
    if participants is None:
        return 0  # the first process of this node does it
    examiner = Examiner(participants, options, lambda text: _echo(f"fleet_train: {text}", err=True))
    try:
        with stopping_signals():  # so that files are also deleted on SIGTERM
            examined = examiner.run()
    except StopRequested as stop:
        click.echo(f"fleet_train: stopped by {request_name(stop.number)}; there is no result", err=True)
        return 128 + stop.number
    findings = judge(examined, options.groups)
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(report.as_json(examined, findings, seconds), indent=1))
    for line in _shown(participants, examined, findings, seconds):
        _echo(line, err=as_json)
    return exit_code(findings)


def _echo(line: str, err: bool) -> None:
    """Facts and names come from other machines: they cannot control this terminal."""
    click.echo(printable(line), err=err)


def _shown(participants: Participants, examined: Examination, findings: list[Finding], seconds: float) -> list[str]:
    """The lowest present node prints everything, the others their own findings."""
    own = examined.host(participants.index)
    if participants.index == min(examined.reports, default=participants.index):
        table = report.matrix(examined)
        return [*report.lines(findings), *([""] if table else []), *table, "", verdict(findings, seconds)]
    mine = [one.line for one in findings if one.level != PASS and own in one.hosts]
    where = f"the whole report is on {examined.host(min(examined.reports))}"
    return [*mine, f"{verdict(findings, seconds)}; {where}"]
