"""The files of tools/examples/cluster that start a training on a cluster, as a user edits them."""

from __future__ import annotations

import re
from typing import Any

from fleet_train.cli import launch
from fleet_train.cli.on_hosts import FLAGS
from fleet_train.launch.request import LaunchRequest
from tests.support.processes import ROOT

FOLDER = ROOT / "tools" / "examples" / "cluster"
BATCH_SCRIPT = FOLDER / "train.sbatch"


def edited(text: str, edits: dict[str, str]) -> str:
    """The batch script with other values: of a variable (``processes``) or of an option of sbatch (``--nodes``)."""
    for name, value in edits.items():
        line = rf"^(#SBATCH {name}=)\S+" if name.startswith("--") else rf"^({name}=)(?:\(.*?\)|\S+)"
        (found,) = re.finditer(line, text, re.MULTILINE)
        text = text[: found.end(1)] + value + text[found.end() :]
    return text


def request_of(words: list[str]) -> LaunchRequest:
    """What the launcher reads of its command line."""
    assert words[:4] == ["python", "-m", "fleet_train", "launch"]
    context = launch.command.make_context("launch", words[4:])
    flags: dict[str, Any] = {name: value for name, value in context.params.items() if name not in {"dry_run", *FLAGS}}
    return launch.read_request(**flags)
