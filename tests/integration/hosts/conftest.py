"""Three machines with an sshd each, and commands that a user types on one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.processes import Job, Started, clean_environ, python, write_script
from tests.support.ssh import Machines, machines


class Desk:
    """A user at ``pc1`` of three machines, or at another one."""

    def __init__(self, folder: Path, these: Machines, job: Job) -> None:
        self.folder, self.machines, self.job = folder, these, job
        self.lab = these.lab

    def write(self, script: str, *disks: int) -> None:
        """The script on these machines' disks, or all."""
        for index in disks or range(len(self.machines.disks)):
            write_script(script, self.machines.disks[index], "train.py")

    def type(
        self, command: str, *words: str, hosts: str = "pc1,pc2,pc3", at: int = 0, name: str = "", **variables: str
    ) -> Started:
        typed = python("-m", "fleet_train", command, f"--hosts={hosts}", f"--ssh_config={self.machines.config}", *words)
        return self.job.start(
            name or command, self.machines.on(at, typed), clean_environ(variables), cwd=self.machines.work
        )

    def run(
        self, command: str, *words: str, hosts: str = "pc1,pc2,pc3", at: int = 0, **variables: str
    ) -> tuple[int, str]:
        """(exit code, output) of a command that leaves nothing behind."""
        self.type(command, *words, hosts=hosts, at=at, **variables)
        ended = self.job.wait(90)[-1]
        assert not ended.killed, ended.output
        self.all_end_within(5)
        return ended.exit_code, ended.output

    def wait_for(self, started: Started, *texts: str, seconds: float = 30.0) -> None:
        self.job.wait_until(lambda: all(text in started.output for text in texts), seconds, f"output of {texts}")

    def all_end_within(self, seconds: float) -> None:
        """On all machines, no process but sshd remains."""
        self.job.wait_until(lambda: not self.others(), seconds, f"only sshd runs, and not {self.others()}")

    def others(self) -> list[str]:
        return [
            f"pc{node.index + 1}: {line}" for node in self.lab.nodes for line in _commands(self.lab.pids(node.index))
        ]

    def has(self, disk: int, name: str) -> bool:
        return (self.machines.disks[disk] / name).exists()

    def read(self, disk: int, name: str) -> str:
        path = self.machines.disks[disk] / name
        return path.read_text() if path.exists() else ""


def _commands(pids: Sequence[int]) -> Iterator[str]:
    for pid in pids:
        try:
            process = psutil.Process(pid)
            words = process.cmdline()
            if words and process.status() != psutil.STATUS_ZOMBIE and words[0] != "unshare" and "sshd" not in words[0]:
                yield " ".join(words)
        except psutil.Error:
            pass


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with Job(tmp_path / "job") as job, machines(tmp_path, 3) as these:
        yield Desk(tmp_path, these, job)
