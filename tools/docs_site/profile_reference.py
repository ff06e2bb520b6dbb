"""The profile reference: each key of the schema, and each profile of the catalogue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS_HEAD = """# Keys of a profile

Made from `strategies/schema.json`, with which editors complete and check a profile. How to write one:
[profiles](../strategies.md#profiles). Which strategies go together, and Fleet's other fields: [knobs](../knobs.md).
"""
CATALOGUE_HEAD = """# Catalogue of profiles

The files of `strategies/`. `--strategy NAME` and `DistributedStrategy.from_profile("NAME")` take them by name, and a
profile of your own builds on one with `extends: NAME`. What each key does: [keys of a profile](profile.md).
"""


def keys_page(root: Path) -> str:
    """One section for each key, in the schema's order."""
    schema = json.loads((root / "strategies" / "schema.json").read_text(encoding="utf-8"))
    return KEYS_HEAD + "".join(_section(name, row) for name, row in schema["properties"].items())


def _section(name: str, row: Mapping[str, Any]) -> str:
    facts = {
        "Allowed": allowed(row),
        "Unit": row.get("unit", ""),
        "Default": f"`{json.dumps(row['default'])}`" if row.get("default") not in (None, "") else "",
        "Only with": _condition(row.get("only_with")),
        "Needs": _condition(row.get("needs")),
        "Fate": row.get("fate", ""),
    }
    lines = "".join(f"- {title}: {value}\n" for title, value in facts.items() if value)
    reason = f"\n{row['reason']}\n" if row.get("reason") else ""
    return f"\n## `{name}` {{ #{name} }}\n\n{row['description']}\n\n{lines}{reason}"


def _condition(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`" if value else ""


def allowed(row: Mapping[str, Any]) -> str:
    """The values that a key of the schema takes, in words."""
    if "anyOf" in row:
        return " or ".join(allowed(one) for one in row["anyOf"])
    if "const" in row:
        return f"`{row['const']}`"
    if "enum" in row:
        return "one of " + ", ".join(f"`{value}`" for value in row["enum"])
    kinds = {
        "boolean": "`true` or `false`",
        "integer": "a whole number",
        "number": "a number",
        "string": "a text",
        "array": "a list of texts",
        "object": "names with values",
    }
    words = {"minimum": "from {}", "exclusiveMinimum": "more than {}", "maximum": "up to {}"}
    return ", ".join(
        [kinds[row["type"]], *(text.format(_number(row[key])) for key, text in words.items() if key in row)]
    )


def _number(value: float) -> str:
    """1000000000.0 -> 1000000000, 0.999 -> 0.999."""
    return str(int(value)) if float(value).is_integer() else str(value)


def catalogue_page(root: Path) -> str:
    """One section for each profile: its file, which starts with its reason, costs and use."""
    files = sorted((root / "strategies").glob("*.yaml"))
    return CATALOGUE_HEAD + "".join(
        f"\n## {path.stem} {{ #{path.stem} }}\n\n```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"
        for path in files
    )
