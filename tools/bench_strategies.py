"""Communication strategies against PyTorch DDP and stock Paddle on an emulated network; docs/benchmarks/ has records.

    sudo python tools/bench_strategies.py --quick
    sudo python tools/bench_strategies.py --scenario strategies --rounds 5 --output docs/benchmarks/DATE-mlp-1gbit
    sudo python tools/bench_strategies.py --scenario strategies --rounds 5 --output docs/benchmarks/DATE-mlp-1gbit --add
    sudo python tools/bench_strategies.py --task resnet18 --network 100mbit --ours powersgd --rivals torch:ddp

The record is written after every turn; ``--add`` continues it, after an interruption or for more rounds. Needs
requirements-bench.txt (CPU PyTorch) and root (tools/lab.py).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from fleet_train.errors import FleetTrainError
from fleet_train.profile import load_profile
from tools.benchmarks import contestants, record
from tools.benchmarks.benchmark import Benchmark
from tools.benchmarks.contestants import Contestant
from tools.benchmarks.jobs import ROOT
from tools.benchmarks.networks import describe
from tools.benchmarks.records import same_code
from tools.benchmarks.report import table
from tools.benchmarks.scenarios import SCENARIOS, rivals_of
from tools.benchmarks.task import TASKS, Task

_QUICK = {"steps": 24, "warmup_steps": 4, "evaluate_every": 12}
# Names as in docs/benchmarks -> tc's.
_NETWORKS = {"unlimited": "none"}


def chosen_contestants(
    ours: Sequence[str], rivals: str, explicit: Sequence[str], has_before: bool = False
) -> list[Contestant]:
    """The contestants that the flags name, after compute-only runs; a click error for an unknown name."""
    try:
        words = list(explicit) or _words(ours or SCENARIOS["strategies"]["ours"], rivals)
        if has_before:
            words = contestants.beside_before(words)
        chosen = [contestants.parse(word) for word in words]
        for each in chosen:
            if each.kind == contestants.OURS:
                load_profile(each.variant)
    except (ValueError, FleetTrainError) as error:
        raise click.UsageError(str(error)) from None
    return contestants.with_baselines(chosen)


def _words(ours: Sequence[str], rivals: str) -> list[str]:
    """Profiles and rivals as contestants; by default the rivals that correspond to the profiles."""
    words = [f"ours:{name}" for name in ours]
    if rivals == "default":
        return words + rivals_of([load_profile(name) for name in ours])
    return words + ([] if rivals == "none" else rivals.split(","))


def _scenario(ctx: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """A scenario's flags become the defaults of the others."""
    del option
    if name is not None:
        ctx.default_map = SCENARIOS[name]
    return name


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--scenario",
    type=click.Choice(sorted(SCENARIOS)),
    is_eager=True,
    expose_value=False,
    callback=_scenario,
    help="A named set of flags; other flags override it.",
)
@click.option("--ours", multiple=True, help="A profile of strategies/ or a YAML file; repeat for more.")
@click.option(
    "--rivals",
    default="default",
    help="default (the corresponding ones), none, or a list such as torch:ddp,torch:powersgd_2.",
)
@click.option(
    "--contestant", "explicit", multiple=True, help="Exactly these contestants, such as ours:multi_node, torch:ddp."
)
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Another checkout of this project: each of ours also runs with the package there.",
)
@click.option("--task", "task_name", type=click.Choice(sorted(TASKS)), default="mlp", help="What is trained.")
@click.option("--nodes", default=2, help="Emulated machines.")
@click.option("--ranks_per_node", default=1, help="Processes on each.")
@click.option("--network", "rate", default="1gbit", help="Rate limit of a node: 1gbit, 100mbit, or unlimited.")
@click.option("--rounds", "repeats", default=3, help="Rounds in total; each runs every contestant once.")
@click.option("--seeds", type=int, help="Number of seeds that the rounds cycle through; default: one per round.")
@click.option("--steps", type=int, help="Training steps per turn; default: the task's.")
@click.option("--evaluate_every", type=int, help="Steps between two evaluations; default: the task's.")
@click.option("--batch_size", type=int, help="Samples of a step over all ranks; default: the task's.")
@click.option("--target", type=float, help="Test accuracy whose time is measured; default: the task's.")
@click.option(
    "--start_iteration", default=10, help="Plain steps before PyTorch's hooks, unless their names give the number."
)
@click.option(
    "--measure_seconds", default=8.0, help="Seconds to measure the links first; with 0 no step time is predicted."
)
@click.option("--timeout", default=900.0, help="Timeout of a turn in seconds.")
@click.option("--quick", is_flag=True, help="One round of few steps: a smoke test, not to be quoted.")
@click.option("--add", is_flag=True, help="Continue the existing record, up to --rounds.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Path of the record without its ending; --quick has a default."
)
def main(
    ours: tuple[str, ...], rivals: str, explicit: tuple[str, ...], task_name: str, quick: bool, output: Path | None,
    before: Path | None, add: bool, **options: Any,
) -> None:  # fmt: skip
    """Train the same network with every contestant, interleaved, and record times, bytes and accuracy."""
    task = _task(task_name, quick, **{key: options.pop(key) for key in ("steps", "evaluate_every", "batch_size")})
    options["target"] = options["target"] or task.target
    options["repeats"] = 1 if quick else options["repeats"]
    options["seeds"] = options["seeds"] or options["repeats"]
    options["rate"] = _NETWORKS.get(options["rate"], options["rate"])
    chosen = chosen_contestants(ours, rivals, explicit, has_before=before is not None)
    _require("matplotlib", *("torch" for each in chosen if each.framework == contestants.TORCH))
    at = record.circumstances()
    benchmark = Benchmark(task, chosen, timeout_seconds=options.pop("timeout"), before=before or ROOT, **options)
    path = _output(output, quick, add)
    if add:
        _go_on(benchmark, path, at)
    click.echo(
        f"{describe(task)}\n{len(chosen)} contestants, {benchmark.repeats} rounds, record: {path}.json, .md, .png"
    )
    click.echo(benchmark.told_left())
    benchmark.run(at, lambda: _keep(benchmark, path))
    summaries = benchmark.summaries()
    click.echo(
        f"\n{table(summaries, benchmark.rate, benchmark.predictions(summaries))}\n\nwritten: {path}.json, .md, .png"
    )
    if benchmark.failures:
        raise click.ClickException(f"{len(benchmark.failures)} turns failed, see above and the record")


