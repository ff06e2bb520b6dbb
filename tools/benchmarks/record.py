"""Records of benchmarks: what was measured, on what, with which command; how they are written, read and judged."""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from fleet_train.cluster.installed import git, processor
from fleet_train.files import publish_where_linked

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "benchmarks"
_PACKAGES = ("paddlepaddle", "torch", "torchft", "horovod", "ray", "numpy", "scikit-learn")


def circumstances() -> dict[str, Any]:
    """Commit, versions, processor, command: what is needed to repeat the measurement. No path of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git(ROOT, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(git(ROOT, "status", "--porcelain", "--", "fleet_train", "tools", "strategies")),
        "command": shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *words]),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def told_circumstances(at: Mapping[str, Any], network: str = "CPU and Gloo") -> list[str]:
    """The lines of a page that give the machine and the command of its record."""
    versions = ", ".join(f"{key} {value}" for key, value in at["versions"].items() if value)
    return [
        f"- Machine: {at['processor']}, {at['processors']} processors for all processes, Linux {at['kernel']}, "
        f"load average {at['load_average_before'][0]} before the start; {network}.",
        f"- Versions: {versions}; commit {at['commit'][:10]}"
        f"{' with uncommitted changes' if at['uncommitted_changes'] else ''}.",
        f"- Command: `{at['command']}`",
    ]


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def spread(values: Sequence[float], middle: float, digits: int = 2) -> str:
    """``middle`` with the smallest and the largest of the values."""
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


@dataclass(frozen=True)
class Keep:
    """Writes a record so far, if one is asked for. ``path``: without its ending. A ``picture`` (SVG) ends the page."""

    path: Path | None

    def begun(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record of this name, to go on with; if there is none ``record``, which has all but results. A click error
        if its rounds are not comparable with those to come."""
        path = self.path and beside(self.path, ".json")
        if path is None or not path.exists():
            return dict(record)
        there: dict[str, Any] = json.loads(path.read_text())
        if differing := differences(there, record):
            told = "; ".join(differing)
            raise click.UsageError(f"{path} is there, and its rounds are not comparable ({told}); give another --name")
        return there

    def __call__(self, record: Mapping[str, Any], page: Sequence[str], picture: str = "", shows: str = "") -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parts = [f"{json.dumps(key)}: {_in_lines(value)}" for key, value in record.items()]
        publish_where_linked(beside(self.path, ".json"), _block("{}", parts).encode() + b"\n")
        if picture:
            publish_where_linked(beside(self.path, ".svg"), picture.encode())
            page = [*page, "", f"![{shows}]({self.path.name}.svg)"]
        publish_where_linked(beside(self.path, ".md"), "\n".join([*page, ""]).encode())


