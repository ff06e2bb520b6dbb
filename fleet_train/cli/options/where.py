"""Options of the commands that examine a whole cluster: which machines, from which port."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from fleet_train.cli.options.numbers import WholeNumber

Command = TypeVar("Command", bound=Callable[..., object])


def where(ranks: str) -> Callable[[Command], Command]:
    """The fields of `fleet_train.selftest.start.Where`. ``ranks``: the ranks of a machine without --nproc."""
    options = (
        click.option(
            "--nproc",
            "--nproc_per_node",
            type=WholeNumber(),
            metavar="N",
            help=f"Ranks per machine. [default: every GPU, or {ranks}]",
        ),
        click.option("--ips", "--cluster_node_ips", metavar="A,B", help="All machines, the same list on each."),
        click.option("--node_ip", "--host", metavar="A", help="This machine's address in the list, if it has several."),
        click.option(
            "--started_port", "--start_port", type=WholeNumber(), metavar="PORT", help="First port, as for launch."
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
