"""Slurm's lists of hosts: ``rack[1-2]node[01-03,07],login`` -> the hosts, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from fleet_train.errors import ClusterError

MOST_HOSTS = 65_536
"""Slurm's own bound for a list (MAX_RANGE of its hostlist)."""
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


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
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if found is None:
            raise ClusterError(f"{name}={text} is not a list of tasks per node such as 2(x3),1")
        counts += [int(found[1])] * min(int(found[2] or 1), MOST_HOSTS)
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
        found = _RANGE.fullmatch(each.strip())
        if found is None:
            raise _malformed(text, name)
        first, last = found[1], found[2] or found[1]
        low, high = int(first), int(last)
        if not low <= high < low + MOST_HOSTS:
            raise _malformed(text, name)
        for number in range(low, high + 1):
            yield f"{number:0{len(first)}d}"


def _malformed(text: str, name: str) -> ClusterError:
    return ClusterError(f"{name}={text[:200]} is not a list of hosts such as node[01-04,7],login")
