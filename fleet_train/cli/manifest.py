"""``python -m fleet_train manifest``: the batch script or manifest that starts a training on an engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleet_train.cli.numbers import WholeNumberRange
from fleet_train.errors import ClusterError

if TYPE_CHECKING:
    from fleet_train.manifest import Pods, Training

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "max_content_width": 110,
}
_GROUP_EPILOG = """
\b
Examples
  python -m fleet_train manifest slurm --nodes 4 --gpus 8 --time 24:00:00 --output train.sbatch train.py --epochs 90
  python -m fleet_train manifest job --nodes 4 --gpus 8 --image registry.local/train:1 \\
      --volume datasets:/data:ro --volume runs:/runs --output job.yaml train.py --data /data
\b
The text goes to the standard output without --output. Its comments say how to submit, watch and stop it.
Everything behind the script belongs to the script. docs/engines.md has one page on all engines.
"""
_SLURM_EPILOG = """
\b
Examples
  # four machines of eight GPUs; at the limit the state is saved, and the job is queued again
  python -m fleet_train manifest slurm --nodes 4 --gpus 8 --cpus 64 --mem 500G --time 24:00:00 \\
      --partition gpu --venv ~/venv --output train.sbatch train.py --epochs 90
  sbatch train.sbatch
\b
  # the reference trainer on CPUs; --resume lets every run go on from the newest checkpoint
  python -m fleet_train manifest slurm --nodes 2 --processes 2 --cpus 16 --setup 'module load python' \\
      -m fleet_train train --resume --model mlp --data digits --output_dir runs/digits
"""
_PODS_EPILOG = """
\b
Example
  python -m fleet_train manifest {kind} --nodes 2 --gpus 4 --cpu 32 --memory 256Gi --image registry.local/train:1 \\
      --volume datasets:/data:ro --volume runs:/runs --env NCCL_DEBUG=WARN --output {kind}.yaml \\
      train.py --data /data --output_dir /runs/first
  kubectl apply -f {kind}.yaml
\b
Values of --env stand in the manifest in plain text: put nothing secret there. The checkpoints' volume must be
one that several machines can mount at once (ReadWriteMany).
"""


@click.group(name="manifest", context_settings=_SETTINGS, epilog=_GROUP_EPILOG)
def command() -> None:
    """Write the batch script or manifest that starts a training on an engine.

    What is written starts one launcher per node. Each learns its place from the engine's variables, so that the script
    is the same as on one machine.
    """


def _training(most_retries: str, retries_help: str) -> Callable[[_Command], _Command]:
    """What every engine is told of the training; ``--max_retries`` or ``--max_requeues`` is the engine's own bound."""
    default = 10 if most_retries == "--max_requeues" else 6
    options = [
        click.option("--nodes", type=WholeNumberRange(1, 100_000), required=True, metavar="N", help="Machines, or pods."),
        click.option("--name", metavar="NAME", help="Name of the job. [default: made from the script's]"),
        click.option("--processes", type=WholeNumberRange(1), metavar="N", help="Ranks per node. [default: --gpus, or 1]"),
        click.option("--strategy", metavar="NAME|FILE", help="Profile, as launch takes it."),
        click.option("--python", default="python", show_default=True, metavar="PATH", help="The interpreter there."),
        click.option(
            "--max_restarts",
            type=WholeNumberRange(0),
            default=3,
            show_default=True,
            metavar="N",
            help="How often the launchers start the ranks again before the engine hears of a failure.",
        ),
        click.option(most_retries, type=WholeNumberRange(0), default=default, show_default=True, help=retries_help),
        click.option(
            "--join_timeout",
            type=WholeNumberRange(1, 1_000_000),
            default=900,
            show_default=True,
            metavar="SECONDS",
            help="How long the first node waits for the last.",
        ),
        click.option("--launch_flags", default="", metavar="TEXT", help="More of launch's flags: '--min_nodes=3'"),
        click.option("--output", type=Path, metavar="FILE", help="Write there instead of the standard output."),
        click.option("--force", is_flag=True, help="Overwrite FILE."),
        click.option("-m", "is_module", is_flag=True, help="Run a module instead of a script, as python -m does."),
        click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGS]..."),
    ]
    return _all_of(options)


def _all_of(options: list[Callable[[Any], Any]]) -> Callable[[_Command], _Command]:
    def decorate(function: _Command) -> _Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_grace = click.option(
    "--grace_seconds",
    type=WholeNumberRange(0, 1_000_000),
    metavar="SECONDS",
    help="After SIGTERM, how long ranks may take to save their state. [default: 60 for Slurm, else 30]",
)
_pods = _all_of(
    [
        click.option("--image", required=True, metavar="IMAGE", help="With Python, Paddle, fleet_train and the script."),
        click.option("--namespace", metavar="NAME", help="[default: kubectl's own]"),
        click.option("--cpu", metavar="N", help="Processors of a pod: 8, 500m."),
        click.option("--memory", metavar="SIZE", help="Memory of a pod: 64Gi."),
        click.option("--gpus", type=WholeNumberRange(0, 1000), default=0, metavar="N", help="GPUs of a pod."),
        click.option("--gpu_resource", default="nvidia.com/gpu", show_default=True, metavar="NAME"),
        click.option("--shm", default="1Gi", show_default=True, metavar="SIZE", help="Of /dev/shm; 0: not mounted."),
        click.option("--volume", "volumes", multiple=True, metavar="CLAIM:/PATH[:ro]", help="A PersistentVolumeClaim."),
        click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Taken as it is."),
        click.option("--workdir", metavar="/PATH", help="Where the script starts. [default: the image's]"),
    ]
)
_port = click.option(
    "--port", type=WholeNumberRange(1, 65_000), default=6170, show_default=True, help="First port of a pod."
)


