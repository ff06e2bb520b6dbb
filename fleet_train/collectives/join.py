"""Joining: from a described cluster to connected processes, in bounded time; and how fast their links are."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

import fleet_train
from fleet_train.cluster import Cluster, StoreClient
from fleet_train.cluster.at_import import advise
from fleet_train.cluster.cluster import is_number
from fleet_train.cluster.environment import asked_trace, log_folder, rank_variables
from fleet_train.cluster.flight.ring import recorder
from fleet_train.cluster.network import interface_towards, interface_variables, local_addresses
from fleet_train.cluster.partial import PartialCluster, complete
from fleet_train.cluster.store.access import access_of, number_of_job
from fleet_train.cluster.store.client import JOINED, Variants
from fleet_train.cluster.store.host import StoreHost, endpoint_of, has_helper
from fleet_train.collectives.engine import CallContext, Collective, Stage, Stages
from fleet_train.collectives.groups import formed, forming, held_port, new_group, send_at_once, warm_up
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import backend_name, dynamic_mode, installed_version, keep_freed_memory
from fleet_train.errors import ClusterError, ScheduleMismatch
from fleet_train.plan.choose import MEASURED_BYTES, MeasuredLink, Sample, coarse, fit
from fleet_train.plan.price import Link

_GLANCE_SECONDS = 0.25
"""How long the largest timed allreduces of a quick look at a link may take: they delay the start of a training."""


def join(cluster: Cluster | PartialCluster, timeout_seconds: float) -> Job:
    """Connect to all ranks of ``cluster``, compare what must be equal, and form Paddle's default process group.

    Raises JoinTimeout with the ranks and hosts that did not connect, ScheduleMismatch when ranks disagree,
    ClusterError when this process's address is not an address of this machine, LinkFailed when Paddle cannot connect
    the ranks, or has connected something else.
    """
    cluster, host = complete(cluster, timeout_seconds)
    recorder.join(cluster.rank, cluster.world_size, number_of_job(cluster), cluster.this.endpoint)
    place = choose_place(cluster)
    if cluster.world_size == 1:
        return Job(cluster, place)
    _refuse_foreign_address(cluster)
    if backend_name() == "gloo":
        keep_freed_memory()
    job = _meet(cluster, place, host, timeout_seconds)
    try:
        _compare(job, timeout_seconds)
        _form_process_group(job, timeout_seconds)
    except BaseException as error:
        job.report_failure(job.located(error), doing="could not join")
        job.close()
        raise
    return job


def choose_place(cluster: Cluster) -> Any:
    """The device of this rank: its GPU on a GPU build, the CPU otherwise.

    Makes the GPU Paddle's current device and sets FLAGS_selected_gpus to it: by default ``init_parallel_env`` takes GPU
    0.
    """
    if backend_name() == "gloo":
        return paddle.CPUPlace()
    gpu = chosen_gpu(os.environ, cluster.local_rank, paddle.device.cuda.device_count())
    os.environ["FLAGS_selected_gpus"] = str(gpu)
    paddle.device.set_device(f"gpu:{gpu}")
    return paddle.CUDAPlace(gpu)


def chosen_gpu(environ: Mapping[str, str], local_rank: int, visible: int) -> int:
    """The number of the GPU, of ``visible`` ones, that a rank computes on: the one that its launcher has selected, the
    only visible one, or that of its local rank. Raises ClusterError if there is none."""
    selected = environ.get("FLAGS_selected_gpus", "").split(",")[0].strip()
    if selected and not is_number(selected):
        raise ClusterError(f"FLAGS_selected_gpus={environ['FLAGS_selected_gpus']!r}: it takes GPU numbers, such as 0,1")
    gpu = int(selected) if selected else 0 if visible == 1 else local_rank
    if gpu >= visible:
        why = f"FLAGS_selected_gpus={selected}" if selected else f"local rank {local_rank}"
        raise ClusterError(
            f"{why} asks for GPU {gpu}, and this process sees {visible} (CUDA_VISIBLE_DEVICES); start as many "
            "processes on a node as it has GPUs (--nproc_per_node), or PADDLE_DISTRI_BACKEND=gloo for processors"
        )
    return gpu


def _refuse_foreign_address(cluster: Cluster) -> None:
    host = cluster.this.host
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    ours = local_addresses()
    if host not in ours and not host.startswith("127."):
        raise ClusterError(
            f"{cluster.describe(cluster.rank)} is this process according to {cluster.formed_by}, but {host} is not an "
            f"address of this machine, which has {', '.join(sorted(ours))}; give this machine its own address "
            "(--node_ip, or --host for the stock launcher's --ips)"
        )


def _meet(cluster: Cluster, place: Any, host: StoreHost | None, timeout_seconds: float) -> Job:
    endpoint = endpoint_of(cluster)
    if host is None and has_helper(cluster):
        host = StoreHost.of(cluster, timeout_seconds)
    if host is not None:
        host.watch(cluster, log_folder(os.environ))
    try:
        store, barriers = (
            StoreClient.connect(
                endpoint,
                cluster.rank,
                timeout_seconds=timeout_seconds,
                describe=cluster.describe,
                watched=stands_for_us,
                access=access_of(cluster),
            )
            for stands_for_us in (True, False)
        )
    except BaseException:
        if host is not None:
            host.release()
        raise
    recorder.set_clock(*clock_of(store))
    return Job(cluster, place, host=host, store=store, barriers=barriers, timeout_seconds=timeout_seconds)


def clock_of(store: StoreClient) -> tuple[float, float]:
    """This machine's ``time.perf_counter`` minus the store's clock, and how wrong that can be, in seconds: half of the
    quickest answer's time (Cristian, Probabilistic clock synchronization, 1989)."""
    best = (0.0, math.inf)
    for _ in range(_CLOCK_QUESTIONS):
        began = time.perf_counter()
        clock = store.clock()
        error = (time.perf_counter() - began) / 2
        best = min(best, (began + error - clock, error), key=lambda each: each[1])
    return best


