"""Commands as the READMEs print them, and how a test runs them on this machine instead of on two others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

# The machines and the port of every example in the READMEs.
README_IPS = ("192.168.1.2", "192.168.1.3")
README_PORT = "6170"
README_MASTER_PORT = "6070"

# Not the module that a launcher is given: `-m fleet_train train`.
_SCRIPT = re.compile(r"(?<!-m )(?<![\w-])fleet_train (?=[a-z])")

OLD_RECIPE = (
    "python -m paddle.distributed.launch --cluster_node_ips=192.168.1.2,192.168.1.3 --node_ip=192.168.1.2 "
    "--started_port=6170 --selected_gpus=0 --log_dir mylog train.py"
)
FLEET_TRAIN = (
    "python -m fleet_train launch --cluster_node_ips=192.168.1.2,192.168.1.3 --node_ip=192.168.1.2 "
    "--started_port=6170 --selected_gpus=0,1 --strategy multi_node --log_dir mylog train.py"
)
TODAYS_IPS = (
    "python -m paddle.distributed.launch --ips=192.168.1.2,192.168.1.3 --host=192.168.1.2 --start_port=6170 "
    "--nproc_per_node=2 train.py"
)
TODAYS_MASTER = "python -m paddle.distributed.launch --master=192.168.1.2:6070 --nnodes=2 --nproc_per_node=2 train.py"
PADDLECLOUD = "python -m fleet_train launch --use_paddlecloud --nproc_per_node=2 --strategy multi_node train.py"
ONE_PROCESS = "python train.py"
INSTALL = "python -m pip install ."


def on_node(command: str, node: int, hosts: Sequence[str], first_port: int) -> list[str]:
    """The argument list of a README command on machine ``node`` of ``hosts``.

    Only addresses and ports are replaced: this machine's own in --node_ip and --host, the list's everywhere else.
    """
    text = re.sub(r"(--node_ip=|--host=)\S+", rf"\g<1>{hosts[node]}", command)
    for shown, real in zip(README_IPS, hosts, strict=True):
        text = text.replace(shown, real)
    text = text.replace(f"={README_PORT}", f"={first_port}").replace(f":{README_MASTER_PORT}", f":{first_port}")
    return shlex.split(text)


def shell_commands(markdown: str) -> list[str]:
    """The commands of every fenced ``bash`` or ``sh`` block, and of ``console`` blocks the lines after a ``$``.

    Comments and continuation lines are joined away. The command ``fleet_train``, of an activated environment, is
    ``python -m fleet_train``, which is the same and needs no installation.
    """
    lines: list[str] = []
    for language, block in re.findall(r"^```(bash|sh|console)\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE):
        joined = block.replace("\\\n", " ").splitlines()
        lines += [line[2:] for line in joined if line.startswith("$ ")] if language == "console" else joined
    commands = (_SCRIPT.sub("python -m fleet_train ", re.sub(r"\s+#.*$", "", line).strip()) for line in lines)
    return [re.sub(r"\s+", " ", command) for command in commands if command and not command.startswith("#")]


def fenced_blocks(markdown: str, language: str) -> list[str]:
    """The contents of every fenced block of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)


def put_script(folder: Path, nodes: int, script: Path) -> None:
    """Place ``script`` as train.py into the working folder of every node."""
    for node in range(nodes):
        (folder / f"node{node}").mkdir(parents=True, exist_ok=True)
        (folder / f"node{node}" / "train.py").write_bytes(script.read_bytes())
