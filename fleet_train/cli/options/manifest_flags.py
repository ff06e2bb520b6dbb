"""Flags of ``manifest`` that several engines share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fleet_train.cli.options.numbers import WholeNumberRange

Command = TypeVar("Command", bound=Callable[..., Any])


def of_training(bound: str | None, bound_help: str = "", default: int = 0) -> Callable[[Command], Command]:
    """The flags of every engine about the training. ``bound``: the flag that limits the engine's restarts."""
    starts_again = click.option(
        str(bound), type=WholeNumberRange(0, 10_000), default=default, show_default=True, metavar="N", help=bound_help
    )
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--nodes", type=WholeNumberRange(1, 100_000), required=True, metavar="N", help="Machines, or pods."
        ),
        click.option("--name", metavar="NAME", help="Name of the job. [default: made from the script's]"),
        click.option(
            "--processes", type=WholeNumberRange(1), metavar="N", help="Ranks per node. [default: --gpus, or 1]"
        ),
        click.option("--strategy", metavar="NAME|FILE", help="Profile, as for launch."),
        click.option("--python", default="python", show_default=True, metavar="PATH", help="The interpreter there."),
        click.option(
            "--max_restarts",
            type=WholeNumberRange(0),
            default=3,
            show_default=True,
            metavar="N",
            help="How often the launchers restart the ranks before they report a failure to the engine.",
        ),
        *([starts_again] if bound else []),
        click.option(
            "--join_timeout",
            type=WholeNumberRange(1, 1_000_000),
            default=900,
            show_default=True,
            metavar="SECONDS",
            help="How long a node waits for the others.",
        ),
        click.option("--launch_flags", default="", metavar="TEXT", help="More flags of launch: '--min_nodes=3'"),
        click.option("--output", type=Path, metavar="FILE", help="Write there instead of to standard output."),
        click.option("--force", is_flag=True, help="Overwrite FILE."),
        click.option("-m", "is_module", is_flag=True, help="Run a module instead of a script, as python -m does."),
        click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGS]..."),
    ]
    return _all_of(options)


def _all_of(options: list[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


of_ending = click.option(
    "--grace_seconds",
    type=WholeNumberRange(0, 1_000_000),
    metavar="SECONDS",
    help="After SIGTERM, how long ranks may take to save their state. [default: 60 for Slurm, else 30]",
)
of_pods = _all_of(
    [
        click.option(
            "--image", required=True, metavar="IMAGE", help="With Python, Paddle, fleet_train and the script."
        ),
        click.option("--namespace", metavar="NAME", help="[default: kubectl's own]"),
        click.option("--cpu", metavar="N", help="Processors of a pod: 8, 500m."),
        click.option("--memory", metavar="SIZE", help="Memory of a pod: 64Gi."),
        click.option("--gpus", type=WholeNumberRange(0, 1000), default=0, metavar="N", help="GPUs of a pod."),
        click.option("--gpu_resource", default="nvidia.com/gpu", show_default=True, metavar="NAME"),
        click.option(
            "--shm", default="1Gi", show_default=True, metavar="SIZE", help="Size of /dev/shm; 0: not mounted."
        ),
        click.option("--volume", "volumes", multiple=True, metavar="CLAIM:/PATH[:ro]", help="A PersistentVolumeClaim."),
        click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Used as given."),
        click.option("--workdir", metavar="/PATH", help="Where the script starts. [default: the image's]"),
    ]
)
of_port = click.option(
    "--port", type=WholeNumberRange(1, 65_000), default=6170, show_default=True, help="First port of a pod."
)
