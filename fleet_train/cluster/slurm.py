"""Slurm: a task of a job step (``srun``). A batch script and the shells of ``salloc`` and ``srun --pty`` are not tasks.

Variables: slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES". The step's variables are read, not those of the
allocation, which give the possible number of tasks. Nodes are lists such as ``rack[1-2]node[01-03,07],login``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import product

from fleet_train.cluster.cluster import is_number
from fleet_train.cluster.started import Started, Variables, port_of_job
from fleet_train.errors import ClusterError

# The batch script, an interactive step and the like have numbers from here on (SLURM_MAX_NORMAL_STEP_ID).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
MOST_HOSTS = 65_536
"""Slurm's own bound for a list (MAX_RANGE of its hostlist)."""
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def read(environ: Mapping[str, str]) -> Started | None:
    if not is_task(environ):
        return None
    job, step = environ["SLURM_JOB_ID"].strip(), environ["SLURM_STEP_ID"].strip()
    engine = f"Slurm (job {job}, step {step})"
    of = Variables(environ, engine)
    if (of.number("SLURM_HET_SIZE") or 1) > 1:
        raise ClusterError(
            f"{engine}: a heterogeneous job numbers its tasks per component; give one component to the training, or "
            "list the nodes yourself (--engine none --cluster_node_ips=...)"
        )
    hosts = expand_hostlist(of.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    node = of.needed("SLURM_NODEID")
    if node >= len(hosts):
        raise ClusterError(f"SLURM_NODEID={node}, but SLURM_STEP_NODELIST names {len(hosts)} nodes; they must agree")
    per_node = of.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = expand_counts(per_node) if per_node else ()
    started = of.started(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS|SLURM_NTASKS|SLURM_NPROCS",
        local_index=of.needed("SLURM_LOCALID"),
        local_count=counts[node] if node < len(counts) else None,
        node=node,
        hosts=hosts,
        master=hosts[0],
        port=port_of(environ),
        job=f"slurm-{job}.{step}",
        restarts=of.number("SLURM_RESTART_COUNT") or 0,
        run=f"slurm-{of.text('SLURM_CLUSTER_NAME') or 'cluster'}-{job}",
    )
    if counts and (sum(counts) != started.count or len(counts) != len(hosts)):
        raise ClusterError(
            f"SLURM_STEP_TASKS_PER_NODE={per_node} makes {sum(counts)} tasks on {len(counts)} nodes, but "
            f"SLURM_STEP_NUM_TASKS={started.count} and SLURM_STEP_NODELIST names {len(hosts)}; they must agree"
        )
    return started


def is_task(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "").strip()
    return (
        bool(environ.get("SLURM_JOB_ID"))
        and "SLURM_PROCID" in environ
        and _is_id(step)
        and int(step) < _FIRST_SPECIAL_STEP
        and not ("SLURM_PTY_PORT" in environ and _has_terminal())
    )


def _has_terminal() -> bool:
    """Whether this process was started in the shell of ``srun --pty``, whose variables its own job steps inherit."""
    return any(os.isatty(descriptor) for descriptor in (0, 1, 2))


def allocated_nodes(environ: Mapping[str, str]) -> int:
    """The number of nodes of the allocation in which this process runs without being a task; 0 elsewhere."""
    if is_task(environ) or not environ.get("SLURM_JOB_ID"):
        return 0
    return Variables(environ, "Slurm").number("SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 0


def port_of(environ: Mapping[str, str]) -> int:
    """The first port that Slurm has reserved for the step, else one derived from the job's number."""
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "").split("-")[0].split(",")[0].strip()
    if is_number(reserved):
        return int(reserved)
    job, step = environ["SLURM_JOB_ID"].strip(), environ.get("SLURM_STEP_ID", "").strip() or "0"
    return port_of_job(int(job) + 97 * int(step) if _is_id(job) and _is_id(step) else f"{job}.{step}")


def _is_id(text: str) -> bool:
    """Whether a text is a number of 32 bits: in a federation job numbers have ten digits."""
    return text.isascii() and text.isdigit() and len(text) <= 10


def expand_hostlist(text: str, name: str = "SLURM_STEP_NODELIST") -> tuple[str, ...]:
    """Every host once per mention, in the list's order; numbers keep their leading zeros. Raises ClusterError."""
    hosts: list[str] = []
    parts = _PART.findall(text)
    if ",".join(parts) != text.strip().strip(","):
        raise _malformed(text, name)
    for part in parts:
        hosts += _expand_part(part, text, name)
    return tuple(hosts)


def expand_counts(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> tuple[int, ...]:
    """``"2(x3),1"`` -> (2, 2, 2, 1): tasks per node. Raises ClusterError."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise ClusterError(f"{name}={text} is not a list of tasks per node such as 2(x3),1")
        counts += [int(match[1])] * min(int(match[2] or 1), MOST_HOSTS)
    return tuple(counts)


def _expand_part(part: str, text: str, name: str) -> list[str]:
    pieces = re.split(r"\[([^\[\]]*)\]", part)  # name, ranges, name, ranges, ..., name
    choices = [list(_numbers(piece, text, name)) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    many = 1
    for each in choices:
        many *= len(each)
    if many > MOST_HOSTS:
        raise ClusterError(f"{name}={text[:100]} expands to {many} hosts, more than {MOST_HOSTS}")
    return ["".join(each) for each in product(*choices)]


def _numbers(ranges: str, text: str, name: str) -> Iterator[str]:
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each.strip())
        if match is None:
            raise _malformed(text, name)
        first, last = match[1], match[2] or match[1]
        low, high = int(first), int(last)
        if not low <= high < low + MOST_HOSTS:
            raise _malformed(text, name)
        for number in range(low, high + 1):
            yield f"{number:0{len(first)}d}"


def _malformed(text: str, name: str) -> ClusterError:
    return ClusterError(f"{name}={text[:200]} is not a list of hosts such as node[01-04,7],login")
