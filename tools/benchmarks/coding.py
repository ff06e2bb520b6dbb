"""What each compression costs a rank beside its bytes: the `CodingCosts` of its description, of two ranks that compute.

    python tools/bench.py coding
    python tools/bench.py coding --compression int4 --megabytes 16

Two ranks exchange one bucket of float32 products again and again, first alone and then while they multiply matrices,
as in a backward pass. Printed are seconds per byte of the gradients, in the order of `CodingCosts`: what the computing
thread hands over, what a communicator's thread takes beyond the time of the link, which is measured before, how much
longer that takes beside computing, and how much longer the computing takes: medians, of the slower rank.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks.record import ROOT, table

_SECONDS = 600.0
_RESULT = "coding.json"


@click.command()
@click.option("--compression", "names", multiple=True, help="Only these; by default all that Gloo carries out.")
@click.option("--megabytes", type=click.FloatRange(min=0.1), default=8.0, help="Of the bucket's gradients, in float32.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, help="Exchanges of each kind.")
@click.option("--started_port", default=6260, help="Of the two ranks.")
def main(names: tuple[str, ...], megabytes: float, rounds: int, started_port: int) -> None:
    """See the module's docstring."""
    from fleet_train.profile.methods import COMPRESSIONS

    chosen = list(dict.fromkeys(["none", *(names or (name for name in COMPRESSIONS if name != "fp16"))]))
    if unknown := set(chosen) - set(COMPRESSIONS):
        raise click.UsageError(f"--compression {', '.join(sorted(unknown))}: choose from {', '.join(COMPRESSIONS)}")
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps({"names": chosen, "megabytes": megabytes, "rounds": rounds, "folder": folder})
        flags = ["--nproc_per_node=2", f"--started_port={started_port}", f"--log_dir={folder}/log"]
        command = [sys.executable, "-m", "fleet_train", "launch", *flags, __file__, asked]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        status = subprocess.run(command, cwd=ROOT, env=environ, check=False, timeout=_SECONDS).returncode
        if status:
            raise click.ClickException(f"the ranks ended with exit code {status}")
        measured = json.loads((Path(folder) / _RESULT).read_text())
    heads = ["compression", "handing", "codec", "waiting", "taken"]
    rows = [[name, *(f"{1e9 * each:.2f}e-9" for each in costs)] for name, costs in measured.items()]
    click.echo("\n".join(table(heads, rows)))


class _Bucket:
    """One bucket of products, and the method that a compression's description makes for it."""

    def __init__(self, job: Any, name: str, megabytes: float) -> None:
        import paddle

        from fleet_train.collectives.methods.dense import make_allreduces
        from fleet_train.collectives.methods.quantised import QuantisedSums
        from fleet_train.collectives.methods.registry import Parts
        from fleet_train.plan import TensorSpec, build_plan
        from fleet_train.profile import Profile
        from fleet_train.profile.methods import compression_of

        side = int((megabytes * 2**20 / 4) ** 0.5)
        settings = {"nccl_comm_num": 1, "fuse_grad_size_in_MB": 4 * megabytes, "last_comm_group_size_MB": 4 * megabytes}
        # Without the steps in which whole gradients are sent.
        settings |= dict.fromkeys(compression_of(name).short_warm_up, 0)
        profile = Profile(compression=name, **settings)
        plan = build_plan([TensorSpec("w", (side, side), "float32")], job.cluster, profile)
        allreduce = make_allreduces(job, 1, 0)[0]
        sums = QuantisedSums(job, plan, [allreduce]) if plan.is_quantised else None
        self._method = Parts(plan.buckets[0], job, plan, profile, allreduce, sums).make()
        self._values = [paddle.randn([side, side])]
        self.nbytes = 4 * side * side
        self.plan = plan
        self.handing: list[float] = []

    def stages(self) -> Any:
        """The stages of an exchange."""
        began = time.perf_counter()
        stages = self._method.average(self._values)
        first = next(stages)
        self.handing.append(time.perf_counter() - began)
        yield first
        yield from stages


def _measure(
    job: Any, name: str, megabytes: float, rounds: int, paths: Any, compute: Callable[[], object]
) -> list[float]:
    """The four costs, seconds per byte."""
    from fleet_train.collectives.engine import CallContext
    from fleet_train.collectives.paddle_compat import dynamic_mode

    context = CallContext("coding", f"exchanging {name}", job.timeout_seconds)
    alone: list[float] = []
    beside: list[float] = []
    taken: list[float] = []
    computing: list[float] = []
    with dynamic_mode(job.place):
        bucket = _Bucket(job, name, megabytes)
        for number in range(rounds + 1):  # the first one connects
            job.barrier(f"alone {name} {number}")
            began = time.perf_counter()
            job.engine.start(bucket.stages(), context).result()
            alone.append(time.perf_counter() - began)
            job.barrier(f"computing {name} {number}")
            began = time.perf_counter()
            compute()
            computing.append(time.perf_counter() - began)
            job.barrier(f"both {name} {number}")
            began = time.perf_counter()
            running = job.engine.start(_ended(bucket.stages(), beside, began), context)
            compute()
            taken.append(time.perf_counter() - began - computing[-1])
            running.result()
    of = [statistics.median(each[1:]) for each in (bucket.handing, alone, beside, taken)]
    link = sum(phase.seconds for sent in bucket.plan.exchanges() for phase in paths.of(bucket.plan, sent))
    found = [of[0], of[1] - of[0] - link, of[2] - of[1], of[3]]
    every = job.all_gather(f"measured {name}", found).values()
    return [max(0.0, *each) / bucket.nbytes for each in zip(*every, strict=True)]


def _ended(stages: Any, times: list[float], began: float) -> Any:
    """The same stages; the seconds until they have ended are added to ``times``."""
    try:
        return (yield from stages)
    finally:
        times.append(time.perf_counter() - began)


def _rank(asked: dict[str, Any]) -> None:
    import paddle

    from fleet_train import fleet
    from fleet_train.collectives.join import glance
    from fleet_train.collectives.paddle_compat import dynamic_mode
    from fleet_train.convert import session
    from fleet_train.plan.price import Network, Paths

    paddle.enable_static()
    fleet.init(is_collective=True)
    job = session.current().job
    with dynamic_mode(job.place):
        matrix = paddle.randn([1024, 1024])
    # As long as the exchange at least: both sides are busy throughout.
    products = max(4, int(4 * asked["megabytes"]))

    def compute() -> None:
        for _ in range(products):
            paddle.matmul(matrix, matrix)

    link = glance(job)
    paths = Paths(job.cluster, Network(link, link))
    found = {name: _measure(job, name, asked["megabytes"], asked["rounds"], paths, compute) for name in asked["names"]}
    if fleet.worker_index() == 0:
        (Path(asked["folder"]) / _RESULT).write_text(json.dumps(found))
    fleet.shutdown()


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
