"""The subject of one job as a child of its supervisor: its environment, its log, its reports, its end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.environment import rank_variables
from fleet_train.files import open_new, write_new
from fleet_train.launch.agent.prepare import import_path_for_ranks
from fleet_train.launch.report.worker_result import last_lines
from fleet_train.launch.spec.worker_environment import appended
from fleet_train.launch.workers.watching import end_of
from fleet_train.launch.workers.worker_main import dying_with_us

_LAST_LINES = 8
_LONGEST_LINE = 16 * 1024
# Variables of the selftest's own launch that the subject must not see: its profiles come from the checks.
# Its ranks train on their own, too, to compare.
_NOT_PASSED_ON = frozenset(
    "FLEET_TRAIN_STRATEGY FLEET_TRAIN_STRICT FLEET_TRAIN_ATTEMPT PADDLE_MASTER MASTER_ADDR MASTER_PORT".split()
)


def free_port(host: str) -> int:
    """A port of this machine without a listener now; it identifies a subject, whose rank may open it or not."""
    with socket.socket() as holder:
        holder.bind((host, 0))
        return int(holder.getsockname()[1])


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


class Child:
    """A running subject. The kernel ends it with its supervisor, however that ends, also while the subject is
    stopped."""

    def __init__(
        self,
        job: str,
        arguments: list[str],
        environ: Mapping[str, str],
        log: Path,
        module: str = "fleet_train.selftest.subjects.subject",
    ) -> None:
        self.log = log
        self._reports = log.with_suffix(".reports")
        self._read = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        write_new(self._reports, b"")
        command = [sys.executable, "-m", module, job, str(self._reports), *arguments]
        with open_new(log) as sink:
            self.process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                preexec_fn=dying_with_us(),
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def exit_code(self) -> int:
        """Negative: the signal that ended it."""
        return self.process.wait()

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
        self.process.kill()
        self.process.wait()

    def last_lines(self) -> tuple[str, ...]:
        """The end of its output, to explain a failure."""
        return last_lines(end_of(self.log), _LAST_LINES, _LONGEST_LINE)
