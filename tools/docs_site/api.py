"""The API reference: its pages, and the modules on each. Modules are parsed, not imported."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.docs_site.folders import PACKAGE, docstring_of, dotted_name, folders

INDEX = "reference/api/index.md"
HEAD = """# API

What a training script uses. Every folder of the package has a page of its own beside this one.
"""


def api_uri(folder: str) -> str:
    """The page of a folder."""
    return f"reference/api/{folder}.md"


def api_pages(root: Path) -> dict[str, str]:
    """Each page of the API reference: uri -> Markdown with mkdocstrings' directives."""
    everything = "    options:\n      show_if_no_docstring: true\n"
    pages = {INDEX: HEAD + "".join(_shown(name) + everything for name in public_names(root))}
    for folder in folders(root):
        modules = [module for path in sorted(folder.glob("*.py")) if (module := _module(path, root))]
        name = dotted_name(folder, root)
        pages[api_uri(name)] = f"# {name}\n\n{docstring_of(folder)}\n" + "".join(map(_shown, modules))
    return pages


def public_names(root: Path) -> list[str]:
    """The modules that define the public names of the package, in their order there."""
    tree = ast.parse((root / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guard = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guard.body if isinstance(node, ast.ImportFrom)]
    return [f"{node.module}.{alias.name}" for node in imports for alias in node.names]


def _module(path: Path, root: Path) -> str | None:
    """The dotted name of a module, if it has a public definition with a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    shown = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node for node in body if isinstance(node, shown) and not node.name.startswith("_")]
    if path.name in ("__init__.py", "__main__.py") or not any(map(ast.get_docstring, public)):
        return None
    return ".".join(path.relative_to(root).with_suffix("").parts)


def _shown(name: str) -> str:
    return f"\n::: {name}\n"
