"""Write, or check, the files generated from the knob table: ``strategies/schema.json`` and ``docs/knobs.md``.

``python -m fleet_train.profile.export`` writes them, ``--check`` (called by ``make check``) fails if they are out of
date or if a profile of the catalogue does not load.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fleet_train.errors import ProfileError
from fleet_train.profile.catalogue import MEASURED, load_profile, profile_names
from fleet_train.profile.compatibility import Strategy, entries
from fleet_train.profile.fleet_fields import STOCK_FIELDS, StockField
from fleet_train.profile.knobs import FATES, Knob, shown
from fleet_train.profile.methods.base import Combination
from fleet_train.profile.rules import VARIABLE_NAME
from fleet_train.profile.schema import DESCRIPTIVE, FLAG_KNOBS, KNOBS, Settings

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
MARKDOWN_HEAD = """# Knobs

Made from the code by `python -m fleet_train.profile.export`; do not edit. `fleet_train profiles NAME` prints
the same with the values of one profile. How to write a profile: [profiles](strategies.md#profiles).

Each knob has one of three fates. **carried out**: it does what it says. **mapped**: what it asked for is done
differently today, and rank 0 says so once. **refused**: setting it to anything but its default is an error that says
what to use instead. Nothing is ignored silently.
"""
COMPATIBILITY_HEAD = """
## Which strategies go together

`fleet_train profiles --compatibility` prints the same. A profile that combines two that do not go together
is refused with the reason.

| one | and the other | together | how, or why not |
| --- | --- | --- | --- |
"""
STOCK_HEAD = """
## Fields of Fleet's own strategies

How `fleet_train.DistributedStrategy`, and `DistributedStrategy.from_stock` of a stock
`paddle.distributed.fleet.DistributedStrategy`, read names that are not knobs of the same name. A field that is not
listed is refused by its name; a value that Fleet has anyway asks for nothing, and is taken. Two defaults of Fleet 2.x
differ from ours, and an unmodified stock object does not set them: `fuse_grad_size_in_MB` (Fleet 32, here auto; a 32
that was assigned counts) and `sync_nccl_allreduce` (Fleet true, here false; the results are the same). A LocalSGD that
is switched on in a stock object brings Fleet's own defaults with it (`k_steps` 1 and `begin_step` 1, here 2 and
100), and so does an `amp` (float16, here bfloat16).

| field | fate | how it is read |
| --- | --- | --- |
"""


def json_schema() -> dict[str, Any]:
    """The JSON Schema with which editors complete and check a profile."""
    schema = Settings.model_json_schema()
    schema.update(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "A fleet_train profile",
            "description": "A communication strategy for training on many machines.",
        }
    )
    properties = schema["properties"]
    for name, row in properties.items():
        row.pop("title", None)
        if KNOBS[name].auto and KNOBS[name].kind is not list:
            row["anyOf"][0] |= _bounds(row)
    properties["environment"]["additionalProperties"] = {"type": ["string", "number", "boolean"]}
    properties["environment"]["propertyNames"] = {"pattern": f"^({VARIABLE_NAME.pattern})$"}
    properties["extends"] = {
        "type": "string",
        "description": "A profile to build on: a name, or a path from this file.",
    }
    for flag in FLAG_KNOBS.values():
        properties[flag.name] = {"type": JSON_TYPES[flag.kind], "description": f"{flag.meaning} {flag.reason}"}
    return dict(schema)


def _bounds(row: dict[str, Any]) -> dict[str, Any]:
    """The range of a number, removed from the row of a knob that may also be a word."""
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
    return {word: row.pop(mark) for mark, word in words.items() if mark in row}


def knobs_page() -> str:
    """``docs/knobs.md``: the knob table by fate, which strategies go together, Fleet's other fields."""
    parts = [MARKDOWN_HEAD]
    rows = [knob for name, knob in KNOBS.items() if name not in DESCRIPTIVE]
    for fate in FATES:
        lines = [_knob_line(knob) for knob in rows if knob.fate == fate]
        parts.append(f"\n## {fate.capitalize()}\n\n")
        if not lines:
            parts.append("No knob at present; refused fields of Fleet's own strategies are listed below.\n")
            continue
        last = {"carried out": "how", "mapped": "to what", "refused": "reason, and alternative"}[fate]
        parts.append(f"| knob | default | allowed | meaning | {last} |\n| --- | --- | --- | --- | --- |\n")
        parts += lines
    others = [field for path, field in STOCK_FIELDS.items() if field.knob != path]
    parts += [COMPATIBILITY_HEAD, *(_pair_line(*entry) for entry in entries())]
    return "".join(parts) + STOCK_HEAD + "".join(_stock_line(field) for field in others)


def _pair_line(first: Strategy, second: Strategy, entry: Combination) -> str:
    return f"| {first.title} | {second.title} | {'yes' if entry.allowed else 'refused'} | {entry.words} |\n"


def _knob_line(knob: Knob) -> str:
    default = "none" if knob.default in ({}, []) else shown(knob.default)
    unit = f" ({knob.unit})" if knob.unit else ""
    return f"| `{knob.name}` | {default} | {knob.allowed}{unit} | {knob.meaning} | {knob.reason} |\n"


def _stock_line(field: StockField) -> str:
    if field.knob:
        return f"| `{field.path}` | mapped | read as `{field.knob}`{field.note} |\n"
    mapped = [f"{shown(field.switch.value)}: {field.switch.words}"] if field.switch else []
    if field.mapping and not field.mapped:
        return f"| `{field.path}` | mapped | {field.mapping} |\n"
    if field.mapping:
        mapped.append(" or ".join(shown(value) for value in field.mapped) + f": {field.mapping}")
    if mapped:
        return f"| `{field.path}` | mapped | {'; '.join(mapped)}; another value {field.refusal} |\n"
    return f"| `{field.path}` | refused | {field.refusal} |\n"


def outputs(root: Path) -> dict[Path, str]:
    """The text of each file that is generated from the table."""
    return {
        root / "strategies" / "schema.json": json.dumps(json_schema(), indent=2) + "\n",
        root / "docs" / "knobs.md": knobs_page(),
    }


def stale_files(root: Path) -> list[str]:
    """One line for each file that differs from the table."""
    fix = "differs from the knob table; run: python -m fleet_train.profile.export"
    return [
        f"{path.relative_to(root)}: {fix}"
        for path, text in outputs(root).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def broken_profiles() -> list[str]:
    """One line for each problem in the catalogue's profiles."""
    problems = []
    for name in profile_names():
        try:
            profile = load_profile(name)
        except ProfileError as error:
            problems.append(str(error))
            continue
        if profile.name != name or not profile.description:
            problems.append(f"strategies/{name}.yaml: needs a description, and no name other than its file's")
        if not profile.measured:
            problems.append(f"strategies/{MEASURED}: needs what was measured with {name}, or 'not measured' and why")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if everything is written or up to date, else 1 with the reasons on stderr."""
    parser = argparse.ArgumentParser(prog="python -m fleet_train.profile.export", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    root = Path(__file__).resolve().parents[2]
    if not parser.parse_args(arguments).check:
        for path, text in outputs(root).items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(root)}")
    problems = stale_files(root) + broken_profiles()
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