def _task(name: str, quick: bool, steps: int | None, evaluate_every: int | None, batch_size: int | None) -> Task:
    changes: dict[str, Any] = (_QUICK if quick else {}) | ({"steps": steps} if steps else {})
    changes |= {"evaluate_every": evaluate_every} if evaluate_every else {}
    changes |= {"global_batch_size": batch_size} if batch_size else {}
    task = dataclasses.replace(TASKS[name], **changes)
    if task.steps <= task.warmup_steps:
        raise click.UsageError(f"--steps {task.steps}: the first {task.warmup_steps} are not timed; give more")
    return task


def _output(output: Path | None, quick: bool, add: bool) -> Path:
    """The path of the record; an existing one is not overwritten by accident."""
    if output is None:
        if not quick:
            raise click.UsageError(
                "--output is missing: the path of the record, such as docs/benchmarks/DATE-mlp-1gbit"
            )
        return Path(tempfile.mkdtemp(prefix="bench_quick_")) / "quick"
    exists = record.beside(output, ".json").exists()
    if exists and not add:
        raise click.UsageError(f"{output}.json exists already: give --add to continue it, or another --output")
    if add and not exists:
        raise click.UsageError(f"--add: there is no {output}.json to continue")
    return output


def _go_on(benchmark: Benchmark, path: Path, at: dict[str, Any]) -> None:
    """Continue the record at ``path``; a click error if it was made with other settings, code or machine."""
    there = json.loads(record.beside(path, ".json").read_text())
    then = there["circumstances"]
    rule = "the rounds of a record have to be comparable: give another --output"
    if then["processor"] != at["processor"]:
        raise click.UsageError(f"--add: the record is of {then['processor']}, this is {at['processor']}; {rule}")
    if not same_code(then["commit"], at["commit"]):
        raise click.UsageError(
            f"--add: fleet_train, tools or strategies have changed since the record's commit {then['commit'][:10]}; "
            f"{rule}"
        )
    try:
        benchmark.go_on_from(there)
    except ValueError as error:
        raise click.UsageError(f"--add: {error}") from None


def _keep(benchmark: Benchmark, path: Path) -> None:
    from tools.benchmarks.plot import draw  # matplotlib is slow to import and needed only here

    summaries = benchmark.summaries()
    record.write(path, benchmark.record(), summaries, benchmark.predictions(summaries))
    if summaries:
        draw(record.beside(path, ".png"), benchmark.rounds, summaries, benchmark.target)


def _require(*modules: str) -> None:
    missing = sorted({module for module in modules if importlib.util.find_spec(module) is None})
    if missing:
        raise click.ClickException(f"not installed: {', '.join(missing)}; pip install -r requirements-bench.txt")


if __name__ == "__main__":
    main()
