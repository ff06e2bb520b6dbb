"""A subject as a child of its supervisor: its environment, its log, its reports, its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.environment import rank_variables
from fleet_train.files import open_new, write_new
from fleet_train.launch.node import appended
from fleet_train.launch.prepare import import_path_for_ranks
from fleet_train.launch.processes import Process, end_of
from fleet_train.launch.report import last_lines

SUBJECT = "fleet_train.selftest.subject"
_LAST_LINES = 8
_LINES_OF_NCCL = 10
_CHATTER = " NCCL INFO "
_LONGEST_LINE = 16 * 1024
# Variables of the selftest's own launch that the subject must not see: its profiles come from the checks.
# Its ranks train on their own, too, to compare.
_NOT_PASSED_ON = frozenset(
    """
    FLEET_TRAIN_STRATEGY FLEET_TRAIN_SET FLEET_TRAIN_STRICT FLEET_TRAIN_TRACE FLEET_TRAIN_ATTEMPT PADDLE_MASTER
    MASTER_ADDR MASTER_PORT
    """.split()
)


def environ_of(cluster: Cluster, join_timeout_seconds: float, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of this rank's subject: its supervisor's, with the subjects' cluster."""
    kept = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    kept |= rank_variables(cluster) | {
        "PADDLE_NNODES": str(cluster.node_num),
        "FLEET_TRAIN_STORE": cluster.store_endpoint,
        "FLEET_TRAIN_JOIN_TIMEOUT": f"{join_timeout_seconds:g}",
        "PYTHONUNBUFFERED": "1",
    }
    home = import_path_for_ranks()
    if home is not None:
        kept["PYTHONPATH"] = appended(kept.get("PYTHONPATH", ""), str(home))
    return kept


class Child(Process):
    """A running subject. The kernel ends it with its supervisor, also while it is stopped."""

    def __init__(
        self, job: str, argument: Mapping[str, Any], environ: Mapping[str, str], log: Path, module: str = SUBJECT
    ) -> None:
        self._log = log
        self._reports = log.with_suffix(".reports")
        self._read = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        write_new(self._reports, b"")
        command = [sys.executable, "-m", module, job, str(self._reports), json.dumps(argument)]
        with open_new(log) as sink:
            super().__init__(command, environ, sink)

    def reports(self) -> Iterator[dict[str, Any]]:
        """The subject's reports since the last call."""
        with self._reports.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # the rest is being written
                self._read += len(line)
                yield json.loads(line)

    def kill(self) -> None:
        """It has ended afterwards, and what it has started."""
        self.kill_group()
        self.wait()

    def last_lines(self) -> tuple[str, ...]:
        """The end of its output, to explain a failure."""
        lines = (line for line in end_of(self._log).split("\n") if _CHATTER not in line)
        return last_lines("\n".join(lines), _LAST_LINES, _LONGEST_LINE)

    def lines_of_nccl(self) -> tuple[str, ...]:
        """NCCL's last lines (NCCL_DEBUG)."""
        lines = (line for line in end_of(self._log).split("\n") if "NCCL" in line)
        return last_lines("\n".join(lines), _LINES_OF_NCCL)


@dataclass(frozen=True)
class End:
    """How one rank's subject ended. ``exit_code`` is negative for a signal."""

    exit_code: int
    ended_at: float
    """On the clock of all supervisors."""
    why_killed: str
    """Why its supervisor has killed it; empty if it has ended by itself."""
    began: str
    """What it had begun last, by its reports; empty if it had done all."""
    last_lines: tuple[str, ...]
    lines_of_nccl: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> End:
        return cls(**data | {name: tuple(data[name]) for name in ("last_lines", "lines_of_nccl")})

    @property
    def how(self) -> str:
        return describe_code(self.exit_code)

    @property
    def last_words(self) -> str:
        """A rank's message about its end: its last line of ours, or its last one."""
        ours = [line for line in self.last_lines if line.startswith("fleet_train:")]
        return (ours or list(self.last_lines) or ["it printed nothing"])[-1]


def describe_code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
