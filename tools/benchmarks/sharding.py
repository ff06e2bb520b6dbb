"""A sharded optimizer beside one that every rank has all of: a rank's memory, steps and bytes on an emulated network.

    sudo .venv/bin/python tools/bench.py sharding --rounds 5 --record docs/benchmarks

Adam trains a network of matrix products, where the link decides, and a ResNet-18, where computing does. All sides run
in turn within a round, in a lab of machines with one rank each (tools/lab.py, root); ratios are taken within a round.
Memory is the process's largest resident set less that after importing Paddle; the state is what the optimizer keeps.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmarks.jobs import Command, Place, launcher, results_of, run_commands
from tools.benchmarks.ranks import interface_bytes
from tools.benchmarks.record import ROOT, Keep, circumstances, recorded, spread, table, told_circumstances
from tools.lab import Lab

RATE = "1gbit"
NETWORKS = ("products", "resnet18")
SIDES: dict[str, dict[str, Any]] = {
    "whole": {},
    "sharded": {"sharding": True},
    "sharded in pairs": {"sharding": True, "sharding_degree": 2},
    "sharded, bf16": {"sharding": True, "compression": "bf16"},
    "whole, clipped": {},
    "sharded, clipped": {"sharding": True},
}
WARM_STEPS, STEPS = 3, 8
_FIRST_PORT = 6400
_SECONDS = 300.0


@dataclass(frozen=True)
class Run:
    """What one rank is to do."""

    network: str
    side: str
    folder: str


def network(name: str) -> tuple[Any, tuple[int, ...], int]:
    """Its layers, the shape of a sample, samples of a rank."""
    import paddle

    if name == "resnet18":
        return paddle.vision.models.resnet18(num_classes=10), (3, 48, 48), 8
    sizes = (784, 2048, 2048, 10)
    layers: list[Any] = []
    for before, after in pairwise(sizes):
        layers += [paddle.nn.Linear(before, after), paddle.nn.ReLU()]
    return paddle.nn.Sequential(*layers[:-1]), (784,), 16


def rank_main(run: Run) -> None:
    """One rank of a job: its steps' seconds, the bytes that it sent, and its memory, into rank<N>.json."""
    import paddle

    from fleet_train import fleet, role_maker
    from fleet_train.plan.shards import memory_of

    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    paddle.seed(1)
    layers, shape, samples = network(run.network)
    before = _resident()
    images, labels = paddle.static.data("x", [None, *shape]), paddle.static.data("y", [None, 1], "int64")
    loss = paddle.nn.functional.cross_entropy(layers(images), labels)
    clip = paddle.nn.ClipGradByGlobalNorm(1.0) if "clipped" in run.side else None
    adam = paddle.optimizer.Adam(1e-4, grad_clip=clip)
    fleet.distributed_optimizer(adam).minimize(loss)
    executor = paddle.static.Executor(fleet.place())
    executor.run(paddle.static.default_startup_program())
    random = np.random.default_rng(fleet.worker_index())
    seconds: list[float] = []
    sent = 0
    for step in range(WARM_STEPS + STEPS):
        if step == WARM_STEPS:
            sent = interface_bytes()
        began = time.perf_counter()
        feed = {"x": random.standard_normal((samples, *shape)).astype("float32")}
        executor.run(feed=feed | {"y": random.integers(0, 10, (samples, 1))}, fetch_list=[loss])
        seconds.append(time.perf_counter() - began)
    program = paddle.static.default_main_program()
    kept, parameters = program.state_dict("all"), program.state_dict("param")
    own = [name for name in kept if name not in parameters and not name.endswith("@rows")]
    plan = fleet.plan()
    assert plan is not None
    record = {
        "seconds": seconds[WARM_STEPS:],
        "sent": (interface_bytes() - sent) / STEPS,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "state": sum(np.array(kept[name]).nbytes for name in own),
        "planned_sent": plan.sent_bytes_per_step,
        "parameters": plan.gradient_bytes,
        "planned": memory_of(plan),
        "sum": float(sum(np.array(value, dtype=np.float64).sum() for value in parameters.values())),
    }
    (Path(run.folder) / f"rank{fleet.worker_index()}.json").write_text(json.dumps(record))
    fleet.shutdown()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(name: str, side: str, ranks: int, place: Place) -> dict[str, Any]:
    """One job: the median step of its slowest rank in ms, the most bytes a rank sent, most memory and state. Raises
    JobFailed."""
    with tempfile.TemporaryDirectory(prefix="bench-sharding-") as made:
        folder = Path(made)
        run = folder / "run.json"
        run.write_text(json.dumps(asdict(Run(name, side, made))))
        strategy = folder / "side.yaml"
        strategy.write_text(json.dumps({"extends": "multi_node", **SIDES[side]}))
        script = [str(ROOT / "tools" / "benchmarks" / "sharding.py"), str(run)]
        commands: list[Command] = [
            ([*launcher(place, node, folder, str(strategy)), *script], {}) for node in range(ranks)
        ]
        run_commands(f"{name}, {side}", commands, folder, _SECONDS, place.lab)
        found = results_of(folder, ranks)
    return {
        "ms": 1e3 * max(statistics.median(rank["seconds"]) for rank in found),
        **{key: max(rank[key] for rank in found) for key in ("sent", "memory", "state", "planned_sent", "parameters")},
        "sum": found[0]["sum"],
        "planned": found[0]["planned"],
    }


