"""A rank's report of a failure to the store: its own, or that of a missing rank.

A report is written when the failure is known; the process may end later and differently: its exit handlers run,
threads continue, a data loader is closed. So the launchers attribute a failure by reports first.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fleet_train.cluster.cluster import Rank
from fleet_train.errors import FleetTrainError, JoinTimeout, LinkFailed, WorkerFailed

NO_RANK = -1
"""The ``rank`` of a report by which no rank is to blame."""

_TRACEBACK_LINES = 15
_LINE_CHARACTERS = 240


@dataclass(frozen=True)
class FailureReport:
    """One rank's failure. ``rank`` is the failed rank, or NO_RANK, ``reporter`` the reporting one."""

    rank: int
    reporter: int
    kind: str
    """``raised``, ``exited`` (both by the rank itself); ``missing``, ``left``, ``lost`` (by others, see Absence);
    ``link`` (of no rank)."""
    what: str
    """A few words for the table: ``ValueError``, ``sys.exit(3)``, ``did not arrive at step 4 within 2 s``."""
    message: str
    """One line that names the rank, for the waiting ranks."""
    exit_code: int
    """The job's exit code if the process's own end gives none."""
    traceback: tuple[str, ...] = ()
    """Its last lines."""
    seconds: float = 0.0
    """When it arrived, since the ranks were started: on the store's clock, so the same number on every node."""

    @property
    def is_own(self) -> bool:
        return self.rank == self.reporter

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FailureReport:
        return cls(**{**data, "traceback": tuple(data["traceback"])})

    def at(self, seconds: float) -> FailureReport:
        return replace(self, seconds=round(seconds, 3))


def reports_of(error: BaseException, this: Rank, name: str, doing: str) -> list[FailureReport]:
    """The reports of the rank ``this`` about the error that ends it: none if another rank has reported it already.

    ``name`` is the rank in words; ``doing`` what it did with the error, where ``{kind}`` is the class.
    """
    if isinstance(error, LinkFailed):
        return [
            FailureReport(NO_RANK, this.index, "link", "the ranks could not communicate", str(error), error.exit_code)
        ]
    if isinstance(error, (WorkerFailed, JoinTimeout)):
        code, absent = error.exit_code, error.absent
        return [FailureReport(a.member, this.index, a.kind, a.what, str(error), code) for a in absent]
    kind = type(error).__name__
    code, rank = (error.exit_code, error.failed_rank) if isinstance(error, FleetTrainError) else (1, None)
    lines = last_of_traceback(error)
    if rank is None or rank == this.index:
        rank = this.index
    else:
        name, lines = f"rank {rank}", ()
    message = f"{name} {doing.format(kind=kind)}: {str(error).strip() or '(no message)'}"
    return [FailureReport(rank, this.index, "raised", kind, message, code, lines)]


def report_of_exit(code: Any, this: Rank, name: str) -> FailureReport | None:
    """The report for ``sys.exit(code)`` in the rank ``this``; None if the process ends with 0."""
    status = exit_status(code)
    if status == 0:
        return None
    is_text = not isinstance(code, int)
    what = "sys.exit" if is_text else f"sys.exit({code})"
    message = f"{name} stopped with {what}" + (f": {code}" if is_text else "")
    lines = tuple(line[:_LINE_CHARACTERS] for line in str(code).splitlines()) if is_text else ()
    return FailureReport(this.index, this.index, "exited", what, message, status, lines[-_TRACEBACK_LINES:])


def exit_status(code: Any) -> int:
    """The exit code of ``sys.exit(code)``: Python prints anything but a number, and ends with 1."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def last_of_traceback(error: BaseException) -> tuple[str, ...]:
    text = "".join(traceback.format_exception(error))
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(line[:_LINE_CHARACTERS] for line in lines[-_TRACEBACK_LINES:])
