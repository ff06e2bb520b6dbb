"""How a rank ends: the others learn why, the user reads one line, the exit code says what kind of end it was."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from types import TracebackType

from fleet_train.collectives.job import Job
from fleet_train.errors import ClusterError, FleetTrainError, PaddleUnusable, Preempted, ScheduleMismatch, WorkerFailed

# Their message says all there is to say; a traceback through Paddle would bury it.
_ONE_LINE = (PaddleUnusable, ClusterError, ScheduleMismatch, WorkerFailed, Preempted)

_job: Job | None = None
_exit_code: int | None = None
_installed = False
_teardown_is_skipped = False


def install() -> None:
    """Hook the uncaught-exception handler and the normal exit; once per process."""
    global _installed
    if not _installed:
        _installed = True
        sys.excepthook = _on_uncaught
        atexit.register(_on_exit)


def watch(job: Job | None) -> None:
    """From now on this process's end is told to ``job``."""
    global _job
    _job = job
    if job is not None and job.world_size > 1:
        _skip_teardown_of_libraries()


def _skip_teardown_of_libraries() -> None:
    """Let the process end right after Python has, with its exit status, once per process.

    Threads of Gloo and of Paddle's stores are still at work when the C++ libraries of a normal exit are torn down; a
    rank whose training was done and saved has ended with signal 11 there. glibc calls ``on_exit`` handlers, latest
    first, with the status; this one is ``_exit`` itself. Python's own exit handlers and buffers come before it.
    """
    global _teardown_is_skipped
    if not _teardown_is_skipped:
        _teardown_is_skipped = True
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


def report(error: BaseException) -> None:
    """Tell the other ranks that this one stops because of ``error``, unless it only follows another's failure.

    ``Preempted`` is no failure: all ranks stop at the same step, each leaves in good order.
    """
    if _job is None or isinstance(error, Preempted):
        return
    _job.failure = error if isinstance(error, FleetTrainError) else FleetTrainError(str(error))
    if not isinstance(error, WorkerFailed):
        where = _job.cluster.describe(_job.cluster.rank)
        _job.report_failure(f"{where} stopped with {type(error).__name__}: {str(error).strip() or '(no message)'}")


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if getattr(error, "inside_host_operator", False):
        # Not the end yet: the executor will raise a SystemError in the script, and the cause is kept in the job.
        if not isinstance(error, FleetTrainError):
            sys.__excepthook__(kind, error, traceback)
        elif _job is not None and _job.failure is None:
            _job.failure = error
        return
    cause = _job.failure if _job is not None and isinstance(error, SystemError) and _job.failure else error
    report(cause)
    if isinstance(cause, _ONE_LINE):
        sys.stdout.flush()
        print(f"fleet_train: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, traceback)
    if isinstance(cause, FleetTrainError):
        global _exit_code
        _exit_code = cause.exit_code
        raise SystemExit(cause.exit_code)


def _on_exit() -> None:
    if _job is None:
        return
    _job.leave()
    if _exit_code is not None and _job.world_size > 1:
        # A step was cut off: threads of Paddle's executor may still run, and tearing down under them has crashed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)