@command.command(name="slurm", context_settings=_SETTINGS, epilog=_SLURM_EPILOG)
@_training("--max_requeues", "How often the job is queued again.")
@_grace
@click.option("--cpus", type=WholeNumberRange(1), metavar="N", help="Processors of a node.")
@click.option("--gpus", metavar="[KIND:]N", help="GPUs of a node: 8, a100:4.")
@click.option("--mem", metavar="SIZE", help="Memory of a node: 64G; 0: all of it.")
@click.option("--time", metavar="LIMIT", help="Time limit of a run: 12:00:00, 2-00:00:00.")
@click.option("--partition", metavar="NAME")
@click.option("--account", metavar="NAME")
@click.option("--qos", metavar="NAME")
@click.option("--sbatch", "options", multiple=True, metavar="OPTION", help="Another option of sbatch: --exclusive")
@click.option("--venv", metavar="FOLDER", help="Virtual environment to activate.")
@click.option("--setup", multiple=True, metavar="LINE", help="A line of shell before the start: 'module load cuda'")
@click.option("--workdir", metavar="FOLDER", help="Where the script starts. [default: where sbatch is called]")
@click.option("--log_dir", default="log", show_default=True, metavar="FOLDER", help="Receives JOB/runN/workerlog.N.")
@click.option(
    "--signal_seconds",
    type=WholeNumberRange(0),
    metavar="SECONDS",
    help="So long before the limit the state is saved. [default: --grace_seconds + 60]",
)
def slurm(**given: Any) -> None:
    """Write a batch script for sbatch.

    One launcher per node, through srun. Some time before the limit all ranks save their state after the same step; then
    the job queues itself again, and goes on from there.
    """
    from fleet_train.manifest import Batch, batch_script
    from fleet_train.manifest.slurm import gpus_per_node

    training = _read_training(given, gpus_per_node(given["gpus"]), 60 if given["grace_seconds"] is None else None)
    signal_seconds = given["signal_seconds"]
    batch = Batch(
        name=given["name"] or training.default_name(),
        cpus=given["cpus"],
        gpus=given["gpus"],
        memory=given["mem"],
        time=given["time"],
        partition=given["partition"],
        account=given["account"],
        qos=given["qos"],
        options=given["options"],
        venv=None if given["venv"] is None else os.path.expanduser(given["venv"]),
        setup=given["setup"],
        working_folder=given["workdir"],
        log_dir=given["log_dir"],
        signal_seconds=training.grace_seconds + 60 if signal_seconds is None else signal_seconds,
        max_requeues=given["max_requeues"],
    )
    _write(batch_script(training, batch), given, "sbatch")


@command.command(name="job", context_settings=_SETTINGS, epilog=_PODS_EPILOG.format(kind="job"))
@_training("--max_retries", "How often Kubernetes starts a pod again that has failed.")
@_grace
@_pods
@_port
def job(**given: Any) -> None:
    """Write an indexed Job of Kubernetes and its headless service. No operator is needed (Kubernetes 1.29 or later)."""
    from fleet_train.manifest import indexed_job

    training = _read_training(given, given["gpus"], None)
    _write(indexed_job(training, _read_pods(given, training), given["max_retries"]), given, "kubectl apply -f")


@command.command(name="paddlejob", context_settings=_SETTINGS, epilog=_PODS_EPILOG.format(kind="paddlejob"))
@_training("--max_retries", "How often all pods are started again after a failure.")
@_grace
@_pods
@_port
def paddlejob(**given: Any) -> None:
    """Write a PaddleJob for Kubeflow's training operator (v1)."""
    from fleet_train.manifest import paddle_job

    training = _read_training(given, given["gpus"], None)
    _write(paddle_job(training, _read_pods(given, training), given["max_retries"]), given, "kubectl apply -f")


@command.command(name="trainjob", context_settings=_SETTINGS, epilog=_PODS_EPILOG.format(kind="trainjob"))
@_training("--max_retries", "Not for a TrainJob: its runtime decides.")
@_grace
@_pods
@click.option("--runtime", default="torch-distributed", show_default=True, metavar="NAME", help="One for PyTorch.")
@click.option(
    "--runtime_kind",
    type=click.Choice(["ClusterTrainingRuntime", "TrainingRuntime"]),
    default="ClusterTrainingRuntime",
    show_default=True,
    help="TrainingRuntime: one of the namespace.",
)
@click.option(
    "--trainer_version", type=click.Choice(["2.3", "2.2"]), default="2.3", show_default=True, help="Kubeflow Trainer's."
)
def trainjob(**given: Any) -> None:
    """Write a TrainJob for Kubeflow Trainer (v2), on its runtime for PyTorch, which tells pods their place."""
    from fleet_train.manifest import train_job

    ...


def _read_training(given: dict[str, Any], gpus: int, grace_seconds: int | None) -> Training:
    """Raises ClusterError, and click's errors for flags that launch does not know."""
    ...
