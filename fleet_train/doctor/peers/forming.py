"""One process per node forms a process group and adds exact integers: the selftest's subject, on separate ports."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fleet_train.cluster.cluster import Cluster, Rank
from fleet_train.cluster.network import interface_addresses, interface_of
from fleet_train.doctor.facts import GroupResult
from fleet_train.selftest.child import Child, environ_of
from fleet_train.selftest.options import TOGETHER
from fleet_train.selftest.options import Options as SelftestOptions
from fleet_train.selftest.results import FAIL, Result

_TICK_SECONDS = 0.05


def form(addresses: Sequence[str], ports: Sequence[int], rank: int, log: Path, seconds: float) -> GroupResult:
    """Of these nodes, in this order; ``ports``: a free one on each."""
    ranks = tuple(Rank(i, address, ports[i], i, 0) for i, address in enumerate(addresses))
    cluster = Cluster(ranks, rank, formed_by="the doctor")
    options = replace(SelftestOptions(groups=("collectives",)), join_timeout_seconds=seconds)
    environ = _on_our_interface(environ_of(cluster, seconds, os.environ), addresses[rank])
    began = time.monotonic()
    child = Child(TOGETHER, [json.dumps(options.to_json())], environ, log)
    results: list[Result] = []
    try:
        while not (has_ended := child.has_ended()) and time.monotonic() - began < seconds:
            time.sleep(_TICK_SECONDS)
        results = [Result.from_json(one["result"]) for one in child.reports() if "result" in one]
    finally:
        child.kill()
    return _result(child, has_ended, results, time.monotonic() - began, len(ranks))


def _result(child: Child, has_ended: bool, results: Sequence[Result], seconds: float, ranks: int) -> GroupResult:
    if not has_ended:
        return GroupResult(False, f"did not finish within {seconds:.0f} s", seconds)
    wrong = [f"{one.name}: {one.words}" for one in results if one.status == FAIL]
    if wrong:
        return GroupResult(False, wrong[0][:300], seconds)
    if child.exit_code:
        last = (child.last_lines() or ("no message",))[-1]
        return GroupResult(False, f"ended with exit code {child.exit_code}: {last[:300]}", seconds)
    return GroupResult(True, f"{ranks} processes added exact integers", seconds)


def _on_our_interface(environ: dict[str, str], address: str) -> dict[str, str]:
    """As in the launcher: otherwise Gloo and NCCL might use another interface, or the address of the host name."""
    interface = interface_of(address, interface_addresses())
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is not None:
            environ.setdefault(name, interface)
    return environ
