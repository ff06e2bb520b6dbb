"""The process of one spawned rank: reads a function, calls it, writes its result or error for the caller of spawn.

    python -m fleet_train.spawning.rank_main GREETING

which is a file of `shipping`, and names those for the ranks' answers. Of the caller's script only what the function
itself needs is imported or run here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Any

from fleet_train import timeouts
from fleet_train.cluster.store.reports import exit_status
from fleet_train.errors import FleetTrainError, Preempted
from fleet_train.spawning import shipping


def main(greeting: str) -> int:
    """The exit code of the process."""
    with shipping.opened(greeting) as asked:
        message = shipping.read(asked)
    if not message["keeps_logs"]:
        os.environ.pop("PADDLE_LOG_DIR", None)  # what else a rank writes beside its log would go with it
    with shipping.opened(message["answers"][int(os.environ["PADDLE_TRAINER_ID"])]) as answer:
        status = _Call(answer, message).run(message["call"])
    patience = timeouts.FAILED_RANK_EXIT_SECONDS if status else timeouts.SPAWN_EXIT_SECONDS
    threading.Thread(target=_end_anyway, args=(status, patience), daemon=True).start()
    return status


def _end_anyway(status: int, seconds: float) -> None:
    """Threads of the function may go on behind it, but not forever."""
    time.sleep(seconds)
    os._exit(status)


class _Call:
    """The call of the function, and how it ended."""

    def __init__(self, answer: int, message: dict[str, Any]) -> None:
        self._answer = answer
        self._train = str(message["train"])
        sys.path[:] = message["path"]
        sys.argv[:] = message["argv"]
        shipping.take_sources(message["sources"])

    def run(self, body: bytes) -> int:
        try:
            train, args, profile = shipping.unship_call(body, self._train)
            offer(profile)
            result = shipping.ship_result(train(*args), self._train)
        except SystemExit as end:
            return self._exited(end)
        except BaseException as error:
            return self._failed(error)
        sys.stdout.flush()
        shipping.write(self._answer, {"result": result})
        return 0

    def _exited(self, end: SystemExit) -> int:
        status = exit_status(end.code)
        if status == 0:
            shipping.write(self._answer, {"result": shipping.ship_result(None, self._train)})
            return 0
        return self._send_failure("failed", f"sys.exit({end.code!r})", status, _traceback_text(end, end))

    def _failed(self, error: BaseException) -> int:
        cause = cause_reported(error)
        code = cause.exit_code if isinstance(cause, FleetTrainError) else 1
        sys.stdout.flush()
        kind, message = "failed", f"{type(cause).__name__}: {cause}"
        if isinstance(cause, Preempted):
            kind, message = "preempted", str(cause)
        elif isinstance(cause, shipping.CalledWhileImported):
            kind, message = "unguarded", str(cause)
        return self._send_failure(kind, message, code, _traceback_text(error, cause))

    def _send_failure(self, kind: str, message: str, exit_code: int, traceback_text: str) -> int:
        failure = {"kind": kind, "message": message, "exit_code": exit_code, "traceback": traceback_text}
        shipping.write(self._answer, failure)
        return exit_code


def offer(profile: Any) -> None:
    """Make it the default of this rank's ``fleet``; None: there is none."""
    if profile is not None:
        from fleet_train.convert import session

        session.offered_profile = profile


def cause_reported(error: BaseException) -> BaseException:
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
    status = main(sys.argv[1])
    if status:
        sys.exit(status)
