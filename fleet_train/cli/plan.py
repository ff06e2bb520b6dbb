"""``fleet_train plan``: what would be communicated on a hypothetical cluster, and its cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet_train.cli.options import (
    BEFORE_A_SCRIPT,
    Command,
    NumberRange,
    WholeNumberRange,
    ask_here,
    files,
    gone_option,
    profiles,
    set_option,
    verbose_option,
)
from fleet_train.errors import ConversionError, ScheduleMismatch
from fleet_train.lazy import part_if_there

if TYPE_CHECKING:
    from fleet_train.cluster import Cluster
    from fleet_train.convert.rehearsal import Planned
    from fleet_train.plan import CommPlan
    from fleet_train.plan.price import Network
    from fleet_train.plan.pricing import Conditions, Pricing
    from fleet_train.plan.trial import Trial

_TRAINER = part_if_there("fleet_train.train.settings")
_EPILOG = """
\b
Examples
  # what a built-in model would send on 4 nodes of 2 processes
  fleet_train plan --model mlp --nodes 4 --ranks_per_node 2
\b
  # your own script; the arguments after --script SCRIPT are the script's
  fleet_train plan --nodes 2 --strategy multi_node --script train.py --lr 0.1
\b
  # the cost on a network of 1 Gb/s, with 30 ms of computing per step
  fleet_train plan --model cnn --nodes 2 --latency_us 100 --bandwidth_mbps 1000 \\
      --compute_ms 30 --batch_size 64
\b
  # simulate the exchange of random gradients, all ranks in this process: is it exact, what is sent?
  fleet_train plan --model mlp --nodes 2 --strategy powersgd --simulate
\b
--compute_ms is the time of a step of the same script in one process.
All times and bytes are predictions; docs/planning.md describes the model and its limits.
"""
_DEFAULTS = {
    "latency_us": 100.0,
    "bandwidth_mbps": 1000.0,
    "inside_latency_us": 30.0,
    "inside_bandwidth_mbps": 10000.0,
}
_LINKS = (
    "fleet_train recommend measures the links for what it proposes, doctor --ips A,B those between machines; "
    "give them here as --latency_us and --bandwidth_mbps"
)


def _positive(flag: str, help_text: str) -> Callable[[Command], Command]:
    """An option that takes a number above 0; its default is applied later, where it can be marked as assumed."""
    name = flag.removeprefix("--")
    smallest = NumberRange(min=0, min_open="bandwidth" in name)
    return click.option(flag, type=smallest, help=f"{help_text}  [default: {_DEFAULTS[name]:g}]")


@click.command(
    context_settings=BEFORE_A_SCRIPT | {"ignore_unknown_options": True},
    epilog=_EPILOG,
    short_help="Show what a script or model would communicate, and which knob causes it.",
)
@click.option(
    "--nodes", type=WholeNumberRange(1), default=2, show_default=True, help="Nodes of the cluster to plan for."
)
@click.option(
    "--ranks_per_node", type=WholeNumberRange(1), default=1, show_default=True, help="Processes on each node."
)
@click.option(
    "--strategy",
    metavar="NAME|FILE",
    help="Profile, whatever the script names. Default: the script's, or depends on the cluster.",
    shell_complete=profiles,
)
@set_option
@click.option(
    "--model",
    type=click.Choice(_TRAINER.MODELS if _TRAINER else ()),
    metavar="NAME",
    help="Plan for a model of the reference trainer.",
)
@_positive("--latency_us", "Between nodes: microseconds of one message of a collective.")
@_positive("--bandwidth_mbps", "Between nodes: 10^6 bits per second of a node in each direction.")
@_positive("--inside_latency_us", "The same inside a node.")
@_positive("--inside_bandwidth_mbps", "The same inside a node, per rank.")
@click.option(
    "--compute_ms", type=NumberRange(min=0), help="Computing time of a step without communication.  [default: 0]"
)
@click.option("--backward_share", type=NumberRange(0, 1), help="Its share in the backward pass.  [default: two thirds]")
@click.option("--batch_size", type=WholeNumberRange(0), default=0, help="Samples per rank and step, for samples/s.")
@click.option(
    "--ids_per_step",
    type=WholeNumberRange(1),
    help="Different rows that a rank's step looks up in each embedding's table.  [default: one for each index of 1,024 "
    "samples]",
)
@click.option("--simulate", is_flag=True, help="Execute the plan in numpy for all ranks, on random gradients.")
@click.option(
    "--simulate_steps",
    type=WholeNumberRange(1, 100_000),
    help="Updates to simulate.  [default: enough to see two synchronisations, warm-ups cut short]",
)
@gone_option("--nodes_on_paper", "plan for each number of nodes: --nodes 64 --ranks_per_node 8")
@gone_option("--measure", _LINKS, is_flag=True)
@gone_option("--measure_seconds", _LINKS)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@verbose_option
@click.option(
    "--script",
    "script",
    metavar="SCRIPT",
    help="Plan for a training script; the arguments after it are the script's.",
    shell_complete=files,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
def command(
    nodes: int,
    ranks_per_node: int,
    strategy: str | None,
    settings: tuple[str, ...],
    model: str | None,
    as_json: bool,
    script: str | None,
    arguments: tuple[str, ...],
    ids_per_step: int | None,
    simulate: bool,
    simulate_steps: int | None,
    **given: Any,
) -> None:
    """Show what each step sends, which knob causes it, and what it costs.

    Buckets, bytes per rank and per link, steps between synchronisations, predicted time. The script runs up to its
    first step, or its first write after a minimize, as if it were rank 0 of that cluster: nothing is trained, sent or
    saved. --simulate also executes the
    plan in numpy: do all ranks get the same bits, and how far are averages from the exact ones?
    """
    _refuse_bad_target(script, arguments, model)
    if simulate_steps is not None and not simulate:
        raise click.UsageError("--simulate_steps needs --simulate: give both")
    ask_here(strategy, settings)
    from fleet_train.cluster import Cluster
    from fleet_train.plan.build import with_rows
    from fleet_train.plan.pricing import price
    from fleet_train.plan.trial import try_out

    cluster = Cluster.imagined(nodes, ranks_per_node)
    conditions = _conditions(**given)
    shown = []
    for planned in _plans(script, arguments, model, cluster, conditions.network):
        plan = with_rows(planned.plan, planned.profile, ids_per_step) if ids_per_step else planned.plan
        trial = try_out(plan, planned.profile, simulate_steps or 0) if simulate else None
        shown.append(_Shown(planned.place, plan, price(plan, cluster, conditions), trial))
    _show(shown, as_json)
    if any(each.trial and not each.trial.holds for each in shown):
        raise ScheduleMismatch("simulate: the replicas were not equal where the plan makes them equal; see above")


@dataclass(frozen=True)
class _Shown:
    """What is shown of one program. ``place``: the script's line that converts it."""

    place: str
    plan: CommPlan
    pricing: Pricing
    trial: Trial | None

    def to_json(self) -> dict[str, Any]:
        from fleet_train.plan.shards import memory_of

        plan = self.plan
        content = {**plan.to_json(), "digest": plan.digest, "sent_bytes_per_step": plan.sent_bytes_per_step}
        content["memory"] = memory_of(plan)
        simulated = {"simulation": self.trial.to_json()} if self.trial else {}
        return {**content, **self.pricing.to_json(), **simulated}

    def text(self) -> str:
        from fleet_train.plan import explain
        from fleet_train.plan.pricing import describe
        from fleet_train.plan.trial import describe as describe_trial

        parts = [explain(self.plan), describe(self.pricing)]
        return "\n\n".join([*parts, *([describe_trial(self.trial)] if self.trial else [])])


