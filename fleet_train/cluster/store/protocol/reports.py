"""Failure reports as the store accepts them: small, of known types, printable, and never with exit code 0."""

from __future__ import annotations

from typing import Any

from fleet_train.cluster.store.protocol.wire import Body, ProtocolError, parse, printable

# More reports add nothing: the first ones identify the failed ranks, and the job is ending.
MOST_REPORTS = 256
_MOST_REPORT_BYTES = 1 << 18
_MOST_MESSAGE = 8000
_MOST_LINES = 100
_CODES = ("exit_code",)


def checked_report(body: Body) -> dict[str, Any]:
    """The report in ``body``. Raises ProtocolError; texts are cut and made printable, a code of 0 becomes 1."""
    if len(body) > _MOST_REPORT_BYTES:
        raise ProtocolError("a failure report is too long")
    report = {str(name)[:100]: _checked(value) for name, value in parse(body).items()}
    for name in _CODES:
        if name in report:
            report[name] = _failing_code(report[name])
    return report


def _checked(value: Any) -> Any:
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int:
        if abs(value) > 1 << 53:
            raise ProtocolError("a failure report holds a number that is too long")
        return value
    if isinstance(value, str):
        return printable(value, _MOST_MESSAGE)
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return [printable(line) for line in value[:_MOST_LINES]]
    raise ProtocolError("a failure report holds something other than texts, numbers and lines")


def _failing_code(code: Any) -> int:
    return code & 0xFF or 1 if type(code) is int else 1
