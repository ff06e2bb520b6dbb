"""CPU cost of coding float32 in few bits and decoding it: one thread, no communication.

python tools/bench_codec.py --record docs/benchmarks/2026-11-22-codec
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import paddle

from fleet_train.collectives.methods.codec import Codec, CompiledCodec, HostCodec, find_loops
from fleet_train.collectives.paddle_compat import keep_freed_memory
from fleet_train.profile.methods.base import QuantisedSettings
from tools.benchmarks.record import circumstances, told_circumstances

BLOCKS = (128, 512, 2048)
SETTINGS = {
    f"int{bits}, blocks of {block}{', stochastic' if stochastic else ''}": QuantisedSettings(
        bits, block, stochastic=stochastic
    )
    for bits in (8, 4)
    for block in BLOCKS
    for stochastic in ((False, True) if block == 512 else (False,))
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


def measure(megabytes: float, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Every case once per round, interleaved; the first round is discarded."""
    elements = int(megabytes * 2**20) // 4 // max(BLOCKS) * max(BLOCKS)
    gradients, measured = paddle.randn([elements]), cases()
    owed = {name: paddle.zeros([elements]) for name in measured}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in measured}
    for number in range(rounds + 1):
        for name, (settings, codec) in measured.items():
            seconds, owed[name] = once(settings, codec, gradients, owed[name])
            if number:
                found[name].append({part: 4 * elements / 1e9 / spent for part, spent in seconds.items()})
    return found


def page(record: Mapping[str, Any]) -> str:
    """The markdown page of a record."""
    at = record["circumstances"]
    lines = [
        f"# Codec of few bits, {at['date'][:10]}",
        "",
        "GB/s of float32 per thread (processor time), median with smallest and largest. *add*: gradients to what is "
        "owed; *encode*: scales, levels, and what rounding leaves out; *decode*: two wires into a sum.",
        "",
        *told_circumstances(at, "no network"),
        f"- {record['megabytes']:g} MB, {record['rounds']} rounds, every case once per round in turn.",
        "",
        "| | add | encode | decode |",
        "| --- | --- | --- | --- |",
    ]
    for name, rounds in record["gigabytes_per_second"].items():
        cells = []
        for part in ("add", "encode", "decode"):
            rates = [each[part] for each in rounds]
            cells.append(f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--megabytes", default=16.0, show_default=True, help="Size in MB of the float32 values that are coded at a time."
)
@click.option("--rounds", default=15, show_default=True, help="Rounds; each measures every case once.")
@click.option("--record", "path", type=click.Path(path_type=Path), help="Write PATH.json and PATH.md.")
def main(megabytes: float, rounds: int, path: Path | None) -> None:
    paddle.set_device("cpu")
    keep_freed_memory()
    at = circumstances() | {"command": " ".join(["python", "tools/bench_codec.py", *map(shlex.quote, sys.argv[1:])])}
    found = measure(megabytes, rounds)
    record = {"circumstances": at, "megabytes": megabytes, "rounds": rounds, "gigabytes_per_second": found}
    click.echo(page(record))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_name(path.name + ".md").write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main()
