"""The throughput of unlike machines together, by shares of the joint batch, over the sum of what each computes alone.

    sudo .venv/bin/python tools/bench.py shares --rounds 3 --record docs/benchmarks
    sudo .venv/bin/python tools/bench.py shares --quotas 2:2:1 --task bytes

A machine is a control group with a part of a processor (cpu.cfs_quota_us, or cpu.max), in which its launcher and its
rank run, on loopback. Alone, the machines train a model each, side by side: they have each other's load beside them,
and send nothing. PyTorch's DistributedDataParallel has equal shares, the better of two bucket sizes. Root.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fleet_train.cluster.shares import dealt
from tools.benchmarks.contestants import ALONE, OURS, TORCH
from tools.benchmarks.record import Keep, circumstances, recorded, spread, table, told_circumstances
from tools.benchmarks.tasks import BYTES, RESNET18, TASKS
from tools.demo import free_port
from tools.processes import ROOT, Process, leaving_on_signals, start, stop

_PERIOD_US, _STOP_SECONDS = 100_000, 30.0
_GROUPS = Path("/sys/fs/cgroup")
JOINT = {RESNET18: 192, BYTES: 192}
"""Samples of a joint batch for each machine. Alone, machines take parts of it in proportion to their processors."""
_EVERY, _SETTLING = 6, 18
"""Steps between two measurements of `batch_shares: auto`, and steps that nobody's throughput is taken from."""
# Else glibc gives large arrays back to the kernel after each step, most of all in a job of one rank: 15 % of its time.
_ENVIRON = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_MAX_": "0"}
SWAPPED = "auto, parts swapped"
"""After the steps that settle, the first and the last machine have each other's part of a processor."""
SETS: dict[str, tuple[str, ...]] = {
    ALONE: (OURS,),
    "equal": (OURS, "--set=batch_shares=equal"),
    "auto": (OURS, "--set=batch_shares=auto", f"--set=batch_shares_steps={_EVERY}"),
    SWAPPED: (OURS, "--set=batch_shares=auto", f"--set=batch_shares_steps={_EVERY}"),
    "PyTorch, 25 MiB": (f"{TORCH}:ddp",),
    "PyTorch": (f"{TORCH}:ddp_",),
}
"""Contestant -> kind and flags of the launcher."""


@contextmanager
def machines(parts: Sequence[float]) -> Iterator[list[Path]]:
    """A control group for each: that part of a processor."""
    is_second, made = (_GROUPS / "cgroup.controllers").is_file(), []
    try:
        for part in parts:
            made.append(_GROUPS / ("" if is_second else "cpu") / f"fleet-{uuid.uuid4().hex[:8]}")
            made[-1].mkdir()
            limit(made[-1], part)
        yield made
    finally:
        for group in made:
            group.rmdir()


def limit(group: Path, part: float) -> None:
    """Give a control group that part of a processor from now on."""
    quota = int(part * _PERIOD_US)
    if (group / "cpu.max").is_file():
        (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        return
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


def commands(name: str, task: str, parts: Sequence[float], steps: int, folder: Path, rival: str) -> list[list[str]]:
    """One for each machine."""
    ranks = len(parts)
    kind, *flags = SETS[name]
    kind += TASKS[task].bucket if kind.endswith("_") else ""
    joint = JOINT[task] * ranks

    def program(samples: int, steps: int, folder: Path) -> list[str]:
        script = Path(__file__).with_name("shares_rank.py")
        return [str(script), kind, task, str(samples), str(steps), str(folder)]

    if kind != OURS:
        return [[rival, *program(joint, steps, folder)]] * ranks
    hosts = [f"127.0.0.{number + 2}" for number in range(ranks)]
    first = free_port((*hosts, "127.0.0.1"), 2 * ranks)
    launch = [sys.executable, "-m", "fleet_train", "launch", "--nproc_per_node=1"]
    if name == ALONE:
        alone = []
        for rank, samples in enumerate(dealt(joint, parts)):
            place, port = folder / f"{rank}", f"--started_port={first + 2 * rank}"
            many = 1_000_000  # until the slowest one has made its steps
            alone.append([*launch, port, f"--log_dir={place / 'log'}", *program(samples, many, place)])
        return alone
    where = [f"--started_port={first}", f"--cluster_node_ips={','.join(hosts)}"]
    return [
        [*launch, *where, f"--node_ip={host}", f"--log_dir={folder / host}", *flags, *program(joint, steps, folder)]
        for host in hosts
    ]


def notes_of(folder: Path, rank: int) -> list[tuple[float, int]]:
    """The end of each step of a rank, in seconds, and its samples."""
    path = folder / f"notes.{rank}.json"
    return json.loads(path.read_text()) if path.exists() else []


def run(name: str, task: str, parts: Sequence[float], steps: int, rival: str) -> dict[str, Any]:
    """Samples per second of all machines together, and the sizes of the ranks' last batches."""
    with machines(parts) as groups, tempfile.TemporaryDirectory(prefix="shares-") as place:
        folder, ranks = Path(place), len(parts)
        for rank in range(ranks):
            (folder / f"{rank}").mkdir()
        of_torch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(("127.0.0.1",), 1))}
        of_torch["GLOO_SOCKET_IFNAME"] = "lo"
        processes: list[Process] = []
        try:
            for rank, command in enumerate(commands(name, task, parts, steps, folder, rival)):
                environ = {**os.environ, "PYTHONPATH": str(ROOT), **_ENVIRON}
                if SETS[name][0] != OURS:
                    environ |= {**of_torch, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
                enter = ["sh", "-c", f'echo $$ > {groups[rank]}/cgroup.procs; exec "$@"', "sh"]
                processes.append(start([*enter, *command], folder / f"output{rank}", environ, folder))
            are_swapped = False
            while any(each.poll() is None for each in processes):
                if any(each.poll() for each in processes):
                    break
                if name == SWAPPED and not are_swapped and len(notes_of(folder, 0)) >= _SETTLING:
                    are_swapped = True
                    limit(groups[0], parts[-1])
                    limit(groups[-1], parts[0])
                if name == ALONE and all(len(notes_of(folder / f"{rank}", 0)) >= steps for rank in range(ranks)):
                    break
                time.sleep(0.2)
            if any(each.poll() for each in processes):
                told = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("output*")))
                raise click.ClickException(f"{name} has failed:\n{told}")
        finally:
            stop(processes, _STOP_SECONDS)
        places = [(folder / f"{rank}", 0) if name == ALONE else (folder, rank) for rank in range(ranks)]
        notes = [notes_of(*each) for each in places]
    first = {"auto": _SETTLING, SWAPPED: _SETTLING + 2 * _EVERY}.get(name, 1)
    speeds = [sum(size for _, size in each[first + 1 :]) / (each[-1][0] - each[first][0]) for each in notes]
    shown = [_SETTLING - 1, _SETTLING + _EVERY, _SETTLING + 2 * _EVERY] if name == SWAPPED else [-1]
    sizes = [[each[step][1] for each in notes] for step in shown]
    return {"samples_per_second": round(sum(speeds), 3), "sizes": sizes}


