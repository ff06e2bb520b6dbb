"""What the package does to the process of a user: everything that it replaces there, and how a rank ends.

Replaced are:

- ``sys.excepthook``: an error of ours is one line, and has its own exit code.
- ``sys.exit``: its code is this rank's failure, which the others learn before the process has ended.
- ``paddle.static.Executor.run`` (`session`, `trainings`, `compat.programs`, trials of `recommend`): scripts, and
  the libraries that they use, run programs with Paddle's executors.
- While a script runs for a plan or a trial (`rehearsal`): ``minimize``, ``backward``, Paddle's saving functions.
- ``paddle.optimizer.Optimizer._apply_optimize`` and Paddle's ``all_reduce`` (`session`): an update in dynamic mode.
- ``paddle.base.core.serialize_pir_program`` (`one_card`): scripts save converted programs with Paddle's functions.
- ``paddle.static.ExponentialMovingAverage``, and the constructors of Paddle's wrappers of optimizers (`moving_average`,
  `paddle_optimizers`): the first fails in PIR programs, the others around an optimizer of ours.
- Paddle's flags: the profile's ``environment``; oneDNN's, whose layouts cannot be sent (`optimizer`); the in-place pass
  (`passes.aliases`).

All of these go through this module. ``fleet.shutdown`` puts them back, in one process and in several, unless it is
called while an error of ours may be ending the script, which is still to be printed. With them it unregisters an
``atexit`` function. Six things cannot be undone: the flight recorder (a thread, an anonymous file, and a handler of a
real-time signal); the audit hook that sees an uncaught exception although another library has replaced
``sys.excepthook`` (it does nothing without a job); glibc's ``on_exit``, because Paddle's threads outlive the job; what
forked children do with what they inherit (here, and for the store's connections and claims of folders); the
allocator's thresholds; and variables of the environment that Paddle's C++ code reads (`collectives.join`).

How a rank ends is reported to the other ranks with its reason, and to the user in one line; the exit code gives the
kind. There are three cases. Python's audit event ``sys.excepthook`` announces an uncaught exception, even if a library
(rich, sentry) has replaced our hook. ``sys.exit`` is distinguished from a normal end by which code reads the exit code.
Finally, ``atexit`` leaves the job. None of this runs in a process forked from a rank; it only freezes what it inherits.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fleet_train.cluster.flight import trace
from fleet_train.cluster.flight.ring import recorder
from fleet_train.cluster.store.reports import exit_status
from fleet_train.errors import (
    ClusterError,
    ComputeFault,
    FleetTrainError,
    NotSaved,
    PaddleUnusable,
    Preempted,
    ScheduleMismatch,
    WorkerFailed,
    is_news,
)

if TYPE_CHECKING:  # it imports Paddle, which is not checked yet
    from fleet_train.collectives.job import Job

Hook = Callable[[Any, Any, Any], tuple[Any, Any]]
_OF_RUN = ("program", "feed", "fetch_list", "feed_var_name", "fetch_var_name", "scope")
"""The first arguments of ``Executor.run``; hooks may change the first three."""
# Paddle's words for an optimizer without parameters; the script meant a static program.
_IN_DYNAMIC_MODE = "should not be None in dygraph mode"
_STATIC_MODE = (
    "Paddle is in dynamic mode, and fleet_train converts static programs: call paddle.enable_static() at the top of "
    "the script, before the network is built"
)
# Their message is complete; a traceback through Paddle would hide it.
_ONE_LINE = (PaddleUnusable, ClusterError, ScheduleMismatch, WorkerFailed, Preempted, NotSaved, ComputeFault)

_job: Job | None = None
_pid = 0  # of the process that joined the job
_exit_code: int | None = None
_noted: tuple[BaseException, BaseException] | None = None  # the exception that ends this rank, and its cause
_is_printed = False  # our own hook has printed it
_ends_badly = False  # the script has called exit with another code than 0
_installed = False
_earlier_hook: Callable[..., Any] = sys.__excepthook__


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    name: str
    original: Any
    replacement: Any


_replaced: list[_Replaced] = []
_hooks: list[Hook] = []
_last_hooks: list[Hook] = []
_on_runs: list[Callable[[Any, Any], None]] = []
_after_runs: list[Callable[[Any], Any]] = []
_choosers: list[Callable[[Any, Any], tuple[Any, Any]]] = []
_explanations: list[Callable[[Exception], FleetTrainError | None]] = []
_flags: dict[str, Any] = {}  # as they were
_running: Any = None  # a weak reference to the executor that runs, or has run last


def install() -> None:
    """Hook the uncaught-exception handler, the normal exit and forks, until ``put_back``."""
    global _installed, _earlier_hook
    if not _installed:
        _installed = True
        _earlier_hook = replace(sys, "excepthook", _on_uncaught)
        atexit.register(_on_exit)
        _freeze_in_children()


def watch(job: Job) -> None:
    """Report the end of this process to ``job`` from now on."""
    global _job, _pid
    _job, _pid = job, os.getpid()
    install()
    if job.world_size > 1:
        _skip_teardown_of_libraries()
        _listen_for_uncaught()
        replace(sys, "exit", _exit)


def leave(job: Job) -> None:
    """Leave the watched job, and put back everything that the package has replaced in this process.

    Where an error of ours is being handled, as in ``finally: fleet.shutdown()``, it may be what ends the process and is
    still to be printed: then everything stays.
    """
    global _installed, _job
    if sys.exc_info()[1] is None:
        job.settle()
    _job = None
    job.leave()
    if not isinstance(sys.exc_info()[1], FleetTrainError):
        atexit.unregister(_on_exit)
        put_back()
        _installed = False


def _watched() -> Job | None:
    """The job, in the process that has joined it; None in its children."""
    return _job if os.getpid() == _pid else None


@functools.cache
def _freeze_in_children() -> None:
    """A child that collects an executor of its parent's crashes: the executor's threads were not forked."""
    os.register_at_fork(after_in_child=gc.freeze)


@functools.cache
def _skip_teardown_of_libraries() -> None:
    """End the process right after Python's exit, with its exit status; once per process.

    Threads of Gloo and of Paddle's stores are still running when a normal exit tears down the C++ libraries; a rank
    with finished, saved training has ended with signal 11 there. glibc calls ``on_exit`` handlers, latest first, with
    the status; this one is ``_exit`` itself. Python's own exit handlers and flushes run before it. (A forked child
    keeps it: it has none of the threads that the libraries would wait for.)
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


