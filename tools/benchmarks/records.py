"""The records of docs/benchmarks: which exist, which may be quoted, and how refuted ones are marked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
_MARK = "**Refuted** by "


@dataclass(frozen=True)
class Record:
    """One ``.json`` of the folder; ``source`` is its path as quoted."""

    path: Path
    content: Mapping[str, Any]

    @property
    def source(self) -> str:
        return f"docs/benchmarks/{self.path.name}"

    @property
    def circumstances(self) -> Mapping[str, Any]:
        """Date, commit, command, ..., wherever this kind of record keeps them."""
        found: Mapping[str, Any] = self.content.get("circumstances", self.content)
        return found

    @property
    def compares_strategies(self) -> bool:
        """Whether tools/bench_strategies.py wrote it."""
        return "start_iteration_of_hooks" in self.content

    @property
    def refutation(self) -> Mapping[str, str] | None:
        """``by`` and ``because`` of a marked record."""
        found: Mapping[str, str] | None = self.content.get("refuted")
        return found

    @property
    def setting(self) -> tuple[str, str, int, int]:
        """Task, rate, nodes, ranks per node: newer figures of the same setting replace older ones."""
        lab = self.content["lab"]
        return self.content["task"]["name"], lab["rate"], lab["nodes"], lab["ranks_per_node"]

    def why_not_quoted(self) -> str | None:
        """Why its figures may not be quoted in profiles and pages; None if they may."""
        if self.refutation:
            return f"refuted by {self.refutation['by']}"
        if "sittings" not in self.content:
            return "it was made before the rules of docs/benchmarks/README.md"
        if any(each["uncommitted_changes"] for each in self.content["sittings"]):
            return "it was made with uncommitted changes"
        return None if self.content["whole_rounds"] else "it holds no whole round"


def read(path: Path) -> Record:
    return Record(path, json.loads(path.read_text(encoding="utf-8")))


def all_records(folder: Path = FOLDER) -> list[Record]:
    return [read(path) for path in sorted(folder.glob("*.json"))]


def quotable(folder: Path = FOLDER) -> list[Record]:
    """Records of strategies whose figures may be quoted, newest first."""
    found = [each for each in all_records(folder) if each.compares_strategies and not each.why_not_quoted()]
    return sorted(found, key=lambda each: str(each.circumstances["date"]), reverse=True)


def mark(path: Path, by: str, because: str) -> None:
    """Mark a record (path without its ending) and its page as refuted, at their top. The rest is unchanged.

    Raises ValueError if it is marked already.
    """
    record, page = path.with_name(path.name + ".json"), path.with_name(path.name + ".md")
    text = record.read_text(encoding="utf-8")
    if json.loads(text).get("refuted"):
        raise ValueError(f"{record.name} is marked already: take its mark away first to write another")
    entry = json.dumps({"by": by, "because": because}, ensure_ascii=False)
    record.write_text(f'{{\n "refuted": {entry},{text.lstrip()[1:]}', encoding="utf-8")
    title, _, rest = page.read_text(encoding="utf-8").partition("\n")
    page.write_text(f"{title}\n\n> {_MARK}{by}, because {because}.\n{rest}", encoding="utf-8")


def is_marked_page(text: str) -> bool:
    """Whether a record's page says below its title that the record is refuted."""
    return f"> {_MARK}" in "\n".join(text.splitlines()[:4])


def in_history(commit: str) -> bool | None:
    """Whether a commit is an ancestor of the checked-out one; None without git or the whole history."""
    if _git("rev-parse", "--is-shallow-repository") != (0, "false"):
        return None
    return _git("merge-base", "--is-ancestor", commit, "HEAD")[0] == 0


def same_code(one: str, other: str) -> bool:
    """Whether the code that a benchmark runs is the same in two commits; False if one of them is missing."""
    return one == other or _git("diff", "--quiet", one, other, "--", "fleet_train", "tools", "strategies")[0] == 0


def _git(*words: str) -> tuple[int, str]:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return 127, ""
    return done.returncode, done.stdout.strip()
