"""This process's place among the processes of its engine, from the engine's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet_train.cluster.cluster import is_number
from fleet_train.errors import ClusterError

_LAST_PORT = 65535


@dataclass(frozen=True)
class Started:
    """One of ``count`` processes. To ``launch`` they are the nodes' launchers, to ``fleet.init`` the ranks."""

    engine: str
    """What started them, for messages: ``Slurm (job 17, step 0)``."""
    index: int
    count: int
    local_index: int = 0
    local_count: int | None = None
    """How many of them run on this node; None where the engine does not say."""
    node: int | None = None
    """This node's number among the nodes, if the engine numbers them."""
    hosts: tuple[str, ...] = ()
    """Names or addresses of all nodes in order, if the engine lists them; process 0 of each node runs there."""
    master: str = ""
    """Name or address of the node of process 0; empty if only process 0 itself knows it."""
    port: int | None = None
    """The port of the rendezvous; None: not given."""
    job: str = ""
    """Distinguishes this job from others that run at the same time; authenticates the store's connections."""
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
        """The first that is set and not blank; "" if none is."""
        return next((value for name in names if (value := self._environ.get(name, "").strip())), "")

    def number(self, *names: str) -> int | None:
        """A whole number of 0 or more, from the first that is set; None if none is."""
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


def checked(started: Started, index_name: str, count_name: str) -> Started:
    """Raises ClusterError for a number outside those of the processes."""
    if started.count < 1:
        raise ClusterError(f"{count_name}={started.count}: a job has at least one process")
    if not 0 <= started.index < started.count:
        raise ClusterError(
            f"{index_name}={started.index} is not in 0 .. {started.count - 1}, the processes of {count_name}="
            f"{started.count}"
        )
    return started


def endpoint(text: str, name: str) -> tuple[str, int | None]:
    """``"host:6170"`` -> ("host", 6170); ``"host"`` -> ("host", None). Raises ClusterError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        return text.strip(), None
    if not host or not is_number(port) or not 1 <= int(port) <= _LAST_PORT:
        raise ClusterError(f"{name}={text} is not of the form host:port with a port of 1 to {_LAST_PORT}")
    return host, int(port)


# RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: of torchrun, PyTorchJob, Volcano's plugin, and of hand-made scripts.
#
# Sources: pytorch.org "torchrun (Elastic Launch)", "Environment variables"; volcano-sh/volcano
# ``pkg/controllers/job/plugins/distributed-framework/pytorch``. Volcano and PyTorchJob count pods, torchrun ranks.


def read_torchrun(environ: Mapping[str, str]) -> Started | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
        return None
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    of = Variables(environ, "torchrun" if by_torchrun else "RANK and WORLD_SIZE")
    port = of.port("MASTER_PORT")
    if port is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun's own store listens at MASTER_PORT
    started = Started(
        engine="torchrun" if by_torchrun else "whoever set RANK and WORLD_SIZE",
        index=of.needed("RANK"),
        count=of.needed("WORLD_SIZE"),
        local_index=of.number("LOCAL_RANK") or 0,
        local_count=of.number("LOCAL_WORLD_SIZE"),
        node=of.number("GROUP_RANK"),
        master=of.text("MASTER_ADDR"),
        port=port,
        job=f"torchrun-{of.text('TORCHELASTIC_RUN_ID') or of.text('MASTER_ADDR')}",
    )
    return checked(started, "RANK", "WORLD_SIZE")
