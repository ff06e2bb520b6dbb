"""Manifests as YAML that PyYAML and Kubernetes parse identically."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

# YAML parsers differ in what they treat as a number or a boolean (1e-3, 0o7, 12:30, y, no): only texts that are
# neither in any of them stay unquoted.
_PLAIN = re.compile(r"(?:--)?[A-Za-z/][A-Za-z0-9_./@=+-]*", re.ASCII)
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _NOT_TEXT
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(comment: Sequence[str], *documents: dict[str, Any]) -> str:
    """A comment, then the documents, keys in the given order."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment[: -1 if comment[-1:] == [""] else None])
    bodies = (yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True) for one in documents)
    return head + "---\n".join(bodies)
