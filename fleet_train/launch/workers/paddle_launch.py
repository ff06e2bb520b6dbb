"""The command line of ``paddle.distributed.launch`` that starts this node's ranks, and its private folder."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from fleet_train.files import hold
from fleet_train.launch.spec.node import Node
from fleet_train.launch.workers import paddle_launch_main, worker_main
from fleet_train.launch.workers.folder_lock import remove_abandoned

# It cannot be made as a folder, so the stock launcher cannot write <job>.<pod>.log, which starts with str(os.environ).
_JOB_ID = "/dev/null/fleet_train"


def stock_command(
    node: Node, program: tuple[str, ...], *, is_module: bool, log_dir: Path, token: str, private: Path
) -> list[str]:
    """The command that starts the ranks: the stock launcher, with our wrapper as the script of every rank.

    Without devices it does not need Paddle's core, and starts in a tenth of the time without it.
    """
    command = [sys.executable, *([] if node.devices else [paddle_launch_main.__file__])]
    command += ["-m", "paddle.distributed.launch"]
    command += [f"--ips={','.join(node.addresses)}", f"--host={node.address}", f"--start_port={node.started_port}"]
    command += [f"--devices={','.join(node.devices)}"] if node.devices else [f"--nproc_per_node={node.processes}"]
    command += [f"--log_dir={private}", f"--job_id={_JOB_ID}", "--enable_gpu_log=False"]
    # The program is one word: the launcher's parser searches every word for flags of its own, even after the
    # script, and stops with "ambiguous option" at a script's --a or --n.
    return [*command, worker_main.__file__, str(log_dir), token, program_word(program, is_module)]


def program_word(program: tuple[str, ...], is_module: bool) -> str:
    """The script, or module, and its arguments as the wrapper gets them."""
    return json.dumps([*(["-m"] if is_module else []), *program])


class PrivateFolder:
    """A folder for the stock launcher's own files, readable by this user only.

    It writes the whole environment into ``envlog.N`` and ``backup_env.RANK.json``: both link to /dev/null here.
    """

    def __init__(self, ranks: range) -> None:
        remove_abandoned_folders()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=worker_main.PRIVATE_PREFIX))
            with suppress(BlockingIOError):  # another launcher is removing it already
                self._held = hold(self.path)
                if self.path.is_dir():
                    break
        for local, rank in enumerate(ranks):
            (self.path / f"envlog.{local}").symlink_to("/dev/null")
            (self.path / f"backup_env.{rank}.json").symlink_to("/dev/null")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held is not None:
            self._held.close()


def remove_abandoned_folders() -> None:
    """Remove the folders of this user's launchers that were killed together with their ranks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{worker_main.PRIVATE_PREFIX}*"):
        with suppress(OSError):
            about = folder.lstat()
            if about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode):
                remove_abandoned(folder)
