"""``fleet_train recommend``: which profile is best for a script on this cluster?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fleet_train.cli.on_hosts import examine_on_hosts, on_hosts
from fleet_train.cli.options import BEFORE_A_SCRIPT, NumberRange, WholeNumberRange, files, recorded, set_option, where
from fleet_train.recommend.options import ALLOWABLE, DEFAULT_FOLDER, DEFAULT_OUTPUT, RecommendOptions

_EPILOG = """\b
Examples:
  fleet_train recommend --script train.py --lr 0.1
  fleet_train recommend --ips 10.0.0.1,10.0.0.2 --script train.py     (the same line on both machines)
  fleet_train recommend --allow lossy --allow local_steps --script train.py

\b
As the program of a launcher, one process per rank:
  fleet_train launch --ips 10.0.0.1,10.0.0.2 -m fleet_train recommend --script train.py

\b
Each trial runs the unchanged script for some steps and then stops it: give it an output folder it may write to.
The arguments after --script SCRIPT are the script's.

\b
Exit codes:
  0        a profile is recommended and written
  1        no trial completed, or the script did not reach its first steps
  2 to 6   flags, Paddle, addresses or ports, a machine that did not connect
  7        the script is not converted: it was ended before it trained
  8, 11    machines were started differently; a machine or a supervisor was lost
"""


@click.command(
    epilog=_EPILOG,
    context_settings=BEFORE_A_SCRIPT | {"ignore_unknown_options": True},
)
@on_hosts(examine_on_hosts("recommend", "the profile"))
@where("2")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(list(ALLOWABLE)),
    help="Also pick profiles that may cost accuracy: gradients rounded to 16 bits, approximated (and rounded) "
    "gradients, local steps. May be repeated.",
)
@set_option
@click.option("--seconds", type=NumberRange(10, 3600), default=90.0, show_default=True, help="About how long it takes.")
@click.option("--trials", type=WholeNumberRange(1, 30), default=4, show_default=True, help="Profiles to try.")
@click.option(
    "--output",
    type=Path,
    default=DEFAULT_OUTPUT,
    show_default=True,
    help="The profile to write.",
    shell_complete=files,
)
@recorded(DEFAULT_FOLDER, "Logs.", "Print everything as JSON on stdout, and the lines on stderr.")
@click.option(
    "--script",
    required=True,
    metavar="SCRIPT",
    help="The training script; the arguments after it are the script's.",
    shell_complete=files,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
def command(
    script: str, arguments: tuple[str, ...], allow: tuple[str, ...], settings: tuple[str, ...], seconds: float,
    trials: int, output: Path, record: Path, as_json: bool, outcome: Path | None, **machines: Any,
) -> None:  # fmt: skip
    """Measure the links and a script's computing, predict every profile, try the best, and write the one to use.

    By default only profiles that cannot change the result are picked; --allow adds others. --set changes a knob of all
    of them. Excluded profiles are listed with the reason, and trials that contradict their predictions are named. A
    trial that fails or hangs is stopped.
    """
    from fleet_train.launch.on_ranks import Where
    from fleet_train.recommend.report import start

    options = RecommendOptions(script, arguments, allow, seconds, trials, settings=settings)
    sys.exit(start(options, Where(**machines), record, output, as_json, outcome))
