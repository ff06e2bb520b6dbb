"""Reads the requested job from the stock launcher's own command line.

On Paddle 3.3 an unknown flag (every flag of the 1.8 recipe, and every typo) makes ``python -m
paddle.distributed.launch`` switch to a legacy launcher that drops it and starts a job of this machine alone. The
requested job is then only in the launcher's argument list.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from fleet_train.errors import ClusterError

# Old and new spellings -> one name.
_SPELLINGS = {
    "cluster_node_ips": "node_ips",
    "ips": "ips",
    "node_ip": "node_ip",
    "host": "host",
    "started_port": "started_port",
    "start_port": "started_port",
    "selected_gpus": "devices",
    "devices": "devices",
    "gpus": "devices",
    "nproc_per_node": "nproc_per_node",
    "log_dir": "log_dir",
    "use_paddlecloud": "use_paddlecloud",
}
# Flags of the modern launcher that do not affect which nodes take part, and one of the 1.8 launcher's.
_OTHERS = (
    "master rank log_level log_overwrite sort_ip enable_gpu_log nnodes run_mode job_id servers trainers workers "
    "trainer_num worker_num server_num gloo_port with_gloo max_restart elastic_level elastic_timeout legacy "
    "auto_parallel_config auto_tuner_json auto_cluster_config print_config backend xpus npus mlus ipus"
).split()
_SWITCHES = {"use_paddlecloud", "print_config"}  # 1.8: store_true, no value


@dataclass(frozen=True)
class AskedLaunch:
    """The stock launcher's flags: known ones under one name each, and unknown ones."""

    flags: dict[str, str]
    unknown: tuple[str, ...]
    script: tuple[str, ...]

    def ips(self) -> list[str]:
        text = self.flags.get("node_ips", "")
        return [ip.strip() for ip in text.split(",") if ip.strip()]


def parse_launch(command: Sequence[str]) -> AskedLaunch | None:
    """The launch that an argument list requests, or None if it is not ``paddle.distributed.launch``."""
    arguments = _after_launcher(list(command))
    if arguments is None:
        return None
    flags: dict[str, str] = {}
    unknown: list[str] = []
    position = 0
    while position < len(arguments) and arguments[position].startswith("--"):
        name, has_value, value = arguments[position][2:].partition("=")
        known = name in _SPELLINGS or name in _OTHERS
        position += 1
        if not has_value and known and name not in _SWITCHES and position < len(arguments):
            value = arguments[position]
            position += 1
        if name in _SPELLINGS:
            flags[_SPELLINGS[name]] = value
        elif not known:
            unknown.append(name)
    return AskedLaunch(flags, tuple(unknown), tuple(arguments[position:]))


def _after_launcher(command: list[str]) -> list[str] | None:
    for position, word in enumerate(command):
        if word == "-m" and command[position + 1 : position + 2] in (
            ["paddle.distributed.launch"],
            ["paddle.distributed.fleet.launch"],
        ):
            return command[position + 2 :]
        if word.endswith(("distributed/launch/main.py", "distributed/launch/__main__.py", "/fleetrun")):
            return command[position + 1 :]
    return None


def refuse_unknown_flags(asked: AskedLaunch) -> None:
    """Report that an unknown flag made the stock launcher start a job of one machine.

    Raises ClusterError with the nearest known flag.
    """
    if not asked.unknown:
        return
    name = asked.unknown[0]
    near = difflib.get_close_matches(name, [*_SPELLINGS, *_OTHERS], n=1)
    hint = f"; did you mean '--{near[0]}'?" if near else ""
    raise ClusterError(
        f"paddle.distributed.launch does not know '--{name}'{hint} It dropped the flag and started the processes of "
        "this machine alone, so this is not the requested job"
    )