@click.command()
@click.option("--quotas", default="4:1", help="The machines' parts, such as 2:2:1.")
@click.option("--processors", default=1.6, help="Of all machines together at most; none has more than one.")
@click.option("--task", type=click.Choice([RESNET18, BYTES]), default=RESNET18)
@click.option("--steps", default=10, type=click.IntRange(4), help="Steps that are measured.")
@click.option("--rival_python", default=sys.executable, help="A Python with PyTorch.")
@click.option("--only", multiple=True, type=click.Choice(list(SETS)), help="Only these; may be repeated.")
@recorded(rounds=3, of_rounds="in each, all contestants in turn")
def main(
    rounds: int, quotas: str, processors: float, task: str, steps: int, rival_python: str, only: Sequence[str],
    keep: Keep,
) -> None:  # fmt: skip
    """Measure it, and print the table. A record of this name that is there gets more rounds."""
    given = [float(each) for each in quotas.split(":")]
    scale = min(1 / max(given), processors / sum(given))
    parts = [round(scale * each, 3) for each in given]
    record: dict[str, Any] = {
        "circumstances": circumstances(), "task": task, "quotas": quotas, "parts": parts, "joint": JOINT[task],
        "steps": steps, "rounds": [],
    }  # fmt: skip
    record = keep.begun(record)
    with leaving_on_signals():
        for _ in range(rounds):
            record["rounds"].append({})
            for name in only or SETS:
                many = steps + {"auto": _SETTLING, SWAPPED: _SETTLING + 2 * _EVERY}.get(name, 2)
                record["rounds"][-1][name] = run(name, task, parts, many, rival_python)
                click.echo(f"{name}: {record['rounds'][-1][name]}")
            keep(record, page(record))
    click.echo("\n".join(page(record)))


def page(record: Mapping[str, Any]) -> list[str]:
    rows = []
    whole = [each for each in record["rounds"] if ALONE in each]
    for name in SETS:
        of_name = [(each[name], each[ALONE]) for each in whole if name in each]
        if of_name:
            ratios = [one["samples_per_second"] / alone["samples_per_second"] for one, alone in of_name]
            speed = statistics.median(one["samples_per_second"] for one, _ in of_name)
            sizes = "; then ".join(", ".join(map(str, each)) for each in of_name[-1][0]["sizes"])
            rows.append([name, f"{speed:.1f}", spread(ratios, statistics.median(ratios)), sizes])
    parts = ", ".join(f"{each:g}" for each in record["parts"])
    return [
        f"# Unlike machines together: {record['task']}, {record['quotas']}",
        "",
        f"Each machine is a control group with a part of a processor ({parts}); a joint batch has {record['joint']} "
        "samples for each. *alone*: a model on each machine, side by side, with a part of that batch in proportion to "
        "its processor, and nothing is sent; others: one model on all. All keep their memory between steps "
        f"({', '.join(name for name in _ENVIRON if name.startswith('MALLOC'))}). "
        f"`auto` measures every {_EVERY} steps here. *parts swapped*: the first and the last machine get each other's "
        "part of a processor in mid-training; sizes before it, after the first measurement since, and after the next.",
        "",
        *told_circumstances(record["circumstances"], "loopback, Gloo"),
        "",
        *table(["", "samples/s", "over alone: median (range)", "batches of the machines"], rows),
    ]


if __name__ == "__main__":
    main()
