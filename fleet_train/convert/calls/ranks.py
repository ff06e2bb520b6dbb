"""The facade's queries: ranks, nodes, roles, endpoints."""

from __future__ import annotations

from typing import Any

from fleet_train.convert.session import current


def place() -> Any:
    """The device of this rank: ``CUDAPlace`` of its GPU on a GPU build, else ``CPUPlace``."""
    return current().job.place


def worker_index() -> int:
    """This process's rank, 0 .. worker_num() - 1. Also ``rank``."""
    return current().job.cluster.rank


def worker_num() -> int:
    """The number of processes of the job (world size). Also ``nranks``, ``world_size``."""
    return current().job.world_size


def local_rank() -> int:
    """This process's index on its node. Also ``rank_in_node``."""
    return current().job.cluster.local_rank


def node_num() -> int:
    """The number of nodes of the job."""
    return current().job.cluster.node_num


def is_first_worker() -> bool:
    """Whether this is rank 0, the one that reports and saves."""
    return worker_index() == 0


def is_worker() -> bool:
    """True: every process trains, there are no parameter servers."""
    current()
    return True


def is_server() -> bool:
    """False: there are no parameter servers."""
    current()
    return False


def is_coordinator() -> bool:
    """False: there is no coordinator of federated learning."""
    current()
    return False


def server_num() -> int:
    """0: there are no parameter servers."""
    current()
    return 0


def server_endpoints(to_string: bool = False) -> list[str] | str:
    """Empty: there are no parameter servers."""
    current()
    return "" if to_string else []


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """``host:port`` of every rank, by rank; with ``to_string`` joined by commas."""
    endpoints = current().job.cluster.endpoints
    return ",".join(endpoints) if to_string else endpoints


def gone_workers() -> dict[int, str]:
    """Ranks that have left the job (``left``) or are lost, and how, as currently recorded in the job's store. From any
    thread.

    Raises WorkerFailed if the store does not answer. Empty in a job of one process.
    """
    return current().job.gone()


def init_worker(scopes: Any = None) -> None:
    """Does nothing: a worker without parameter servers is ready after ``init``."""
    del scopes  # Fleet's signature
    current()


def stop_worker() -> None:
    """Does nothing: there are no servers, and a rank leaves the job when its script ends (``shutdown``)."""
    current()


rank = worker_index
nranks = world_size = worker_num
rank_in_node = local_rank
