"""What the flight recorder takes of a step's time, per profile, on ranks of this machine over loopback.

    python tools/bench.py recorder --record docs/benchmarks

Two answers. Counted: the time that a step spends in the recorder, each call timed in its place, where caches are as a
step leaves them; calls of other threads count although they may overlap computing. Compared: blocks of steps with the
recorder and with nothing in its place, its thread asleep too, in turn within one job; the ratio of each pair.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

from fleet_train import fleet
from fleet_train.cluster.flight import ring
from fleet_train.cluster.flight.ring import read_ring, recorder
from fleet_train.files import publish_where_linked
from fleet_train.profile import profile_names
from tools.benchmarks.contestants import rhythm
from tools.benchmarks.jobs import JobFailed, results_of, run_here
from tools.benchmarks.networks import described
from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances
from tools.benchmarks.tasks import BYTES, CLICKS, TASKS, Batches, Task
from tools.benchmarks.trainees import StaticTrainee

NETWORKS = {name: TASKS[name] for name in (BYTES, CLICKS)}
BAR = 0.5
"""Percent of a step's time that the recorder may take."""
_TIMED_STEPS, _LOOPS, _FEWEST_PAIRS = 100, 20_000, 20
_CLIPPED = 99
"""Percentile to which a call's time is cut: beyond, its thread was interrupted."""


class Switch:
    """Leaves the recorder ``on``; ``off``: puts nothing in its place, and its thread to sleep; or times its calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.events = 0
        """Begun while calls are timed; those that are too short to be kept count, too."""
        self._runs, self._inside = threading.Event(), threading.local()
        real = {name: getattr(recorder, name) for name in ("begin", "end", "event", "add")}
        nothing = {name: lambda *_, **__: -1 for name in real} | {"event": lambda *_, **__: nullcontext()}
        timed = {name: self._timed(call, begins=name != "end") for name, call in real.items()}
        self._calls: dict[str, dict[str, Any]] = {"on": real, "off": nothing, "timed": timed}

        def sleep(seconds: float) -> None:
            time.sleep(seconds)
            self._runs.wait()

        vars(ring)["time"] = SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)

    def __call__(self, kind: str) -> None:
        vars(recorder).update(self._calls[kind])
        self._runs.clear() if kind == "off" else self._runs.set()

    def _timed(self, call: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            if vars(self._inside):  # `event` calls `begin`, `add` both
                return call(*given, **named)
            self._inside.yes = True
            began = time.perf_counter()
            result = call(*given, **named)
            self.seconds.append(time.perf_counter() - began)
            self.events += begins
            del self._inside.yes
            return result

        return timed


def loop_seconds() -> float:
    began = time.perf_counter()
    for _ in range(_LOOPS):
        recorder.end(recorder.begin("wire", "bucket 0", 1_000_000, "group 0: ranks 0-1"))
    return (time.perf_counter() - began) / _LOOPS


def helper_seconds() -> float:
    """Processor time of the recorder's thread."""
    copy = read_ring(recorder.copy())
    assert copy is not None
    return int(Path(f"/proc/self/task/{copy.helper}/schedstat").read_text().split()[0]) / 1e9


