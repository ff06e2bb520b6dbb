"""OpenSSH on emulated machines: each node has its own sshd, its own disk below one path, and keys made for the test."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.namespaces import why_no_namespaces
from tools.lab import Lab

SSHD = Path("/usr/sbin/sshd")


def why_no_sshd() -> str | None:
    """Why this process cannot emulate machines with sshd, or None when it can."""
    if reason := why_no_namespaces():
        return reason
    return None if SSHD.exists() and shutil.which("ssh") else "there is no sshd: apt-get install openssh-server"


@dataclass(frozen=True)
class Machines:
    """``pc1``, ``pc2``, ... of ``config``, with the same user on each."""

    lab: Lab
    config: Path
    work: Path
    """The working folder: on each machine another disk."""
    disks: tuple[Path, ...]
    """What each machine has there, as seen from outside."""

    def on(self, index: int, command: Sequence[str]) -> list[str]:
        """A command as a user types it on a machine, in its working folder."""
        return [*self.lab.nodes[index].prefix, *_with_disk(self.disks[index], self.work, command)]


def _with_disk(disk: Path, work: Path, command: Sequence[str], before: str = "true") -> list[str]:
    # ``ip netns exec`` has made a mount namespace: nothing of this is seen outside.
    script = (
        f"mount --bind {shlex.quote(str(disk))} {shlex.quote(str(work))} && cd {shlex.quote(str(work))} && {before}"
    )
    return ["sh", "-c", f'{script} && exec "$@"', "sh", *command]


@contextmanager
def machines(folder: Path, number: int, before: Sequence[str] = ()) -> Iterator[Machines]:
    """Emulated machines until the end of the block. ``before``: shell commands of each one, before its sshd starts."""
    work, keys = folder / "work", folder / "keys"
    disks = tuple(folder / f"disk{index + 1}" for index in range(number))
    for path in (work, keys, *disks):
        path.mkdir()
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    (keys / "authorized").write_text((keys / "client.pub").read_text())
    (keys / "authorized").chmod(0o600)
    Path("/run/sshd").mkdir(exist_ok=True)
    with Lab(number, "none") as lab:
        public = " ".join((keys / "host.pub").read_text().split()[:2])
        (keys / "known").write_text("".join(f"{node.address} {public}\n" for node in lab.nodes))
        config = folder / "ssh_config"
        config.write_text(
            "".join(f"Host pc{index + 1}\n  HostName {node.address}\n" for index, node in enumerate(lab.nodes))
            + f"Host *\n  User root\n  IdentityFile {keys / 'client'}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {keys / 'known'}\n  GlobalKnownHostsFile none\n  StrictHostKeyChecking yes\n"
        )
        (keys / "sshd_config").write_text(
            f"HostKey {keys / 'host'}\nAuthorizedKeysFile {keys / 'authorized'}\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\nPrintMotd no\n"
        )
        servers = []
        for index, node in enumerate(lab.nodes):
            subprocess.run(["ip", "-n", node.namespace, "link", "set", "lo", "up"], check=True)
            # It sees the processes of its own machine only.
            command = [
                *"unshare --pid --fork --kill-child --mount-proc --".split(),
                str(SSHD),
                "-D",
                "-e",
                "-f",
                str(keys / "sshd_config"),
            ]
            extra = before[index] if index < len(before) else "true"
            with (folder / f"sshd{index + 1}.log").open("w") as log:
                servers.append(
                    subprocess.Popen(
                        [*node.prefix, *_with_disk(disks[index], work, command, extra)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            _await(folder, number)
            yield Machines(lab, config, work, disks)
        finally:
            for server in servers:
                server.kill()  # and with it, all processes of its machine
                server.wait()


def _await(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 20
    for index in range(number):
        log = folder / f"sshd{index + 1}.log"
        while "Server listening" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
