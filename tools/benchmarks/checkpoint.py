"""The cost of a checkpoint as a share of the step time: written in the background, and with a wait.

    python tools/bench.py checkpoint --record docs/benchmarks

Blocks of steps with one checkpoint each, or none, are trained in turn; one job for each number of ranks. Shares are of
the block without a checkpoint in the same round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tools.benchmarks import blocks
from tools.benchmarks.networks import TASKS, Batches, PaddleKit, build, describe, start_feed
from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances

KINDS = {"none": "", "background": "in the background", "waiting": "waited for"}
Rounds = Sequence[Sequence[Mapping[str, Any]]]


class Rank:
    """One rank with its program, and checkpoints for each kind of block."""

    def __init__(self, folder: Path) -> None:
        import paddle

        from fleet_train import fleet, role_maker
        from fleet_train.train.checkpoint.manager import Checkpoints

        paddle.enable_static()
        fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
        self.fleet, task = fleet, TASKS["mlp"]
        features = paddle.static.data("features", [None, *task.sample_shape], "float32")
        labels = paddle.static.data("labels", [None], "int64")
        self._loss = paddle.nn.functional.cross_entropy(build(task, PaddleKit(task))(features), labels)
        fleet.distributed_optimizer(paddle.optimizer.Momentum(task.learning_rate, task.momentum)).minimize(self._loss)
        self._exe, self._step = paddle.static.Executor(fleet.place()), 0
        self._exe.run(fleet.startup_program, feed=start_feed(task, fleet.startup_program))
        self._batches = Batches(task, fleet.worker_index(), fleet.worker_num())
        kinds = list(KINDS)[1:]
        self._checkpoints = {
            kind: Checkpoints(folder / kind, keep=2, background=kind == "background") for kind in kinds
        }

    def block(self, kind: str, steps: int) -> dict[str, float]:
        """A block of steps, a save after the first: its seconds, how long the training stood still for the save, and
        the seconds of processor time with the write in the background."""
        from fleet_train.train.checkpoint.manager import TrainState

        checkpoints = self._checkpoints.get(kind)
        self.fleet.barrier_worker()
        clock, stood = blocks.Clock(), 0.0
        for number in range(steps):
            self._train()
            if number == 0 and checkpoints is not None:
                before = clock.seconds
                state = TrainState(0, self._step, 1, self.fleet.worker_num(), {}, {}, {}, {})
                assert checkpoints.save(self._exe, state) is not None
                stood = clock.seconds - before
        seconds = clock.seconds
        if checkpoints is not None:
            checkpoints.finish()
        late = clock.seconds - seconds  # near 0, else part of the write falls outside the block
        times = {"seconds": seconds, "processor_seconds": clock.processor_seconds}
        return times | {"stood_ms": 1000 * stood, "late_ms": 1000 * late}

    def _train(self) -> None:
        images, labels = self._batches.at(self._step)
        feed = {"features": images, "labels": labels}
        (loss,) = self._exe.run(self.fleet.main_program, feed=feed, fetch_list=[self._loss])
        assert loss == loss, "the loss is NaN"
        self._step += 1


def run_rank() -> None:
    folder, (rounds, steps) = blocks.arguments_of_a_rank()
    rank = Rank(folder)
    for kind in KINDS:
        rank.block(kind, min(int(steps), 10))
    measured = blocks.measure_in_turn(list(KINDS), int(rounds), lambda kind: rank.block(kind, int(steps)))
    saved = sorted((folder / "background" / "checkpoints").glob("step-*"))
    size = sum(path.stat().st_size for path in saved[-1].iterdir()) if saved else 0
    blocks.write(folder, rank.fleet.worker_index(), {"rounds": measured, "checkpoint_bytes": size})
    rank.fleet.shutdown()


def summarise(rounds: Rounds, steps: int) -> dict[str, Any]:
    """Medians over the rounds; shares are of the block without a checkpoint in the same round."""
    by_kind = [{block["kind"]: block for block in found} for found in rounds]
    summary: dict[str, Any] = {"step_ms": _median([1000 * each["none"]["seconds"] / steps for each in by_kind])}
    for kind in list(KINDS)[1:]:
        shares, worked = (
            [100 * (each[kind][what] / each["none"][what] - 1) for each in by_kind]
            for what in ("seconds", "processor_seconds")
        )
        quartiles = statistics.quantiles(shares, n=4) if len(shares) > 1 else [shares[0]] * 3
        summary[kind] = {
            "share_percent": _median(shares),
            "share_percent_quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
            "processor_share_percent": _median(worked),
            "stood_ms": _median([each[kind]["stood_ms"] for each in by_kind]),
            "late_ms": _median([each[kind]["late_ms"] for each in by_kind]),
        }
    return summary


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def page(record: Mapping[str, Any]) -> list[str]:
    jobs = record["jobs"]
    rows = []
    for job, kind in ((job, kind) for job in jobs for kind in list(KINDS)[1:]):
        each = job["summary"][kind]
        low, high = each["share_percent_quartiles"]
        share = f"{each['share_percent']:+.2f} % ({low:+.2f} to {high:+.2f})"
        processor, stood = f"{each['processor_share_percent']:+.2f} %", f"{each['stood_ms']:.1f} ms"
        rows.append((job["ranks"], f"{job['summary']['step_ms']:.1f} ms", KINDS[kind], share, processor, stood))
    return [
        f"# What a checkpoint costs, {record['circumstances']['date'][:10]}",
        "",
        f"- Network: {record['task']}; batch 128 over all ranks, Momentum, float32, one thread per rank; a checkpoint "
        f"is {jobs[0]['checkpoint_bytes'] / 1e6:.1f} MB on a local disk.",
        *told_circumstances(record["circumstances"]),
        f"- Blocks of {record['steps']} steps with one checkpoint each, or none, in turn; share: time of a block over "
        f"that of the one without in the same round, median over {len(jobs[0]['rounds'])} rounds (quartiles). "
        "Processor time: rank 0's own, its write included; it says what a checkpoint costs when no processor is idle.",
        "",
        *table(
            ("ranks", "step", "written", "share of the step time", "of the processor time", "training stands still"),
            rows,
        ),
    ]


@click.command(context_settings={"show_default": True})
@click.option("--ranks", multiple=True, default=(1, 2), help="Ranks of a job; repeat for more jobs.")
@click.option("--steps", default=50, help="Steps per block, so per checkpoint.")
@click.option("--timeout", default=300.0, help="Timeout of one job in seconds.")
@recorded(7, "each trains one block of each kind")
def main(ranks: tuple[int, ...], steps: int, timeout: float, rounds: int, keep: Keep) -> None:
    record: dict[str, Any] = {"circumstances": circumstances(), "task": describe(TASKS["mlp"]), "steps": steps}
    record["jobs"] = []
    for number in ranks:
        job = blocks.run_job("checkpoint", (rounds, steps), number, timeout)[0] | {"ranks": number}
        record["jobs"].append(job | {"summary": summarise(job["rounds"], steps)})
        keep(record, page(record))
    click.echo("\n".join(page(record)))


if __name__ == "__main__":
    run_rank()
