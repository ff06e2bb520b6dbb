"""Write what the records of docs/benchmarks measured into strategies/measured.json and docs/strategies.md.

    python tools/bench.py quote           # after a new record, or a new mark on an old one
    python tools/bench.py quote --check   # only report what is out of date; exit code 1

A profile has one line for each task, network and number of ranks, from the newest record in which it ran, by its name,
with the knobs that it has now. Refuted records, records with uncommitted changes, and files made for the benchmark give
no line; lines from records of another kind are hand-written, and stay. A page has a block for each table:

    <!-- figures: task=mlp network=1gbit -->
    ...
    <!-- end of figures -->

The lines between are from the newest record of that task and network, 2 nodes x 1 rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.profile.catalogue import MEASURED
from tools.benchmarks.record import ROOT, Record, all_records, quotable, table
from tools.benchmarks.tasks import ALONE, OURS, REFERENCE, parse

PAGES = ("docs/strategies.md",)
NOT_YET = "not measured yet: no record in docs/benchmarks has it"
_BLOCK = re.compile(r"(<!-- figures: (?P<settings>[^>]*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_NETWORKS = {"unlimited": "none"}
_HEADINGS = [
    "strategy", "step / best DDP", "step / PyTorch's own", "times fewer bytes", "accuracy, points from synchronous",
    "best DDP's time to target / its",
]  # fmt: skip
_NO_RECORD = "No record has these figures under the present rules."


def line(record: Record, name: str) -> str:
    """One contestant's figures as a line of a profile's ``measured`` section."""
    content, figures = record.content, record.content["summary"][name]
    lab = content["lab"]
    rate = "an unlimited link" if lab["rate"] == "none" else lab["rate"]
    parts = [
        f"{record.circumstances['date'][:10]}, {content['task']['name']}, {lab['nodes']} nodes x "
        f"{lab['ranks_per_node']} on {rate}, CPU, {len(figures['round_step_ms'])} rounds",
        f"step {figures['step_ms']:.1f} ms{_than(figures)}",
        f"{figures['interface_bytes'] / 1e6:.3g} MB sent per step and node",
        _accuracy(figures),
        _target(content, figures),
    ]
    return f"{'; '.join(parts)}; {record.source}"


def _than(figures: Mapping[str, Any]) -> str:
    told = [f"{figures['ratio']:.2f} of PyTorch DDP's best"] if figures["ratio"] else []
    if figures["twin"] and figures["over_twin"] and not figures["twin"].startswith(REFERENCE):
        told.append(f"{figures['over_twin']:.2f} of {figures['twin']}'s")
    over_compute = figures.get("over_compute")
    if over_compute and over_compute < 1:  # no strategy can do that: read it as computing alone
        told.append(f"but {over_compute:.2f} of computing alone, which is unexplained")
    whole = [] if figures["whole_periods"] else ["less than its own start and one period"]
    return f" ({', '.join(told + whole)})" if told or whole else ""


def _accuracy(figures: Mapping[str, Any]) -> str:
    values = figures["accuracies"].values()
    points = figures["points_from_synchronous"]
    return f"accuracy {sum(values) / len(values):.2%}" + (f" ({points[0]:+.2f} points)" if points else "")


def _target(content: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    seconds = figures["seconds_to_target"].values()
    if not seconds:
        return f"{content['target']:.0%} not reached"
    ratio = f" (DDP needs {figures['target_ratio']:.2f} times that)" if figures["target_ratio"] else ""
    return f"{content['target']:.0%} after {sum(seconds) / len(seconds):.1f} s{ratio}"


def with_blocks(text: str, records: Sequence[Record]) -> str:
    """A page of docs/ with its blocks rewritten; ``records``: those that may be quoted, newest first."""
    return _BLOCK.sub(lambda found: found[1] + _block(found["settings"], records) + found[3], text)


def _block(settings: str, records: Sequence[Record]) -> str:
    words = dict(word.split("=", 1) for word in settings.split())
    rate = _NETWORKS.get(words["network"], words["network"])
    fitting = (each for each in records if each.setting == (words["task"], rate, 2, 1))
    newest = next((each for each in fitting if REFERENCE in each.content["summary"]), None)
    if newest is None:
        return f"\n{_NO_RECORD}\n\n"
    shown = [each for each in newest.content["summary"].items() if parse(each[0]).kind != ALONE]
    lines = table(_HEADINGS, [_cells(*each) for each in shown])
    return "\n".join(["", *lines, "", _told(newest), "", ""])


def _cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    contestant = parse(name)
    label = contestant.variant.rpartition("/")[2] if contestant.kind == OURS else name
    points = figures["points_from_synchronous"]
    return [
        f"`{label}`" + (" (tuned file)" if figures["tuned"] else ""),
        _number(figures["ratio"], 2),
        _number(figures["over_twin"], 2),
        _number(figures["times_fewer_bytes"], 1),
        f"{points[0]:+.2f} ({points[1]:+.2f} … {points[2]:+.2f})" if points else "",
        _number(figures["target_ratio"], 2) if figures["seconds_to_target"] else "not reached",
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _told(record: Record) -> str:
    content, at, name = record.content, record.circumstances, record.path.stem
    seeds = len({each["seed"] for each in content["rounds"]})
    return (
        f"[{name}](benchmarks/{name}.md): {content['whole_rounds']} of {content['repeats']} rounds, {seeds} seeds, "
        f"target {content['target']:.0%}, commit {at['commit'][:10]}, {at['processor']}, {at['date'][:10]}. "
        "Accuracy: mean (smallest to largest)."
    )


def lines_for(profile: Profile, name: str, records: Sequence[Record]) -> list[str]:
    """A profile's lines. ``records``: those that may be quoted, newest first."""
    newest: dict[tuple[str, str, int, int], str] = {}
    for record in records:
        if record.setting not in newest and _ran(profile, f"ours:{name}", record):
            newest[record.setting] = line(record, f"ours:{name}")
    return [newest[setting] for setting in sorted(newest)]