Rounds = Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]]


def page(at: Mapping[str, Any], ranks: int, rounds: Rounds) -> list[str]:
    """For people."""
    lines = [
        f"# A sharded optimizer on {ranks} ranks, {at['date'][:10]}",
        "",
        *told_circumstances(at, f"CPU and Gloo, one rank on each of {ranks} emulated machines, links of {RATE}"),
        f"- Adam, {STEPS} steps after {WARM_STEPS}; {len(rounds)} rounds, medians with the smallest and largest. All",
        "  ranks share the processors. *ratio*: of the step without sharding, within a round; of clipped ones, of the",
        "  clipped one without sharding. *state*: of all values that Adam keeps, on the rank with most.",
        "- *memory*: largest resident set less that after importing Paddle, with activations and Paddle's own buffers.",
        "- *sent*: bytes of a rank's interface in a step, headers included; *planned*: the plan's payload.",
    ]
    for name in rounds[0]:
        whole = rounds[0][name]["whole"]
        lines += ["", f"## {name}: {whole['parameters'] / 2**20:.1f} MB of parameters", ""]
        rows = []
        for side in rounds[0][name]:
            each = [made[name][side] for made in rounds]
            beside = "whole, clipped" if "clipped" in side else "whole"
            ratios = [made[name][side]["ms"] / made[name][beside]["ms"] for made in rounds]
            rows.append(
                (
                    side,
                    f"{statistics.median(one['ms'] for one in each):.0f}",
                    spread(ratios, statistics.median(ratios)),
                    f"{each[0]['state'] / whole['state']:.3f}",
                    f"{statistics.median(one['memory'] for one in each) / 2**20:.0f}",
                    f"{statistics.median(one['sent'] for one in each) / 2**20:.1f}",
                    f"{each[0]['planned_sent'] / 2**20:.1f}",
                )
            )
        lines += table(("side", "ms", "ratio", "state", "memory MB", "sent MB", "planned MB"), rows)
    return lines


_SHOWN = "Planned memory of a rank, and what it sends in a step"
_COLOURS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "state": "#55a868",
    "buffers": "#c9c9c9",
    "sent": "#8172b3",
}


def picture(name: str, sides: Mapping[str, Mapping[str, Any]], ranks: int) -> str:
    """Of each side as SVG: the memory of a rank by the plan, and the bytes that it has sent in a step."""
    scale = 300 / max(sum(side["planned"].values()) for side in sides.values())
    drawn, top = [f'<text x="10" y="20">{name} on {ranks} ranks, MB</text>'], 34
    for number, (part, colour) in enumerate(_COLOURS.items()):
        drawn.append(f'<rect x="{180 + 105 * number}" y="9" width="13" height="13" fill="{colour}"/>')
        drawn.append(f'<text x="{198 + 105 * number}" y="20">{part}</text>')
    for side, found in sides.items():
        left = 150.0
        drawn.append(f'<text x="140" y="{top + 14}" text-anchor="end">{side}</text>')
        for part, nbytes in found["planned"].items():
            width = scale * nbytes
            drawn.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="18" fill="{_COLOURS[part]}"/>')
            left += width
        total = sum(found["planned"].values()) / 2**20
        drawn.append(f'<text x="{left + 6:.1f}" y="{top + 14}">{total:.0f}</text>')
        sent = scale * found["sent"]
        drawn.append(f'<rect x="510" y="{top}" width="{sent:.1f}" height="18" fill="{_COLOURS["sent"]}"/>')
        drawn.append(f'<text x="{516 + sent:.1f}" y="{top + 14}">{found["sent"] / 2**20:.0f}</text>')
        top += 26
    size = f'viewBox="0 0 720 {top + 6}" width="720" height="{top + 6}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">\n<title>{_SHOWN}</title>\n'
        + '<rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=4, type=click.IntRange(2, 16), help="Emulated machines of one rank.")
@click.option("--network", "names", multiple=True, default=NETWORKS, type=click.Choice(NETWORKS), help="Repeat.")
@recorded(5, "each runs every side once")
def main(ranks: int, names: tuple[str, ...], rounds: int, keep: Keep) -> None:
    at, made = circumstances(), list[dict[str, dict[str, dict[str, Any]]]]()
    port = _FIRST_PORT
    for number in range(1, rounds + 1):
        found: dict[str, dict[str, dict[str, Any]]] = {}
        with Lab(ranks, RATE) as lab:
            for name in names:
                found[name] = {}
                for side in SIDES:
                    found[name][side] = measure(name, side, ranks, Place(lab, 1, port))
                    port += 10
                    click.echo(f"round {number}, {name}, {side}: {found[name][side]['ms']:.0f} ms", err=True)
        made.append(found)
        record = {"circumstances": at, "ranks": ranks, "rounds": made}
        keep(record, page(at, ranks, made), picture(names[-1], made[-1][names[-1]], ranks), _SHOWN)
    click.echo("\n".join(page(at, ranks, made)))


if __name__ == "__main__":
    rank_main(Run(**json.loads(Path(sys.argv[1]).read_text())))
