"""The failure report: the last output of a failed job. Text in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet_train.launch.report.worker_result import WorkerResult, choose_root_cause

_ROWS_FOR_FOLLOWERS = 8


def failure_report(ends: Iterable[WorkerResult], silent_nodes: Sequence[str] = ()) -> str:
    """The root cause's last log lines, then a table: the root cause first, then the secondary failures.

    ``silent_nodes`` are nodes that have not reported how their ranks ended.
    """
    every = sorted(ends, key=lambda end: (end.seconds, end.rank))
    root_cause = choose_root_cause(every)
    if root_cause is None:
        return "the job has failed, but no rank of the nodes that reported has"
    parts = [_last_lines(root_cause), _table(root_cause, [end for end in every if end is not root_cause])]
    if silent_nodes:
        parts.append(f"not heard from: {', '.join(silent_nodes)}")
    return "\n".join(parts)


def headline(root_cause: WorkerResult) -> str:
    """One line for other nodes and for ranks that wait in the store."""
    rank, seconds = f"rank {root_cause.rank} ({root_cause.endpoint})", root_cause.failed_seconds
    return f"{rank} failed first: {root_cause.how()} after {seconds:.1f} s"


def _last_lines(root_cause: WorkerResult) -> str:
    host = root_cause.endpoint.rpartition(":")[0]
    told = root_cause.report.traceback if root_cause.report else ()
    if told and told[-1] not in root_cause.last_lines:  # much was printed since, or the log is unavailable
        lines = "\n".join(f"  | {line}" for line in told)
        return f"rank {root_cause.rank} reported ({host}:{root_cause.log_file}):\n{lines}"
    if not root_cause.last_lines:
        return f"rank {root_cause.rank} wrote nothing to its log ({host}:{root_cause.log_file})"
    lines = "\n".join(f"  | {line}" for line in root_cause.last_lines)
    return f"last lines of rank {root_cause.rank} ({host}:{root_cause.log_file}):\n{lines}"


def _table(root_cause: WorkerResult, others: list[WorkerResult]) -> str:
    rows = [("", "rank", "host:port", "how it ended", "after", "log file"), _row("failed first", root_cause)]
    followers = [end for end in others if not end.succeeded or end.failed]
    rows += [_row("secondary", end) for end in followers[:_ROWS_FOR_FOLLOWERS]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += _rest("secondary", followers[_ROWS_FOR_FOLLOWERS:])
    lines += _rest("finished", [end for end in others if end.succeeded and not end.failed])
    return "\n".join(lines)


def _row(role: str, end: WorkerResult) -> tuple[str, ...]:
    return (role, str(end.rank), end.endpoint, end.how(), f"{end.failed_seconds:.1f} s", end.log_file)


def _rest(role: str, ends: list[WorkerResult]) -> list[str]:
    if not ends:
        return []
    return [f"{role}: {'rank' if len(ends) == 1 else 'ranks'} {spans(sorted(end.rank for end in ends))}"]


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, span)) for span in found)
