"""CPU cost of coding float32 in few bits and decoding it: one thread, no communication.

    python tools/bench.py codec --record docs/benchmarks

Every setting is coded by numpy and by compiled loops (numba), once per round in turn; the first round is discarded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import paddle

from fleet_train.collectives.methods.codec import Codec, CompiledCodec, HostCodec, find_loops
from fleet_train.collectives.paddle_compat import keep_freed_memory
from fleet_train.profile.methods.base import QuantisedSettings
from tools.benchmarks.record import Keep, circumstances, recorded, spread, table, told_circumstances

BLOCKS = (128, 512, 2048)
PARTS = ("add", "encode", "decode")
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


def page(record: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
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
def main(megabytes: float, rounds: int, keep: Keep) -> None:
    at, measured = circumstances(), cases()
    paddle.set_device("cpu")
    keep_freed_memory()
    elements = int(megabytes * 2**20) // 4 // max(BLOCKS) * max(BLOCKS)
    gradients = paddle.randn([elements])
    owed = {name: paddle.zeros([elements]) for name in measured}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in measured}
    for number in range(rounds + 1):
        for name, (settings, codec) in measured.items():
            seconds, owed[name] = once(settings, codec, gradients, owed[name])
            if number:
                found[name].append({part: 4 * elements / 1e9 / spent for part, spent in seconds.items()})
    record = {"circumstances": at, "megabytes": megabytes, "gigabytes_per_second": found}
    keep(record, page(record, found))
    click.echo("\n".join(page(record, found)))
