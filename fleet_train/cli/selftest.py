"""``python -m fleet_train selftest``: does this cluster do what training will need?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fleet_train.selftest.options import DEFAULT_FOLDER, GROUPS, QUICK, Options, chosen

_EPILOG = """\b
Examples:
  python -m fleet_train selftest                          this machine: every GPU, or 2 processes on a CPU build
  python -m fleet_train selftest --nproc 4
  python -m fleet_train selftest --ips 10.0.0.1,10.0.0.2  the same line on both machines
  python -m fleet_train selftest --only faults --json

\b
Under another launcher, one process per rank:
  python -m fleet_train launch --ips 10.0.0.1,10.0.0.2 -m fleet_train selftest
"""


@click.command(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--nproc", "--nproc_per_node", type=int, metavar="N", help="Ranks per machine. [default: every GPU, or 2]"
)
@click.option("--ips", "--cluster_node_ips", metavar="A,B", help="All machines, the same list on each.")
@click.option("--node_ip", "--host", metavar="A", help="This machine's address of the list, where it has several.")
@click.option("--started_port", type=int, metavar="PORT", help="First port, as of launch.")
@click.option("--only", multiple=True, type=click.Choice(list(GROUPS)), help="Do these checks; may be repeated.")
@click.option("--skip", multiple=True, type=click.Choice(list(GROUPS)), help="Leave these out; may be repeated.")
@click.option("--quick", is_flag=True, help="Fewer steps and repeats.")
@click.option("--record", type=Path, default=DEFAULT_FOLDER, show_default=True, metavar="DIR", help="Record and logs.")
@click.option("--json", "as_json", is_flag=True, help="Print the record on stdout, and the lines on stderr.")
@click.option("--outcome", type=Path, hidden=True, help="Where a rank that was started by us writes how it went.")
def command(only: tuple[str, ...], skip: tuple[str, ...], quick: bool, **flags: Any) -> None:
    """Check a cluster: devices, collectives, every profile, overlap, faults. About two minutes."""
    import sys

    options = Options(chosen(only, skip), **(QUICK if quick else {}))
    from fleet_train.selftest.start import start

    sys.exit(start(options, **flags))
