"""The command line of ``paddle.distributed.launch`` that carries out this node's share, and its private folder."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from fleet_train.launch import worker
from fleet_train.launch.node import Node

# As a folder it cannot be made, so the stock launcher cannot write <job>.<pod>.log, which opens with str(os.environ).
_JOB_ID = "/dev/null/fleet_train"


def stock_command(
    node: Node, program: tuple[str, ...], *, is_module: bool, log_dir: Path, token: str, private: Path
) -> list[str]:
    """What starts the ranks: the stock launcher, with our wrapper as the script of every rank."""
    command = [sys.executable, "-m", "paddle.distributed.launch"]
    command += [f"--ips={','.join(node.addresses)}", f"--host={node.address}", f"--start_port={node.started_port}"]
    command += [f"--devices={','.join(node.devices)}"] if node.devices else [f"--nproc_per_node={node.processes}"]
    command += [f"--log_dir={private}", f"--job_id={_JOB_ID}", "--enable_gpu_log=False"]
    # The program goes as one word: the launcher's parser looks at every word for flags of its own, also behind the
    # script, and stops with "ambiguous option" at a script's --a or --n.
    return [*command, worker.__file__, str(log_dir), token, json.dumps([*(["-m"] if is_module else []), *program])]


def make_private_folder(processes: range) -> Path:
    """A folder for the stock launcher's own files, which nobody else can read.

    It writes the whole environment into ``envlog.N`` and ``backup_env.RANK.json``: both lead to /dev/null here.
    """
    private = Path(tempfile.mkdtemp(prefix=worker.PRIVATE_PREFIX))
    for local, rank in enumerate(processes):
        (private / f"envlog.{local}").symlink_to("/dev/null")
        (private / f"backup_env.{rank}.json").symlink_to("/dev/null")
    return private


def remove_private_folder(private: Path) -> None:
    shutil.rmtree(private, ignore_errors=True)
