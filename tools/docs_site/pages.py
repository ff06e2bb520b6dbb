"""Generated pages: the API by folder, each command's --help, each key of a profile, each profile of the catalogue."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from fleet_train.cli import cli
from tools.docs_site.layout import PACKAGE, docstring_of, dotted_name, folders
from tools.docs_site.links import CATALOGUE

INDEX = "reference/api/index.md"
WIDTH = 100
API_HEAD = """# API

What a training script uses. Every folder of the package has a page of its own beside this one.
"""
COMMANDS_HEAD = """# Command line

Every command's `--help`. `python -m fleet_train` and, once the package is installed, `fleet_train` are the same.
"""
KEYS_HEAD = """# Keys of a profile

Made from `strategies/schema.json`, with which editors complete and check a profile. How to write one:
[profiles](../strategies.md#profiles). Which strategies go together, and Fleet's other fields: [knobs](../knobs.md).
"""
CATALOGUE_HEAD = """# Catalogue of profiles

The files of `strategies/`. `--strategy NAME` and `DistributedStrategy.from_profile("NAME")` take them by name, and a
profile of your own builds on one with `extends: NAME`. What each key does: [keys of a profile](profile.md).
"""
_KINDS = {
    "boolean": "`true` or `false`",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list of texts",
    "object": "names with values",
}


def generated_pages(root: Path) -> dict[str, str]:
    """Every page that is made from the sources: uri -> Markdown."""
    return {
        "reference/command-line.md": command_line_page(),
        "reference/profile.md": keys_page(root),
        CATALOGUE: catalogue_page(root),
        **api_pages(root),
    }


def api_uri(folder: str) -> str:
    """The page of a folder."""
    return f"reference/api/{folder}.md"


def api_pages(root: Path) -> dict[str, str]:
    """Each page of the API reference: uri -> Markdown for mkdocstrings. Modules are parsed, not imported."""
    everything = "    options:\n      show_if_no_docstring: true\n"
    pages = {INDEX: API_HEAD + "".join(f"\n::: {name}\n{everything}" for name in public_names(root))}
    for folder in folders(root):
        modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in _documented(folder)]
        name = dotted_name(folder, root)
        pages[api_uri(name)] = f"# {name}\n\n{docstring_of(folder)}\n" + "".join(f"\n::: {each}\n" for each in modules)
    return pages


def public_names(root: Path) -> list[str]:
    """The modules that define the public names of the package, in their order there."""
    tree = ast.parse((root / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guard.body if isinstance(node, ast.ImportFrom)]
    return [f"{node.module}.{alias.name}" for node in imports for alias in node.names]


def _documented(folder: Path) -> Iterator[Path]:
    """The modules with a public definition that has a docstring."""
    shown = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for path in sorted(folder.glob("[!_]*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if any(isinstance(node, shown) and node.name[0] != "_" and ast.get_docstring(node) for node in body):
            yield path


def command_line_page() -> str:
    """One section for each command, in the order of ``fleet_train --help``."""
    top = click.Context(cli, info_name="fleet_train", terminal_width=WIDTH, max_content_width=WIDTH)
    helps = {"fleet_train": cli.get_help(top)}
    for name in cli.list_commands(top):
        if command := cli.get_command(top, name):
            helps[name] = command.get_help(click.Context(command, parent=top, info_name=name))
    sections = (f"\n## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in helps.items())
    return COMMANDS_HEAD + "".join(sections)


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
    words = {"minimum": "from", "exclusiveMinimum": "more than", "maximum": "up to"}
    # 1000000000.0 -> 1000000000, 0.999 -> 0.999
    values = {key: int(row[key]) if float(row[key]).is_integer() else row[key] for key in words if key in row}
    return ", ".join([_KINDS[row["type"]], *(f"{words[key]} {value}" for key, value in values.items())])


def catalogue_page(root: Path) -> str:
    """One section for each profile: its file, which starts with its reason, costs and use."""
    return CATALOGUE_HEAD + "".join(
        f"\n## {path.stem} {{ #{path.stem} }}\n\n```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"
        for path in sorted((root / "strategies").glob("*.yaml"))
    )
