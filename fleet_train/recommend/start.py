"""From the command to ranks: started through our launcher, or this process is one, started by any launcher."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import click

from fleet_train.errors import ClusterError, ConversionError, printable
from fleet_train.files import publish_where_linked
from fleet_train.recommend.options import Options
from fleet_train.recommend.report import describe, pick, profile_text, to_json
from fleet_train.recommend.supervisor import Supervisor
from fleet_train.selftest.peers import Peers
from fleet_train.selftest.start import Where, is_rank, outcome_in, request_for, run_ranks


def start(options: Options, where: Where, folder: Path, output: Path, as_json: bool, outcome: Path | None) -> int:
    """Run the recommendation; returns the exit code. ``outcome``: given to ranks that were started from here."""
    if not Path(options.script).is_file():
        raise ConversionError(f"--script {options.script}: there is no such file")
    if not is_rank(os.environ):
        written = outcome_in(folder)
        command = command_of(options, folder, output, written)
        return run_ranks(request_for(command, where, folder, options.join_timeout_seconds), written, as_json)
    if where.is_said:
        raise ClusterError(
            "--nproc, --ips, --node_ip and --started_port start ranks, but a launcher has started this process as one: "
            "give them to the launcher"
        )
    return supervise(options, folder, output, as_json, outcome)


def command_of(options: Options, folder: Path, output: Path, outcome: Path | None = None) -> list[str]:
    """A rank's arguments after ``-m``; without ``outcome`` also the command that a user would repeat."""
    words = ["fleet_train", "recommend"]
    words += ["--outcome", str(outcome)] if outcome else []
    words += ["--record", str(folder.absolute()), "--output", str(output.absolute())]
    words += ["--seconds", f"{options.seconds:g}", "--trials", str(options.trials)]
    words += [word for risk in options.allow for word in ("--allow", risk)]
    return [*words, "--script", str(Path(options.script).absolute()), *options.arguments]


def supervise(options: Options, folder: Path, output: Path, as_json: bool, outcome: Path | None) -> int:
    """As one rank: the whole recommendation; rank 0 prints, and writes the profile."""
    peers = Peers.join(options.join_timeout_seconds, "recommend")
    cluster = peers.cluster
    if cluster.world_size == 1:
        peers.close_host()
        raise ClusterError(
            "recommend found one rank, which communicates nothing: give --nproc, or --ips of all machines"
        )

    def say(text: str) -> None:
        if cluster.rank == 0:
            click.echo(printable(text), err=as_json)  # of other machines, too

    supervisor = Supervisor(peers, options, folder, say)
    with supervisor.peers.leaving_together():
        results = supervisor.run()
        made = to_json(results, options, cluster)
        say(f"\n{describe(results, options, cluster)}")
        if cluster.rank == 0 and pick(results, options) is not None:
            command = shlex.join(["python", "-m", *command_of(options, folder, output)])
            publish_where_linked(output, profile_text(results, options, cluster, command).encode())
            say(f"written: {output}; train with: python -m fleet_train launch --strategy {output} ...")
    if outcome is not None:
        if cluster.local_rank == 0:
            outcome.write_text(json.dumps(made))
        return 0
    if as_json and cluster.rank == 0:
        click.echo(json.dumps(made, indent=1))
    return int(made["exit_code"])
