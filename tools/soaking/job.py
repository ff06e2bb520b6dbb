"""The job under test: one launcher per machine with the reference trainer, observed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MARK = "FLEET_TRAIN_SOAK"
_STOP_SECONDS = 45.0


def end_launchers(launchers: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGTERM (also to stopped processes), then SIGKILL."""
    running = [launcher for launcher in launchers if launcher.poll() is None]
    for launcher in running:
        launcher.send_signal(signal.SIGCONT)
        launcher.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for launcher in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(max(0.1, deadline - time.monotonic()))
        launcher.kill()
        launcher.wait()


@dataclass(frozen=True)
class Machine:
    """One node: its address, and what to put before a command so that it runs there."""

    address: str
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class SoakJob:
    """How the job is started. Everything it writes is below ``folder``."""

    folder: Path
    machines: Sequence[Machine]
    ranks_per_node: int
    started_port: int
    max_restarts: int
    train_flags: tuple[str, ...]

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    def log_dir(self, node: int) -> Path:
        return self.folder / f"node{node}"

    def command(self, node: int) -> list[str]:
        """The launch command of one machine, as a user would type it."""
        machine = self.machines[node]
        nodes = ",".join(each.address for each in self.machines)
        launch = f"--cluster_node_ips={nodes} --node_ip={machine.address} --started_port={self.started_port}"
        launch += f" --nproc_per_node={self.ranks_per_node} --max_restarts={self.max_restarts}"
        train = ["-m", "fleet_train", "train", *self.train_flags, f"--output_dir={self.output}"]
        python = [*machine.prefix, sys.executable, "-m", "fleet_train", "launch"]
        return [*python, *launch.split(), f"--log_dir={self.log_dir(node)}", *train]


class Running:
    """A started job, observed through its files and processes only."""

    def __init__(self, job: SoakJob, launchers: list[subprocess.Popen[bytes]], mark: str) -> None:
        self.job = job
        self.launchers = launchers
        self.began = time.time()
        self._mark = mark

    def attempt(self) -> int:
        """The current attempt on node 0, counted by the logs that the launcher kept of earlier ones."""
        return len(list(self.job.log_dir(0).glob("workerlog.0.attempt*")))

    def rank_pids(self) -> dict[int, int]:
        """Rank -> process id of its script, for the ranks running now."""
        found = {}
        for node in range(len(self.job.machines)):
            for path in self.job.log_dir(node).glob("workerend.*.json"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    record = json.loads(path.read_text())
                    if "ended_monotonic" not in record and _runs(record["pid"]):
                        found[int(record["rank"])] = int(record["pid"])
        return found

    def step_since(self, moment: float) -> int:
        """The newest step reported after ``moment`` (Unix seconds); 0 if none was."""
        records = read_metrics(self.job.output)
        return max((int(record["step"]) for record in records if record["time"] > moment), default=0)

    def first_report_after(self, moment: float) -> float | None:
        """The time of the trainer's first reported step after ``moment``."""
        return min((r["time"] for r in read_metrics(self.job.output) if r["time"] > moment), default=None)

    def draft(self) -> str | None:
        """The checkpoint that is being written now."""
        with contextlib.suppress(OSError), os.scandir(self.job.checkpoints) as entries:
            return next((entry.name for entry in entries if entry.name.startswith(".writing-")), None)
        return None

    def exit_codes(self) -> list[int | None]:
        return [launcher.poll() for launcher in self.launchers]

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float, pause_seconds: float = 0.02) -> bool:
        """Whether the condition holds before the timeout and before a launcher ends."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            if time.monotonic() > deadline or any(code is not None for code in self.exit_codes()):
                return condition()
            time.sleep(pause_seconds)
        return True

    def wait(self, timeout_seconds: float) -> list[int]:
        """Exit codes of all launchers; any that exceed the timeout are stopped."""
        deadline = time.monotonic() + timeout_seconds
        for launcher in self.launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.1, deadline - time.monotonic()))
        self.stop()
        return [int(launcher.returncode) for launcher in self.launchers]

    def stop(self) -> None:
        """SIGTERM, which lets the ranks save, then SIGKILL; no process is left."""
        end_launchers(self.launchers)

    def orphans(self, patience_seconds: float = 5.0) -> list[str]:
        """Command lines of this job's processes that still run after a short grace period."""
        deadline = time.monotonic() + patience_seconds
        while (found := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _processes(self) -> list[str]:
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == self._mark:
                    found.append(" ".join(process.cmdline()))
        return found


@contextmanager
def started(job: SoakJob) -> Iterator[Running]:
    """The job, running. On leaving, none of its launchers runs."""
    mark = f"{os.getpid()}-{job.folder.name}-{time.monotonic_ns()}"
    launchers: list[subprocess.Popen[bytes]] = []
    running = Running(job, launchers, mark)
    try:
        for node in range(len(job.machines)):
            job.log_dir(node).mkdir(parents=True, exist_ok=True)
            with (job.folder / f"launcher{node}.log").open("wb") as log:
                launchers.append(
                    subprocess.Popen(
                        job.command(node),
                        env={**environment(), _MARK: mark},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # they get Ctrl-C only through this process
                    )
                )
        yield running
    finally:
        running.stop()


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The scalars of ``metrics.jsonl`` so far, without an incomplete last line."""
    records = []
    with contextlib.suppress(OSError):
        for line in (output / "metrics.jsonl").read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if "kind" not in record:
                    records.append(record)
    return records


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def freeze(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def environment() -> dict[str, str]:
    import_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": import_path, "GLOG_minloglevel": "2"}
