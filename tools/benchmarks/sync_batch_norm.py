"""The cost of synchronised batch norm: its step over the plain one's, on ranks of this machine over loopback.

    python tools/bench.py sync-batch-norm --record docs/benchmarks

One job per round and network holds both programs, and trains blocks of each in turn. A round's ratio is of the medians
over its blocks, so both kinds have run beside the same load.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import click
import numpy as np

from tools.benchmarks import blocks
from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances

KINDS = ("plain", "synchronised")
CLASSES, SIDE, _WARMUP_STEPS = 10, 64, 2
# Per rank and step.
IMAGES = {"ResNet-50": 8, "convnet": 32}
Round = Mapping[str, Any]


class Trained:
    """A network in programs of its own: plain or synchronised."""

    def __init__(self, network: str, kind: str) -> None:
        import paddle
        from paddle import nn

        from fleet_train import fleet
        from fleet_train.profile import Profile

        layers: list[Any] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            layers += [(nn.Conv2D, before, after, 3, 2, 1), (nn.BatchNorm2D, after), (nn.ReLU,)]
        layers += [(nn.AdaptiveAvgPool2D, 1), (nn.Flatten,), (nn.Linear, 128, CLASSES)]
        networks = {
            "ResNet-50": lambda: paddle.vision.models.resnet50(num_classes=CLASSES),
            "convnet": lambda: nn.Sequential(*(layer(*sizes) for layer, *sizes in layers)),
        }
        self._program, startup = paddle.static.Program(), paddle.static.Program()
        profile = Profile(sync_batch_norm=kind == "synchronised")
        with paddle.static.program_guard(self._program, startup), paddle.utils.unique_name.guard(f"{kind}_"):
            features = paddle.static.data("features", [None, 3, SIDE, SIDE], "float32")
            labels = paddle.static.data("labels", [None], "int64")
            self._loss = nn.functional.cross_entropy(networks[network]()(features), labels)
            fleet.distributed_optimizer(paddle.optimizer.Momentum(0.01, 0.9), profile).minimize(self._loss)
        plan = fleet.plan()
        self.exchanges = 0 if plan is None else len(plan.statistics)
        self._fleet, self._exe = fleet, paddle.static.Executor(fleet.place())
        self._exe.run(startup)
        random, images = np.random.default_rng(fleet.worker_index()), IMAGES[network]
        self._feed = {
            "features": random.standard_normal((images, 3, SIDE, SIDE)).astype("float32"),
            "labels": random.integers(0, CLASSES, images),
        }

    def block(self, steps: int) -> dict[str, float]:
        self._fleet.barrier_worker()
        clock = blocks.Clock()
        for _ in range(steps):
            (loss,) = self._exe.run(self._program, feed=self._feed, fetch_list=[self._loss])
            assert np.isfinite(loss).all(), "the loss is not finite"
        return {"seconds": clock.seconds, "processor_seconds": clock.processor_seconds}


def run_rank() -> None:
    import paddle

    from fleet_train import fleet, role_maker

    folder, (network, count, steps) = blocks.arguments_of_a_rank()
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    trained = {kind: Trained(network, kind) for kind in KINDS}
    for each in trained.values():
        each.block(_WARMUP_STEPS)
    measured = blocks.measure_in_turn(KINDS, int(count), lambda kind: trained[kind].block(int(steps)))
    found = {"blocks": [block for turn in measured for block in turn], "exchanges": trained["synchronised"].exchanges}
    blocks.write(folder, fleet.worker_index(), found)
    fleet.shutdown()


def summarise(rounds: Sequence[Round], steps: int) -> dict[str, Any]:
    """Of one network's rounds: medians, and the ratios with their least and largest."""
    figures: dict[str, Any] = {"exchanges": rounds[0]["exchanges"]}
    for name, what in (("step_ms", "seconds"), ("processor_ms", "processor_seconds")):
        times = [{kind: 1000 / steps * _median(each, kind, what) for kind in KINDS} for each in rounds]
        ratios = [each["synchronised"] / each["plain"] for each in times]
        figures[name] = {
            **{kind: round(statistics.median(each[kind] for each in times), 1) for kind in KINDS},
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return figures


def _median(each: Round, kind: str, what: str) -> float:
    return statistics.median(float(block[what]) for found in each["ranks"] for block in found if block["kind"] == kind)


def page(record: Mapping[str, Any]) -> list[str]:
    asked, loads, rows = record["asked"], [each["load_average"] for each in record["rounds"]], []
    for network, figures in record["summary"].items():
        samples = [1000 * IMAGES[network] * asked["ranks"] / figures["step_ms"][kind] for kind in KINDS]
        step, worked = _cells(figures["step_ms"]), _cells(figures["processor_ms"])
        told = f"{samples[0]:.1f} -> {samples[1]:.1f}"
        rows.append((network, IMAGES[network], figures["exchanges"], *step[:2], told, step[2], *worked))
    return [
        f"# What synchronised batch norm costs, {record['circumstances']['date'][:10]}",
        "",
        f"- {asked['ranks']} ranks over loopback by the launcher, one thread each; images of {SIDE} x {SIDE}, "
        "Momentum, float32. Both programs are in one job and train in turn, "
        f"{asked['blocks']} blocks of {asked['steps']} steps of each kind per round.",
        *told_circumstances(record["circumstances"]),
        f"- Load average before the rounds: {min(loads):.1f} to {max(loads):.1f}. Ranks that wait for each other in "
        "every layer lose more if other processes take their processors than ranks that do so once per step: the "
        "ratio of processor times (all threads of a rank, waiting not counted) says what the work itself costs.",
        f"- Ratio: synchronised over plain, median over {asked['rounds']} rounds (least to largest).",
        "",
        *table(
            ("network", "images per rank", "exchanges per step", "plain", "synchronised", "samples/s",
             "ratio of steps", "processor time, plain", "synchronised", "ratio"), rows,
        ),
    ]  # fmt: skip


def _cells(figures: Mapping[str, Any]) -> tuple[str, str, str]:
    least, largest = figures["ratios"]
    ratio = f"{figures['ratio']:.2f} ({least:.2f} to {largest:.2f})"
    return f"{figures['plain']:.0f} ms", f"{figures['synchronised']:.0f} ms", ratio


@click.command(context_settings={"show_default": True})
@click.option("--network", "networks", multiple=True, type=click.Choice(list(IMAGES)), default=tuple(IMAGES))
@click.option("--ranks", default=2, help="Processes.")
@click.option("--blocks", "count", default=4, help="Blocks of each kind per round.")
@click.option("--steps", default=4, help="Steps per block.")
@click.option("--started_port", default=0, help="The launcher's port, if another job uses the default.")
@click.option("--timeout", default=900.0, help="Timeout of one job in seconds.")
@recorded(5, "each runs one job per network")
def main(
    networks: tuple[str, ...], ranks: int, count: int, steps: int, started_port: int, timeout: float, rounds: int,
    keep: Keep,
) -> None:  # fmt: skip
    record: dict[str, Any] = {"circumstances": circumstances(), "rounds": []}
    for number in range(rounds):
        for network in networks:
            load = round(os.getloadavg()[0], 2)
            found = blocks.run_job("sync_batch_norm", (network, count, steps), ranks, timeout, started_port)
            turn = {"round": number, "network": network, "load_average": load, "exchanges": found[0]["exchanges"]}
            record["rounds"].append(turn | {"ranks": [each["blocks"] for each in found]})
        done = {name: [each for each in record["rounds"] if each["network"] == name] for name in networks}
        record["summary"] = {name: summarise(turns, steps) for name, turns in done.items()}
        record["asked"] = {"ranks": ranks, "blocks": count, "steps": steps, "rounds": number + 1}
        keep(record, page(record))
    click.echo("\n".join(page(record)))


if __name__ == "__main__":
    run_rank()
