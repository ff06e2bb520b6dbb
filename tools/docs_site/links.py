"""Convert Markdown as GitHub reads it into Markdown whose links and lists are right in the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Pages of the site that are outside docs/.
PAGES_OUTSIDE = {
    "README.md": "index.md",
    "README_cn.md": "index_cn.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
CATALOGUE = "reference/catalogue.md"

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^ *(```+|~~~+)")
_ITEM = re.compile(r"^ *([-*+]|\d+\.) ")


@dataclass(frozen=True)
class Page:
    """A page of the site and its source file in the repository; both relative, with slashes."""

    source: str
    uri: str


@dataclass
class Rewriter:
    """Converts the text of pages; ``shown`` collects files outside docs/ that need a page."""

    root: Path
    shown: set[str] = field(default_factory=set)

    def rewritten(self, page: Page, text: str) -> str:
        """The text with links that are valid in the site. A broken link stays: strict mode reports it."""

        def changed(line: str) -> str:
            return _LINK.sub(lambda match: self._target(page, match[1], match[2] or ""), line)

        lines = _lines(separated_lists(text))
        return "\n".join(line if is_code else changed(line) for line, is_code in lines) + "\n"

    def _target(self, page: Page, target: str, anchor: str) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), target))
        if path.startswith("..") or not (self.root / path).exists():
            return target + anchor
        uri, own_anchor = self._uri(path)
        return posixpath.relpath(uri, posixpath.dirname(page.uri) or ".") + (anchor or own_anchor)

    def _uri(self, path: str) -> tuple[str, str]:
        """The (page, anchor) of a file or folder of the repository in the site."""
        name = posixpath.basename(path)
        if path in PAGES_OUTSIDE:
            return PAGES_OUTSIDE[path], ""
        if path.startswith("docs/") and (self.root / path).is_file():
            return path.removeprefix("docs/"), ""
        if path == "strategies":
            return CATALOGUE, ""
        if path.startswith("strategies/") and path.endswith(".yaml"):
            return CATALOGUE, "#" + name.removesuffix(".yaml")
        if path.startswith("docs/") and (self.root / path / "README.md").is_file():
            return f"{path.removeprefix('docs/')}/README.md", ""
        self.shown.add(path)
        return source_uri(path), ""


def source_uri(path: str) -> str:
    """The page that shows a file or folder of the repository."""
    return f"source/{path}.md"


def source_page(root: Path, path: str) -> str:
    """A page that shows a file, or lists a folder. Not in the search index: its text is code."""
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    place = root / path
    if place.is_dir():
        names = sorted(item.name + "/" * item.is_dir() for item in place.iterdir() if item.name[0] not in "._")
        return head + "".join(f"- `{name}`\n" for name in names)
    text = place.read_text(encoding="utf-8")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".json": "json"}.get(
        place.suffix, "text"
    )
    return f"{head}{fence}{language}\n{text.rstrip()}\n{fence}\n"


def separated_lists(text: str) -> str:
    """Convert GitHub's lists and tables for Python-Markdown.

    A list or table needs an empty line before it, and a list inside an item four spaces.
    """
    lines = [""]
    for line, is_code in _lines(text):
        if not is_code:
            lines += [""] * _starts_block(lines[-1], line)
            line = re.sub(r"^ {2,3}(?=([-*+]|\d+\.) )", "    ", line)
        lines.append(line)
    return "\n".join(lines[1:]) + "\n"


def _starts_block(before: str, line: str) -> bool:
    """Whether a list or table starts right after a line of another block."""
    if not before.strip() or before.startswith("#"):
        return False
    if line.startswith("|"):
        return not before.startswith("|")
    # An item after an indented continuation line belongs to the same list.
    return bool(re.match(r"([-*+]|1\.) ", line)) and not _ITEM.match(before) and not before.startswith("  ")


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """(line, whether it is a fenced block's, its fences included)."""
    fence = ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence:
            yield line, True
            if mark and mark[1].startswith(fence):
                fence = ""
        else:
            fence = mark[1] if mark else ""
            yield line, bool(mark)
