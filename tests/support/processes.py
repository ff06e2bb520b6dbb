"""Processes of a test: a clean environment, output into files, and no process left behind.

Every process that a test starts through here carries ``FLEET_TRAIN_TEST_JOB`` in its environment. Its descendants
inherit it, so that orphans are found whatever sessions, groups or parents they have moved to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
JOB_VARIABLE = "FLEET_TRAIN_TEST_JOB"
RESULTS_VARIABLE = "FLEET_TRAIN_TEST_RESULTS"
_Found = TypeVar("_Found")

# What a launcher, a cluster or a developer's shell may have set: a test's processes start without it.
_NOT_INHERITED = (
    "PADDLE_",
    "FLAGS_",
    "POD_",
    "TRAINER_",
    "GLOO_",
    "NCCL_",
    "FLEET_TRAIN_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "OMP_",
    "MKL_",
    "PYTEST_",
    "MAKE",
    "MFLAGS",
)
# Bounds are given for a machine with nothing else to do. They only end what hangs: a busy machine gets longer.
_FOR_A_BUSY_MACHINE = 3.0
# How long helpers of an ended job have to end by themselves; an orphan stays for minutes or for ever.
_LAST_MOMENT_SECONDS = 15.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def clean_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without any cluster, proxy or thread settings.

    The checkout can be imported, and ``python`` is the Python of this test: commands can be run as users type them.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_NOT_INHERITED) and name.lower() not in _PROXIES
    }
    environ |= {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    return environ | dict(extra or {})


@dataclass
class Started:
    """One process that runs in its own session, with its output going to ``log``."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass(frozen=True)
class Ended:
    """How one process ended. ``exit_code`` is negative for a signal, as subprocess has it."""

    name: str
    exit_code: int
    output: str
    killed: bool  # by the test's own timeout, not by what was tested
    seconds: float


class Job:
    """The processes of one test job. Use as a context manager: on leaving, every one of them has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = uuid.uuid4().hex
        self.started: list[Started] = []
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_leftovers()
        for one in self.started:
            one.process.wait()

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None) -> Started:
        log = self.folder / f"{name}.log"
        cwd = cwd or self.folder
        cwd.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(command),
                env={**environ, JOB_VARIABLE: self.id},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(Started(name, process, log))
        return self.started[-1]

    def wait(self, timeout_seconds: float, patience_after_failure_seconds: float | None = None) -> list[Ended]:
        """Wait for all; kill what still runs when a bound is over. Results in the order of starting.

        After the first failure the others get ``patience_after_failure_seconds`` (None: the whole timeout).
        """
        deadline = self._began + timeout_seconds * _FOR_A_BUSY_MACHINE
        seconds: dict[int, float] = {}
        while len(seconds) < len(self.started):
            for index, one in enumerate(self.started):
                if index not in seconds and one.process.poll() is not None:
                    seconds[index] = time.monotonic() - self._began
                    if one.process.returncode != 0 and patience_after_failure_seconds is not None:
                        deadline = min(deadline, time.monotonic() + patience_after_failure_seconds)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if len(seconds) < len(self.started):
            self.kill_leftovers()
        now = time.monotonic() - self._began
        return [
            Ended(one.name, one.process.wait(), one.output, index not in seconds, seconds.get(index, now))
            for index, one in enumerate(self.started)
        ]

    def orphans(self) -> list[psutil.Process]:
        """Who of this job stays, though everything that the test started has ended.

        A helper that ends by itself once its members are gone (the store's process beside rank 0) may do so in a
        moment of its own; a process that is still there after that moment is an orphan.
        """
        deadline = time.monotonic() + _LAST_MOMENT_SECONDS
        while (found := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def leftovers(self) -> list[psutil.Process]:
        """The processes of this job, and their descendants, that are still there."""
        return [process for process in psutil.process_iter() if _job_of(process) == self.id]

    def kill_leftovers(self) -> None:
        """All at once: nobody sees another one die."""
        while found := self.leftovers():
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for process in found:
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(number)
            time.sleep(0.02)  # psutil.wait_procs would collect our children before Popen can: exit codes were lost

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        """Poll until ``condition`` holds; fails with ``what`` and all output when it does not within the bound."""
        deadline = time.monotonic() + timeout_seconds * _FOR_A_BUSY_MACHINE
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not within {_FOR_A_BUSY_MACHINE:g} times {timeout_seconds:g} s: {what}\n{self.report()}"
                )
            time.sleep(0.05)

    def report(self) -> str:
        return "\n".join(f"--- {one.name} (exit {one.process.poll()}) ---\n{one.output}" for one in self.started)


def until(condition: Callable[[], _Found], seconds: float = 60.0) -> _Found:
    """What ``condition`` gives once it holds; looks every 10 ms, and fails when it does not within the bound."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)
    return found


def run_alone(
    folder: Path,
    command: Sequence[str],
    extra: Mapping[str, str] | None = None,
    *,
    timeout_seconds: float = 100.0,
    cwd: Path | None = None,
) -> Ended:
    """One command of a user to its end, in a clean environment; nobody of it may be left."""
    with Job(folder) as job:
        job.start("command", command, clean_environ(extra), cwd)
        (ended,) = job.wait(timeout_seconds)
        assert job.orphans() == []
    return ended


def output_of(command: Sequence[str], extra: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """What a command that succeeds prints on stdout."""
    environ = clean_environ(extra)
    done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _job_of(process: psutil.Process) -> str | None:
    # Zombies have no environment any more: what is left of them is their parent's to collect.
    try:
        return process.environ().get(JOB_VARIABLE)
    except (psutil.Error, OSError):
        return None


def write_script(script: str | Path, folder: Path, name: str = "script.py") -> Path:
    """The path of a script; text is written into ``folder`` first (dedented)."""
    if isinstance(script, Path):
        return script
    path = folder / name
    path.write_text(textwrap.dedent(script).lstrip("\n"))
    return path


def every_python_runs(code: str, folder: Path) -> dict[str, str]:
    """Variables with which each Python of a job runs ``code`` before anything else, kept in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def python(*arguments: str) -> list[str]:
    """The command line of this very Python."""
    return [sys.executable, *arguments]