def measure(task: Task, ranks: int, pairs: int, steps: int) -> dict[str, Any]:
    """What this rank has found; times in milliseconds unless named otherwise."""
    trainee = StaticTrainee(task)
    batches = [Batches(task, trainee.rank, ranks).at(number) for number in range(50)]
    facts, switch, done = rhythm(fleet.profile().model_dump(mode="json")), Switch(), 0

    def train(count: int) -> float:
        nonlocal done
        began = time.perf_counter()
        for done in range(done + 1, done + count + 1):  # noqa: B020
            trainee.step(*batches[done % len(batches)])
        return 1e3 * (time.perf_counter() - began) / count

    switch("on")
    train(facts["settles_after"] + 20)
    block, kinds, blocks = max(steps, facts["period_steps"]), ("on", "off"), []
    for number in range(max(pairs * steps // block, _FEWEST_PAIRS)):
        times = {}
        for kind in kinds[:: -1 if number % 2 else 1]:
            switch(kind)
            times[kind] = round(train(block), 4)
        blocks.append([times[kind] for kind in kinds])
    switch("timed")
    train(steps)
    switch.seconds.clear()
    switch.events = 0
    helped, began = helper_seconds(), time.perf_counter()
    train(_TIMED_STEPS)
    helped, took = helper_seconds() - helped, time.perf_counter() - began
    calls = np.array(switch.seconds)
    switch("on")
    return {
        "block_steps": block,
        "on_off_ms": blocks,
        "events": round(switch.events / _TIMED_STEPS, 2),
        "event_us": round(1e6 * float(np.minimum(calls, np.percentile(calls, _CLIPPED)).sum()) / switch.events, 3),
        "loop_us": round(1e6 * loop_seconds(), 3),
        "helper_percent": round(100 * helped / took, 4),
    }


def figures_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a rank: the counted share, and the median of the ratios with an interval of 95 % (bootstrap), in percent."""
    pairs = np.array(found["on_off_ms"])
    added = 100 * (pairs[:, 0] / pairs[:, 1] - 1)
    again = np.median(np.random.default_rng(0).choice(added, (2000, len(added))), axis=1)
    step = float(np.median(pairs[:, 1]))
    return {
        "step_ms": round(step, 3),
        "counted_percent": round(found["events"] * found["event_us"] / 1e3 / step * 100, 3),
        "compared_percent": round(float(np.median(added)), 3),
        "interval_percent": [round(float(each), 3) for each in np.percentile(again, (2.5, 97.5))],
    }


def page(record: Mapping[str, Any]) -> list[str]:
    rows, told = [], record["networks"]
    for each in record["jobs"]:
        if "error" in each:
            rows.append((each["network"], f"`{each['profile']}`", f"did not run: {each['error']}", *[""] * 6))
            continue
        found, figures = each["found"], figures_of(each["found"])
        low, high = figures["interval_percent"]
        rows.append(
            (each["network"], f"`{each['profile']}`", f"{figures['step_ms']:.2f} ms", f"{found['events']:.1f}",
             f"{found['event_us']:.1f} us ({found['loop_us']:.1f})", f"{figures['counted_percent']:.2f} %",
             f"{figures['compared_percent']:+.2f} % ({low:+.2f} to {high:+.2f})", f"{found['helper_percent']:.3f} %",
             "yes" if figures["counted_percent"] <= BAR else "no")
        )  # fmt: skip
    return [
        f"# What the flight recorder costs, {record['circumstances']['date'][:10]}",
        "",
        *told_circumstances(record["circumstances"]),
        f"- {record['ranks']} ranks over loopback, one thread each; {record['pairs']} pairs of blocks of "
        f"{record['steps']} steps, or fewer of a whole period of the profile; rank 0's times.",
        *(f"- `{name}`: {words}." for name, words in told.items()),
        "- Counted: events of a run of the program times the time of one, in its place (in parentheses: in a loop), "
        "over the step. Compared: step with the recorder over the step without, median of the pairs and its 95 % "
        "interval (bootstrap). Its thread: processor time of what wakes four times a second; part of what is compared.",
        "",
        *table(
            ("network", "profile", "step", "events", "one event", "counted", "compared", "its thread",
             f"at most {BAR} %"), rows,
        ),
    ]  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.option("--profile", "profiles", multiple=True, help="Profile; repeat for more.  [default: the catalogue]")
@click.option("--network", "networks", multiple=True, type=click.Choice(list(NETWORKS)), default=tuple(NETWORKS))
@click.option("--ranks", default=2, help="Processes.")
@click.option("--pairs", default=150, help="Pairs of blocks, with and without.")
@click.option("--steps", default=2, help="Steps of a block.")
@click.option("--timeout", default=300.0, help="Timeout of one job in seconds.")
@recorded()
def main(
    profiles: Sequence[str], networks: Sequence[str], ranks: int, pairs: int, steps: int, timeout: float, keep: Keep
) -> None:
    record: dict[str, Any] = {"circumstances": circumstances(), "ranks": ranks, "pairs": pairs, "steps": steps}
    record |= {"networks": {name: described(NETWORKS[name]) for name in networks}, "jobs": []}
    for network, profile in ((network, profile) for network in networks for profile in profiles or profile_names()):
        job = {"network": network, "profile": profile}
        with tempfile.TemporaryDirectory(prefix="bench_recorder_") as name:
            asked = (name, network, *map(str, (ranks, pairs, steps)))
            script = [f"--strategy={profile}", "-m", "tools.benchmarks.recorder", *asked]
            try:
                run_here(profile, script, ranks, Path(name), timeout)
                record["jobs"].append(job | {"found": results_of(Path(name), 1)[0]})
            except JobFailed as error:
                record["jobs"].append(job | {"error": error.message.strip().splitlines()[-1]})
        click.echo(page(record)[-1])
        keep(record, page(record))


if __name__ == "__main__":
    result = measure(NETWORKS[sys.argv[2]], *map(int, sys.argv[3:]))
    publish_where_linked(Path(sys.argv[1], f"rank{fleet.worker_index()}.json"), json.dumps(result).encode())
    fleet.shutdown()
