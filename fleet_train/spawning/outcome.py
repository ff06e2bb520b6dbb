"""What came of a spawn: the ranks' results, or one error that names the rank that failed first.

The launcher decides which rank that is; what the ranks have written (`shipping`) adds their tracebacks.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet_train.errors import ClusterError, FleetTrainError, LinkFailed, Preempted, RankFailed, WorkerFailed
from fleet_train.launch.attempts import Kind, RunResult
from fleet_train.launch.report import WorkerResult

Answer = dict[str, Any] | None
"""What a rank has written: its result, or its own account of its failure; None: nothing."""
_MOST_FOLLOWERS = 8
_SILENT = "its process ended with exit code 0 before its function had returned"


def results(ended: RunResult, answers: Sequence[Answer], keeps_logs: bool) -> list[bytes]:
    """The ranks' return values, in their order.

    ``answers``: what each rank has written; ``keeps_logs``: whether the caller has them. Raises RankFailed, LinkFailed
    if no rank is to blame, Preempted if ranks have stopped gracefully because they were asked to, ClusterError for a
    script that cannot be started this way.
    """
    if ended.kind is Kind.FAILED and ended.root_cause is None:
        kinds = {ClusterError.exit_code: ClusterError, LinkFailed.exit_code: LinkFailed}
        raise kinds.get(ended.exit_code, WorkerFailed)(ended.message)
    failures = [{} if answer is None or "result" in answer else answer for answer in answers]
    if ended.kind is Kind.FAILED:
        assert ended.root_cause is not None
        raise _error(ended.root_cause, ended.ends, failures, keeps_logs)
    if ended.kind is not Kind.DONE:
        stopped = (f"rank {rank} stopped gracefully: {each['message']}" for rank, each in enumerate(failures) if each)
        raise Preempted(next(stopped, ended.message))
    for rank, answer in enumerate(answers):
        if answer is None:
            end = ended.ends[rank]
            raise RankFailed(f"rank {rank} of {len(answers)} failed first: {_SILENT}", rank, end.exit_code, None, "")
    return [answer["result"] for answer in answers if answer is not None]


def _error(
    end: WorkerResult, ends: Sequence[WorkerResult], failures: Sequence[dict[str, Any]], keeps_logs: bool
) -> FleetTrainError:
    failure = failures[end.rank]
    if failure.get("kind") == "unguarded":
        return ClusterError(failure["message"])
    traceback = str(failure.get("traceback", ""))
    how = _how(end, failure)
    parts = [f"rank {end.rank} of {len(failures)} failed first: {how}, after {end.failed_seconds:.1f} s"]
    if traceback:
        parts.append(f"its traceback:\n{_indented(traceback)}")
    elif not failure and end.report is not None and end.report.traceback:
        parts.append(f"its traceback ends with:\n{_indented(chr(10).join(end.report.traceback))}")
    if end.last_lines and not traceback:
        parts.append(f"the last lines of its output:\n{_indented(chr(10).join(end.last_lines))}")
    followers = [replace(each, stand=None) for each in ends if each.rank != end.rank and not each.succeeded]
    parts += [f"rank {each.rank} followed: {_how(each, failures[each.rank])}" for each in followers[:_MOST_FOLLOWERS]]
    if len(followers) > _MOST_FOLLOWERS:
        parts.append(f"and {len(followers) - _MOST_FOLLOWERS} more")
    if keeps_logs:
        parts.append(f"the ranks' complete output is in {Path(end.log_file).parent}")
    code, number = end.exit_code, end.signal_number
    if failure and end.asked_to_stop:  # it was exiting with that, slower than the launcher waited
        code, number = int(failure["exit_code"]), None
    return RankFailed("\n".join(parts), end.rank, code, number, traceback)


def _how(end: WorkerResult, failure: dict[str, Any]) -> str:
    if failure:
        return str(failure["message"]).splitlines()[0]
    hint = ""
    if end.signal_number == signal.SIGKILL and not end.asked_to_stop:
        hint = " (the kernel does this when memory runs out: see dmesg)"
    return f"{end.how()}{hint}"


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())
