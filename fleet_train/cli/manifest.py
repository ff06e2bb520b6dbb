"""``python -m fleet_train manifest``: the batch script or manifest that starts a training on an engine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet_train.cli.options import DASHES_ALLOWED, Command, WholeNumberRange, all_of, set_option
from fleet_train.errors import ClusterError
from fleet_train.files import publish_where_linked

if TYPE_CHECKING:
    from fleet_train.manifest import Pods, Training

_GROUP_EPILOG = """
\b
Examples
  python -m fleet_train manifest slurm --nodes 4 --gpus 8 --time 24:00:00 --output train.sbatch train.py --epochs 90
  python -m fleet_train manifest job --nodes 4 --gpus 8 --image registry.local/train:1 \\
      --volume datasets:/data:ro --volume runs:/runs --output job.yaml train.py --data /data
\b
Without --output, the text goes to standard output. Its comments say how to submit, monitor and stop the job.
Everything after the script belongs to the script. docs/engines.md covers all engines.
"""
_SLURM_EPILOG = """
\b
Examples
  # four machines of eight GPUs; at the time limit the state is saved and the job is requeued
  python -m fleet_train manifest slurm --nodes 4 --gpus 8 --cpus 64 --mem 500G --time 24:00:00 \\
      --partition gpu --venv ~/venv --output train.sbatch train.py --epochs 90
  sbatch train.sbatch
\b
  # the reference trainer on CPUs; with --resume, every run continues from the newest checkpoint
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
Values of --env are plain text in the manifest: put no secret there. Several machines must be able to mount the
checkpoints' volume at once (ReadWriteMany).
"""

# Flags that go on under their own name.
_SAME_IN_TRAINING = ("program", "nodes", "is_module", "python", "strategy", "settings", "max_restarts")
_SAME_IN_BATCH = ("cpus", "gpus", "time", "partition", "account", "qos", "options", "setup", "log_dir", "max_requeues")
_SAME_IN_PODS = ("image", "namespace", "cpu", "memory", "gpus", "gpu_resource", "environment")


def _of_training(engines: Callable[[Any], Any] | None = None) -> Callable[[Command], Command]:
    """The flags of every engine about the training; ``engines``: how often that one starts it again."""
    return all_of(
        click.option(
            "--nodes", type=WholeNumberRange(1, 100_000), required=True, metavar="N", help="Machines, or pods."
        ),
        click.option("--name", metavar="NAME", help="Name of the job. [default: made from the script's]"),
        click.option(
            "--processes", type=WholeNumberRange(1), metavar="N", help="Ranks per node. [default: --gpus, or 1]"
        ),
        click.option("--strategy", metavar="NAME|FILE", help="Profile, as for launch."),
        set_option,
        click.option("--python", default="python", show_default=True, metavar="PATH", help="The interpreter there."),
        _number(
            "--max_restarts",
            3,
            0,
            None,
            "N",
            "How often the launchers restart the ranks before they report a failure to the engine.",
        ),
        *([engines] if engines else []),
        _number("--join_timeout", 900, 1, 1_000_000, "SECONDS", "How long a node waits for the others."),
        click.option("--launch_flags", default="", metavar="TEXT", help="More flags of launch: '--min_nodes=3'"),
        click.option("--output", type=Path, metavar="FILE", help="Write there instead of to standard output."),
        click.option("--force", is_flag=True, help="Overwrite FILE."),
        click.option("-m", "is_module", is_flag=True, help="Run a module instead of a script, as python -m does."),
        click.argument("program", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT [ARGS]..."),
        click.option(
            "--grace_seconds",
            type=WholeNumberRange(0, 1_000_000),
            metavar="SECONDS",
            help="After SIGTERM, how long ranks may take to save their state. [default: 60 for Slurm, else 30]",
        ),
    )


def _number(
    flag: str, default: int, least: int, most: int | None, metavar: str | None, what: str
) -> Callable[[Command], Command]:
    kind = WholeNumberRange(least, most)
    return click.option(flag, type=kind, default=default, show_default=True, metavar=metavar, help=what)


_of_pods = all_of(
    click.option("--image", required=True, metavar="IMAGE", help="With Python, Paddle, fleet_train and the script."),
    click.option("--namespace", metavar="NAME", help="[default: kubectl's own]"),
    click.option("--cpu", metavar="N", help="Processors of a pod: 8, 500m."),
    click.option("--memory", metavar="SIZE", help="Memory of a pod: 64Gi."),
    click.option("--gpus", type=WholeNumberRange(0, 1000), default=0, metavar="N", help="GPUs of a pod."),
    click.option("--gpu_resource", default="nvidia.com/gpu", show_default=True, metavar="NAME"),
    click.option("--shm", default="1Gi", show_default=True, metavar="SIZE", help="Size of /dev/shm; 0: not mounted."),
    click.option("--volume", "volumes", multiple=True, metavar="CLAIM:/PATH[:ro]", help="A PersistentVolumeClaim."),
    click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Used as given."),
    click.option("--workdir", metavar="/PATH", help="Where the script starts. [default: the image's]"),
)
_of_port = _number("--port", 6170, 1, 65_000, None, "First port of a pod.")


@click.group(name="manifest", context_settings=DASHES_ALLOWED, epilog=_GROUP_EPILOG)
def command() -> None:
    """Write the batch script or manifest that starts a training on an engine.

    It starts one launcher per node. Each launcher reads its node rank from the engine's variables, so the script is
    the same as on one machine.
    """


@command.command(name="slurm", context_settings=DASHES_ALLOWED, epilog=_SLURM_EPILOG)
@_of_training(_number("--max_requeues", 10, 0, 10_000, "N", "How often the job is requeued."))
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
    help="How long before the limit the state is saved. [default: --grace_seconds + 60]",
)
def slurm(**given: Any) -> None:
    """Write a batch script for sbatch.

    It starts one launcher per node with srun. Before the time limit all ranks save their state after the same step;
    then the job requeues itself and continues from there.
    """
    from fleet_train.manifest import Batch, batch_script
    from fleet_train.manifest.slurm import gpus_per_node

    training = _read_training(given, gpus_per_node(given["gpus"]), 60)
    signal_seconds = given["signal_seconds"]
    batch = Batch(
        name=given["name"] or training.default_name(),
        memory=given["mem"],
        venv=None if given["venv"] is None else os.path.expanduser(given["venv"]),
        working_folder=given["workdir"],
        signal_seconds=training.grace_seconds + 60 if signal_seconds is None else signal_seconds,
        **{name: given[name] for name in _SAME_IN_BATCH},
    )
    _write(batch_script(training, batch), given, "sbatch")


@command.command(name="job", context_settings=DASHES_ALLOWED, epilog=_PODS_EPILOG.format(kind="job"))
@_of_training(_number("--max_retries", 6, 0, 10_000, "N", "How often Kubernetes restarts a failed pod."))
@_of_pods
@_of_port
def job(**given: Any) -> None:
    """Write an indexed Kubernetes Job and its headless service. No operator is needed (Kubernetes 1.29 or later)."""
    from fleet_train.manifest import indexed_job

    training = _read_training(given, given["gpus"], 30)
    _write(indexed_job(training, _read_pods(given, training), given["max_retries"]), given, "kubectl apply -f")


@command.command(name="paddlejob", context_settings=DASHES_ALLOWED, epilog=_PODS_EPILOG.format(kind="paddlejob"))
@_of_training(_number("--max_retries", 6, 0, 10_000, "N", "How often all pods are restarted after a failure."))
@_of_pods
@_of_port
def paddlejob(**given: Any) -> None:
    """Write a PaddleJob for Kubeflow's training operator (v1)."""
    from fleet_train.manifest import paddle_job

    training = _read_training(given, given["gpus"], 30)
    _write(paddle_job(training, _read_pods(given, training), given["max_retries"]), given, "kubectl apply -f")


