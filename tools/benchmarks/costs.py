"""What a feature costs: blocks of steps with it and without, in turn, in one job; and the codec, on one thread."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import paddle
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.collectives.methods.codec import Codec, CompiledCodec, HostCodec, find_loops
from fleet_train.collectives.paddle_compat import keep_freed_memory
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import QuantisedSettings
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from tools.benchmarks.jobs import results_of, run_here
from tools.benchmarks.networks import PaddleKit, build, described
from tools.benchmarks.record import Keep, circumstances, recorded, spread, table, told_circumstances
from tools.benchmarks.tasks import BYTES, TASKS, Batches, Specs

LARGEST_BLOCK = 2048
PARTS = ("add", "encode", "decode")
SETTINGS = {
    f"int{bits}, blocks of {block}{', stochastic' * stochastic}": QuantisedSettings(bits, block, stochastic=stochastic)
    for bits in (8, 4)
    for block, stochastic in ((128, False), (512, False), (512, True), (2048, False))
}


def cases() -> dict[str, tuple[QuantisedSettings, Codec]]:
    """Cases by name: each setting, coded by numpy and by compiled loops. Raises ClickException without numba."""
    loops = find_loops()
    if isinstance(loops, str):
        raise click.ClickException(loops)
    return {
        f"{name}: {how}": (settings, codec)
        for name, settings in SETTINGS.items()
        for how, codec in (("numpy", HostCodec(settings)), ("compiled", CompiledCodec(settings, loops)))
    }


def once(settings: QuantisedSettings, codec: Codec, gradients: Any, owed: Any) -> tuple[dict[str, float], Any]:
    """Seconds of one thread for each part of a sum of two ranks, with error feedback."""
    seconds = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = work()
        seconds[name] = time.thread_time() - start
        return result

    owed = timed("add", lambda: codec.add(owed, [gradients]))
    random = settings.dither("w", 0, 0, 1) if settings.stochastic else None
    wire, owed = timed("encode", lambda: codec.encode(owed, random))
    timed("decode", lambda: codec.decode([wire, wire], 0.5))
    return seconds, owed


def codec_page(record: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    rates = {name: [[each[part] for each in rounds] for part in PARTS] for name, rounds in found.items()}
    return [
        f"# Codec of few bits, {record['circumstances']['date'][:10]}",
        "",
        "GB/s of float32 per thread (processor time), median with smallest and largest. *add*: gradients to what is "
        "owed; *encode*: scales, levels, and what rounding leaves out; *decode*: two wires into a sum.",
        "",
        *told_circumstances(record["circumstances"], "no network"),
        f"- {record['megabytes']:g} MB, {len(next(iter(found.values())))} rounds.",
        "",
        *table(
            ("case", *PARTS),
            [(name, *(spread(each, statistics.median(each)) for each in parts)) for name, parts in rates.items()],
        ),
    ]


@click.command(context_settings={"show_default": True})
@click.option("--megabytes", default=16.0, help="Size in MB of the float32 values that are coded at a time.")
@recorded(15, "each measures every case once")
def codec_cost(megabytes: float, rounds: int, keep: Keep) -> None:
    """CPU cost of coding float32 in few bits and decoding it: one thread, no communication.

        python tools/bench.py codec --record docs/benchmarks

    Every setting is coded by numpy and by compiled loops (numba), once per round in turn; the first round is discarded.
    """
    at, measured = circumstances(), cases()
    paddle.set_device("cpu")
    keep_freed_memory()
    elements = int(megabytes * 2**20) // 4 // LARGEST_BLOCK * LARGEST_BLOCK
    gradients = paddle.randn([elements])
    owed = {name: paddle.zeros([elements]) for name in measured}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in measured}
    for number in range(rounds + 1):
        for name, (settings, codec) in measured.items():
            seconds, owed[name] = once(settings, codec, gradients, owed[name])
            if number:
                found[name].append({part: 4 * elements / 1e9 / spent for part, spent in seconds.items()})
    record = {"circumstances": at, "megabytes": megabytes, "gigabytes_per_second": found}
    keep(record, codec_page(record, found))
    click.echo("\n".join(codec_page(record, found)))


WRITTEN = {"background": "in the background", "waiting": "waited for"}
KINDS = {"checkpoint": ("none", *WRITTEN), "sync-batch-norm": ("plain", "synchronised")}
CLASSES, SIDE = 10, 64
# Per rank and step.
IMAGES = {"ResNet-50": 8, "convnet": 32}
Blocks = Sequence[Mapping[str, Any]]


FED = ("inputs", "labels")


class Trained:
    """A network in programs of its own on one rank."""

    def __init__(self, name: str, specs: Specs, loss: Callable[..., Any], network: Callable[[], Any], *profile: Any):
        self.program, self.startup = paddle.static.Program(), paddle.static.Program()
        with paddle.static.program_guard(self.program, self.startup), paddle.utils.unique_name.guard(f"{name}_"):
            inputs, labels = (paddle.static.data(name, *spec) for name, spec in zip(FED, specs, strict=True))
            self._loss = loss(paddle.nn.functional, network()(inputs), labels)
            fleet.distributed_optimizer(paddle.optimizer.Momentum(0.01, 0.9), *profile).minimize(self._loss)
        self.plan, self.exe, self._barrier = fleet.plan(), paddle.static.Executor(fleet.place()), fleet.barrier_worker

    def block(
        self, steps: int, batch: Callable[[int], tuple[Any, Any]], save: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """A block of steps, a ``save`` after the first: seconds, and those of the processor (all threads of this
        process), which depend less on who else is at work; how long the training stood still for the save."""
        self._barrier()
        began, worked, stood = time.perf_counter(), time.process_time(), 0.0
        for number in range(steps):
            feed = dict(zip(FED, batch(number), strict=True))
            (loss,) = self.exe.run(self.program, feed=feed, fetch_list=[self._loss])
            assert np.isfinite(loss).all(), "the loss is not finite"
            if number == 0 and save is not None:
                before = time.perf_counter()
                save()
                stood = time.perf_counter() - before
        times = {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - worked}
        return times | {"stood_ms": 1000 * stood}


def in_turn(kinds: Sequence[str], rounds: int, block: Callable[[str], Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """A block of each kind per round, in another order each time, so that no kind is always first or last."""
    orders = [[*kinds[shift:], *kinds[:shift]] for shift in range(len(kinds))]
    return [[{"kind": kind, **block(kind)} for kind in orders[number % len(kinds)]] for number in range(rounds)]


def checkpoints_of_a_rank(folder: Path, rounds: str, steps: str) -> dict[str, Any]:
    """The rounds of a rank, and the size of a checkpoint."""
    task, done, kit = TASKS[BYTES], 0, PaddleKit(0)
    trained = Trained(task.name, task.specs, task.loss, lambda: build(task, kit))
    trained.exe.run(trained.startup, feed=kit.start_feed(trained.startup))
    batches = Batches(task, fleet.worker_index(), fleet.worker_num())
    savers = {kind: Checkpoints(folder / kind, keep=2, background=kind == "background") for kind in WRITTEN}

    def block(kind: str, count: int = int(steps)) -> dict[str, float]:
        nonlocal done
        saver, first = savers.get(kind), done
        done += count
        if saver is None:
            return trained.block(count, lambda number: batches.at(first + number)) | {"late_ms": 0.0}

        def save() -> None:
            state = TrainState(0, first + 1, 1, fleet.worker_num(), {}, {}, {}, {})
            assert saver.save(trained.exe, state) is not None

        times = trained.block(count, lambda number: batches.at(first + number), save)
        ended, worked = time.perf_counter(), time.process_time()
        saver.finish()
        times["processor_seconds"] += time.process_time() - worked
        # Near 0, else a part of the write falls outside the block.
        return times | {"late_ms": 1000 * (time.perf_counter() - ended)}

    for kind in KINDS["checkpoint"]:
        block(kind, min(int(steps), 10))
    measured = in_turn(KINDS["checkpoint"], int(rounds), block)
    saved = sorted((folder / "background" / "checkpoints").glob("step-*"))
    size = sum(path.stat().st_size for path in saved[-1].iterdir()) if saved else 0
    return {"rounds": measured, "checkpoint_bytes": size}


def batch_norm_of_a_rank(folder: Path, network: str, count: str, steps: str) -> dict[str, Any]:
    """The blocks of a rank, and how often synchronised batch norm exchanges in a step."""
    del folder
    layers: list[Any] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [(nn.Conv2D, before, after, 3, 2, 1), (nn.BatchNorm2D, after), (nn.ReLU,)]
    layers += [(nn.AdaptiveAvgPool2D, 1), (nn.Flatten,), (nn.Linear, 128, CLASSES)]
    networks = {
        "ResNet-50": lambda: paddle.vision.models.resnet50(num_classes=CLASSES),
        "convnet": lambda: nn.Sequential(*(layer(*sizes) for layer, *sizes in layers)),
    }
    random, shape = np.random.default_rng(fleet.worker_index()), (IMAGES[network], 3, SIDE, SIDE)
    batch = (random.standard_normal(shape).astype("float32"), random.integers(0, CLASSES, IMAGES[network]))
    specs: Specs = ([None, *shape[1:]], "float32"), ([None], "int64")

    def loss(functional: Any, logits: Any, labels: Any) -> Any:
        return functional.cross_entropy(logits, labels)

    trained = {
        kind: Trained(kind, specs, loss, networks[network], Profile(sync_batch_norm=kind == "synchronised"))
        for kind in KINDS["sync-batch-norm"]
    }
    for each in trained.values():
        each.exe.run(each.startup)
        each.block(2, lambda _: batch)
    measured = in_turn(list(trained), int(count), lambda kind: trained[kind].block(int(steps), lambda _: batch))
    exchanges = [len(each.plan.statistics) if each.plan else 0 for each in trained.values()][1]
    return {"blocks": [block for turn in measured for block in turn], "exchanges": exchanges}


def run_rank(what: str, folder: Path, *asked: str) -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    found = (checkpoints_of_a_rank if what == "checkpoint" else batch_norm_of_a_rank)(folder, *asked)
    part = folder / f"rank{fleet.worker_index()}.part"
    part.write_text(json.dumps(found), encoding="utf-8")
    os.replace(part, part.with_suffix(".json"))
    fleet.shutdown()


def run_job(what: str, asked: Sequence[object], ranks: int, timeout: float, port: int = 0) -> list[Any]:
    """What each rank has found. Raises JobFailed."""
    with tempfile.TemporaryDirectory(prefix="bench_costs_") as name:
        script = ["-m", "tools.benchmarks.costs", what, name, *map(str, asked)]
        run_here(what, script, ranks, Path(name), timeout, port=port)
        return results_of(Path(name), ranks)


def _median(values: Sequence[float], digits: int = 2) -> float:
    return round(statistics.median(values), digits)


def shares_of(rounds: Sequence[Blocks], steps: int) -> dict[str, Any]:
    """Medians over the rounds; shares are of the block without a checkpoint in the same round."""
    by_kind = [{block["kind"]: block for block in found} for found in rounds]
    summary: dict[str, Any] = {"step_ms": _median([1000 * each["none"]["seconds"] / steps for each in by_kind])}
    for kind in WRITTEN:
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


def ratios_of(rounds: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Of one network's rounds: medians, and the ratios of medians in a round with their least and largest."""
    figures: dict[str, Any] = {"exchanges": rounds[0]["exchanges"]}
    kinds = KINDS["sync-batch-norm"]
    for name, what in (("step_ms", "seconds"), ("processor_ms", "processor_seconds")):
        times = []
        for each in rounds:
            blocks = [block for found in each["ranks"] for block in found]
            by_kind = {kind: [float(block[what]) for block in blocks if block["kind"] == kind] for kind in kinds}
            times.append({kind: 1000 / steps * statistics.median(values) for kind, values in by_kind.items()})
        ratios = [each["synchronised"] / each["plain"] for each in times]
        figures[name] = {
            **{kind: _median([each[kind] for each in times], 1) for kind in kinds},
            "ratio": _median(ratios, 3),
            "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return figures


def checkpoint_page(record: Mapping[str, Any]) -> list[str]:
    jobs = record["jobs"]
    rows = []
    for job, kind in ((job, kind) for job in jobs for kind in WRITTEN):
        each = job["summary"][kind]
        low, high = each["share_percent_quartiles"]
        share = f"{each['share_percent']:+.2f} % ({low:+.2f} to {high:+.2f})"
        processor, stood = f"{each['processor_share_percent']:+.2f} %", f"{each['stood_ms']:.1f} ms"
        rows.append((job["ranks"], f"{job['summary']['step_ms']:.1f} ms", WRITTEN[kind], share, processor, stood))
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


def batch_norm_page(record: Mapping[str, Any]) -> list[str]:
    asked, loads, rows = record["asked"], [each["load_average"] for each in record["rounds"]], []
    for network, figures in record["summary"].items():
        steps = [figures["step_ms"][kind] for kind in KINDS["sync-batch-norm"]]
        samples = " -> ".join(f"{1000 * IMAGES[network] * asked['ranks'] / step:.1f}" for step in steps)
        (plain, synchronised, ratio), worked = _cells(figures["step_ms"]), _cells(figures["processor_ms"])
        rows.append((network, IMAGES[network], figures["exchanges"], plain, synchronised, samples, ratio, *worked))
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
@click.option("--ranks", multiple=True, default=(1, 2), help="Ranks of a job; repeat for more jobs.")
@click.option("--steps", default=50, help="Steps per block, so per checkpoint.")
@click.option("--timeout", default=300.0, help="Timeout of one job in seconds.")
@recorded(7, "each trains one block of each kind")
def checkpoint(ranks: tuple[int, ...], steps: int, timeout: float, rounds: int, keep: Keep) -> None:
    """The cost of a checkpoint as a share of the step time: written in the background, and with a wait.

        python tools/bench.py checkpoint --record docs/benchmarks

    Blocks of steps with one checkpoint each, or none, are trained in turn; one job for each number of ranks. Shares
    are of the block without a checkpoint in the same round.
    """
    record: dict[str, Any] = {"circumstances": circumstances(), "task": described(TASKS[BYTES]), "steps": steps}
    record["jobs"] = []
    for number in ranks:
        job = run_job("checkpoint", (rounds, steps), number, timeout)[0] | {"ranks": number}
        record["jobs"].append(job | {"summary": shares_of(job["rounds"], steps)})
        keep(record, checkpoint_page(record))
    click.echo("\n".join(checkpoint_page(record)))


@click.command(context_settings={"show_default": True})
@click.option("--network", "networks", multiple=True, type=click.Choice(list(IMAGES)), default=tuple(IMAGES))
@click.option("--ranks", default=2, help="Processes.")
@click.option("--blocks", "count", default=4, help="Blocks of each kind per round.")
@click.option("--steps", default=4, help="Steps per block.")
@click.option("--started_port", default=0, help="The launcher's port, if another job uses the default.")
@click.option("--timeout", default=900.0, help="Timeout of one job in seconds.")
@recorded(5, "each runs one job per network")
def sync_batch_norm(
    networks: tuple[str, ...], ranks: int, count: int, steps: int, started_port: int, timeout: float, rounds: int,
    keep: Keep,
) -> None:  # fmt: skip
    """The cost of synchronised batch norm: its step over the plain one's, on ranks of this machine over loopback.

        python tools/bench.py sync-batch-norm --record docs/benchmarks

    One job per round and network holds both programs, and trains blocks of each in turn. A round's ratio is of the
    medians over its blocks, so both kinds have run beside the same load.
    """
    record: dict[str, Any] = {"circumstances": circumstances(), "rounds": []}
    for number in range(rounds):
        for network in networks:
            load = round(os.getloadavg()[0], 2)
            found = run_job("sync-batch-norm", (network, count, steps), ranks, timeout, started_port)
            turn = {"round": number, "network": network, "load_average": load, "exchanges": found[0]["exchanges"]}
            record["rounds"].append(turn | {"ranks": [each["blocks"] for each in found]})
        done = {name: [each for each in record["rounds"] if each["network"] == name] for name in networks}
        record["summary"] = {name: ratios_of(turns, steps) for name, turns in done.items()}
        record["asked"] = {"ranks": ranks, "blocks": count, "steps": steps, "rounds": number + 1}
        keep(record, batch_norm_page(record))
    click.echo("\n".join(batch_norm_page(record)))


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
