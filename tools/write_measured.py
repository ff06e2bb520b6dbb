"""Write what benchmark records measured into the profiles of the catalogue.

    python tools/write_measured.py docs/benchmarks/2026-11-20-1gbit-2x1.json [more records]

replaces the ``measured`` section of every profile in ``strategies/`` that one of the records has figures for, one line
per record, and leaves the others alone. A profile file that was made for the benchmark counts for the catalogue's
profile that it differs from in numbers only (a shorter warm-up, say); the line names these numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet_train.errors import ProfileError
from fleet_train.profile import KNOBS, Profile, load_profile, profile_names
from fleet_train.profile.knobs import shown

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "torch:ddp"
_SECTION = re.compile(r"\n*^measured:.*\n(?:(?:[ \t]+.*|[ \t]*)\n?)*", re.MULTILINE)


def lines_of(record: Mapping[str, Any], source: str) -> dict[str, list[str]]:
    """One record's lines by the catalogue's profile. ``source``: the record's path, as the line shows it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, figures in record["summary"].items():
        kind, _, variant = name.partition(":")
        if kind == "ours":
            for profile, changes in _counts_for(variant):
                found[profile].append(_line(record, figures, changes, source))
    return dict(found)


def _counts_for(variant: str) -> list[tuple[str, str]]:
    """The profiles of the catalogue that figures of ``variant`` are for, and in which numbers it differs from them."""
    if variant in profile_names():
        return [(variant, "")]
    try:
        measured = load_profile(str(ROOT / variant))
    except ProfileError as error:
        print(f"{variant}: left out: {error}", file=sys.stderr)
        return []
    differences = {name: _differing(measured, load_profile(name)) for name in profile_names()}
    return [
        (name, ", ".join(f"{knob} {shown(getattr(measured, knob))}" for knob in differing))
        for name, differing in differences.items()
        if _has_a_strategy(measured) and all(KNOBS[knob].kind in (int, float) for knob in differing)
    ]


def _differing(one: Profile, other: Profile) -> list[str]:
    return [knob for knob in _knobs() if getattr(one, knob) != getattr(other, knob)]


def _has_a_strategy(profile: Profile) -> bool:
    """Whether a switch or a choice is other than by default: profiles that differ in sizes only are all alike."""
    return any(KNOBS[knob].kind not in (int, float) for knob in _differing(profile, Profile()))


def _knobs() -> list[str]:
    return [name for name in Profile.model_fields if name not in ("name", "description", "measured")]


def _line(record: Mapping[str, Any], figures: Mapping[str, Any], changes: str, source: str) -> str:
    lab = record["lab"]
    parts = [
        f"{record['circumstances']['date'][:10]}, {lab['nodes']} nodes x {lab['ranks_per_node']} on {lab['rate']}, CPU",
        f"step {figures['step_ms']:.1f} ms" + _than_reference(figures),
        f"{figures['interface_bytes'] / 1e6:.3g} MB sent per step and node",
        f"accuracy {figures['accuracy']:.2%}" + _target(record, figures),
    ]
    tuned = f" (with {changes})" if changes else ""
    return f"{'; '.join(parts)}{tuned}; {source}"


def _than_reference(figures: Mapping[str, Any]) -> str:
    ratio = figures.get("ratio")
    return f" ({ratio:.2f} of PyTorch DDP's)" if ratio else ""


def _target(record: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    seconds = figures["seconds_to_target"]
    if not seconds or None in seconds:
        return f", {record['target']:.0%} not reached in every round"
    ordered = sorted(seconds)
    middle = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
    return f", {record['target']:.0%} after {middle:.1f} s"


def with_section(text: str, lines: Sequence[str]) -> str:
    """A profile's text with these lines as its ``measured`` section, at its end."""
    entries = "".join(f"  - {json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    return f"{_SECTION.sub(chr(10), text).rstrip()}\n\nmeasured:\n{entries}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="JSON records of tools/bench_strategies.py")
    found: dict[str, list[str]] = defaultdict(list)
    for path in parser.parse_args(arguments).records:
        source = path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path.name
        for profile, lines in lines_of(json.loads(path.read_text()), str(source)).items():
            found[profile] += lines
    for profile, lines in sorted(found.items()):
        file = ROOT / "strategies" / f"{profile}.yaml"
        file.write_text(with_section(file.read_text(), lines))
        print(f"strategies/{profile}.yaml: {len(lines)} line{'' if len(lines) == 1 else 's'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
