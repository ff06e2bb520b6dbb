"""The demo behind `make demo`: two "nodes" on this machine train on handwritten digits through the real launcher.

Each node is one `fleet_train launch` on a loopback address of its own, exactly as on two machines.
Fails when the job does, when it takes too long, or when the network has not learnt the digits.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.processes import ROOT, Process, leaving_on_signals, start, stop

NODES = ("127.0.0.2", "127.0.0.3")
MINIMUM_ACCURACY = 0.97
# 20 epochs of 23 steps; with so little data, shifting the images by a pixel adds 1 % of accuracy.
RECIPE = ("--model=cnn", "--data=digits", "--augment=shift", "--weight_decay=0.001", "--epochs=20")
_STOP_TIMEOUT_SECONDS = 20.0


class DemoFailed(click.ClickException):
    """What went wrong and which files have details; exit code 1."""


@dataclass(frozen=True)
class Folders:
    """Where the demo puts things. `log` has one folder per node with a workerlog per process."""

    output: Path

    @property
    def log(self) -> Path:
        return self.output / "log"

    @property
    def summary(self) -> Path:
        return self.output / "summary.json"

    def prepare(self) -> None:
        """Remove results of an earlier demo, so that they are not taken for this one's."""
        self.log.mkdir(parents=True, exist_ok=True)
        for path in (self.summary, *self.log.glob("node*.out")):
            path.unlink(missing_ok=True)


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.option("--output_dir", default="runs/demo", show_default=True, help="Checkpoint, logs, curves and summary.")
@click.option("--strategy", default="multi_node", show_default=True, help="Profile from strategies/.")
@click.option("--timeout", default=110.0, show_default=True, help="Seconds after which the demo gives up.")
@click.argument("train_flags", nargs=-1, type=click.UNPROCESSED)
def main(output_dir: str, strategy: str, timeout: float, train_flags: tuple[str, ...]) -> None:
    """Train on two loopback "nodes" and check the result. Further flags go to the trainer."""
    folders = Folders(Path(output_dir))
    folders.prepare()
    program, trainer = [sys.executable, "-m", "fleet_train"], [os.path.relpath(ROOT / "tools" / "train.py")]
    commands = [
        [*command, "--overwrite", *train_flags]
        for command in node_commands(program, trainer, folders, strategy, free_port(NODES))
    ]
    click.echo('Two "nodes" on this machine, one command on each. The first one\'s:')
    click.echo("  python " + " ".join(commands[0][1:]) + "\n")
    began = time.monotonic()
    with leaving_on_signals(), started(commands, folders) as nodes:
        exit_codes = wait_for_all(nodes, timeout)
    summary = checked_summary(folders, exit_codes)
    say_results(folders, summary, time.monotonic() - began)


def node_commands(
    program: Sequence[str], trainer: Sequence[str], folders: Folders, strategy: str, port: int
) -> list[list[str]]:
    """The launch command of each node, as a user would type it. ``trainer``: the script or module, and its flags."""
    ips = f"--cluster_node_ips={','.join(NODES)}"
    flags = [ips, f"--started_port={port}", "--nproc_per_node=1", f"--strategy={strategy}"]
    places = [[f"--node_ip={ip}", f"--log_dir={folders.log / f'node{index}'}"] for index, ip in enumerate(NODES)]
    return [
        [*program, "launch", *flags, *place, *trainer, *RECIPE, f"--output_dir={folders.output}"] for place in places
    ]


def free_port(addresses: tuple[str, ...], count: int = 4) -> int:
    """The first of `count` consecutive ports that are free on all addresses."""
    for first in range(16170, 30000, count):
        if all(_is_free(address, port) for address in addresses for port in range(first, first + count)):
            return first
    raise DemoFailed(f"found no {count} consecutive free ports on {' and '.join(addresses)}")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind((address, port))
        return True
    return False


@contextlib.contextmanager
def started(
    commands: list[list[str]], folders: Folders, environment: dict[str, str] | None = None, cwd: Path | None = None
) -> Iterator[list[Process]]:
    """Both launchers running: node 0 writes to this terminal, the other to its file. On leaving, both have ended.

    Without ``environment`` and ``cwd``: this process's, with the checkout importable.
    """
    if environment is None:
        import_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": import_path}
    nodes: list[Process] = []
    try:
        for index, command in enumerate(commands):
            nodes.append(start(command, folders.log / f"node{index}.out" if index else None, environment, cwd))
        yield nodes
    finally:
        stop(nodes, _STOP_TIMEOUT_SECONDS)


def wait_for_all(nodes: list[Process], timeout_seconds: float) -> list[int]:
    """Exit codes of both nodes; raises DemoFailed after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    try:
        return [node.wait(max(0.0, deadline - time.monotonic())) for node in nodes]
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"not finished after {timeout_seconds:g} s; is this machine busy? See --timeout") from None


def checked_summary(folders: Folders, exit_codes: list[int]) -> dict[str, Any]:
    """The job's summary.json; raises DemoFailed if it is not what the demo promises."""
    if any(exit_codes):
        raise DemoFailed(f"the nodes ended with exit codes {exit_codes}; their output is in {folders.log}")
    try:
        summary: dict[str, Any] = json.loads(folders.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DemoFailed(f"both nodes succeeded but {folders.summary} cannot be read: {error}") from error
    if (summary["world_size"], summary["num_nodes"]) != (len(NODES), len(NODES)):
        raise DemoFailed(f"the job had {summary['world_size']} ranks on {summary['num_nodes']} nodes, not 2 on 2")
    if summary["test_accuracy"] < MINIMUM_ACCURACY:
        raise DemoFailed(f"test accuracy {summary['test_accuracy']:.4f} is below {MINIMUM_ACCURACY}")
    return summary


def say_results(folders: Folders, summary: dict[str, Any], seconds: float) -> None:
    click.echo(
        f"\nTest accuracy {summary['test_accuracy']:.4f} after {summary['steps']} steps "
        f"on {summary['world_size']} ranks, {summary['samples_per_second']:.0f} samples/s, {seconds:.0f} s in all."
    )
    numbers = folders.output / "metrics.jsonl"
    places = {"checkpoint": summary["checkpoint"], "logs": folders.log, "numbers": numbers, "summary": folders.summary}
    for name, place in places.items():
        click.echo(f"  {name:<11}{place}")
    script = Path(sys.executable).with_name("fleet_train")
    python = Path(sys.executable)
    shown = script if script.exists() else python
    words = os.path.relpath(shown) if shown.is_relative_to(ROOT) else shown.name
    module = "" if script.exists() else " -m fleet_train"
    click.echo(f"\nSee the curves:  {words}{module} monitor --logdir {folders.output}")


if __name__ == "__main__":
    main()