@command.command(name="trainjob", context_settings=DASHES_ALLOWED, epilog=_PODS_EPILOG.format(kind="trainjob"))
@_of_training()
@_of_pods
@click.option("--runtime", default="torch-distributed", show_default=True, metavar="NAME", help="A PyTorch runtime.")
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
    """Write a TrainJob for Kubeflow Trainer (v2), on its PyTorch runtime, which gives pods their rank."""
    from fleet_train.manifest import train_job

    version = given["trainer_version"]
    training = _read_training(given, given["gpus"], 10 if version == "2.2" else 30)
    text = train_job(training, _read_pods(given, training), given["runtime"], given["runtime_kind"], version)
    _write(text, given, "kubectl apply -f")


def _read_training(given: dict[str, Any], gpus: int, grace_seconds: int) -> Training:
    """Raises ClusterError, and click's errors for flags that launch does not know."""
    from fleet_train.manifest import Training

    asked = given["grace_seconds"]
    training = Training(
        processes=given["processes"] or gpus or 1,
        grace_seconds=grace_seconds if asked is None else asked,
        join_timeout_seconds=given["join_timeout"],
        launch_flags=_launch_flags(given["launch_flags"]),
        **{name: given[name] for name in _SAME_IN_TRAINING},
    )
    _check_launch(training)
    return training


def _launch_flags(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise click.BadParameter(f"{text[:80]!r}: {error}", param_hint="--launch_flags") from None


def _check_launch(training: Training) -> None:
    """Check now that launch accepts this command line, not after the job has waited for its machines."""
    from fleet_train.cli.launch import command as launch

    context = launch.make_context("launch", training.launch()[4:])
    if training.settings:
        from fleet_train.profile.catalogue import check_assignments

        check_assignments(training.settings)
    engine_options = {"cluster_node_ips", "node_ip", "engine", "use_paddlecloud", "dry_run"}
    if of_engine := sorted(name for name in engine_options if context.params[name]):
        raise click.UsageError(
            f"--launch_flags: --{of_engine[0]} is not allowed: the engine gives every launcher its nodes; remove it"
        )
    if context.params["program"] != training.program:
        raise click.UsageError("--launch_flags takes flags only; the script and its arguments go at the end")


def _read_pods(given: dict[str, Any], training: Training) -> Pods:
    """Raises ClusterError."""
    from fleet_train.manifest import Pods, Volume

    return Pods(
        name=given["name"] or training.default_name(),
        shared_memory=None if given["shm"] == "0" else given["shm"],
        volumes=tuple(Volume.read(text) for text in given["volumes"]),
        working_folder=given["workdir"],
        port=given.get("port", 0),
        **{name: given[name] for name in _SAME_IN_PODS},
    )


def _write(text: str, given: dict[str, Any], submit: str) -> None:
    """Raises ClusterError if the file cannot be written."""
    path: Path | None = given["output"]
    if path is None:
        click.echo(text, nl=False)
        return
    try:
        if given["force"]:
            publish_where_linked(path, text.encode())
        else:
            with path.open("xb") as file:
                file.write(text.encode())
    except FileExistsError:
        raise click.UsageError(f"--output {path} exists; --force overwrites it, or choose another name") from None
    except OSError as error:
        raise ClusterError(f"--output {path} cannot be written: {error.strerror}; choose another place") from None
    click.echo(f"wrote {path}; start it with: {submit} {shlex.quote(str(path))}", err=True)
