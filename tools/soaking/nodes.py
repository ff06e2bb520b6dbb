"""The machines of a soak: each is a namespace with its own disk, launcher, and a link that can be taken down."""

from __future__ import annotations

import contextlib
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

from tools.lab import Lab
from tools.soaking.job import ROOT, end_launchers, environment
from tools.soaking.program import LEDGER
from tools.soaking.verdict import leftovers

MARK = "FLEET_TRAIN_SOAK"
_OUR_PREFIX = "fleet_train"
_LEADS = re.compile(rb"node (\d+) \([^)]*\) is the leader")


@dataclass(frozen=True)
class MachineJob:
    """How the job is started: one rank per machine, which share only the network.

    ``folder`` has a folder per node (its disk), and outside of these the ledger and the launchers' output.
    """

    folder: Path
    lab: Lab
    nodes: Sequence[int]
    """Which machines of the lab take part."""
    started_port: int
    launch_flags: tuple[str, ...]
    train_flags: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def disk(self, node: int) -> Path:
        return self.folder / f"node{node}"

    def output(self, node: int) -> Path:
        return self.disk(node) / "out"

    def temporary(self, node: int) -> Path:
        return self.disk(node) / "tmp"

    def launcher_log(self, node: int) -> Path:
        return self.folder / f"launcher{node}.log"

    def command(self, node: int) -> list[str]:
        """The launch command of one machine, as a user would type it: the same on all machines but for the folder."""
        machine = self.lab.nodes[node]
        nodes = ",".join(self.lab.nodes[each].address for each in self.nodes)
        launch = ["--cluster_node_ips", nodes, "--node_ip", machine.address, "--started_port", str(self.started_port)]
        train = [str(ROOT / "tools" / "soaking" / "program.py"), *self.train_flags, "--output_dir=out"]
        python = [*machine.prefix, sys.executable, "-m", "fleet_train", "launch"]
        return [*python, *launch, "--nproc_per_node=1", "--log_dir=log", *self.launch_flags, *train]


class Machines:
    """The started job. ``launchers`` by node; the entry of a lost machine is a launcher that has ended."""

    def __init__(self, job: MachineJob) -> None:
        self.job = job
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self.mark = f"{os.getpid()}-{job.folder.name}-{time.monotonic_ns()}"
        self._leader = job.nodes[0]
        self._heard = dict.fromkeys(job.nodes, 0)
        job.ledger.mkdir(parents=True, exist_ok=True)

    def start(self, node: int) -> None:
        """Start the launcher of a machine on whatever is on its disk."""
        job = self.job
        job.temporary(node).mkdir(parents=True, exist_ok=True)
        environ = {**environment(), **job.environ, MARK: self.mark, LEDGER: str(job.ledger)}
        environ["TMPDIR"] = str(job.temporary(node))
        with job.launcher_log(node).open("ab") as log:
            self.launchers[node] = subprocess.Popen(
                job.command(node),
                cwd=job.disk(node),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # they get Ctrl-C only through this process
            )

    def start_all(self) -> None:
        for node in self.job.nodes:
            self.start(node)

    # faults

    def lose(self, node: int) -> None:
        """Everything on it is killed, and its disk is gone."""
        while pids := self.job.lab.pids(node):
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.launchers[node].wait()
        shutil.rmtree(self.job.disk(node))

    def kill_launcher(self, node: int) -> None:
        self.launchers[node].kill()
        self.launchers[node].wait()

    def freeze_launcher(self, node: int) -> None:
        _signal(self.launchers[node].pid, signal.SIGSTOP)

    def thaw_launcher(self, node: int) -> None:
        _signal(self.launchers[node].pid, signal.SIGCONT)

    def set_wire(self, node: int, state: str) -> None:
        self.job.lab.set_link(node, state)

    # observations

    def ended(self) -> dict[int, int]:
        """Exit codes of the launchers that ended, by node."""
        codes = {node: launcher.poll() for node, launcher in self.launchers.items()}
        return {node: code for node, code in codes.items() if code is not None}

    def leader(self) -> int:
        """The leader by the launchers' output since the last call; the first machine at the start."""
        for node in self.job.nodes:
            with contextlib.suppress(OSError), self.job.launcher_log(node).open("rb") as log:
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
        """Bring links up; SIGTERM, then SIGKILL, to running launchers."""
        end_launchers(self.launchers.values())

    def orphans(self, patience_seconds: float = 5.0) -> list[str]:
        """Command lines of what still runs in a namespace after a short grace period."""
        deadline = time.monotonic() + patience_seconds
        while (pids := self._pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [_command_of(pid) for pid in pids]

    def _pids(self) -> list[int]:
        return [pid for node in self.job.nodes for pid in self.job.lab.pids(node)]

    def left_behind(self) -> list[str]:
        """Folders for temporary files of launchers, and half-written checkpoints, by node."""
        found = []
        for node in self.job.nodes:
            private = sorted(path.name for path in self.job.temporary(node).glob(f"{_OUR_PREFIX}*"))
            drafts = leftovers(self.job.output(node) / "checkpoints")
            found += [f"node {node}: {name}" for name in [*private, *drafts]]
        return found


@contextmanager
def started(job: MachineJob) -> Iterator[Machines]:
    """The job, running. On leaving, none of its launchers runs."""
    machines = Machines(job)
    try:
        machines.start_all()
        yield machines
    finally:
        machines.stop()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return f"process {pid}"
