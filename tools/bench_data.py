"""Images per second of fleet_train's loader against a plain paddle.io.DataLoader; docs/benchmarks/ has records.

    python tools/bench_data.py --output docs/benchmarks/2026-11-21-data-pipeline
    python tools/bench_data.py --quick
    python tools/bench_data.py --workers 1 --workers 2 --contestant ours --contestant dali --contestant paddle

Both read the same generated JPEG files, with a random resized crop, random mirroring and normalisation. Takes less
than two minutes with the defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import numpy as np
from PIL import Image

from tools.benchmarks.record import ROOT, circumstances

CONTESTANTS = ("ours", "paddle", "dali")
_TURN_SECONDS = 300.0
_CLASSES = 10

Turn = dict[str, Any]


def generate(folder: Path, images: int, width: int, height: int) -> int:
    """Write photograph-like JPEGs (smooth colours, some noise) in ten classes; returns the bytes per image."""
    generator = np.random.default_rng(0)
    size = 0
    for number in range(images):
        coarse = generator.integers(0, 256, (height // 25 + 1, width // 25 + 1, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
        pixels = np.clip(smooth + generator.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
        file = folder / "train" / f"class{number % _CLASSES}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file, quality=90)
        size += file.stat().st_size
    (folder / "val").symlink_to(folder / "train")  # our loader needs both parts; only train/ is read
    return size // images


def take_turn(contestant: str, workers: int, folder: Path, batch_size: int, image_size: int, epochs: int) -> Turn:
    """Run one contestant in its own process."""
    words = [contestant, str(folder), *map(str, (workers, batch_size, image_size, epochs))]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.benchmarks.data_turn", *words],
        env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_TURN_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise click.ClickException(f"{contestant} with {workers} workers failed:\n{done.stderr[-3000:]}")
    figures: Turn = json.loads(done.stdout.splitlines()[-1])
    return {"contestant": contestant, "workers": workers, **figures}


def summarise(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per contestant and number of workers: medians over the rounds.

    Ratios are taken within a round, so that a temporary slowdown of the machine affects both sides.
    """
    rows = []
    for workers, contestant in dict.fromkeys((turn["workers"], turn["contestant"]) for turn in turns):
        mine = [turn for turn in turns if (turn["workers"], turn["contestant"]) == (workers, contestant)]
        rivals = {turn["round"]: turn for turn in turns if (turn["workers"], turn["contestant"]) == (workers, "paddle")}
        pairs = [(turn, rivals[turn["round"]]) for turn in mine if turn["round"] in rivals]
        speeds = sorted(turn["images_per_second"] for turn in mine)
        rows.append(
            {
                "contestant": contestant,
                "workers": workers,
                "images_per_second": median(speeds),
                "slowest": speeds[0],
                "fastest": speeds[-1],
                "cpu_ms_per_image": median(turn["cpu_ms_per_image"] for turn in mine),
                "speed_over_paddle": _ratio(pairs, "images_per_second"),
                "cpu_over_paddle": _ratio(pairs, "cpu_ms_per_image"),
            }
        )
    return rows


def _ratio(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], name: str) -> float | None:
    return median(ours[name] / theirs[name] for ours, theirs in pairs) if pairs else None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| loader | workers | images/s (slowest to fastest) | over paddle.io | CPU ms per image | over paddle.io |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = [f"{row[name]:.2f}" if row[name] else "" for name in ("speed_over_paddle", "cpu_over_paddle")]
        lines.append(
            f"| {row['contestant']} | {row['workers']} | {row['images_per_second']:.0f} ({row['slowest']:.0f} to "
            f"{row['fastest']:.0f}) | {ratios[0]} | {row['cpu_ms_per_image']:.2f} | {ratios[1]} |"
        )
    return "\n".join(lines)


def page(record: Mapping[str, Any]) -> str:
    at, task = record["circumstances"], record["task"]
    return "\n".join(
        [
            f"# Data pipeline, {at['date'][:10]}",
            "",
            f"- Data: {task['images']} generated JPEGs of {task['width']} x {task['height']} pixels and "
            f"{task['file_bytes'] / 1024:.0f} KiB, in the page cache; to float32 [3, {task['image_size']}, "
            f"{task['image_size']}] by random resized crop, mirroring and normalisation, batches of "
            f"{task['batch_size']}. `ours` is `--loader workers`, `dali` NVIDIA DALI on the CPU with as many threads, "
            "`paddle` a `paddle.io.DataLoader` with `paddle.vision` transforms and kept workers.",
            f"- Machine: {at['processor']}, {at['processors']} processors, Linux {at['kernel']}, load average "
            f"{at['load_average_before'][0]} before the start (other work was going on if it is above 0.3: compare "
            "ratios only).",
            f"- Versions: {', '.join(f'{key} {value}' for key, value in at['versions'].items() if value)}; "
            f"commit {at['commit'][:10]}{' with uncommitted changes' if at['uncommitted_changes'] else ''}.",
            f"- {record['rounds']} rounds, every contestant once per round in turn in a process of its own; one epoch "
            f"not timed, then {task['epochs']}. Medians over the rounds, ratios within a round. CPU time is that of "
            "all processes together.",
            f"- Command: `{at['command']}`",
            "",
            table(record["summary"]),
            "",
        ]
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--workers", multiple=True, type=int, default=(2,), help="Worker processes; repeat for more counts.")
@click.option("--contestant", "contestants", multiple=True, type=click.Choice(CONTESTANTS), default=("ours", "paddle"))
@click.option("--rounds", default=5, help="Rounds; each runs every contestant once.")
@click.option("--images", default=512, help="Number of JPEG files to generate.")
@click.option("--width", default=500, help="Their width in pixels (500 x 375 is typical of ImageNet).")
@click.option("--height", default=375)
@click.option("--batch_size", default=32)
@click.option("--image_size", default=224)
@click.option("--epochs", default=2, help="Timed passes over the files per turn.")
@click.option("--quick", is_flag=True, help="One round over few images: a smoke test, not to be quoted.")
@click.option("--output", default="docs/benchmarks/data-pipeline", help="Path of the record, without its ending.")
def main(
    workers: tuple[int, ...], contestants: tuple[str, ...], rounds: int, images: int, width: int, height: int,
    quick: bool, output: str, **options: int,
) -> None:  # fmt: skip
    """Have every contestant read the same image folder, interleaved, and record the rates."""
    rounds, images = (1, 64) if quick else (rounds, images)
    at = {**circumstances(), "command": " ".join(["python", "tools/bench_data.py", *sys.argv[1:]])}
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory(prefix="bench_data_") as name:
        file_bytes = generate(Path(name), images, width, height)
        for number in range(1, 1 + rounds):
            for count in workers:
                for contestant in contestants:
                    turn = take_turn(contestant, count, Path(name), **options)
                    turns.append({"round": number, **turn})
                    speed = f"{turn['images_per_second']:7.0f} images/s {turn['cpu_ms_per_image']:6.2f} CPU ms each"
                    click.echo(f"round {number} of {rounds}  {contestant:<7} {count} workers {speed}")
    task = {"images": images, "width": width, "height": height, "file_bytes": file_bytes, **options}
    rows = summarise(turns)
    record = {"circumstances": at, "task": task, "rounds": rounds, "summary": rows, "turns": turns}
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(record), encoding="utf-8")
    click.echo(f"\n{table(rows)}\n\nwritten: {output}.json, .md")


if __name__ == "__main__":
    main()
