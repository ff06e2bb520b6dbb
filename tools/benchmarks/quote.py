"""Write what the records of docs/benchmarks measured into strategies/measured.json, READMEs and pages on strategies.

    python tools/bench.py quote           # after a new record, or a new mark on an old one
    python tools/bench.py quote --check   # only report what is out of date; exit code 1

A profile has one line for each task, network and number of ranks, from the newest record in which it ran, by its name,
with the knobs that it has now; a profile without one has what the trials of the newest `prediction` took at 1 Gb/s.
Refuted records and records with uncommitted changes give no line; lines from records of another kind are hand-written,
and stay. A page has a block for each table:

    <!-- figures: task=bytes network=100mbit -->
    ...
    <!-- end of figures -->

The lines between are from the newest record of that task and network, 2 nodes x 1 rank; with ``short=yes`` only those
that its picture has.
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
from tools.benchmarks.contestants import (
    ALONE,
    AVERAGE_ONCE,
    NOTHING,
    OURS,
    PICTURED,
    REFERENCE,
    parse,
)
from tools.benchmarks.labs import rows_of
from tools.benchmarks.record import ROOT, Record, all_records, network_named, quotable, table
from tools.benchmarks.report import Mean, middle, paired, score_of, shown, told_target
from tools.benchmarks.sentences import sentence

PAGES = {
    "README.md": "docs/benchmarks/",
    "README_cn.md": "docs/benchmarks/",
    "docs/strategies.md": "benchmarks/",
    "docs/zh/strategies.md": "../benchmarks/",
}
"""The pages with figures, and the way from each to the records."""
NOT_YET = "not measured yet: no record of strategies or of recommend's trials in docs/benchmarks has it"
_BLOCK = re.compile(r"(<!-- figures: (?P<settings>[^>]*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_NETWORKS = {"unlimited": "none"}
_TRIALS, _TRIED_ON, _BASE = "-prediction", "1gbit", "multi_node"
_NO_RECORD = "No record has these figures under the present rules."


def line(record: Record, name: str) -> str:
    """One contestant's figures as a line of a profile's ``measured`` section."""
    content, figures = record.content, record.content["summary"][name]
    lab, score = content["lab"], score_of(content)
    rate = "an unlimited link" if lab["rate"] == "none" else network_named(lab)
    parts = [
        f"{record.circumstances['date'][:10]}, {content['task']['name']}, {lab['nodes']} nodes x "
        f"{lab['ranks_per_node']} on {rate}, CPU, {len(figures['steps_ms'])} seeds",
        f"step {figures['step_ms']:.1f} ms{_than(figures)}",
        f"{figures['sent_bytes'] / 1e6:.3g} MB sent per step and node",
    ]
    if score and figures.get("at_equal_steps"):
        mean = Mean(**figures["at_equal_steps"]).told(score.digits)
        to = middle(figures["targets"])
        parts += [f"{score.name} {mean} after {content['task']['steps']} steps",
                  f"{to['target']:g} {_after(told_target(to, len(figures['steps_ms'])))}"]  # fmt: skip
    return f"{'; '.join(parts)}; {record.source}"


def _after(told: str) -> str:
    return f"after {told} s" if "±" in told else told


def _than(figures: Mapping[str, Any]) -> str:
    told = [f"{figures['ratio']['value']:.2f} of PyTorch DDP's best"] if figures["ratio"] else []
    if figures["twin"] and figures["over_twin"] and not figures["twin"].startswith(REFERENCE):
        told.append(f"{figures['over_twin']['value']:.2f} of {figures['twin']}'s")
    whole = [] if figures["whole_periods"] else ["less than its own start and one period"]
    return f" ({', '.join(told + whole)})" if told or whole else ""


def with_blocks(text: str, records: Sequence[Record]) -> str:
    """A page with its blocks rewritten; ``records``: those that may be quoted, newest first."""
    return _BLOCK.sub(lambda found: found[1] + _block(found["settings"], records) + found[3], text)


def _block(settings: str, records: Sequence[Record]) -> str:
    """What a page asks for: the table of a record (``short=yes``: of the picture's contestants), or ``sentence=en``."""
    words = dict(word.split("=", 1) for word in settings.split())
    newest = _newest(words["task"], words["network"], records)
    if newest is None:
        return f"\n{_NO_RECORD}\n\n"
    is_short = words.get("short") == "yes"
    name = newest.path.stem
    scores = "the score over time, and " if score_of(newest.content) else ""
    picture = f"![{words['task']}: {scores}a step's milliseconds](benchmarks/{name}.svg)"
    if "sentence" in words:
        beside = _newest(words["task"], "1gbit", records)
        return "\n".join(["", picture, "", sentence(words["sentence"], words["network"], newest, beside), "", ""])
    lines = figures_of(newest.content, is_short)
    return "\n".join(["", *lines, "", picture, *([] if is_short else [""]), _told(newest), "", ""])


def _newest(task: str, network: str, records: Sequence[Record]) -> Record | None:
    rate = _NETWORKS.get(network, network)
    return next((each for each in records if each.setting == (task, rate, 2, 1)), None)


def figures_of(content: Mapping[str, Any], is_short: bool) -> list[str]:
    """The lines of a page's table."""
    score = score_of(content)
    headings = ["trained with", "step ms", "exposed ms", "/ best DDP", "kB per step"]
    if score:
        headings += [f"{score.name} after {content['task']['steps']} steps", "at equal time"]
        headings += [f"s to {target:g}" for target in score.targets]
    names = [shown(each, content) for each in PICTURED] if is_short else list(content["summary"])
    rows = [
        _cells(name, content["summary"][name], score)
        for name in names
        if name in content["summary"] and (name in (NOTHING, AVERAGE_ONCE) or parse(name).kind != ALONE)
    ]
    return table(headings, [row[: len(headings)] for row in rows])


def _cells(name: str, figures: Mapping[str, Any], score: Any) -> list[str]:
    is_alone = name in (NOTHING, AVERAGE_ONCE)
    exposed, ratio = paired(figures["exposed_ms"]), paired(figures["ratio"])
    cells = [
        {NOTHING: "each rank alone"}.get(name, name if is_alone else f"`{name.removeprefix(f'{OURS}:')}`"),
        f"{figures['step_ms']:.1f}",
        "" if exposed is None else f"{exposed.value:.1f}",
        "" if ratio is None else ratio.told(2),
        "" if is_alone else f"{figures['sent_bytes'] / 1e3:,.1f}",
    ]
    if score is None:
        return cells
    means = [Mean(**figures[key]) if figures.get(key) else None for key in ("at_equal_steps", "at_equal_time")]
    cells += ["" if each is None else each.told(score.digits) for each in means]
    return [*cells, *(told_target(each, len(figures["steps_ms"])) for each in figures["targets"])]


def _told(record: Record) -> str:
    content, at, name = record.content, record.circumstances, record.path.stem
    seeds = len({each["seed"] for each in content["rounds"]})
    return (
        f"[{name}](benchmarks/{name}.md): {content['whole_rounds']} of {content['repeats']} rounds, {seeds} seeds, "
        f"commit {at['commit'][:10]}, {at['processor']}, {at['date'][:10]}."
    )


def lines_for(profile: Profile, name: str, records: Sequence[Record]) -> list[str]:
    """A profile's lines. ``records``: those that may be quoted, newest first."""
    newest: dict[tuple[str, str, int, int], str] = {}
    for record in records:
        if record.setting not in newest and _ran(profile, f"ours:{name}", record):
            newest[record.setting] = line(record, f"ours:{name}")
    return [newest[setting] for setting in sorted(newest)]


def trials_for(name: str, record: Record | None) -> list[str]:
    """A profile's line from trials of `recommend`: the record of `tools/bench.py prediction`."""
    if record is None:
        return []
    found = {row.name: row for row in rows_of(_TRIED_ON, record.content["networks"].get(_TRIED_ON, ()))}
    if not {name, _BASE} <= found.keys():
        return []
    return [
        f"{record.circumstances['date'][:10]}, {record.content['task']}, 2 nodes x 1 on {_TRIED_ON}, CPU, "
        f"{len(found[name].measured)} rounds of recommend's trials; step {found[name].step_ms:.1f} ms "
        f"({_BASE}: {found[_BASE].step_ms:.1f} ms); accuracy not measured; {record.source}"
    ]


def _ran(profile: Profile, contestant: str, record: Record) -> bool:
    """Whether the contestant finished a turn with the profile's current knobs."""
    if contestant not in record.content["summary"]:
        return False
    ran = next(each for each in record.content["rounds"] if each["contestant"] == contestant)
    used = ran["facts"]["profile"]
    return bool(used == profile.model_dump(mode="json", include=set(profile.explicit)))


def section_of(profile: Profile, lines: Sequence[str], others: Collection[str] = ()) -> list[str]:
    """The lines, and those of the profile that end with one of ``others``: records of another kind, whose lines people
    write. Without any, the profile's own reason why it was not measured, if it has one."""
    kept = [each for each in profile.measured if each.endswith(tuple(others))]
    reasons = [each for each in profile.measured if each.startswith("not measured")]
    return [*lines, *kept] or reasons or [NOT_YET]


def wanted(records: Sequence[Record]) -> Mapping[Path, str]:
    """The text that the table and each page should have."""
    others = [each for each in all_records() if not each.compares_strategies and not each.refutation]
    trials = [each for each in others if each.path.stem.endswith(_TRIALS)]
    tried = next((each for each in reversed(trials) if not each.circumstances["uncommitted_changes"]), None)
    by_hand = [each.source for each in others if each not in trials]
    profiles = {name: load_profile(name) for name in profile_names()}
    sections = {
        name: section_of(each, lines_for(each, name, records) or trials_for(name, tried), by_hand)
        for name, each in profiles.items()
    }
    found = {ROOT / "strategies" / MEASURED: json.dumps(sections, indent=1, ensure_ascii=False) + "\n"}
    for page, way in PAGES.items():
        text = with_blocks((ROOT / page).read_text(), records).replace("](benchmarks/", f"]({way}")
        root = way.removesuffix("benchmarks/")
        found[ROOT / page] = re.sub(r"\]\(((?:zh/)?strategies\.md#)", rf"]({root}\1", text) if root == "docs/" else text
    return found


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
