"""The process of one spawned rank: reads a function, calls it, writes its result or error for its parent.

    python -m fleet_train.spawning.rank_main GREETING ANSWER PARENT_PID

The first two are descriptors of files of `channel`.

Of the parent's script only what the function itself needs is imported or run here.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Any

from fleet_train.launch.processes import die_with_parent


def main(greeting: int, answer: int, parent: int) -> int:
    """The exit code of the process. First of all: it ends when its parent does, however that ends."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    os.set_inheritable(answer, False)
    from fleet_train.spawning import shipping as channel

    told = channel.read(greeting)
    os.close(greeting)
    assert told is not None
    header, body = told
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
        from fleet_train.spawning import shipping as channel

        channel.write(self._answer, header, body)

    def _unpacked(self, body: bytes) -> Any:
        from fleet_train.spawning import environment, shipping

        sys.path[:] = self._header["path"]
        sys.argv[:] = self._header["argv"]
        shipping.take_sources(self._header["sources"])
        environment.finding(self._train)
        try:
            return shipping.unship(body)
        finally:
            environment.finding("")

    def _exited(self, end: SystemExit) -> int:
        from fleet_train.cluster.store.reports import exit_status
        from fleet_train.spawning import shipping

        if exit_status(end.code) == 0:
            self._send({"kind": "result"}, shipping.ship_result(None, self._train))
            return 0
        from fleet_train.cluster.cluster import Rank
        from fleet_train.cluster.store.reports import report_of_exit

        report = report_of_exit(end.code, Rank(self._index, "", 0, 0, self._index), f"rank {self._index}")
        assert report is not None
        how = f"sys.exit({end.code!r})"
        self._send(
            {
                "kind": "failed",
                "message": how,
                "exit_code": report.exit_code,
                "reports": [report.to_json()],
                "traceback": _told(end, end),
            }
        )
        return report.exit_code

    def _failed(self, error: BaseException) -> int:
        from fleet_train.cluster.cluster import Rank
        from fleet_train.cluster.store.reports import reports_of
        from fleet_train.errors import FleetTrainError, Preempted
        from fleet_train.spawning.environment import CalledWhileImported

        cause = _cause_told_to_the_others(error)
        code = cause.exit_code if isinstance(cause, FleetTrainError) else 1
        this = Rank(self._index, "", 0, 0, self._index)
        is_preempted = isinstance(cause, Preempted)
        reports = [] if is_preempted else reports_of(cause, this, f"rank {self._index}", "stopped with {kind}")
        sys.stdout.flush()
        is_unguarded = isinstance(cause, CalledWhileImported)
        self._send(
            {
                "kind": "unguarded" if is_unguarded else "preempted" if is_preempted else "failed",
                "message": str(cause) if is_unguarded or is_preempted else f"{type(cause).__name__}: {cause}",
                "exit_code": code,
                "reports": [report.to_json() for report in reports],
                "traceback": _told(error, cause),
            }
        )
        return code


def _cause_told_to_the_others(error: BaseException) -> BaseException:
    """The actual cause of this rank's end; reported to the others now, not when the process ends."""
    if "fleet_train.convert.process" not in sys.modules:  # it has never joined a job
        return error
    from fleet_train.convert import process

    return process.report_caught(error)


def _offer(profile: Any) -> None:
    """Make the parent's strategy this rank's default."""
    from fleet_train.convert import session

    session.offer(profile)


def _told(error: BaseException, cause: BaseException) -> str:
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