def report(error: BaseException) -> None:
    """Report to the other ranks that this one stops because of ``error``, or which ranks are missing if that is the
    cause.

    ``Preempted`` is not a failure: all ranks stop at the same step and leave gracefully.
    """
    job = _watched()
    if job is not None and not isinstance(error, Preempted):
        job.report_failure(_root_of(error, job))


def report_caught(error: BaseException) -> BaseException:
    """Report an exception that ends this rank although it has been caught; returns its cause."""
    return _note(error) or error


def _root_of(error: BaseException, job: Job) -> BaseException:
    """The job's failure, if the error was only raised from it by the script or Paddle's executor."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        if job.failure is not None and (link is job.failure or isinstance(link, SystemError)):
            return job.failure
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return error


@functools.cache
def _listen_for_uncaught() -> None:
    """Intercept every uncaught exception before its hook runs, whichever hook that is; once per process."""
    sys.addaudithook(_on_audit)


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "sys.excepthook" and isinstance(arguments[2], BaseException):
        _note(arguments[2])


def _note(error: BaseException) -> BaseException | None:
    """Report an uncaught exception to the other ranks; returns its cause, or None if it does not end the process."""
    global _exit_code, _noted
    if _noted is not None and _noted[0] is error:  # the audit event came before the hook
        return _noted[1]
    job = _watched()
    if getattr(error, "inside_host_operator", False):
        # Not the end yet: the executor will raise a SystemError in the script, and the cause is kept in the job.
        if isinstance(error, FleetTrainError) and job is not None and job.failure is None:
            job.failure = error
        return None
    cause = job.failure if job is not None and isinstance(error, SystemError) and job.failure else error
    report(error)
    if isinstance(cause, FleetTrainError):
        _exit_code = cause.exit_code
    _noted = (error, cause)
    return cause


def _on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    global _is_printed
    cause = _note(error)
    if cause is None:
        if not isinstance(error, FleetTrainError):
            _earlier_hook(kind, error, traceback)
        return
    if isinstance(cause, _ONE_LINE):
        _print(cause)
    else:
        _earlier_hook(kind, error, traceback)
        if _IN_DYNAMIC_MODE in str(error):
            print(f"fleet_train: {_STATIC_MODE}", file=sys.stderr, flush=True)
    _is_printed = True
    if isinstance(cause, FleetTrainError):
        raise SystemExit(cause.exit_code)


def _print(cause: BaseException) -> None:
    sys.stdout.flush()
    if is_news(cause):
        print(f"fleet_train: {type(cause).__name__}: {cause}", file=sys.stderr, flush=True)


_CODE: Any = SystemExit.__dict__["code"]


class _WatchedExit(SystemExit):
    """What ``sys.exit`` raises in a rank: if the interpreter itself reads the code, the process is ending.

    Only the interpreter reads it outside of any Python frame; code that catches the exit reads it inside one.
    """

    @property
    def code(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            _on_system_exit(code)
        return code

    @code.setter
    def code(self, value: Any) -> None:
        _CODE.__set__(self, value)


def _exit(status: Any = None, /) -> None:
    raise _WatchedExit() if status is None else _WatchedExit(status)


def _on_system_exit(code: Any) -> None:
    """The script has called exit: a code other than 0 is this rank's failure, unless it is due to another rank's."""
    global _ends_badly
    job, _ends_badly = _watched(), exit_status(code) != 0
    if job is None or exit_status(code) in (0, Preempted.exit_code, WorkerFailed.exit_code):
        return
    if job.failure is not None:
        job.report_failure(job.failure)
    else:
        job.report_exit(code)


def _on_exit() -> None:
    job = _watched()
    if job is None:
        return
    if _noted is None and not _ends_badly:
        try:
            job.settle()
        except Exception as error:
            _note(error)
    if _noted is not None and not _is_printed and isinstance(_noted[1], _ONE_LINE):
        _print(_noted[1])
    job.leave()
    if _exit_code is not None and job.world_size > 1:
        # A step was interrupted: threads of Paddle's executor may still run, and tearing down under them has crashed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


def replace(owner: Any, name: str, replacement: Any) -> Any:
    """Set ``owner.name`` until ``put_back``; returns the original. Does nothing the second time."""
    for each in _replaced:
        if each.owner is owner and each.replacement is replacement:
            return each.original
    original = getattr(owner, name)
    _replaced.append(_Replaced(owner, name, original, replacement))
    setattr(owner, name, replacement)
    return original


def set_flags(flags: Mapping[str, Any]) -> None:
    """``paddle.set_flags`` until ``put_back``."""
    import paddle  # not before the installed one has been checked

    for name, value in paddle.get_flags(list(flags)).items():
        _flags.setdefault(name, value)
    paddle.set_flags(dict(flags))


def has_set(flag: str) -> bool:
    """Whether ``set_flags`` has changed this flag."""
    return flag in _flags


def before_each_run(hook: Hook, is_last: bool = False) -> None:
    """Call ``hook(program, feed, fetch_list)`` from now on before a static program runs in this process, with the
    arguments of ``Executor.run``; it returns the feed and the fetch list to use. ``is_last``: after all others."""
    _hook_runs()
    hooks = _last_hooks if is_last else _hooks
    if hook not in hooks:
        hooks.append(hook)


def on_each_run(act: Callable[[Any, Any], None], is_first: bool = False) -> None:
    """Call ``act(program, scope)`` from now on before a static program runs in this process, and before all hooks;
    neither argument is None. ``is_first``: before all others."""
    _hook_runs()
    if act not in _on_runs:
        _on_runs.insert(0 if is_first else len(_on_runs), act)


def choose_each_run(choose: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Call ``choose(program, fetch_list)`` from now on before a static program runs in this process, after all hooks;
    it returns the program to run, and what to fetch of that. Call `before_each_run` as well."""
    _choosers.append(choose)


