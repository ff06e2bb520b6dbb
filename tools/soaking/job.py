"""The job of a soak: a launcher per machine, each with its own disk, observed and disturbed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.lab import Lab
from tools.processes import ROOT, Process, start, stop
from tools.soaking.ledger import LEDGER

_MARK = "FLEET_TRAIN_SOAK"
_OUR_PREFIX = "fleet_train"
_LEADS = re.compile(rb"node (\d+) \([^)]*\) is the leader")
_STOP_SECONDS = 45.0


class SoakFailed(Exception):
    """The job misbehaved, or the soak could not carry out its plan."""


@dataclass(frozen=True)
class Job:
    """How the job is started: machines share only the network.

    ``folder`` has a folder per node (its disk), and outside of these the ledger and the launchers' output. ``lab``:
    each machine is a namespace of it; without one, an address of the loopback interface.
    """

    folder: Path
    lab: Lab | None
    nodes: Sequence[int]
    ranks_per_node: int
    started_port: int
    launch_flags: tuple[str, ...]
    train_flags: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    def disk(self, node: int) -> Path:
        return self.folder / f"node{node}"

    def checkpoints(self, node: int) -> Path:
        return self.disk(node) / "out" / "checkpoints"

    def newest_checkpoint(self, nodes: Sequence[int]) -> Path:
        """The newest whole checkpoint on these disks. Raises SoakFailed if there is none."""
        markers = [path for node in nodes for path in self.checkpoints(node).glob("step-*/complete.json")]
        if not markers:
            raise SoakFailed(f"there is no checkpoint in {self.folder}")
        return max(markers, key=lambda path: path.stat().st_mtime_ns).parent

    def address(self, node: int) -> str:
        return f"127.0.0.{2 + node}" if self.lab is None else self.lab.nodes[node].address

    def command(self, node: int) -> list[str]:
        """The launch command of one machine, as a user would type it: the same on all machines but for its address."""
        flags = ["--cluster_node_ips", ",".join(map(self.address, self.nodes)), "--node_ip", self.address(node)]
        flags += ["--started_port", str(self.started_port), f"--nproc_per_node={self.ranks_per_node}", "--log_dir=log"]
        train = [str(ROOT / "tools" / "soaking" / "program.py"), *self.train_flags, "--output_dir=out"]
        prefix = [] if self.lab is None else self.lab.nodes[node].prefix
        return [*prefix, sys.executable, "-m", "fleet_train", "launch", *flags, *self.launch_flags, *train]


class Running:
    """The started job. ``launchers`` by node; the entry of a lost machine is a launcher that has ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.launchers: dict[int, Process] = {}
        self._mark = f"{os.getpid()}-{job.folder.name}-{time.monotonic_ns()}"
        self._leader = job.nodes[0]
        self._heard = dict.fromkeys(job.nodes, 0)
        job.ledger.mkdir(parents=True, exist_ok=True)

    def start(self, node: int) -> None:
        """Start the launcher of a machine on whatever is on its disk."""
        temporary = self.job.disk(node) / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        import_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": import_path, "GLOG_minloglevel": "2", **self.job.environ}
        environ |= {_MARK: self._mark, LEDGER: str(self.job.ledger), "TMPDIR": str(temporary)}
        log = self.job.folder / f"launcher{node}.log"
        self.launchers[node] = start(self.job.command(node), log, environ, self.job.disk(node))

    def lose(self, node: int) -> None:
        """Everything on the machine is killed, and its disk is gone."""
        assert self.job.lab is not None
        while pids := self.job.lab.pids(node):
            for pid in pids:
                send(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.launchers[node].wait()
        shutil.rmtree(self.job.disk(node))

    def kill_launcher(self, node: int) -> None:
        self.launchers[node].kill()
        self.launchers[node].wait()

    def set_link(self, node: int, state: str) -> None:
        assert self.job.lab is not None
        self.job.lab.set_link(node, state)

    def signal(self, node: int, number: int) -> None:
        send(self.launchers[node].pid, number)

    def rank_pids(self) -> dict[int, int]:
        """Rank -> process id of its script, for the ranks running now."""
        found = {}
        for path in self.job.folder.glob("node*/log/workerend.*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                record = json.loads(path.read_text())
                is_zombie = psutil.Process(record["pid"]).status() == psutil.STATUS_ZOMBIE
                if "ended_monotonic" not in record and not is_zombie:
                    found[int(record["rank"])] = int(record["pid"])
        return found

    def draft(self, since: float) -> str | None:
        """The checkpoint that is being written now; not one that was begun before ``since`` (Unix seconds)."""
        for path in self.job.folder.glob("node*/out/checkpoints/.writing-*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime > since:
                    return path.name
        return None

    def ended(self) -> dict[int, int]:
        """Exit codes of the launchers that ended, by node."""
        codes = {node: launcher.poll() for node, launcher in self.launchers.items()}
        return {node: code for node, code in codes.items() if code is not None}

    def leader(self) -> int:
        """The leader by the launchers' output since the last call; the first machine at the start."""
        for node in self.job.nodes:
            with contextlib.suppress(OSError), (self.job.folder / f"launcher{node}.log").open("rb") as log:
                log.seek(self._heard[node])
                words = log.read()
                self._heard[node] += len(words)
                for said in _LEADS.findall(words):
                    self._leader = self.job.nodes[int(said)]
        return self._leader

    def wait(self, timeout_seconds: float) -> list[int]:
        """Exit codes of all launchers by node; any that exceed the timeout are stopped."""
        deadline = time.monotonic() + timeout_seconds
        for launcher in self.launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.1, deadline - time.monotonic()))
        self.stop()
        return [int(self.launchers[node].returncode) for node in self.job.nodes]

    def stop(self) -> None:
        """Let the ranks save, then kill what is left; no launcher is."""
        stop(list(self.launchers.values()), _STOP_SECONDS)

    def orphans(self, patience_seconds: float = 5.0) -> list[str]:
        """Command lines of this job's processes that still run after a short grace period."""
        deadline = time.monotonic() + patience_seconds
        while True:
            found = []
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    if process.environ().get(_MARK) == self._mark:
                        found.append(" ".join(process.cmdline()))
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def left_behind(self) -> list[str]:
        """Folders for temporary files of launchers, and half-written checkpoints, by node."""
        found = []
        for node in self.job.nodes:
            private = [path.name for path in (self.job.disk(node) / "tmp").glob(f"{_OUR_PREFIX}*")]
            drafts = [path.name for path in self.job.checkpoints(node).glob(".*step-*")]
            found += [f"node {node}: {name}" for name in sorted([*private, *drafts])]
        return found


@contextmanager
def started(job: Job) -> Iterator[Running]:
    """The job, running. On leaving, none of its launchers runs."""
    running = Running(job)
    try:
        for node in job.nodes:
            running.start(node)
        yield running
    finally:
        running.stop()


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
