"""A Slurm of two nodes on this machine: Debian's slurmctld, two slurmd on 127.0.0.2 and 127.0.0.3, and munge.

Everything runs in the foreground as processes of a test job, with its files in the job's folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.ports import free_ports
from tests.support.processes import Job, clean_environ

NODES = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_START_SECONDS = 60.0


def why_no_slurm() -> str | None:
    """Why it cannot be started here; None where it can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    missing = [name for name in _PROGRAMS if _program(name) is None]
    return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge" if missing else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


@dataclass
class Slurm:
    """The running cluster. Commands need ``environ``."""

    job: Job
    folder: Path
    environ: dict[str, str]

    def ask(self, *command: str, timeout: float = 60.0) -> str:
        """The output of a command of Slurm's."""
        done = subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.job.report()}"
        return done.stdout

    def state_of(self, number: str) -> str:
        """Of a job: PENDING, RUNNING, COMPLETED, ..."""
        found = re.search(r"JobState=(\S+)", self.ask("scontrol", "show", "job", number))
        assert found is not None
        return found[1]


@contextmanager
def running_slurm(job: Job, folder: Path) -> Iterator[Slurm]:
    """The cluster, and at the end nothing of it. Raises AssertionError with all output when a node does not come up."""
    try:
        yield _start(job, folder)
    finally:
        _kill_steps(folder)


def _kill_steps(folder: Path) -> None:
    """The daemons of job steps: they leave slurmd's session, and its environment with the test job's mark."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] != "slurmstepd":
            continue
        with contextlib.suppress(psutil.Error):
            sockets = [str(one.laddr) for one in process.net_connections(kind="unix")]
            if any(address.startswith(f"{folder}/") for address in sockets):
                process.kill()


def _start(job: Job, folder: Path) -> Slurm:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    munge = folder / "munge"
    munge.mkdir(mode=0o755)
    key, munge_socket = munge / "key", munge / "socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    port = free_ports(4, list(NODES.values()))
    conf = folder / "slurm.conf"
    conf.write_text(_conf(folder, munge_socket, port))
    environ = clean_environ({"SLURM_CONF": str(conf)})
    files = [f"--{name}-file={munge / name}" for name in ("log", "pid", "seed")]
    job.start("munged", _command("munged", "-F", "--force", f"--key-file={key}", f"-S{munge_socket}", *files), environ)
    job.wait_until(munge_socket.exists, _START_SECONDS, "munge's socket")
    job.start("slurmctld", _command("slurmctld", "-D", "-c", "-f", str(conf)), environ)
    for name in NODES:
        job.start(f"slurmd-{name}", _command("slurmd", "-D", "-c", "-N", name, "-f", str(conf)), environ)
    slurm = Slurm(job, folder, environ)
    job.wait_until(lambda: _are_idle(slurm), _START_SECONDS, "idle nodes")
    return slurm


def _command(name: str, *arguments: str) -> list[str]:
    program = _program(name)
    assert program is not None
    return [program, *arguments]


def _are_idle(slurm: Slurm) -> bool:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=slurm.environ, capture_output=True, text=True, timeout=180, check=False
    )
    return done.returncode == 0 and done.stdout.split() == ["idle"] * len(NODES)


def _conf(folder: Path, munge_socket: Path, port: int) -> str:
    host = socket.gethostname()
    lines = {
        "ClusterName": "tests",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": str(port),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A job that is queued again waits until the credentials of its last run have expired.
        "AuthInfo": f"socket={munge_socket},cred_expire=5",
        "StateSaveLocation": str(folder / "state"),
        "SlurmdSpoolDir": f"{folder}/spool-%n",
        "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
        "SlurmctldPidFile": str(folder / "slurmctld.pid"),
        "SlurmctldLogFile": str(folder / "slurmctld.log"),
        "SlurmdLogFile": f"{folder}/slurmd-%n.log",
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "KillWait": "5",
        "SlurmdTimeout": "60",
        "MessageTimeout": "30",
    }
    (folder / "state").mkdir(exist_ok=True)
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port + 1 + index} CPUs=4 State=UNKNOWN"
        for index, (name, address) in enumerate(NODES.items())
    ]
    partition = f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"
    return "\n".join([*(f"{name}={value}" for name, value in lines.items()), *nodes, partition, ""])
