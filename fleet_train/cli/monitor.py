"""``fleet_train monitor``: the curves of runs in a browser, or as text in this terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from fleet_train.cli.options import HELP, WholeNumberRange
from fleet_train.errors import printable
from fleet_train.launch.processes import StopRequested, die_with_parent, stopping_signals
from fleet_train.log import logger
from fleet_train.train.dashboard import Dashboard, DashboardUnusable, choose_port, find_runs, table

DEFAULT_PORT = 8040
_REFRESH_SECONDS = 2.0
_LOCAL = ("127.0.0.1", "localhost", "::1")


@click.command(context_settings=HELP)
@click.option(
    "--logdir",
    "folders",
    type=click.Path(path_type=Path),
    multiple=True,
    default=("runs",),
    show_default=True,
    help="A run's --output_dir, or a folder above several; may be repeated.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: every address.")
@click.option(
    "--port",
    type=WholeNumberRange(1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Port to listen on. If the default is in use, the next free port is taken.",
)
@click.option(
    "--allowed_host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Another host name that browsers use for this machine, such as a proxy's; may be repeated. Requests for "
    "other names are refused.",
)
@click.option("--text", is_flag=True, help="Show the numbers here, without VisualDL; on a terminal until Ctrl-C.")
@click.pass_context
def command(
    context: click.Context, folders: tuple[Path, ...], host: str, port: int, allowed_hosts: tuple[str, ...], text: bool
) -> None:
    """Show the curves of runs while they train, or afterwards.

    Starts VisualDL's server on this machine and prints the address to open in a browser. Ctrl-C stops it. Without
    VisualDL the numbers are shown as text.
    """
    runs = find_runs(folders)
    with stopping_signals():
        try:
            if text:
                _show_text(runs)
                return
            is_asked_for = context.get_parameter_source("port") is not ParameterSource.DEFAULT
            try:
                chosen = choose_port(host, port, is_asked_for)
                ends_with_us = partial(die_with_parent, signal.SIGTERM)
                _serve(runs, host, Dashboard(folders, host, chosen, ends_with_us, allowed_hosts))
            except DashboardUnusable as error:
                logger.warning("%s; showing metrics.jsonl instead", error)
                _show_text(runs)
        except StopRequested:
            logger.info("ended")


def _serve(runs: Sequence[Path], host: str, server: Dashboard) -> None:
    with server as dashboard:
        for run in runs:
            logger.info("run %s", run)
        if host not in _LOCAL:
            logger.warning("everybody who reaches %s can read these runs", host)
        click.echo(f"{dashboard.address}/app/scalar")
        logger.info("open it in a browser; Ctrl-C stops it")
        dashboard.wait()


def _show_text(runs: Sequence[Path]) -> None:
    while True:
        shown = "\n\n".join(table(run) for run in runs)
        if not sys.stdout.isatty():
            click.echo(printable(shown))
            return
        click.clear()
        click.echo(printable(shown))
        time.sleep(_REFRESH_SECONDS)
