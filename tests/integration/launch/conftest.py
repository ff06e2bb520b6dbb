"""Launchers as real processes: what a user types on each node, on 127.0.0.2 and 127.0.0.3, or on one node."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import ports
from tests.support.processes import Ended, Job, Started, clean_environ, python, write_script

HOSTS = ("127.0.0.2", "127.0.0.3")
SECRET = "abc123-must-not-be-seen"


class Bench:
    """Starts launchers and looks at what they leave behind. Everything lives below ``folder``."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder = folder
        self.job = job
        self.first_port = ports.free_ports(6, [*HOSTS, "127.0.0.1"])

    def start(
        self,
        script: str | Path,
        *arguments: str,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        node: int | None = None,
        shell: str = '"$@"',
        job: str = "",
    ) -> Started:
        """One launcher; ``node`` 0 or 1 of two, or None for a job on this machine alone.

        ``shell``: what a user types around the command (``"$@"``), such as a pipe; a failure anywhere is the exit code.
        ``job`` tells the launchers of several jobs in one folder apart.
        """
        path = write_script(script, self.folder)
        where = [f"--cluster_node_ips={','.join(HOSTS)}", f"--node_ip={HOSTS[node]}"] if node is not None else []
        command = ["-m", "fleet_train", "launch", *where, f"--started_port={self.first_port}", *flags]
        name = f"node{node or 0}"
        environment = clean_environ({"SECRET_TOKEN": SECRET, "TMPDIR": str(self.temporary), **(environ or {})})
        typed = ["bash", "-c", f"set -o pipefail; {shell}", "bash"] if shell != '"$@"' else []
        command = [*typed, *python(*command, str(path), *arguments)]
        return self.job.start(f"{name}{job}", command, environment, cwd=self.folder / name)

    def start_two(self, script: str | Path, *arguments: str, flags: Sequence[str] = ()) -> tuple[Started, Started]:
        return (
            self.start(script, *arguments, flags=flags, node=0),
            self.start(script, *arguments, flags=flags, node=1),
        )

    @property
    def temporary(self) -> Path:
        path = self.folder / "tmp"
        path.mkdir(exist_ok=True)
        return path

    def ended(self, timeout_seconds: float = 60.0) -> list[Ended]:
        return self.job.wait(timeout_seconds)

    def log(self, name: str = "node0/log/workerlog.0") -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
        self.job.wait_until(condition, timeout_seconds, what)

    def wait_for_output(self, text: str, *names: str) -> None:
        self.wait_for(lambda: all(text in self.log(name) for name in names), f"{text!r} in {', '.join(names)}")

    def no_orphans_within(self, seconds: float) -> None:
        self.wait_for(lambda: not self.job.leftovers(), "every process of the job has ended", seconds)

    def files_with(self, text: str) -> list[str]:
        """Files below the folder that contain the text: logs, reports, what was left in the temporary folder."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return [str(path) for path in files if text.encode() in path.read_bytes()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Job(tmp_path) as job:
        yield Bench(tmp_path, job)


def send(started: Started, number: signal.Signals) -> None:
    started.process.send_signal(number)
