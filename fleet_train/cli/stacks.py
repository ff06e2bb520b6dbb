"""``python -m fleet_train stacks``: in which line each rank of a running job stands."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from fleet_train import timeouts
from fleet_train.cli.options import HELP, WholeNumber, WholeNumberRange, folders, seconds
from fleet_train.cluster.cluster import DEFAULT_STARTED_PORT
from fleet_train.errors import ClusterError, printable


@click.command(context_settings=HELP)
@click.option(
    "--log_dir", type=click.Path(path_type=Path), metavar="DIR", help="The job's log folder.", shell_complete=folders
)
@click.option(
    "--ips",
    "--cluster_node_ips",
    metavar="A,B",
    help="The job's machines, as given to launch; the first that answers is asked. HOST:PORT for a store elsewhere.",
)
@click.option(
    "--nproc", "--nproc_per_node", type=WholeNumberRange(1), default=1, show_default=True, help="With --ips: as given."
)
@click.option(
    "--started_port",
    "--start_port",
    type=WholeNumber(),
    default=DEFAULT_STARTED_PORT,
    show_default=True,
    metavar="PORT",
    help="With --ips: as given to launch.",
)
@click.option("--samples", type=WholeNumberRange(1), default=1, show_default=True, help="Look so often.")
@click.option("--every", type=seconds(min=0.05), default=0.5, show_default=True, help="Seconds between two looks.")
@click.option("--native", is_flag=True, help="With C++ frames, on this machine, where py-spy is installed.")
@click.option("--whole", is_flag=True, help="All lines of all threads, not only the script's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    log_dir: Path | None,
    ips: str | None,
    nproc: int,
    started_port: int,
    samples: int,
    every: float,
    native: bool,
    whole: bool,
    as_json: bool,
) -> None:
    """Show in which line of the script each rank of a running job stands, and what it waits for.

    Without --log_dir or --ips: the ranks of this machine that belong to this user. The ranks go on: a look takes them
    a few milliseconds. A rank that cannot answer is told as such: stopped, asleep in the kernel, or in native code that
    keeps Python's lock. Stacks hold files, lines and functions, no values.

    With --samples the lines are counted, for ranks that are slow and do not hang.
    """
    from fleet_train.cluster.stands import merged
    from fleet_train.doctor import stacks

    if log_dir is not None and ips is not None:
        raise click.UsageError("give --log_dir or --ips, not both")
    if log_dir is not None:
        where = stacks.of_log_dir(log_dir)
    elif ips is not None:
        where = stacks.of_nodes([ip.strip() for ip in ips.split(",") if ip.strip()], started_port + nproc)
    else:
        where = None
    looks = []
    for number in range(samples):
        if number:
            time.sleep(every)
        looks.append(stacks.of_this_machine(native) if where is None else [stacks.of_job(*where)])
    jobs = [job for job in looks[-1] if job]
    if not jobs:
        raise ClusterError(_nobody(where is None))
    if as_json:
        click.echo(json.dumps([[[stand.to_json() for stand in job] for job in each] for each in looks]))
        return
    if samples > 1:
        lines = stacks.sampled(job for each in looks for job in each)
    else:
        lines = [
            line
            for job in jobs
            for line in (merged(job), "", *(line for each in job for line in each.lines(whole)), "")
        ]
    click.echo(printable("\n".join(lines).rstrip()))


def _nobody(is_here: bool) -> str:
    if is_here:
        return (
            "no process of this user on this machine is a rank that has imported fleet_train; for another machine's, "
            "give --log_dir or --ips"
        )
    return (
        f"no rank has answered within {timeouts.STACKS_ASK_SECONDS:g} s: the job has ended, or its ranks have not "
        "called fleet.init yet"
    )
