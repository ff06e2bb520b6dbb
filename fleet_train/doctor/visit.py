"""The ranks of a job, for whoever looks at it from outside: of this machine by ``/proc``, of all by the job's store."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from fleet_train import timeouts
from fleet_train.cluster.flight.rows import Row, marked, rows_of
from fleet_train.cluster.flight.stands import Stand
from fleet_train.cluster.flight.witness import (
    JOB_FILE,
    ROWS,
    STACKS,
    Seen,
    ask,
    look,
    looked_at,
    one_of_each,
    ranks_here,
)
from fleet_train.cluster.network import is_local, local_addresses, resolve
from fleet_train.cluster.started import endpoint
from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.client import StoreClient, job_at
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout
from fleet_train.files import parse_json, read_regular

_MOST_FILE_BYTES = 1 << 16


class Visited(Protocol):
    """Ranks that are looked at, wherever they are."""

    def stands(self, *, native: bool) -> list[list[Stand]]: ...

    def rows(self) -> list[Row]: ...

    def nobody(self) -> FleetTrainError:
        """Why there are none."""
        ...


class Here:
    """The ranks of this machine that are this user's. One that has ended stays while others of its job run."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def stands(self, *, native: bool) -> list[list[Stand]]:
        """Ask where this machine's ranks stand; a list for each job."""
        self._find()
        jobs: dict[int, list[Seen]] = {}
        for each in self._seen.values():
            jobs.setdefault(each.ring().job, []).append(each)
        chosen = [one_of_each(job) for job in jobs.values()]
        self._seen = {each.pid: each for job in chosen for each in job}
        return [look(job, native=native) for job in chosen]

    def rows(self) -> list[Row]:
        self._find()
        looked = dict(zip(self._seen, looked_at([*self._seen.values()]), strict=True))
        living = {ring.job for ring, process in looked.values() if ring.has_joined and not process.has_ended}
        for pid, (ring, process) in looked.items():
            if process.has_ended and ring.job not in living:
                self._seen.pop(pid).close()
        return rows_of(looked[pid] for pid in self._seen)

    def nobody(self) -> FleetTrainError:
        return FleetTrainError(
            "no rank of this user runs on this machine: ranks appear once their script has imported "
            "fleet_train; run this as the user, and in the container, of the job, or give --log_dir or --ips"
        )

    def _find(self) -> None:
        known = {*self._seen, os.getpid()}
        self._seen |= {each.pid: each for each in ranks_here(lambda pid: pid not in known)}


class VisitedJob:
    """All ranks of a job whose store is reached, by the witnesses of its machines."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def stands(self, *, native: bool) -> list[list[Stand]]:
        del native  # only where its processes are
        return [ask(self._client, STACKS)]

    def rows(self) -> list[Row]:
        return marked(ask(self._client, ROWS))

    def nobody(self) -> FleetTrainError:
        return FleetTrainError(
            f"no rank has answered within {timeouts.STACKS_ASK_SECONDS:g} s: the job has ended, or its ranks have not "
            "called fleet.init yet"
        )


def visit(log_dir: Path | None, ips: str | None, port: int) -> Here | VisitedJob:
    """The job that these flags name, or without them the ranks of this machine. Raises ClusterError.

    ``port``: of the stores on the nodes ``ips``; one that has a port of its own keeps that.
    """
    if log_dir is None and ips is None:
        return Here()
    nodes = [ip.strip() for ip in (ips or "").split(",") if ip.strip()]
    endpoint, access = _of_log_dir(log_dir) if log_dir is not None else _of_nodes(nodes, port)
    try:
        client = StoreClient.connect(endpoint, 0, group="visitor", timeout_seconds=0, watched=False, access=access)
    except JoinTimeout:
        raise ClusterError(f"no job answers at {endpoint}: it has ended, or cannot be reached from here") from None
    return VisitedJob(client)


def _of_log_dir(folder: Path) -> tuple[str, Access]:
    path = folder / JOB_FILE
    try:
        job = parse_json(read_regular(path, _MOST_FILE_BYTES))
        store, name = job["store"], job["job"]
        address, port = endpoint(str(store).partition("/")[0], "store")
        if port is None:
            raise ValueError(f"store={store!r} is not of the form host:port")
        return str(store), _access(f"{address}:{port}", str(name))
    except FileNotFoundError:
        raise ClusterError(
            f"--log_dir={folder}: there is no {JOB_FILE}, which a job writes when it starts; give the folder that the "
            "job's launcher names, on its first node, or --ips"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, ClusterError) as error:
        raise ClusterError(f"{path} cannot be read: {error}") from None


def _of_nodes(nodes: Sequence[str], port: int) -> tuple[str, Access]:
    failures = []
    for node in nodes:
        try:
            host, own_port = endpoint(node, "--ips")
            address = f"{host}:{port if own_port is None else own_port}"
            return job_at(address, _access(address))
        except ClusterError as error:
            failures.append(str(error))
    raise ClusterError("; ".join(failures) or "--ips names no machine")


def _access(address: str, job: str = "") -> Access:
    """The access to a store. On this machine a connection to it comes from its own address: it may accept no other."""
    host = resolve(address.rpartition(":")[0])
    return Access.of(os.environ, host if is_local(host, local_addresses()) else "", job)


def sampled(stands: Iterable[Sequence[Stand]]) -> list[str]:
    """The lines in which each rank stood in several looks, the most frequent one first."""
    places: dict[tuple[int, int], Counter[str]] = {}
    for each in stands:
        for stand in each:
            # A rank that gave no stack is counted by what kept it.
            where = str(stand.place) if stand.place is not None else stand.state or "gave no stack"
            places.setdefault((stand.rank, stand.pid), Counter())[where] += 1
    lines = []
    for (rank, pid), counted in sorted(places.items()):
        total = sum(counted.values())
        shown = (f"  {100 * n // total:3d} % {place}" for place, n in counted.most_common(5))
        lines += [f"rank {rank} (process {pid}), {total} samples", *shown]
    return lines
