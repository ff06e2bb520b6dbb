"""Where the ranks of a job stand: of this machine by ``/proc``, of a whole job by its store and its witnesses."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fleet_train.cluster.network import is_local, local_addresses
from fleet_train.cluster.stands import Stand
from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.client import StoreClient, job_at
from fleet_train.cluster.witness import JOB_FILE, Seen, ask, look, one_of_each, ranks_here
from fleet_train.errors import ClusterError
from fleet_train.files import parse_json, read_regular

_MOST_FILE_BYTES = 1 << 16


def of_this_machine(native: bool) -> list[list[Stand]]:
    """Where all ranks stand that run on this machine and belong to this user, by job."""
    seen = ranks_here()
    jobs: dict[int, list[Seen]] = {}
    for each in seen:
        jobs.setdefault(each.ring().job, []).append(each)
    try:
        return [look(one_of_each(job), native=native) for job in jobs.values()]
    finally:
        for each in seen:
            each.close()


def of_log_dir(folder: Path) -> tuple[str, Access]:
    """The store of the job that writes its logs into ``folder``, and how to connect. Raises ClusterError."""
    path = folder / JOB_FILE
    try:
        job = parse_json(read_regular(path, _MOST_FILE_BYTES))
        store = str(job["store"])
        return store, _access(store, str(job["job"]))
    except FileNotFoundError:
        raise ClusterError(
            f"--log_dir={folder}: there is no {JOB_FILE}, which a job writes when it starts; give the folder that the "
            "job's launcher names, on its first node, or --ips"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{path} cannot be read: {error}") from None


def of_nodes(nodes: Sequence[str], port: int) -> tuple[str, Access]:
    """The same for a job on these nodes, by the first that answers at ``port``, or at its own (``host:port``). Raises
    ClusterError."""
    failures = []
    for node in nodes:
        address = node if ":" in node else f"{node}:{port}"
        try:
            return job_at(address, _access(address))
        except ClusterError as error:
            failures.append(str(error))
    raise ClusterError("; ".join(failures))


def _access(address: str, job: str = "") -> Access:
    """Where the store is on this machine, a connection to it comes from its own address: it may accept no other."""
    host = address.partition(":")[0]
    return Access.of(os.environ, host if is_local(host, local_addresses()) else "", job)


def of_job(endpoint: str, access: Access) -> list[Stand]:
    """Where the ranks of a job stand, those whose witnesses answer. Raises ClusterError, JoinTimeout, WorkerFailed."""
    client = StoreClient.connect(endpoint, 0, group="visitor", timeout_seconds=0, watched=False, access=access)
    try:
        return ask(client, secrets.token_hex(8))
    finally:
        client.close()


def sampled(stands: Iterable[Sequence[Stand]]) -> list[str]:
    """For several looks: in which lines each rank stood, the most frequent one first."""
    places: dict[tuple[int, int], Counter[str]] = {}
    for each in stands:
        for stand in each:
            places.setdefault((stand.rank, stand.pid), Counter())[str(stand.place)] += 1
    lines = []
    for (rank, pid), counted in sorted(places.items()):
        total = sum(counted.values())
        shown = (f"  {100 * n // total:3d} % {place}" for place, n in counted.most_common(5))
        lines += [f"rank {rank} (process {pid}), {total} samples", *shown]
    return lines