def _compare(job: Job, timeout_seconds: float) -> None:
    facts = {
        "Paddle version": installed_version(),
        "fleet_train version": fleet_train.__version__,
        "backend": backend_name(),
        "the steps of --trace": str(asked_trace(os.environ)),
        "endpoints of all ranks": ",".join(job.cluster.endpoints),
    }
    refuse_other_ranks(job.store.compare("join", facts, job.world_size, timeout_seconds), job.cluster)


def refuse_other_ranks(variants: Variants, cluster: Cluster) -> None:
    """Raise ScheduleMismatch at the first fact in which a rank differs from rank 0."""
    for name, expected in variants[0][1].items() if variants else ():
        differing = [(ranks, facts) for ranks, facts in variants[1:] if facts is None or facts.get(name) != expected]
        if differing:
            ranks = [rank for spans, _ in differing for low, high in spans for rank in range(low, high + 1)]
            theirs = (differing[0][1] or {}).get(name)
            raise ScheduleMismatch(
                f"{name}: {cluster.describe(0)} has {expected}, {cluster.describe(ranks[0])} has {theirs}"
                + (f" (ranks that also differ: {', '.join(map(str, sorted(ranks[1:])))})" if ranks[1:] else "")
                + "; all ranks must agree"
            )


def _form_process_group(job: Job, timeout_seconds: float) -> None:
    cluster = job.cluster
    os.environ.update(rank_variables(cluster))
    advise(os.environ, {"FLAGS_stop_check_timeout": str(int(timeout_seconds) + 1)})
    if backend_name() == "gloo":
        os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"
    _choose_interface(cluster)
    ranks = range(cluster.world_size)
    with forming(ranks):
        _open_paddle_store(job, timeout_seconds)
        group = formed(job, ranks, paddle.distributed.init_parallel_env)
    warm_up(job, group)
    job.add_default_group(group)
    # No rank uses the group before all have formed it: a rank that failed above is named here.
    job.barrier("process group formed", timeout_seconds)
    if cluster.rank == 0:
        job.store.set(JOINED, True)


def _choose_interface(cluster: Cluster) -> None:
    peers = [rank.host for rank in cluster.ranks if rank.host != cluster.this.host] or [cluster.this.host]
    interface = interface_towards(peers[0])
    if interface:
        advise(os.environ, interface_variables(interface))


def _open_paddle_store(job: Job, timeout_seconds: float) -> None:
    """Open Paddle's own store on rank 0 first, then on the others, which would otherwise retry only every 3 s.

    Paddle's store waits, holding the GIL, for PADDLE_TRAINERS_NUM members; all have joined already, so the variable is
    set to 1. ``init_parallel_env`` then takes the existing store.
    """
    cluster = job.cluster
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if cluster.rank == 0:
        with held_port() as port:
            _create_paddle_store(f"{cluster.this.host}:{port}")
    endpoint = job.broadcast("paddle store", os.environ.get("PADDLE_MASTER"), timeout_seconds=timeout_seconds)
    if cluster.rank != 0:
        _create_paddle_store(endpoint)


def _create_paddle_store(endpoint: str) -> None:
    os.environ["PADDLE_MASTER"] = endpoint
    members = os.environ["PADDLE_TRAINERS_NUM"]
    os.environ["PADDLE_TRAINERS_NUM"] = "1"
    try:
        paddle.base.core.create_or_get_global_tcp_store()
    finally:
        os.environ["PADDLE_TRAINERS_NUM"] = members
    send_at_once(int(endpoint.rpartition(":")[2]))


