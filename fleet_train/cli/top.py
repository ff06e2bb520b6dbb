"""``python -m fleet_train top``: what the ranks of this machine do right now."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict

import click

from fleet_train import timeouts
from fleet_train.cli.options import HELP, seconds
from fleet_train.errors import FleetTrainError

_EPILOG = """\b
Examples:
  python -m fleet_train top
  python -m fleet_train top --once
  watch -n 5 'python -m fleet_train top --json | jq .[].step_ms'

\b
Exit codes:
  0        ranks were shown, or Ctrl-C
  1        no rank of this user runs here
"""


@click.command(epilog=_EPILOG, context_settings=HELP)
@click.option(
    "--interval",
    type=seconds(min=0.1),
    default=timeouts.TOP_REFRESH_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="Look once, as without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Look once; print a list with an object for each rank.")
def command(interval: float, once: bool, as_json: bool) -> None:
    """Show the ranks of this machine while they train: step, times, memory, state; until Ctrl-C.

    Reads what each rank has recorded, and /proc. The ranks are not asked for anything, and do not notice.
    """
    from fleet_train.doctor.top import Ranks, lines
    from fleet_train.launch.processes import StopRequested, stopping_signals

    with suppress(StopRequested), stopping_signals():
        ranks = Ranks()
        rows = ranks.rows()
        if not rows:
            raise FleetTrainError(
                "no rank runs on this machine that this user may look at: ranks appear once their script has imported "
                "fleet_train; run this as the user, and in the container, of the job"
            )
        if as_json:
            click.echo(json.dumps([asdict(row) for row in rows], indent=1))
            return
        while not once and sys.stdout.isatty():
            click.clear()
            click.echo("\n".join(lines(rows)) if rows else "no rank runs any more")
            time.sleep(interval)
            rows = ranks.rows()
        click.echo("\n".join(lines(rows)))
