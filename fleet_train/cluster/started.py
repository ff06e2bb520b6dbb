"""This process's place among the processes of its engine, from the engine's variables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet_train.cluster.cluster import is_number
from fleet_train.errors import ClusterError

_LAST_PORT = 65535
# Ports below the kernel's ephemeral ones (32768 and up), 64 of them for each job: one per rank of a node, and one more.
_FIRST_PORT, _PORTS_PER_JOB, _PLACES = 10_240, 64, 350


@dataclass(frozen=True)
class Started:
    """One of ``count`` processes. To ``launch`` they are the nodes' launchers, to ``fleet.init`` the ranks."""

    engine: str
    """What started the processes, for messages: ``Slurm (job 17, step 0)``."""
    index: int
    count: int
    local_index: int = 0
    local_count: int | None = None
    """How many of the processes run on this node; None where the engine does not say."""
    node: int | None = None
    """This node's number among the nodes, if the engine numbers them."""
    hosts: tuple[str, ...] = ()
    """Names or addresses of all nodes in order, if the engine lists them; process 0 of each node runs there."""
    master: str = ""
    """Name or address of the node of process 0; empty if only process 0 itself knows it."""
    port: int | None = None
    """The port of the rendezvous; None: not given."""
    job: str = ""
    """What distinguishes this job from others that run at the same time, and authenticates the store's connections."""
    restarts: int = 0
    """How often the engine has started this job before."""
    run: str = ""
    """A unique identifier of this job, the same when the engine restarts it; empty if the engine has no such
    identifier."""
    processes: int | None = None
    """How many ranks each process is to start, if the engine specifies it."""

    def in_words(self) -> str:
        return f"started by {self.engine}: process {self.index} of {self.count}"


class Variables:
    """An engine's variables, read with errors that name them; messages never contain values of other variables."""

    def __init__(self, environ: Mapping[str, str], engine: str) -> None:
        self._environ = environ
        self._engine = engine

    def text(self, *names: str) -> str:
        """The value of the first variable that is set and not blank; "" if none is."""
        return next((value for name in names if (value := self._environ.get(name, "").strip())), "")

    def number(self, *names: str) -> int | None:
        """A whole number of 0 or more, from the first variable that is set; None if none is."""
        for name in names:
            text = self._environ.get(name, "").strip()
            if text:
                if not is_number(text):
                    raise ClusterError(
                        f"{name}={text}, a variable of {self._engine}, is not a whole number; if this process was "
                        f"not started by it, set FLEET_TRAIN_ENGINE=none (launch: --engine none)"
                    )
                return int(text)
        return None

    def needed(self, *names: str) -> int:
        number = self.number(*names)
        if number is None:
            raise ClusterError(
                f"{self._engine} started this process, but {' or '.join(names)} is not set; without it its rank "
                "is unknown. FLEET_TRAIN_ENGINE=none (launch: --engine none) makes it a separate job"
            )
        return number

    def port(self, *names: str) -> int | None:
        number = self.number(*names)
        if number is not None and not 1 <= number <= _LAST_PORT:
            raise ClusterError(f"{names[0]}={number} is not a port; ports are 1 to {_LAST_PORT}")
        return number

    def started(self, index: str, count: str, *, by: str = "", **more: Any) -> Started:
        """The process whose number and their number are in these variables (each name, or several with ``|``), with
        more of `Started`; ``by``: the engine's name, if it is another. Raises ClusterError for a number outside those
        of the processes."""
        names = index.split("|"), count.split("|")
        number, total = (self.needed(*each) for each in names)
        return checked(Started(by or self._engine, number, total, **more), names[0][0], names[1][0])


def checked(started: Started, index_name: str, count_name: str) -> Started:
    """The process as given. Raises ClusterError if its number is outside those of the processes."""
    if started.count < 1:
        raise ClusterError(f"{count_name}={started.count}: a job has at least one process")
    if not 0 <= started.index < started.count:
        raise ClusterError(
            f"{index_name}={started.index} is not in 0 .. {started.count - 1}, the processes of {count_name}="
            f"{started.count}"
        )
    return started


def port_of_job(job: int | str) -> int:
    """A first port that another job on the same nodes is unlikely to have, from the job's number or name."""
    number = job if isinstance(job, int) else zlib.crc32(job.encode())
    return _FIRST_PORT + _PORTS_PER_JOB * (number % _PLACES)


def endpoint(text: str, name: str) -> tuple[str, int | None]:
    """``"host:6170"`` -> ("host", 6170); ``"host"`` -> ("host", None). Raises ClusterError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        return text.strip(), None
    if not host or not is_number(port) or not 1 <= int(port) <= _LAST_PORT:
        raise ClusterError(f"{name}={text} is not of the form host:port with a port of 1 to {_LAST_PORT}")
    return host, int(port)