_CLOCK_QUESTIONS = 5
_SMALL_BYTES, _SCALE_BYTES = 4096, 256 * 1024
_LARGE_BYTES = (4 * 2**20, 2 * 2**20, 2**20, 2**19)
_MOST_REPEATS = 50
_FEWEST_REPEATS = 3


@dataclass(frozen=True)
class _Sweep:
    """One kind of link: its display name, the groups measured at the same time, and this rank's group."""

    where: str
    groups: Sequence[Sequence[int]]
    own: Any

    @property
    def largest(self) -> Sequence[int]:
        return max(self.groups, key=len)


def probe(job: Job, seconds: float) -> dict[str, MeasuredLink]:
    """Latency and bandwidth ``between nodes`` and ``inside a node``, where the cluster has both; takes about
    ``seconds``.

    All ranks call it; all get the slowest rank's numbers.
    """
    nodes = [job.cluster.ranks_on_node(node) for node in range(job.cluster.node_num)]
    sweeps = [_sweep(job, "between nodes", [[ranks[0] for ranks in nodes]]), _sweep(job, "inside a node", nodes)]
    sweeps = [sweep for sweep in sweeps if len(sweep.largest) > 1]
    return {sweep.where: fit(_measure(job, sweep, seconds / len(sweeps)), len(sweep.largest)) for sweep in sweeps}


def glance(job: Job) -> Link:
    """The link of a ring over all ranks, from a fraction of a second of allreduces, rounded to a grid (`coarse`). All
    ranks call it; all get the slowest rank's result."""
    group = job.communicators(1)[0]
    sweep = _Sweep("the ranks", [range(job.world_size)], group)
    _timed_best(job, sweep, _SMALL_BYTES, 1)
    small = _slowest(job, sweep, _timed_best(job, sweep, _SMALL_BYTES, 8))
    scale = _slowest(job, sweep, _timed_best(job, sweep, _SCALE_BYTES, 2))
    large = next((n for n in _LARGE_BYTES if 3 * scale * n / _SCALE_BYTES < _GLANCE_SECONDS), _SCALE_BYTES)
    seconds = _slowest(job, sweep, _timed_best(job, sweep, large, 3)) if large > _SCALE_BYTES else scale
    samples = [Sample(_SMALL_BYTES, small), Sample(large, max(seconds, small))]
    return coarse(fit(samples, job.world_size).link)


def _sweep(job: Job, where: str, groups: Sequence[Sequence[int]]) -> _Sweep:
    # Every rank must create every group, in the same order.
    made = [(ranks, new_group(job, ranks)) for ranks in groups if len(ranks) > 1]
    return _Sweep(where, groups, next((group for ranks, group in made if job.cluster.rank in ranks), None))


def _measure(job: Job, sweep: _Sweep, seconds: float) -> list[Sample]:
    budget = seconds / len(MEASURED_BYTES)
    samples: list[Sample] = []
    for nbytes in MEASURED_BYTES:
        first = _slowest(job, sweep, _timed(job, sweep, nbytes, 2))
        if first > 2 * budget and len(samples) > 1:
            break
        repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(budget / first)))
        samples.append(Sample(nbytes, _slowest(job, sweep, _timed(job, sweep, nbytes, repeats))))
    return samples


def _timed(job: Job, sweep: _Sweep, nbytes: int, repeats: int) -> float:
    """Median seconds of an allreduce on this rank; 0 on a rank in no group. All ranks start together."""
    times = _times(job, sweep, nbytes, repeats)
    return statistics.median(times) if times else 0.0


def _timed_best(job: Job, sweep: _Sweep, nbytes: int, repeats: int) -> float:
    """The shortest of several in a row, without the first one, which runs on an idle link."""
    times = _times(job, sweep, nbytes, repeats)
    return min(times[1:] or times)


def _times(job: Job, sweep: _Sweep, nbytes: int, repeats: int) -> list[float]:
    name = f"probe {job.count('probe')}"
    with dynamic_mode():
        buffer = paddle.zeros([nbytes // 4], "float32")
        job.barrier(name)
        times: list[float] = []
        if sweep.own is None:
            return times
        context = CallContext(name, f"measuring {sweep.where}", job.timeout_seconds)
        for _ in range(repeats):
            start = time.perf_counter()
            job.engine.run_here(_one_sum(sweep.own, buffer), context)
            job.engine.device.moment().await_passed()
            times.append(time.perf_counter() - start)
    return times


def _one_sum(group: Any, buffer: Any) -> Stages[None]:
    yield Stage((Collective("all_reduce", group, buffer),))


def _slowest(job: Job, sweep: _Sweep, seconds: float) -> float:
    """The time of the largest group; smaller ones have fewer rounds. Also the barrier before the next size."""
    everybody = job.all_gather(f"probed {job.count('probed')}", seconds)
    return max(float(everybody[rank]) for rank in sweep.largest)
