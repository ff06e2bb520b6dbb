"""``fleet_train stacks``: in which line each rank of a running job stands."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet_train.cli.on_hosts import OF_HOSTS, on_hosts
from fleet_train.cli.options import HELP, WholeNumberRange, of_a_job, seconds
from fleet_train.errors import printable

if TYPE_CHECKING:
    from fleet_train.doctor.visit import Visited
    from fleet_train.hosts.job import Where

_EPILOG = """\b
Examples:
  fleet_train stacks
  fleet_train stacks --log_dir mylog
  fleet_train stacks --ips 192.168.1.2,192.168.1.3 --nproc 2
  fleet_train stacks --hosts pc1,pc2,pc3
  fleet_train stacks --samples 20
"""


def _on_hosts(context: click.Context, where: Where, **flags: Any) -> int:
    from fleet_train.hosts.visit import visit_hosts

    del context
    with visit_hosts(where, os.environ) as visited:
        show(visited, **{name: value for name, value in flags.items() if name not in OF_HOSTS})
    return 0


@click.command(epilog=_EPILOG, context_settings=HELP)
@on_hosts(_on_hosts, OF_HOSTS)
@of_a_job
@click.option("--samples", type=WholeNumberRange(1), default=1, show_default=True, help="Look so often.")
@click.option("--every", type=seconds(min=0.05), default=0.5, show_default=True, help="Seconds between two looks.")
@click.option("--native", is_flag=True, help="With C++ frames, by py-spy, on this machine.")
@click.option("--whole", is_flag=True, help="All lines of all threads, not only the script's.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of looks, each a list of jobs with their ranks.")
def command(
    log_dir: Path | None,
    ips: str | None,
    port: int,
    samples: int,
    every: float,
    native: bool,
    whole: bool,
    as_json: bool,
) -> None:
    """Show in which line of the script each rank of a running job stands, and what it waits for.

    Without --log_dir or --ips: the ranks of this machine that belong to this user. The ranks go on: a look takes them
    a few milliseconds. A rank that cannot answer is told as such: stopped, asleep in the kernel, without a processor,
    or in native code that keeps Python's lock. Stacks hold files, lines and functions, no values.

    With --samples the lines are counted, for ranks that are slow and do not hang.
    """
    if native and (log_dir is not None or ips is not None):
        raise click.UsageError("--native looks at this machine's processes: leave out --log_dir and --ips")
    if native and shutil.which("py-spy") is None:
        raise click.UsageError("--native needs py-spy, which is not installed: python -m pip install py-spy")
    from fleet_train.doctor.visit import visit

    show(visit(log_dir, ips, port), samples, every, native, whole, as_json)


def show(where: Visited, samples: int, every: float, native: bool, whole: bool, as_json: bool) -> None:
    """The looks that were asked for."""
    from fleet_train.cluster.flight.stands import merged
    from fleet_train.doctor.visit import sampled

    looks = []
    for number in range(samples):
        if number:
            time.sleep(every)
        looks.append([job for job in where.stands(native=native) if job])
    if not looks[-1]:
        raise where.nobody()
    if as_json:
        click.echo(json.dumps([[[stand.to_json() for stand in job] for job in look] for look in looks]))
        return
    lines = []
    if samples > 1:
        lines = sampled(job for look in looks for job in look)
    else:
        for job in looks[-1]:
            lines += [merged(job), "", *(line for stand in job for line in stand.lines(whole)), ""]
    click.echo(printable("\n".join(lines).rstrip()))
