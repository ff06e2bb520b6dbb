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
from typing import TYPE_CHECKING, Any

from fleet_train.launch.processes import die_with_parent

if TYPE_CHECKING:
    from fleet_train.cluster.cluster import Rank
    from fleet_train.cluster.store.reports import FailureReport


def main(greeting: int, answer: int, parent: int) -> int:
    """The exit code of the process. First of all: it ends when its parent does, however that ends."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    os.set_inheritable(answer, False)
    from fleet_train.spawning import shipping

    message = shipping.read(greeting)
    os.close(greeting)
    assert message is not None
    header, body = message
    return _Rank(answer, header).run(body)


class _Rank:
    """One call, and how it ended."""

    def __init__(self, answer: int, header: dict[str, Any]) -> None:
        self._answer = answer
        self._index = int(os.environ["PADDLE_TRAINER_ID"])
        self._train = str(header["train"])
        self._header = header

    def run(self, body: bytes) -> int:
        from fleet_train.spawning import shipping

        try:
            train, args, profile = self._unpacked(body)
            if profile is not None:
                _offer(profile)
            result = shipping.ship_result(train(*args), self._train)
        except SystemExit as end:
            return self._exited(end)
        except BaseException as error:
            return self._failed(error)
        sys.stdout.flush()
        self._send({"kind": "result"}, result)
        return 0

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        from fleet_train.spawning import shipping

        shipping.write(self._answer, header, body)

    def _unpacked(self, body: bytes) -> Any:
        from fleet_train.spawning import shipping

        sys.path[:] = self._header["path"]
        sys.argv[:] = self._header["argv"]
        shipping.take_sources(self._header["sources"])
        return shipping.unship_call(body, self._train)

    def _exited(self, end: SystemExit) -> int:
        from fleet_train.cluster.store.reports import exit_status, report_of_exit
        from fleet_train.spawning import shipping

        if exit_status(end.code) == 0:
            self._send({"kind": "result"}, shipping.ship_result(None, self._train))
            return 0
        report = report_of_exit(end.code, self._rank(), f"rank {self._index}")
        assert report is not None
        traceback_text = _traceback_text(end, end)
        return self._send_failure("failed", f"sys.exit({end.code!r})", report.exit_code, [report], traceback_text)

    def _failed(self, error: BaseException) -> int:
        from fleet_train.cluster.store.reports import reports_of
        from fleet_train.errors import FleetTrainError, Preempted
        from fleet_train.spawning.shipping import CalledWhileImported

        cause = _cause_reported(error)
        code = cause.exit_code if isinstance(cause, FleetTrainError) else 1
        sys.stdout.flush()
        if isinstance(cause, Preempted):
            return self._send_failure("preempted", str(cause), code, [], _traceback_text(error, cause))
        kind, message = "failed", f"{type(cause).__name__}: {cause}"
        if isinstance(cause, CalledWhileImported):
            kind, message = "unguarded", str(cause)
        reports = reports_of(cause, self._rank(), f"rank {self._index}", "stopped with {kind}")
        return self._send_failure(kind, message, code, reports, _traceback_text(error, cause))

    def _rank(self) -> Rank:
        from fleet_train.cluster.cluster import Rank

        return Rank(self._index, "", 0, 0, self._index)

    def _send_failure(
        self, kind: str, message: str, exit_code: int, reports: Sequence[FailureReport], traceback_text: str
    ) -> int:
        header = {"kind": kind, "message": message, "exit_code": exit_code, "traceback": traceback_text}
        self._send({**header, "reports": [report.to_json() for report in reports]})
        return exit_code


def _cause_reported(error: BaseException) -> BaseException:
    """The actual cause of this rank's end; reported to the others now, not when the process ends."""
    if "fleet_train.convert.process" not in sys.modules:  # it has never joined a job
        return error
    from fleet_train.convert import process

    return process.report_caught(error)


def _offer(profile: Any) -> None:
    """Make the parent's strategy this rank's default."""
    from fleet_train.convert import session

    session.offer(profile)


def _traceback_text(error: BaseException, cause: BaseException) -> str:
    """The traceback without our own frames; of an error that only repeats its cause, with the cause in one line.

    Empty if it would only show our own code.
    """
    from fleet_train.spawning.shipping import NotSerializable

    if isinstance(error, NotSerializable):
        return ""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if cause is not error:
        text += f"caused by {type(cause).__name__}: {cause}\n"
    return text


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    if status:
        sys.exit(status)
