"""Write what the records of docs/benchmarks measured into strategies/measured.json and docs/strategies.md.

    python tools/write_measured.py           # after a new record, or a new mark on an old one
    python tools/write_measured.py --check   # only report what is out of date; exit code 1

A profile has one line for each task, network and number of ranks, from the newest record in which it ran, by its name,
with the knobs that it has now. Refuted records, records with uncommitted changes, and files made for the benchmark give
no line; lines from records of another kind are hand-written, and stay. A page has what its blocks ask for
(tools/benchmarks/quoted.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.profile.catalogue import MEASURED
from tools.benchmarks.quoted import line, with_blocks
from tools.benchmarks.records import ROOT, Record, all_records, quotable

PAGES = ("docs/strategies.md",)
NOT_YET = "not measured yet: no record in docs/benchmarks has it"


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
    found: dict[Path, str] = {}
    others = [each.source for each in all_records() if not each.compares_strategies and not each.refutation]
    table = {}
    for name in profile_names():
        profile = load_profile(name)
        table[name] = section_of(profile, lines_for(profile, name, records), others)
    found[ROOT / "strategies" / MEASURED] = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    for page in PAGES:
        found[ROOT / page] = with_blocks((ROOT / page).read_text(), records)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args(arguments).check
    differing = {file: text for file, text in wanted(quotable()).items() if file.read_text() != text}
    for file, text in differing.items():
        if not is_check:
            file.write_text(text)
        print(f"{file.relative_to(ROOT)}: {'not what the records say' if is_check else 'written'}")
    return 1 if is_check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