def _ran(profile: Profile, contestant: str, record: Record) -> bool:
    """Whether the contestant finished a turn with the profile's current knobs."""
    if contestant not in record.content["summary"]:
        return False
    ran = next(each for each in record.content["rounds"] if each["contestant"] == contestant)
    used = ran["ranks"][0]["facts"]["profile"]
    return bool(used == profile.model_dump(mode="json", include=set(profile.explicit)))


def section_of(profile: Profile, lines: Sequence[str], others: Collection[str] = ()) -> list[str]:
    """The lines, and those of the profile that end with one of ``others``: records of another kind, whose lines people
    write. Without any, the profile's own reason why it was not measured, if it has one."""
    kept = [each for each in profile.measured if each.endswith(tuple(others))]
    reasons = [each for each in profile.measured if each.startswith("not measured")]
    return [*lines, *kept] or reasons or [NOT_YET]


def wanted(records: Sequence[Record]) -> Mapping[Path, str]:
    """The text that the table and each page should have."""
    others = [each.source for each in all_records() if not each.compares_strategies and not each.refutation]
    profiles = {name: load_profile(name) for name in profile_names()}
    sections = {name: section_of(each, lines_for(each, name, records), others) for name, each in profiles.items()}
    found = {ROOT / "strategies" / MEASURED: json.dumps(sections, indent=1, ensure_ascii=False) + "\n"}
    return found | {ROOT / page: with_blocks((ROOT / page).read_text(), records) for page in PAGES}


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if something is out of date.")
def main(check: bool) -> None:
    differing = {file: text for file, text in wanted(quotable()).items() if file.read_text() != text}
    for file, text in differing.items():
        if not check:
            file.write_text(text)
        click.echo(f"{file.relative_to(ROOT)}: {'not what the records say' if check else 'written'}")
    if check and differing:
        raise SystemExit(1)
