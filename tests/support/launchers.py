"""One launcher command per node, as a user types it on each machine; nodes are loopback addresses or namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import RESULTS_VARIABLE, Ended, Job, clean_environ
from tests.support.ranks import read_results


@dataclass(frozen=True)
class LaunchersResult:
    """How each node's launcher ended, what the ranks reported, and who was left behind.

    ``orphans`` are command lines of processes that outlived every launcher (they have been killed since).
    """

    nodes: list[Ended]
    values: dict[int, dict[str, Any]]
    folders: list[Path]
    orphans: list[str]

    @property
    def exit_codes(self) -> list[int]:
        return [node.exit_code for node in self.nodes]

    def of_all(self, name: str) -> list[Any]:
        """The value that each rank reported under ``name``, by rank."""
        return [self.values[rank][name] for rank in sorted(self.values)]

    def report(self) -> str:
        """The launchers' output and every log file below the nodes' folders."""
        parts = [f"--- {node.name}: exit {node.exit_code} ---\n{node.output}" for node in self.nodes]
        for folder in self.folders:
            parts += [f"--- {p} ---\n{p.read_text(errors='replace')}" for p in sorted(folder.rglob("workerlog.*"))]
        return "\n".join(parts)


def run_launchers(
    commands: Sequence[Sequence[str]],
    *,
    folder: Path,
    env: Mapping[str, str] | None = None,
    env_of_node: Sequence[Mapping[str, str]] = (),
    prefixes: Sequence[Sequence[str]] = (),
    timeout_seconds: float = 120.0,
    patience_after_failure_seconds: float | None = 40.0,
    check: bool = True,
) -> LaunchersResult:
    """Start ``commands[i]`` as node i in ``folder/node<i>`` and wait for all.

    ``prefixes[i]`` goes before a node's command (``ip netns exec ...``). With ``check``, an exit code other than 0 or
    an orphan fails the test with all output and logs.
    """
    reports = folder / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    folders = [folder / f"node{node}" for node in range(len(commands))]
    with Job(folder) as job:
        for node, command in enumerate(commands):
            own = {RESULTS_VARIABLE: str(reports), **(env or {}), **(env_of_node[node] if env_of_node else {})}
            prefix = prefixes[node] if prefixes else ()
            job.start(f"node{node}", [*prefix, *command], clean_environ(own), cwd=folders[node])
        ended = job.wait(timeout_seconds, patience_after_failure_seconds)
        orphans = [" ".join(process.cmdline()) for process in job.orphans()]
    result = LaunchersResult(ended, read_results(reports), folders, orphans)
    if check:
        assert result.exit_codes == [0] * len(commands), result.report()
        assert result.orphans == [], result.report()
    return result
