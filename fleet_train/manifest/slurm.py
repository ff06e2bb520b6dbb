"""A batch script for Slurm. Sources: slurm.schedmd.com, sbatch, srun, scancel, slurm.conf (KillWait, GraceTime)."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from fleet_train import timeouts
from fleet_train.errors import ClusterError, Preempted
from fleet_train.manifest.checks import Training, about, paragraph, rows

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*", re.ASCII)
_MEMORY = re.compile(r"\d{1,9}[KMGT]?", re.ASCII)
_GPUS = re.compile(r"(?:[A-Za-z0-9_.-]+:)?(\d{1,4})", re.ASCII)
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)
_LONGEST_SIGNAL_SECONDS = 65_535


@dataclass(frozen=True)
class Batch:
    """The script's requests to Slurm, per node. None: the cluster's default."""

    name: str
    cpus: int | None = None
    gpus: str | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()
    """Further options of sbatch, unchanged: ``--exclusive``."""
    venv: str | None = None
    setup: tuple[str, ...] = ()
    """Lines of shell before the start, unchanged: ``module load cuda/12.6``."""
    working_folder: str | None = None
    log_dir: str = "log"
    signal_seconds: int = 120
    """How long before the time limit the launchers get SIGTERM."""
    max_requeues: int = 10

    def __post_init__(self) -> None:
        words = {"--name": self.name, "--partition": self.partition, "--account": self.account, "--qos": self.qos}
        for flag, word in words.items():
            if word is not None and not (_WORD.fullmatch(word) and len(word) <= 200):
                raise ClusterError(f"{flag}={word[:80]!r}: letters, digits and . , _ @ + - name it, without spaces")
        self._check("--mem", self.memory, _MEMORY, "a number followed by K, M, G or T (default M), as in 64G")
        self._check("--gpus", self.gpus, _GPUS, "a number, or a kind and a number as in a100:4")
        if self.time is not None:
            seconds = time_limit_seconds(self.time)
            if self.signal_seconds >= seconds:
                raise ClusterError(
                    f"--signal_seconds={self.signal_seconds} is not below --time={self.time} ({seconds} s): the job "
                    "would be asked to stop as soon as it starts; request more time"
                )
        for option in self.options:
            if not re.fullmatch(r"--?[A-Za-z][^\n\r\0#]*", option):
                raise ClusterError(
                    f"--sbatch={option[:80]!r} is not an option of sbatch on one line, as in --sbatch=--exclusive"
                )
        for flag, path in (("--venv", self.venv), ("--workdir", self.working_folder), ("--log_dir", self.log_dir)):
            if path is not None and (not path or re.search(r"[\n\r\0]", path)):
                raise ClusterError(f"{flag}={path!r} is not a path that fits on a line of a script; give another one")
        if self.working_folder is not None and re.search(r"\s|%", self.working_folder):
            raise ClusterError(
                f"--workdir={self.working_folder!r}: sbatch takes no spaces or % in it; use a link to it"
            )

    def _check(self, flag: str, text: str | None, pattern: re.Pattern[str], rule: str) -> None:
        if text is not None and not pattern.fullmatch(text):
            raise ClusterError(f"{flag}={text[:80]!r} is not valid for Slurm: {rule}")


def gpus_per_node(text: str | None) -> int:
    """``"a100:4"`` -> 4; 0 for none or an invalid text."""
    match = _GPUS.fullmatch(text or "")
    return int(match[1]) if match else 0


def time_limit_seconds(text: str) -> int:
    """Of ``MIN``, ``MIN:SEC``, ``HOUR:MIN:SEC``, ``DAY-HOUR``, ``DAY-HOUR:MIN``, ``DAY-HOUR:MIN:SEC``."""
    match = _TIME.fullmatch(text)
    numbers = [int(each) for each in match.groups()[1:] if each is not None] if match else []
    if match is None or not numbers:
        raise ClusterError(
            f"--time={text[:40]!r} is not a time limit of Slurm: minutes, H:MM:SS, or D-HH:MM:SS; for example 12:00:00"
        )
    if match[1] is not None:  # from the hours on
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(match[1]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def batch_script(training: Training, batch: Batch) -> str:
    """The script for ``sbatch``. Raises ClusterError."""
    if not training.grace_seconds + timeouts.BATCH_END_SECONDS <= batch.signal_seconds <= _LONGEST_SIGNAL_SECONDS:
        raise ClusterError(
            f"--signal_seconds={batch.signal_seconds}: it must be --grace_seconds={training.grace_seconds} + "
            f"{timeouts.BATCH_END_SECONDS} or more (and at most {_LONGEST_SIGNAL_SECONDS}), so that all has ended "
            f"before the limit; give --signal_seconds={training.grace_seconds + 2 * timeouts.BATCH_END_SECONDS}"
        )
    parts = [_head(training, batch), _options(training, batch), _body(training, batch)]
    return "\n".join(line for part in parts for line in part) + "\n"


def _head(training: Training, batch: Batch) -> list[str]:
    commands = {
        "submit": "sbatch FILE",
        "watch": f"squeue --name={batch.name}; tail -F {batch.name}-JOB.out",
        "save": "scancel --signal=TERM JOB: saves the state and requeues the job, as at the time limit",
        "stop": "scancel JOB: SIGTERM, and SIGKILL after KillWait (usually 30 s). State saved by then is kept, and\n"
        "the job is not requeued",
    }
    lines = [*about(training, f"Slurm job {batch.name}", counts_starts=True), *rows(commands)][:-1]
    return ["#!/bin/bash", *_comment(lines), ""]


def _comment(lines: list[str]) -> list[str]:
    return [f"# {line}".rstrip() for line in lines]


def _note(text: str) -> list[str]:
    return _comment(paragraph(text)[:-1])


def _options(training: Training, batch: Batch) -> list[str]:
    asked = {
        "job-name": batch.name,
        "partition": batch.partition,
        "account": batch.account,
        "qos": batch.qos,
        "nodes": training.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": batch.cpus,
        "gpus-per-node": batch.gpus,
        "mem": batch.memory,
        "time": batch.time,
        "chdir": batch.working_folder,
    }
    return [
        *_note("One task per node: the launcher. It starts the node's ranks itself, on all of the task's processors."),
        *(f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None),
        *(f"#SBATCH {option}" for option in batch.options),
        *_note(
            f"{batch.signal_seconds} s before the time limit (Slurm may be up to 60 s early) the launchers get "
            "SIGTERM: all ranks save their state after the same step. They do the same before a preemption, if the "
            "cluster grants a GraceTime."
        ),
        f"#SBATCH --signal=TERM@{batch.signal_seconds}",
        *_note(
            "The same job may run several times: Slurm requeues it after a lost node, and this script does after "
            "the state was saved. Every run appends to one file."
        ),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        "",
    ]


def _body(training: Training, batch: Batch) -> list[str]:
    saved, most = Preempted.exit_code, batch.max_requeues
    activate = f"{batch.venv}/bin/activate" if batch.venv is not None else ""
    return [
        ': "${SLURM_JOB_ID:?start this script with sbatch}"',
        "# 0 at first, then how often the job has been requeued.",
        "run=${SLURM_RESTART_COUNT:-0}",
        "",
        *_note(
            "scancel, the time limit and a preemption end the whole job, including this script, by SIGTERM. --signal "
            "goes to the launchers only. So the trap shows whether Slurm ends the job. bash runs it after srun."
        ),
        "ended_by_slurm=0",
        "trap 'ended_by_slurm=1' TERM",
        "",
        *([f"source {shlex.quote(activate)} || exit 1"] if activate else []),
        *batch.setup,
        *([""] if activate or batch.setup else []),
        *_note(
            "No --cluster_node_ips: each launcher reads the step's nodes, and which one it is, from Slurm's variables. "
            "A launcher that fails notifies the others, and all end by themselves; --wait bounds that. "
            "--kill-on-bad-exit=1 would kill launchers that are about to end, and the exit code would be lost."
        ),
        _srun(training, batch),
        "code=$?",
        "",
        *_note(f"{saved}: stopped when asked to, state saved. 0 is the end of the training, any other code a failure."),
        f'if [ "$code" -eq {saved} ] && [ "$ended_by_slurm" -eq 0 ]; then',
        f'    if [ "$run" -ge {most} ]; then',
        f'        echo "the state is saved; requeued $run times already, at most {most}: sbatch it again to continue"',
        "    else",
        '        echo "the state of run $run is saved; the job requeues itself"',
        '        scontrol requeue "$SLURM_JOB_ID" || echo "Slurm did not requeue it: sbatch it again to continue"',
        "    fi",
        "fi >&2",
        'exit "$code"',
    ]


def _srun(training: Training, batch: Batch) -> str:
    # Since Slurm 22.05 srun does not inherit --cpus-per-task from the allocation.
    flags = ['--nodes="$SLURM_JOB_NUM_NODES"', '--ntasks="$SLURM_JOB_NUM_NODES"', "--ntasks-per-node=1"]
    flags += [f"--cpus-per-task={batch.cpus}"] if batch.cpus is not None else []
    flags += [f"--gpus-per-node={shlex.quote(batch.gpus)}"] if batch.gpus is not None else []
    flags += ["--kill-on-bad-exit=0", f"--wait={training.grace_seconds + timeouts.BATCH_END_SECONDS}"]
    words = [shlex.quote(word) for word in training.launch()]
    log_dir = f'--log_dir={shlex.quote(batch.log_dir.rstrip("/") or "/")}/"$SLURM_JOB_ID/run$run"'
    launch, program = words[:4], words[4:]
    return " \\\n    ".join(["srun " + " ".join(flags), " ".join([*launch, log_dir, *program])])
