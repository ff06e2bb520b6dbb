"""Run as several ranks: strategies through the stream engine, whose collectives end late, and the thread engine.

Both start from the same values; reported per case: digests of all that the program holds at the end, for each engine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.convert.fleet import _current
from fleet_train.profile import Profile
from tests.parallel import local_sgd, strategies
from tests.parallel.simulated import share
from tests.parity.compare import SAMPLES_PER_RANK, Trained
from tests.parity.networks import Network, batches
from tests.support.late import install_tripwire, late_engine
from tests.support.worker import digest, report

STEPS = 12
CASES: dict[str, tuple[Network, Any, dict[str, Any]]] = {
    **strategies.CASES,
    **{f"local SGD: {name}": (*case[:2], local_sgd.LOCAL | case[2]) for name, case in local_sgd.CASES.items()},
}


def train(
    network: Network, make: Any, settings: dict[str, Any], seed: int, start: dict[str, np.ndarray] | None, device: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(start, end): everything that the program holds."""
    rank, profile = fleet.worker_index(), Profile(**settings)
    paddle.seed(seed * 10 + rank)
    trained = Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), make)
    if start is not None:
        trained.start_from(start)
    start = trained.state()
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), seed):
        trained.step(features[share(rank)], labels[share(rank)])
        if device is not None:
            device.step += 1
    return start, trained.state()


def compare(network: Network, make: Any, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    job = _current().job
    start, threads = train(network, make, settings, seed, None, None)
    usual = job.engine
    job.engine, backend, device = late_engine(job, seed * 100 + job.cluster.rank)
    try:
        _, streams = train(network, make, settings, seed, start, device)
    finally:
        job.engine.stop()
        backend.stop()
        job.engine = usual
    differing = [name for name in threads if not np.array_equal(threads[name], streams[name], equal_nan=True)]
    return {
        "differing": differing,
        "names": sorted(threads) == sorted(streams),
        "parameters": digest({name: value for name, value in streams.items() if "w_0" in name or "b_0" in name}),
        "begun": backend.begun,
        "early": device.early_reads,
    }


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    install_tripwire()
    results = {}
    for number, name in json.loads(sys.argv[1]):
        print(f"case {name}", flush=True)  # in the log of a rank that fails
        results[name] = compare(*CASES[name], seed=number)
    report(fleet.worker_index(), cases=results)


if __name__ == "__main__":
    main()
