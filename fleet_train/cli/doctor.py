"""``fleet_train doctor``: what is wrong with these machines, or with the network between them?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fleet_train import timeouts
from fleet_train.cli.on_hosts import examine_on_hosts, on_hosts
from fleet_train.cli.options import HELP, NumberRange, WholeNumberRange, folders, where
from fleet_train.doctor.facts import GROUPS, DoctorOptions, chosen

_WHAT = "\n".join(f"  {name:<10}{what}" for name, what in GROUPS.items())
_EPILOG = f"""\b
What is examined, in this order:
{_WHAT}

\b
Examples:
  fleet_train doctor
  fleet_train doctor --ips 10.0.0.1,10.0.0.2     (the same line on both machines)
  fleet_train doctor --ips 10.0.0.1,10.0.0.2 --strategy multi_node --script train.py
  fleet_train doctor --skip group --json
  fleet_train doctor --only data --data ./ImageNet --needs 1200

\b
Under a launcher or an engine (Slurm, MPI, Kubernetes), on its nodes:
  fleet_train launch --ips 10.0.0.1,10.0.0.2 -m fleet_train doctor
  srun --ntasks-per-node=1 fleet_train doctor

\b
Each line shows PASS, WARN (suspicious) or FAIL; the check; the host, or the source and destination hosts; the
measured value; the threshold; what fixes it. docs/doctor.md explains each check.

\b
Exit codes:
  0        no FAIL
  1        a FAIL; the last line lists the first ones
  2, 5     flags, addresses: nothing was examined
  6        a machine did not connect; the others were examined
"""


@click.command(epilog=_EPILOG, context_settings=HELP)
@on_hosts(examine_on_hosts("doctor"))
@where("1")
@click.option("--only", multiple=True, type=click.Choice(list(GROUPS)), help="Examine this; may be repeated.")
@click.option("--skip", multiple=True, type=click.Choice(list(GROUPS)), help="Leave this out; may be repeated.")
@click.option("--strategy", metavar="NAME|FILE", help="Profile of the job: is it the same everywhere?")
@click.option("--script", metavar="FILE", help="Training script of the job: is it the same everywhere?")
@click.option("--log_dir", type=Path, default=Path("log"), show_default=True, metavar="DIR", help="The job's logs.")
@click.option("--output", type=Path, default=Path("runs"), show_default=True, metavar="DIR", help="The job's output.")
@click.option("--data", metavar="DIR", help="Image folder of the training: is it read fast?", shell_complete=folders)
@click.option(
    "--needs",
    type=NumberRange(min=0, min_open=True),
    metavar="N",
    help="Samples per second that training uses up on this machine, all its ranks together.",
)
@click.option("--image_size", type=WholeNumberRange(1), default=224, show_default=True, help="As in training.")
@click.option(
    "--workers", type=WholeNumberRange(1), help="Worker processes on this machine. Default: its cores, at most 8."
)
@click.option(
    "--join_timeout",
    type=NumberRange(1, timeouts.DOCTOR_MOST_JOIN_SECONDS),
    default=timeouts.DOCTOR_JOIN_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the other machines; the examination then takes at most 40 s, 80 s with --data.",
)
@click.option("--verbose", is_flag=True, help="Also print what was measured by each check that was passed.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON on stdout, and the lines on stderr.")
def command(
    only: tuple[str, ...], skip: tuple[str, ...], strategy: str | None, script: str | None, log_dir: Path, output: Path,
    data: str | None, needs: float | None, image_size: int, workers: int | None, join_timeout: float,
    verbose: bool, as_json: bool, **machines: Any,
) -> None:  # fmt: skip
    """Diagnose this machine, or several and the network between them, in less than a minute.

    Nothing is started, changed or sent to third parties. A temporary file is written and deleted, and the job's ports
    are listened on meanwhile, on this machine's own address, for the listed machines only.
    """
    from fleet_train.doctor.examine import start
    from fleet_train.launch.on_ranks import Where

    if data is None and (needs is not None or "data" in only):
        raise click.UsageError("--needs and --only data are about a folder of data: give --data")
    of_data = () if data is None else (data, f"{needs or 0:g}", f"{image_size}", f"{workers or 0}")
    options = DoctorOptions(chosen(only, skip), join_timeout, strategy, script, log_dir, output, of_data, verbose)
    sys.exit(start(options, Where(**machines), as_json))
