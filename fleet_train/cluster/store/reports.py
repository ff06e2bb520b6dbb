"""What a failed job is told: a rank's report of its failure to the store, and the store's refusals in words.

A report is written when the failure is known; the process may end later and differently: its exit handlers run,
threads continue, a data loader is closed. So the launchers attribute a failure by reports first. Where the store
refuses an answer, a client says which members are missing, lost, or elsewhere, and what to do about it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from fleet_train.cluster.cluster import Rank
from fleet_train.cluster.flight.stands import Frame
from fleet_train.cluster.store.wire import Body, Header, Json, ProtocolError, parse, shortened
from fleet_train.errors import (
    Absence,
    ClusterError,
    FleetTrainError,
    JoinTimeout,
    LinkFailed,
    ScheduleMismatch,
    WorkerFailed,
)

NO_RANK = -1
"""The ``rank`` of a report by which no rank is to blame."""

_TRACEBACK_LINES = 15
_LINE_CHARACTERS = 240
# What the store takes as a report.
_MOST_REPORT_BYTES = 1 << 18
_MOST_MESSAGE = 8000
_MOST_LINES = 100


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
    """The last lines of the failed rank's traceback."""
    seconds: float = 0.0
    """Seconds from the ranks' start to the report's arrival: on the store's clock, so the same number on every node."""

    @property
    def is_own(self) -> bool:
        return self.rank == self.reporter

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FailureReport:
        return cls(**{**data, "traceback": tuple(data["traceback"])})

    @classmethod
    def of_store(cls, entries: Iterable[tuple[Mapping[str, Any], float]], zero: float) -> list[FailureReport]:
        """The ranks' reports in a store, in seconds since ``zero``; others (a launcher's) are skipped."""
        reports = []
        for data, at in entries:
            with suppress(TypeError, KeyError, ValueError):
                reports.append(cls.from_json(data).at(at - zero))
        return reports

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
    shown = traceback.TracebackException.from_exception(error)
    if isinstance(error, FleetTrainError):  # the script's own line is the last one
        while shown.stack and not Frame(shown.stack[-1].filename, 0, "").is_users:
            shown.stack.pop()
    text = "".join(shown.format() if shown.stack else shown.format_exception_only())
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(line[:_LINE_CHARACTERS] for line in lines[-_TRACEBACK_LINES:])


def checked_report(body: Body) -> dict[str, Any]:
    """The report in ``body``. Raises ProtocolError; texts are cut and made printable, a code of 0 becomes 1."""
    if len(body) > _MOST_REPORT_BYTES:
        raise ProtocolError("a failure report is too long")
    report = {str(name)[:100]: _checked(value) for name, value in parse(body).items()}
    if "exit_code" in report:
        code = report["exit_code"]
        report["exit_code"] = (code & 0xFF) or 1 if type(code) is int else 1
    return report


def _checked(value: Any) -> Any:
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int and abs(value) <= 1 << 53:
        return value
    if isinstance(value, str):
        return shortened(value, _MOST_MESSAGE)
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return [shortened(line) for line in value[:_MOST_LINES]]
    raise ProtocolError("a failure report holds something other than texts, lines, and numbers that are not too long")


Describe = Callable[[int], str]
# Up to this many members are listed one by one, more as ranges. As many are recorded as absent.
_MOST_NAMED = 8

_Error = TypeVar("_Error", bound=FleetTrainError)


def with_absent(error: _Error, absent: Iterable[Absence], more: str = "") -> _Error:
    """The error with the members that caused it; ``more`` is appended for each."""
    error.absent = tuple(Absence(absence.member, absence.kind, absence.what + more) for absence in absent)
    return error


