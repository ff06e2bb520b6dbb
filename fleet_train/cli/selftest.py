"""``fleet_train selftest``: does this cluster do what training will need?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fleet_train.cli.on_hosts import examine_on_hosts, on_hosts
from fleet_train.cli.options import HELP, recorded, where
from fleet_train.selftest.options import DEFAULT_FOLDER, GROUPS, chosen

_SCRIPT = Path(__file__).resolve().parents[1] / "__main__.py"
_WHAT = "\n".join(f"  {name:<12}{what}" for name, what in GROUPS.items())
_EPILOG = f"""\b
Checks, in this order:
{_WHAT}

\b
Examples:
  fleet_train selftest
  fleet_train selftest --nproc 4 --skip faults
  fleet_train selftest --ips 10.0.0.1,10.0.0.2     (the same line on both machines)
  fleet_train selftest --only faults --json
  fleet_train selftest --ladder                    (the first hour on GPUs)

\b
As the program of a launcher, one process per rank:
  fleet_train launch --ips 10.0.0.1,10.0.0.2 --nproc_per_node 8 -m fleet_train selftest
  python -m paddle.distributed.launch --master 10.0.0.1:6070 --nnodes 2 --nproc_per_node 8 \\
      {_SCRIPT} selftest

\b
Exit codes:
  0        no check failed
  1        a check failed, or all were left out; the last line says which
  2 to 6   flags, Paddle, addresses or ports, a machine that did not connect
  8, 11    machines were started differently; a machine or a supervisor was lost
"""


class _Check(click.Choice):  # type: ignore[type-arg]
    """A check by its name; one that is no more is refused with what to use."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "overlap":
            self.fail("overlap is no check: launch --trace STEPS and timeline show what a step waits for", param, ctx)
        return super().convert(value, param, ctx)


@click.command(epilog=_EPILOG, context_settings=HELP)
@on_hosts(examine_on_hosts("selftest", "the record"))
@where("2")
@click.option("--only", multiple=True, type=_Check(list(GROUPS)), help="Run these checks; may be repeated.")
@click.option("--skip", multiple=True, type=_Check(list(GROUPS)), help="Skip these checks; may be repeated.")
@click.option("--quick", is_flag=True, help="20 steps per profile instead of 50.")
@click.option(
    "--ladder",
    is_flag=True,
    help="Steps from the cheapest on instead, which end at the first failure and say what to do about it: for GPUs "
    "that have not trained with this package yet.",
)
@recorded(
    DEFAULT_FOLDER,
    "Folder of the record and logs.",
    "Print the record on stdout, and the lines on stderr. (launch merges the two: read the record's file.)",
)
def command(
    only: tuple[str, ...], skip: tuple[str, ...], quick: bool, ladder: bool, record: Path, as_json: bool,
    outcome: Path | None, **machines: Any,
) -> None:  # fmt: skip
    """Check a new cluster before it trains: one line per check, a verdict, a record. About two minutes.

    Each rank is a supervisor that starts the processes under test, so that one of them can be stopped or killed.
    Rank 0 prints. The record contains no addresses, names or paths, so it can be attached to a report.
    """
    from fleet_train.launch.on_ranks import Where
    from fleet_train.selftest.ladder import Ladder
    from fleet_train.selftest.supervisor import SelftestSupervisor, start

    if ladder and (only or skip):
        raise click.UsageError("--ladder has steps of its own, all in one order: leave out --only and --skip")
    make = Ladder if ladder else SelftestSupervisor
    sys.exit(start(chosen(only, skip, quick, ladder), Where(**machines), record, as_json, outcome, make))