def _show(shown: Sequence[_Shown], as_json: bool) -> None:
    """Show one program as it is; several, such as those of a GAN, each below its line of the script."""
    if len(shown) == 1:
        click.echo(json.dumps(shown[0].to_json(), indent=1) if as_json else shown[0].text())
    elif as_json:
        click.echo(json.dumps({"programs": [{"place": each.place, **each.to_json()} for each in shown]}, indent=1))
    else:
        titles = [f"program {i} of {len(shown)}, converted by {each.place}" for i, each in enumerate(shown, 1)]
        click.echo("\n\n\n".join(f"{title}\n\n{each.text()}" for title, each in zip(titles, shown, strict=True)))


def _refuse_bad_target(script: str | None, arguments: tuple[str, ...], model: str | None) -> None:
    if (script is None) == (model is None):
        raise click.UsageError("give either --script SCRIPT or --model mlp|cnn")
    if arguments and script is None:
        raise click.UsageError(f"unexpected {' '.join(arguments)!r}: arguments go with --script")
    if script is not None and not Path(script).is_file():
        raise ConversionError(f"--script {script}: there is no such file")


def _conditions(batch_size: int, backward_share: float | None, **given: float | None) -> Conditions:
    from fleet_train.plan.price import BACKWARD_SHARE, Compute, Link, Network
    from fleet_train.plan.pricing import Conditions

    values = {name: default if given[name] is None else float(given[name] or 0) for name, default in _DEFAULTS.items()}
    return Conditions(
        Network(
            Link(values["latency_us"] / 1e6, values["bandwidth_mbps"] * 1e6 / 8),
            Link(values["inside_latency_us"] / 1e6, values["inside_bandwidth_mbps"] * 1e6 / 8),
        ),
        Compute.of(float(given["compute_ms"] or 0) / 1e3, BACKWARD_SHARE if backward_share is None else backward_share),
        batch_size,
        tuple(f"--{name} {default:g}" for name, default in _DEFAULTS.items() if given[name] is None),
    )


def _plans(
    script: str | None, arguments: tuple[str, ...], model: str | None, cluster: Cluster, network: Network
) -> list[Planned]:
    from fleet_train.convert.rehearsal import plans_of, plans_of_script

    if script is not None:
        return plans_of_script(Path(script), arguments, cluster, network)
    from fleet_train.train import settings
    from fleet_train.train.config import TrainConfig
    from fleet_train.train.reference import convert_only

    # Image models are planned with ImageNet's classes; the size of the images changes no parameter.
    data = "synthetic:3x32x32x1000x16" if model in settings.VISION_MODELS else "digits"
    return plans_of(lambda: convert_only(TrainConfig(model=str(model), data=data)), cluster, network)
