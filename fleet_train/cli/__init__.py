"""The command line: parse, call a layer, turn errors into one line and one exit code.

Each command is a module of this package, named after it, with a click command called ``command``.
It is imported only when it is used: ``launch --help`` must not import Paddle.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from fleet_train.errors import FleetTrainError
from fleet_train.lazy import is_a_part

COMMANDS = {
    "launch": "Start this node's ranks of a job over a list of node IPs.",
    "train": "Train a built-in model with the reference trainer.",
    "doctor": "Diagnose one machine, its data, or several machines and the network between them.",
    "monitor": "Show the curves of runs in a browser, or as text.",
    "plan": "Show what a script or model would communicate, and which knob causes it.",
    "port": "Rewrite scripts for Paddle 1.6 to 2.x for Paddle 3 and fleet_train.",
    "profiles": "List the strategy profiles, or show one with each knob's fate.",
    "recommend": "Measure a cluster and a script, and write the profile that is best for them.",
    "selftest": "Check a new cluster: devices, collectives, profiles, faults.",
    "stacks": "Show in which line each rank of a running job stands.",
    "timeline": "Show where the time of traced steps went, for all ranks on one clock.",
    "top": "Show what the ranks of this machine do right now: steps, times, memory, state.",
    "version": "Show versions, machine, limits and engine for a bug report.",
}

GONE = {
    "completion": 'eval "$(_FLEET_TRAIN_COMPLETE=bash_source fleet_train)" in ~/.bashrc completes fleet_train on TAB; '
    "zsh_source, fish_source alike",
    "check": "fleet_train doctor --data DIR --needs SAMPLES_PER_SECOND measures how fast a folder is read",
    "manifest": "copy a file of tools/examples/cluster/ in the project's repository (train.sbatch, job.yaml, "
    "paddlejob.yaml, trainjob.yaml) and edit the lines that it marks",
}
"""Commands that were here before: what to use instead."""
_COMPLETE = "_FLEET_TRAIN_COMPLETE"


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"fleet_train.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in GONE:
            ctx.fail(f"No such command '{args[0]}': {GONE[args[0]]}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        from fleet_train.cluster.installed import one_line

        click.echo(one_line())
        context.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version in one line.",
)
def cli() -> None:
    """Train static-graph Paddle programs on many machines; the strategy comes from a YAML profile."""


def _shown() -> str:
    """The command that was asked for."""
    return f"`{next((each for each in sys.argv[1:] if not each.startswith('-')), 'this command')}`"


def main() -> None:
    """Run the command line; a FleetTrainError becomes one line on stderr and its own exit code, Ctrl-C code 130."""
    try:
        status = cli(prog_name="fleet_train", complete_var=_COMPLETE, obj=os.environ, standalone_mode=False)
        sys.exit(status)
    except click.Abort as aborted:
        if isinstance(aborted.__cause__, EOFError):  # a truncated file, read by a script or by us: click says nothing
            raise aborted.__cause__ from None
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if not is_a_part(error):
            raise
        click.echo(f"fleet_train: this copy of the package is without {error.name}, which {_shown()} needs", err=True)
        sys.exit(FleetTrainError.exit_code)
    except FleetTrainError as error:
        process = sys.modules.get("fleet_train.convert.process")
        if process is not None:  # a command has joined a job: report to the other ranks why this one stops
            process.report(error)
        click.echo(f"fleet_train: {type(error).__name__}: {error}", err=True)
        sys.exit(error.exit_code)
