"""The process of one spawned rank: reads a function, calls it, writes its result or error for its parent.

    python -m fleet_train.spawning.rank_main GREETING ANSWER PARENT_PID

The first two are descriptors of files of `shipping`.

Of the parent's script only what the function itself needs is imported or run here.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from fleet_train.cluster.cluster import Rank
from fleet_train.cluster.store.reports import FailureReport, exit_status, report_of_exit, reports_of
from fleet_train.errors import FleetTrainError, Preempted
from fleet_train.launch.processes import die_with_parent
from fleet_train.spawning import shipping


def main(greeting: int, answer: int, parent: int) -> int:
    """The exit code of the process. First of all: it ends when its parent does, however that ends."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    os.set_inheritable(answer, False)
    message = shipping.read(greeting)
    os.close(greeting)
    assert message is not None
    header, body = message
    return _Call(answer, header).run(body)


class _Call:
    """The call of the function, and how it ended."""

    def __init__(self, answer: int, header: dict[str, Any]) -> None:
        index = int(os.environ["PADDLE_TRAINER_ID"])
        self._answer = answer
        self._rank = Rank(index, "", 0, 0, index)
        self._name = f"rank {index}"
        self._train = str(header["train"])
        sys.path[:] = header["path"]
        sys.argv[:] = header["argv"]
        shipping.take_sources(header["sources"])

    def run(self, body: bytes) -> int:
        try:
            train, args, profile = shipping.unship_call(body, self._train)
            if profile is not None:  # the parent's strategy is this rank's default
                from fleet_train.convert import session

                session.offered_profile = profile
            result = shipping.ship_result(train(*args), self._train)
        except SystemExit as end:
            return self._exited(end)
        except BaseException as error:
            return self._failed(error)
        sys.stdout.flush()
        shipping.write(self._answer, {"kind": "result"}, result)
        return 0

    def _exited(self, end: SystemExit) -> int:
        if exit_status(end.code) == 0:
            shipping.write(self._answer, {"kind": "result"}, shipping.ship_result(None, self._train))
            return 0
        report = report_of_exit(end.code, self._rank, self._name)
        assert report is not None
        what = f"sys.exit({end.code!r})"
        return self._send_failure("failed", what, report.exit_code, [report], _traceback_text(end, end))

    def _failed(self, error: BaseException) -> int:
        cause = _cause_reported(error)
        code = cause.exit_code if isinstance(cause, FleetTrainError) else 1
        sys.stdout.flush()
        if isinstance(cause, Preempted):
            return self._send_failure("preempted", str(cause), code, [], _traceback_text(error, cause))
        kind, message = "failed", f"{type(cause).__name__}: {cause}"
        if isinstance(cause, shipping.CalledWhileImported):
            kind, message = "unguarded", str(cause)
        reports = reports_of(cause, self._rank, self._name, "stopped with {kind}")
        return self._send_failure(kind, message, code, reports, _traceback_text(error, cause))

    def _send_failure(
        self, kind: str, message: str, exit_code: int, reports: Sequence[FailureReport], traceback_text: str
    ) -> int:
        header = {"kind": kind, "message": message, "exit_code": exit_code, "traceback": traceback_text}
        shipping.write(self._answer, {**header, "reports": [report.to_json() for report in reports]})
        return exit_code


def _cause_reported(error: BaseException) -> BaseException:
    """The actual cause of this rank's end; reported to the others now, not when the process ends."""
    if "fleet_train.convert.process" not in sys.modules:  # it has never joined a job
        return error
    from fleet_train.convert import process

    return process.report_caught(error)


def _traceback_text(error: BaseException, cause: BaseException) -> str:
    """The traceback without our own frames; of an error that only repeats its cause, with the cause in one line.

    Empty if it would only show our own code.
    """
    if isinstance(error, shipping.NotSerializable):
        return ""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, shipping.__file__):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if cause is not error:
        text += f"caused by {type(cause).__name__}: {cause}\n"
    return text


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    if status:
        sys.exit(status)
