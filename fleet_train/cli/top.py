"""``fleet_train top``: what the ranks of a job do right now."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet_train.cli.on_hosts import OF_HOSTS, on_hosts
from fleet_train.cli.options import HELP, of_a_job, seconds
from fleet_train.errors import printable

if TYPE_CHECKING:
    from fleet_train.cluster.flight.rows import Row
    from fleet_train.doctor.visit import Visited
    from fleet_train.hosts.job import Where

_TOP_REFRESH_SECONDS = 1.0
"""Default of ``top``'s ``--interval`` between two tables."""

_EPILOG = """\b
Examples:
  fleet_train top
  fleet_train top --log_dir mylog --once
  fleet_train top --hosts pc1,pc2,pc3
  watch -n 5 'fleet_train top --json | jq .[].step_ms'

\b
Exit codes:
  0        ranks were shown, or Ctrl-C
  1        no rank of this user runs here, or none answers
"""


def _on_hosts(context: click.Context, where: Where, **flags: Any) -> int:
    from fleet_train.hosts.visit import visit_hosts
    from fleet_train.launch.processes import StopRequested, stopping_signals

    del context
    with suppress(StopRequested), stopping_signals(), visit_hosts(where, os.environ) as visited:
        show(visited, **{name: value for name, value in flags.items() if name not in OF_HOSTS})
    return 0


@click.command(epilog=_EPILOG, context_settings=HELP)
@on_hosts(_on_hosts, OF_HOSTS)
@of_a_job
@click.option(
    "--interval",
    type=seconds(min=0.1),
    default=_TOP_REFRESH_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="Look once, as without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Look once; print a list with an object for each rank.")
def command(log_dir: Path | None, ips: str | None, port: int, interval: float, once: bool, as_json: bool) -> None:
    """Show the ranks of a job while they train: step, times, memory, state; until Ctrl-C.

    Without --log_dir or --ips: all ranks of this machine that belong to this user. What each rank has recorded is
    read, and /proc. The ranks are not asked for anything, and do not notice.
    """
    from fleet_train.doctor.visit import visit
    from fleet_train.launch.processes import StopRequested, stopping_signals

    with suppress(StopRequested), stopping_signals():
        show(visit(log_dir, ips, port), interval, once, as_json)


def show(where: Visited, interval: float, once: bool, as_json: bool) -> None:
    """The table, again and again."""
    rows = where.rows()
    if not rows:
        raise where.nobody()
    if as_json:
        click.echo(json.dumps([row.to_json() for row in rows], indent=1))
        return
    while not once and sys.stdout.isatty():
        click.clear()
        click.echo("\n".join(lines(rows)) if rows else "no rank runs any more")
        time.sleep(interval)
        rows = where.rows()
    click.echo("\n".join(lines(rows)))


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """A heading and a table for each job."""
    from fleet_train.cluster.flight.rows import UPDATES

    for job, group in groupby(rows, key=lambda row: row.job):
        ranks = list(group)
        yield f"job {job}: {len(ranks)} of {ranks[0].ranks} ranks" if job else "have not joined a job yet:"
        yield _line("rank", "step", "step time", "exposed", "loader", "memory", "state")
        for row in ranks:
            times = (f"{ms:.1f} ms" if ms is not None else "-" for ms in (row.step_ms, row.exposed_ms, row.loader_ms))
            state = "; ".join([row.state, *["slowest"] * row.is_slowest, *["others wait for it"] * row.is_waited_for])
            yield _line(str(row.rank), str(row.step), *times, f"{row.memory_bytes / 1e6:,.0f} MB", printable(state))
        yield ""
    yield (
        f"step time, exposed (it waits for buckets): median of the last {UPDATES} updates; loader: mean, since "
        "it may deliver in bursts; memory: of the process on the host, without a GPU's"
    )


def _line(rank: str, step: str, *cells: str) -> str:
    *numbers, state = cells
    return f"{rank:>6} {step:>9} {' '.join(f'{cell:>12}' for cell in numbers)}  {state}"
