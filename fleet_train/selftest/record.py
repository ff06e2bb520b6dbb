"""The record of a selftest: JSON and a page, for reports. It has no host name, address, path or variable."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import fleet_train
from fleet_train.cluster.at_import import usable_processors
from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.installed import commit, installed_paddle, processor
from fleet_train.files import write_new
from fleet_train.selftest.options import GROUPS, Result, SelftestOptions, exit_code, failed, verdict

_ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b")


def facts() -> dict[str, Any]:
    """Of this machine: what figures depend on."""
    return {
        "processor": processor(),
        "processors": usable_processors(),
        "kernel": platform.release().split("-")[0],
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def backend_of(environ: Mapping[str, str]) -> str:
    """The backend of the ranks by Paddle's build, or the environment; Paddle is not imported for it."""
    requested = environ.get("PADDLE_DISTRI_BACKEND", "").lower()
    return "nccl" if installed_paddle()[0] == "paddlepaddle-gpu" and requested != "gloo" else "gloo"


def make(
    cluster: Cluster,
    options: SelftestOptions,
    machines: Sequence[Mapping[str, Any]],
    results: Sequence[Result],
    seconds: float,
) -> dict[str, Any]:
    """``machines``: the facts of each node."""
    return {
        "circumstances": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": command_of(options),
            **commit(),
            "versions": _versions(),
            "machines": list(machines),
        },
        "backend": backend_of(os.environ),
        "nodes": cluster.node_num,
        "ranks": [len(cluster.ranks_on_node(node)) for node in range(cluster.node_num)],
        "options": options.to_json(),
        "seconds": round(seconds, 1),
        "verdict": verdict(results, seconds),
        "failures": failed(results),
        "checks": [_cleaned(result.to_json(), cluster) for result in results],
        "exit_code": exit_code(results),
    }


def command_of(options: SelftestOptions) -> str:
    """The command without details of this cluster."""
    only = [f"--only {group}" for group in options.groups] if options.groups != tuple(GROUPS) else []
    only += ["--ladder"] if options.ladder else []
    return " ".join(["fleet_train selftest", *only, *(["--quick"] if options.is_quick else [])])


def _versions() -> dict[str, str]:
    distribution, version = installed_paddle()
    return {
        "python": platform.python_version(),
        distribution or "paddle": version,
        "numpy": metadata.version("numpy"),
        "fleet_train": fleet_train.__version__,
    }


def _cleaned(value: Any, cluster: Cluster) -> Any:
    if isinstance(value, dict):
        return {name: _cleaned(item, cluster) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item, cluster) for item in value]
    return without_names(value, cluster) if isinstance(value, str) else value


def without_names(text: str, cluster: Cluster) -> str:
    """A text without the addresses of the cluster, this machine's name and its folders."""
    for node in range(cluster.node_num):
        host = cluster.ranks[cluster.ranks_on_node(node)[0]].host
        text = re.sub(rf"(?<![\w.]){re.escape(host)}(:\d+)?(?![\w.]*\w)", f"node {node}", text)
    text = _ADDRESS.sub("<address>", text)
    folders: Iterable[tuple[str, str]] = ((str(Path.cwd()), "."), (str(Path.home()), "~"))
    for known, name in (*folders, (socket.gethostname(), "<host>")):
        if len(known) > 1:
            text = text.replace(known, name)
    return text


def write(folder: Path, record: Mapping[str, Any]) -> Path:
    """``<date>-selftest-<backend>-<nodes>x<ranks>.json`` (``ladder`` for ``selftest``; ``1+2`` for unlike nodes), and a
    page of the same name; returns the first one's path."""
    what = "ladder" if record["options"]["ladder"] else "selftest"
    each = record["ranks"]
    ranks = f"{len(each)}x{each[0]}" if len(set(each)) == 1 else "+".join(map(str, each))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['circumstances']['date'][:10]}-{what}-{record['backend']}-{ranks}.json"
    write_new(path, f"{json.dumps(record, indent=1)}\n".encode())
    write_new(path.with_suffix(".md"), page(record).encode())
    return path


def how_to_send(path: Path, code: int) -> str:
    """What to do with a record that was written. The address is the one in the package's metadata, if it has one."""
    page = "the project's page"
    with suppress(metadata.PackageNotFoundError):
        links = dict(entry.split(", ", 1) for entry in metadata.metadata("fleet-train").get_all("Project-URL") or ())
        page = links.get("Issues", page)
    more = ", and the lines above," if code else ""
    return f"send it in, whatever it says: attach {path} and {path.with_suffix('.md').name}{more} to an issue on {page}"


def page(record: Mapping[str, Any]) -> str:
    """The record for people."""
    at = record["circumstances"]
    machines = "; ".join(
        f"{machine['processor']}, {machine['processors']} processors, Linux {machine['kernel']}, load average "
        f"{machine['load_average_before']} before the start"
        for machine in at["machines"]
    )
    commit = ""
    if at.get("commit"):
        commit = f"; commit {at['commit'][:10]}{' with uncommitted changes' * at['uncommitted_changes']}"
    lines = [
        f"# Selftest, {at['date'][:10]}: {record['nodes']} node(s), {sum(record['ranks'])} ranks, {record['backend']}",
        "",
        f"- Result: {record['verdict']}",
        f"- Machines: {machines}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in at['versions'].items())}{commit}.",
        f"- Command: `{at['command']}`",
        "",
        "| check | result | seconds | what was found |",
        "| --- | --- | --- | --- |",
        *(
            f"| {check['name']} | {check['status']} | {check['seconds']:.1f} | {_cell(check['words'])} |"
            for check in record["checks"]
        ),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