class Messages:
    """A client's messages for the server's answers."""

    def __init__(self, endpoint: str, group: str, describe: Describe) -> None:
        self._endpoint = endpoint
        self._group = group
        self._describe = describe

    def error(self, answer: Header, body: Body) -> FleetTrainError:
        match answer["error"]:
            case "timeout":
                who = answer["missing"]
                missing = [Absence(member, "missing", "did not arrive") for member in _few(who)]
                return with_absent(JoinTimeout(f"{self.names(who)} did not arrive"), missing)
            case "gone":
                return self._gone(json.loads(body), answer.get("call", ""))
            case "failed":
                report = json.loads(body)
                return WorkerFailed(str(report.get("message") or report))
            case "count":
                (first, count), (second, other) = answer["counts"]
                return ScheduleMismatch(
                    f"{self._describe(first)} says that the job has {count} {self._group}s, {self._describe(second)} "
                    f"says {other}; start every node with the same node list and the same number of processes"
                )
            case "crossed":
                where = sorted(json.loads(body))
                elsewhere = [Absence(m, "elsewhere", _place(*at)) for who, *at in where for m in _few(who)]
                return with_absent(ScheduleMismatch(self._crossed(where)), elsewhere[:_MOST_NAMED])
            case "store":
                return WorkerFailed(self.lost_server(str(answer.get("why"))))
            case "large":
                return ClusterError("the values of all members together exceed what the rendezvous store can hold")
            case "full":
                return ClusterError(f"the rendezvous store at {self._endpoint} can hold no more values")
            case other:
                return ClusterError(f"the rendezvous store at {self._endpoint} answered {other!r}")

    def lost_server(self, why: str) -> str:
        return (
            f"the rendezvous store at {self._endpoint} no longer answers ({why}): the process that hosts it "
            "(the first node's launcher, or rank 0) has ended or its machine cannot be reached"
        )

    def on_all(self, call: str) -> str:
        return f"; call {call} on all {self._group}s, without `if rank == 0` around it" if call else ""

    def names(self, ranges: list[list[int]]) -> str:
        """``rank 3 (10.0.0.2:6171), rank 5 (...)``, or ``ranks 8-15, 24-31`` where there are many."""
        if _size(ranges) <= _MOST_NAMED:
            return ", ".join(self._describe(member) for member in _few(ranges))
        spans = ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in ranges[:_MOST_NAMED])
        return f"{self._group}s {spans}{', ...' if len(ranges) > _MOST_NAMED else ''} ({_size(ranges)} in all)"

    def _gone(self, departed: list[list[Json]], call: str) -> WorkerFailed:
        parts = [f"{self._describe(m)} {self._how_gone(how, call)}" for who, how in departed for m in _few(who)]
        if sum(_size(who) for who, _ in departed) > _MOST_NAMED:
            parts = [f"{self.names(who)}: {self._how_gone(how, call)}" for who, how in departed]
        absent = [_absence(member, how) for who, how in departed for member in _few(who)]
        return with_absent(WorkerFailed("; ".join(parts)), absent[:_MOST_NAMED])

    def _how_gone(self, how: str, call: str) -> str:
        if how == "left" and call:
            return f"finished and left the job while others wait for it in {call}{self.on_all(call)}"
        if how == "left":
            return "finished and left the job while others still wait for it (unequal numbers of steps, or an exit?)"
        return f"was lost ({how}: the process ended or its machine cannot be reached)"

    def _crossed(self, where: list[list[Json]]) -> str:
        """``where``: ranges of members, the name of their barrier, and the call that they are in or an empty text."""
        if sum(_size(who) for who, _, _ in where) <= _MOST_NAMED:
            each = sorted((member, name, call) for who, name, call in where for member in _few(who))
            parts = [f"{self._describe(m)} {_place(name, call)}" for m, name, call in each]
        else:
            parts = [f"{self.names(who)} {_place(name, call)}" for who, name, call in where]
        calls = {call for _, _, call in where}
        group = self._group
        if not any(calls):
            why = f"every {group} must make the same steps and calls in the same order (unequal numbers of batches?)"
        elif len(calls) == 1:
            why = f"every {group} must make the same calls in the same order"
        else:
            named = " and ".join(sorted(call for call in calls if call))
            why = (
                f"call {named} on all {group}s, without `if rank == 0` around it; if all of them do, "
                "they have made unequal numbers of steps before it"
            )
        return f"the {group}s wait for each other at different points: {', '.join(parts)}; {why}"


def _place(name: str, call: str) -> str:
    return f"in {call}" if call else f"at '{name}'"


def _size(ranges: list[list[int]]) -> int:
    return sum(high - low + 1 for low, high in ranges)


def _few(ranges: list[list[int]]) -> list[int]:
    """The first members of ranges, as many as are listed one by one."""
    members: list[int] = []
    for low, high in ranges:
        members += range(low, min(high + 1, low + _MOST_NAMED - len(members)))
    return members


def _absence(member: int, how: str) -> Absence:
    if how == "left":
        return Absence(member, "left", "left the job")
    return Absence(member, "lost", f"was lost ({how})")