def differences(there: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Why rounds of two records are not comparable: other settings (all but what is empty in ``mine``, which grows with
    the rounds), another processor, another commit."""
    mine = {name: value for name, value in json.loads(json.dumps(mine)).items() if value not in ([], {})}
    then, at = there["circumstances"], mine.pop("circumstances")
    differing = [f"{key}: {there.get(key)} there, {mine[key]} now" for key in mine if there.get(key) != mine[key]]
    if then["processor"] != at["processor"]:
        differing.append(f"processor: {then['processor']} there, {at['processor']} now")
    if then["commit"] != at["commit"]:
        differing.append(f"commit: {then['commit'][:10]} there, {at['commit'][:10]} now (git worktree add has it)")
    return differing


def _in_lines(value: Any) -> str:
    """JSON with a line for each entry, so that a round is one line of its file."""
    if isinstance(value, Mapping) and value:
        return _block("{}", [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()])
    return _block("[]", map(json.dumps, value)) if isinstance(value, list) and value else json.dumps(value)


def _block(ends: str, parts: Iterable[str]) -> str:
    inner = ",\n".join(parts)
    return f"{ends[0]}\n{inner}\n{ends[1]}"


def beside(path: Path, ending: str) -> Path:
    """Append an ending; ``Path.with_suffix`` would cut a name that contains dots."""
    return path.with_name(path.name + ending)


def recorded(rounds: int = 0, of_rounds: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that every benchmark has; the function gets ``keep`` and, with a default for it, ``rounds``."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        @click.option("--record", "folder", type=click.Path(path_type=Path), help="Folder that gets a record.")
        @click.option("--name", help="The record's name in it.  [default: DATE-WHAT]")
        @functools.wraps(function)
        def wrapped(*, folder: Path | None, name: str | None, **options: Any) -> None:
            today = datetime.now(timezone.utc).date()
            what = name or f"{today}-{click.get_current_context().info_name}".removesuffix(".py")
            function(keep=Keep(folder / what if folder else None), **options)

        option = click.option("--rounds", default=rounds, type=click.IntRange(1), help=f"Rounds; {of_rounds}.")
        return option(wrapped) if rounds else wrapped

    return decorated


def network_named(lab: Mapping[str, Any]) -> str:
    """``1gbit``, ``100mbit-20ms`` or ``none``."""
    return str(lab["rate"]) + (f"-{lab['rtt']:g}ms" if lab.get("rtt") else "")


_UNITS = {"kbit": "kb/s", "mbit": "Mb/s", "gbit": "Gb/s"}


def told_network(name: str) -> str:
    """`network_named` for people: ``at 100 Mb/s``, ``at 100 Mb/s with a ping of 20 ms``, ``without a limit``."""
    rate, _, ping = name.partition("-")
    unit = next((unit for unit in _UNITS if rate.endswith(unit)), None)
    limit = f"at {rate.removesuffix(unit)} {_UNITS[unit]}" if unit else "without a limit"
    return f"{limit} with a ping of {ping.removesuffix('ms')} ms" if ping else limit


@dataclass(frozen=True)
class Record:
    """One ``.json`` of docs/benchmarks."""

    path: Path
    content: Mapping[str, Any]

    @property
    def source(self) -> str:
        """As quoted."""
        return f"docs/benchmarks/{self.path.name}"

    @property
    def circumstances(self) -> Mapping[str, Any]:
        """Date, commit, command, ..., wherever this kind of record keeps them."""
        found: Mapping[str, Any] = self.content.get("circumstances", self.content)
        return found

    @property
    def compares_strategies(self) -> bool:
        return "frozen" in self.content

    @property
    def refutation(self) -> Mapping[str, str] | None:
        """``by`` and ``because`` of a record that people have marked as refuted, at its top and on its page."""
        found: Mapping[str, str] | None = self.content.get("refuted")
        return found

    @property
    def setting(self) -> tuple[str, str, int, int]:
        """Task, network, nodes, ranks per node: newer figures of the same setting replace older ones."""
        lab = self.content["lab"]
        return self.content["task"]["name"], network_named(lab), lab["nodes"], lab["ranks_per_node"]

    def why_not_quoted(self) -> str | None:
        """Why its figures may not be quoted in profiles and pages; None if they may."""
        if self.refutation:
            return f"refuted by {self.refutation['by']}"
        if any(each["uncommitted_changes"] for each in self.content["sittings"]):
            return "it was made with uncommitted changes"
        if any(name.endswith(".yaml") for name in self.content["contestants"]):
            return "it compares profiles that are not in the catalogue"
        return None if self.content["whole_rounds"] else "it holds no whole round"


def all_records(folder: Path = FOLDER) -> list[Record]:
    return [Record(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def quotable(folder: Path = FOLDER) -> list[Record]:
    """Records of strategies whose figures may be quoted, newest first."""
    found = [each for each in all_records(folder) if each.compares_strategies and not each.why_not_quoted()]
    return sorted(found, key=lambda each: str(each.circumstances["date"]), reverse=True)


# What the turns of a record run, and may therefore change a number.
_MODULES = "contestants jobs networks ranks stand_ins tasks trainees".split()
RUN = (
    "fleet_train", "strategies/*.yaml", "requirements.txt", "requirements-bench.txt", "tools/lab.py",
    "tools/distance.py", *(f"tools/benchmarks/{name}.py" for name in _MODULES),
)  # fmt: skip
