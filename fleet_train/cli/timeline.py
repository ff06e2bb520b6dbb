"""``fleet_train timeline``: where the time of a job's steps went, on one clock for all machines."""

from __future__ import annotations

import io
import json
from pathlib import Path

import click

from fleet_train.cli.options import HELP, WholeNumberRange, folders
from fleet_train.cluster.flight.ring import Ring, read_ring
from fleet_train.cluster.flight.stands import spans
from fleet_train.cluster.flight.timeline import RankTimeline, chrome_trace, common_steps, timelines, typical_step
from fleet_train.cluster.flight.trace import MOST_TRACE_BYTES
from fleet_train.errors import FleetTrainError, printable
from fleet_train.files import publish, read_regular
from fleet_train.log import logger

_REASONS = 5
_EPILOG = """\b
Examples:
  fleet_train launch --trace 100-104 --nproc_per_node 2 train.py
  fleet_train timeline log
  fleet_train timeline log --step 102 --png step.png

\b
FOLDER/timeline.json opens in https://ui.perfetto.dev and in chrome://tracing. After a failure there is
no trace: what the flight recorders had, flight.N.bin, is read then.
"""


@click.command(epilog=_EPILOG, context_settings=HELP)
@click.argument(
    "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="FOLDER", shell_complete=folders
)
@click.option("--output", type=Path, metavar="FILE", help="The timeline of all ranks. [default: FOLDER/timeline.json]")
@click.option("--png", type=Path, metavar="FILE", help="The picture of one step. [default: FOLDER/timeline.png]")
@click.option("--step", type=WholeNumberRange(min=1), metavar="N", help="Look at this step. [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON on stdout.")
def command(folder: Path, output: Path | None, png: Path | None, step: int | None, as_json: bool) -> None:
    """Show the traced steps of a job: one file for all ranks, a picture, and the five longest reasons why a step was
    not shorter.

    FOLDER: a job's log folder, or one with those of several nodes, whose trace.N.bin or flight.N.bin are read.
    """
    from fleet_train.doctor.slow_steps import reasons

    ranks = timelines(read_rings(folder))
    common = common_steps(ranks)
    if step is not None and step not in common:
        raise FleetTrainError(f"--step {step}: {folder} has {_numbers(common)} of all ranks")
    steps = common if step is None else [step]
    step_ms, found = reasons(ranks, steps)
    files = [_write(output or folder / "timeline.json", json.dumps(chrome_trace(ranks)).encode())]
    if steps:
        files += _draw(ranks, typical_step(ranks, steps), png or folder / "timeline.png", is_asked_for=png is not None)
    if as_json:
        clocks = [[rank.rank, rank.endpoint, rank.clock_offset, rank.clock_error] for rank in ranks]
        told = {"clocks": clocks, "steps": steps, "step_ms": round(step_ms, 3), "files": [str(file) for file in files]}
        click.echo(json.dumps({**told, "reasons": [reason.as_json() for reason in found]}, indent=2))
        return
    for line in _clock_lines(ranks):
        click.echo(printable(line))
    length = f": {step_ms:.1f} ms{' each on average' * (len(steps) > 1)}; why not less:" if steps else ""
    click.echo(f"{_numbers(steps)}{length}")
    for number, reason in enumerate(found[:_REASONS], 1):
        click.echo(printable(f"  {number}. {reason.text}"))
    click.echo(printable(f"written: {', '.join(str(file) for file in files)}"))


def read_rings(folder: Path) -> list[Ring]:
    """One ring of each rank below the folder. Raises FleetTrainError without one, and for those of several jobs."""
    found = sorted(folder.rglob("trace.*.bin")) or sorted(folder.rglob("flight.*.bin"))
    rings: dict[int, tuple[Path, Ring]] = {}
    for path in found:
        try:
            ring = read_ring(read_regular(path, MOST_TRACE_BYTES))
        except OSError as error:
            logger.warning("%s cannot be read (%s): it is left out", path, error.strerror or error)
            continue
        if ring is None:
            logger.warning("%s is not a recording: it is left out", path)
        elif ring.rank in rings:
            raise FleetTrainError(
                f"rank {ring.rank} is in {rings[ring.rank][0]} and in {path}: give the folder of one job"
            )
        else:
            rings[ring.rank] = path, ring
    if not rings:
        raise FleetTrainError(
            f"{folder} has no trace.N.bin, and no flight.N.bin of a failure: trace steps with launch --trace 100-104, "
            "train --trace, or fleet.trace(100, 104)"
        )
    world_size = max(ring.world_size for _, ring in rings.values())
    if missing := sorted(set(range(world_size)) - rings.keys()):
        logger.warning("without rank %s: copy the log folders of all nodes below one", spans(missing))
    return [ring for _, ring in rings.values()]


def _numbers(steps: list[int]) -> str:
    if not steps:
        return "no whole step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _clock_lines(ranks: list[RankTimeline]) -> list[str]:
    """A line about each machine's clock, which its ranks share."""
    machines: dict[float, list[RankTimeline]] = {}
    for rank in ranks:
        machines.setdefault(rank.clock_offset, []).append(rank)
    lines = []
    for offset, own in machines.items():
        names = ", ".join(rank.name for rank in own)
        lines.append(f"{names}: clock {offset:+.6f} s from the job's, within {1e3 * own[0].clock_error:.3f} ms")
    return lines


def _write(path: Path, content: bytes) -> Path:
    try:
        publish(path, content, f"{path.name}.tmp")
    except OSError as error:
        raise FleetTrainError(
            f"{path} cannot be written: {error.strerror}; give another one: --output, --png"
        ) from None
    return path


def _draw(ranks: list[RankTimeline], number: int, path: Path, *, is_asked_for: bool) -> list[Path]:
    from fleet_train.train.step_picture import step_picture

    try:
        from PIL import Image

        encoded = io.BytesIO()
        Image.fromarray(step_picture(ranks, number)).save(encoded, "PNG")
    except ImportError as error:
        why = f"no picture: {error}; python -m pip install pillow"
        if is_asked_for:
            raise FleetTrainError(why) from None
        logger.warning("%s", why)
        return []
    return [_write(path, encoded.getvalue())]