def after_each_run(take: Callable[[Any], Any]) -> None:
    """Call ``take(results)`` from now on with what a run has fetched; it returns what the script gets of it. Call
    `before_each_run` as well."""
    _after_runs.append(take)


def _hook_runs() -> None:
    import paddle

    if not _hooks and not _last_hooks and not _on_runs:
        run = paddle.static.Executor.run

        @functools.wraps(run)
        def run_with_hooks(self: Any, *args: Any, **named: Any) -> Any:
            global _running
            _running = weakref.ref(self)
            # Passed on as the caller gave them, by place or by name: what ``run`` is may be another library's wrapper.
            given = dict(zip(_OF_RUN, args, strict=False)) | named
            program, feed, fetch_list, *_, scope = (given.get(name) for name in _OF_RUN)
            for act in _on_runs:
                act(
                    paddle.static.default_main_program() if program is None else program,
                    paddle.static.global_scope() if scope is None else scope,
                )
            for each in (*_hooks, *_last_hooks):
                feed, fetch_list = each(program, feed, fetch_list)
            for choose in _choosers:
                program, fetch_list = choose(program, fetch_list)
            places = list(args)
            for place, (name, value) in enumerate(zip(_OF_RUN, (program, feed, fetch_list), strict=False)):
                if place < len(places):
                    places[place] = value
                elif value is not given.get(name):
                    named[name] = value
            event = recorder.begin("run")
            try:
                results = run(self, *places, **named)
            except Exception as error:
                for explain in _explanations:
                    if (cause := explain(error)) is not None:
                        raise cause from error
                raise
            finally:
                recorder.end(event)
            trace.after_run()
            for take in _after_runs:
                results = take(results)
            return results

        replace(paddle.static.Executor, "run", run_with_hooks)


def running() -> weakref.ref[Any]:
    """The executor of the script whose run is under way, or has been the last. Called by hooks of a run."""
    found: weakref.ref[Any] = _running
    return found


def run_without_hooks(executor: Any, program: Any, feed: Any, scope: Any) -> None:
    """Run a program that the script does not know of. ``executor``: one that keeps the scopes that it has run in no
    longer than the script does."""
    replaced = next(each for each in _replaced if each.name == "run")
    replaced.original(executor, program, feed=feed, fetch_list=[], scope=scope)


def explain_failed_runs(explain: Callable[[Exception], FleetTrainError | None]) -> None:
    """Ask ``explain(error)`` from now on when a run has failed; what it returns is raised instead. Call
    `before_each_run` as well."""
    _explanations.append(explain)


def put_back() -> None:
    """Make everything in this process as it was. What somebody else has replaced since stays."""
    _hooks.clear()
    _last_hooks.clear()
    _on_runs.clear()
    _after_runs.clear()
    _choosers.clear()
    _explanations.clear()
    while _replaced:
        last = _replaced.pop()
        if getattr(last.owner, last.name) is last.replacement:
            setattr(last.owner, last.name, last.original)
    if _flags:
        import paddle

        paddle.set_flags(dict(_flags))
        _flags.clear()
