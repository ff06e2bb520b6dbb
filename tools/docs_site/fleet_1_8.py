"""Write, or check, ``fleet-1.8.md`` of ``docs`` and ``docs/zh``: each setting of Fleet 1.8's recipe, then and now.

``python -m tools.docs_site.fleet_1_8`` writes them; ``--check`` (called by ``make check``) fails if one is out of date
or a row lacks a language. The texts are in ``fleet_1_8.yaml`` beside this file; a setting's fate and its default today
come from the knob table, the table of Fleet's fields, the rules of ``environment`` and the launcher's flags.
"""

from __future__ import annotations

import argparse
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml

from fleet_train.cli.launch import INSTEAD, command
from fleet_train.profile import Profile
from fleet_train.profile.fleet_fields import STOCK_FIELDS
from fleet_train.profile.knobs import shown
from fleet_train.profile.rules import variable_problem
from fleet_train.profile.schema import FLAG_KNOBS, KNOBS

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_suffix(".yaml")
PAGES = {"en": "docs/fleet-1.8.md", "zh": "docs/zh/fleet-1.8.md"}
TEXTS = ("then", "today", "use")
_CHINESE = re.compile("[\u4e00-\u9fff]|^`[^`]+`$")
"""A Chinese text, or code alone."""
_LINK = re.compile(r"\]\(([\w.-]+\.md)\)")


@cache
def data() -> Any:
    return yaml.safe_load(DATA.read_text(encoding="utf-8"))


def path_of(kind: str, name: str) -> str:
    """The setting's name in the table of Fleet's fields."""
    return f"{kind}.{name}" if f"{kind}.{name}" in STOCK_FIELDS else name


def fate_of(kind: str, row: dict[str, Any]) -> str:
    """Carried out, mapped or refused, by the tables. Raises KeyError for a setting that no table has."""
    name = row["name"]
    if kind == "launch":
        known = {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts}
        if name not in known and name not in INSTEAD:
            raise KeyError(name)
        return "carried out" if name in known else "refused"
    if name in FLAG_KNOBS:
        return FLAG_KNOBS[name].fate
    if kind == "environment":
        if variable_problem(name, row["example"]):
            return "refused"
        return "mapped" if Profile().overridden_by({name: row["example"]})[1] else "carried out"
    return STOCK_FIELDS[path_of(kind, name)].fate


def default_today(kind: str, name: str) -> str:
    """The default of the knob that the setting is or becomes, as a profile has it; nothing without one."""
    if name in FLAG_KNOBS:
        return shown(KNOBS[FLAG_KNOBS[name].becomes].default)
    field = STOCK_FIELDS.get(path_of(kind, name))
    row = KNOBS.get(field.knob) if field else None
    return "" if row is None else shown(row.default) if row.default != [] else "[]"


def page(language: str) -> str:
    """The Markdown of a page. Links to other pages lead to those of the language, where there are any."""
    words = data()["pages"][language]
    parts = [f"# {words['title']}\n\n{words['head']}\n{data()['order'][language]}"]
    for group in data()["groups"]:
        parts.append(
            f"\n## {group[language]}\n\n| {' | '.join(words['columns'])} |\n|{' --- |' * len(words['columns'])}\n"
        )
        parts += [_line(group["kind"], row, language) for row in group["rows"]]
    return _LINK.sub(lambda link: f"]({_target(link[1], language)})", "".join(parts))


def _line(kind: str, row: dict[str, Any], language: str) -> str:
    words = data()["pages"][language]
    then, today, use = (row[text][language] for text in TEXTS)
    if row["default"]:
        then = words["default"].format(f"`{row['default']}`") + then
    if default := default_today(kind, row["name"]):
        today = words["default"].format(f"`{default}`") + today
    return f"| `{row['name']}` | {then} | {today} | {words['fates'][fate_of(kind, row)]} | {use} |\n"


def _target(name: str, language: str) -> str:
    if language == "en" or (ROOT / "docs" / "zh" / name).is_file():
        return name
    return f"../{name}"


def problems() -> list[str]:
    """One line for each page that is out of date, each row without a text, each Chinese text that is not Chinese."""
    rows = [(group["kind"], row) for group in data()["groups"] for row in group["rows"]]
    found = [
        f"{DATA.name}: {row['name']}: {text} has no text in {language}"
        for _, row in rows
        for text in TEXTS
        for language in PAGES
        if not row.get(text, {}).get(language)
    ]
    found += [
        f"{DATA.name}: {row['name']}: {text} is not Chinese"
        for _, row in rows
        for text in TEXTS
        if not _CHINESE.search(row.get(text, {}).get("zh") or "`none`")
    ]
    return found + [
        f"{path}: differs from the tables; run: python -m tools.docs_site.fleet_1_8"
        for language, path in PAGES.items()
        if not found and (not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != page(language))
    ]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if everything is written or up to date, else 1 with the reasons on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs_site.fleet_1_8", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    if not parser.parse_args(arguments).check:
        for language, path in PAGES.items():
            (ROOT / path).write_text(page(language), encoding="utf-8")
            print(f"wrote {path}")
    print("\n".join(found := problems()), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
