"""Plans without a cluster: a script runs up to its first step as rank 0 of a job whose other ranks do not exist.

It ends there, or before its first write after a ``minimize``: nothing is trained, sent or saved. A script that
fleet_train has not converted ends at the same place, with the lines that it lacks.
"""

from __future__ import annotations

import atexit
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import popen_forkserver, popen_spawn_posix
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import paddle

from fleet_train.cluster import Cluster
from fleet_train.cluster.store.client import Variants
from fleet_train.collectives.job import Array, Job, refuse_unreducible
from fleet_train.collectives.paddle_compat import require_paddle
from fleet_train.convert import process, session
from fleet_train.convert.passes.program import script_line, updates_alone
from fleet_train.errors import ConversionError
from fleet_train.log import logger
from fleet_train.plan import CommPlan
from fleet_train.plan.price import PAPER, Network
from fleet_train.profile import Profile

LINES = """\
from fleet_train import fleet                                      # below `import paddle`
fleet.init(is_collective=True)                                     # below `paddle.enable_static()`
optimizer = fleet.distributed_optimizer(optimizer)                 # before `optimizer.minimize(loss)`
random = np.random.default_rng(seed=fleet.worker_index())          # each rank reads samples of its own: docs/data.md
fleet.save_persistables(exe, "output/mlp")                         # in place of `paddle.static.save`, by every rank"""


def not_converted(what: str, who: str = "", minimizes: str = "") -> ConversionError:
    """The error for a script that trains, or would, without the other ranks. ``what``: what it was about to do, and
    where; ``who``: the command that has ended it there, empty for none; ``minimizes``: the line that does."""
    ended = f" {who} has ended the script there: nothing was trained or saved." if who else ""
    alone = f", and {minimizes} minimizes without the other ranks" if minimizes else ""
    if who and paddle.in_dynamic_mode():
        return ConversionError(
            f"{what}, and nothing in the script is converted.{ended} It trains in dynamic mode; fleet_train converts "
            "static programs (paddle.enable_static()). Dynamic scripts run below `launch` with paddle.DataParallel"
        )
    if not session.is_open():
        return ConversionError(
            f"{what}{alone}; nothing in the script is converted.{ended} It lacks these lines (docs/start.md; `port` "
            f"writes them for scripts of Fleet and fluid):\n{LINES}"
        )
    return ConversionError(
        f"{what}{alone}; nothing in the script is converted.{ended} Write optimizer = "
        "fleet.distributed_optimizer(optimizer) before minimize, and call minimize of that optimizer"
    )


def before_training_alone(stop: Callable[[ConversionError], None], who: str) -> None:
    """Call ``stop``, until a program is converted, before a program without communication updates parameters, before a
    backward pass in dynamic mode, and before Paddle saves. It raises, ends the process, or lets it pass."""

    def refuse(what: str, minimizes: str = "") -> None:
        if not session.is_open() or not session.current().plans:
            stop(not_converted(what, who, minimizes))

    def check(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        if where := _updates_alone(program):
            refuse(f"{script_line()} runs a program that trains", where)
        return feed, fetch_list

    process.before_each_run(check)
    _before_dynamic_steps_and_saves(refuse)


def _updates_alone(program: Any) -> str:
    """The line at which a program that is run updates parameters; empty if it does not. Scripts may wrap it
    (CompiledProgram); None is the default main program."""
    inner = getattr(program, "_program", program) or paddle.static.default_main_program()
    return updates_alone(inner, set()) if isinstance(inner, paddle.static.Program) else ""


def _before_dynamic_steps_and_saves(action: Callable[[str], None]) -> None:
    for owner in (paddle.Tensor, paddle.autograd):
        _before(owner, "backward", lambda *_: action(f"{script_line()} calls backward"))
    _before(paddle, "grad", lambda *_: action(f"{script_line()} calls paddle.grad"))
    for owner, name in _SAVES:
        _before(owner, name, lambda *_: action(f"{script_line()} saves"))


def _before(owner: Any, name: str, action: Callable[..., Any]) -> None:
    """Give ``action`` the arguments of each call of ``owner.name`` before it, from now on."""
    original = getattr(owner, name)

    def replacement(*arguments: Any, **named: Any) -> Any:
        action(*arguments)
        return original(*arguments, **named)

    process.replace(owner, name, replacement)


@dataclass(frozen=True)
class Planned:
    """A plan, the profile that it was made from, and the line of the script that converts the program."""

    plan: CommPlan
    profile: Profile
    place: str = ""


def plans_of(action: Callable[[], Any], cluster: Cluster, network: Network = PAPER) -> list[Planned]:
    """The plans of the programs that ``action`` converts before its first step. Nothing is trained, sent or saved.
    Settings that the profile leaves open are chosen for ``network``.

    Raises ConversionError when ``action`` converts no program.
    """
    require_paddle()
    if cluster.world_size == 1:
        raise ConversionError("one rank communicates nothing: plan for more (--nodes, --ranks_per_node)")
    session.end()
    watched = _Watched()
    session.imagined_job = lambda: _ImaginedJob(cluster, network, watched)
    try:
        watched.begin()
        action()
    except _Over:
        pass
    except (Exception, SystemExit) as error:
        watched.ended_with(error)
    finally:
        watched.close()
        session.end()
        session.imagined_job = None
    return watched.result()


def plans_of_script(
    script: Path, arguments: Sequence[str], cluster: Cluster, network: Network = PAPER
) -> list[Planned]:
    """Make the plans of a training script, run with these arguments up to its first step; see `plans_of`."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        return plans_of(lambda: runpy.run_path(str(script), run_name="__main__"), cluster, network)
    finally:
        sys.argv, sys.path[:] = before


class _Over(BaseException):
    """Ends the script. A BaseException: a script's ``except Exception`` lets it pass."""


class _Watched:
    """The script, watched for the first thing that it may not do here.

    Startup programs run until the first ``minimize``; later ones are left out, so that a model larger than this
    machine can be planned. What the script does before, such as making folders, is its own.
    """

    def __init__(self) -> None:
        self._planned: list[Planned] = []
        self._error: ConversionError | None = None
        self._minimized_alone = ""
        self._refused = 0
        self._is_closed = False

    def begin(self) -> None:
        global _watched
        _watched = self
        _listen_for_writes()
        for name in ("run", "train_from_dataset", "infer_from_dataset"):
            original = getattr(paddle.static.Executor, name)
            method = self._run if name == "run" else self._runs_dataset
            process.replace(paddle.static.Executor, name, _method(partial(method, original)))
        for name in ("minimize", "apply_gradients"):
            _before(paddle.optimizer.Optimizer, name, self._minimizes)
        _before_dynamic_steps_and_saves(self._step)
        for popen in (popen_spawn_posix.Popen, popen_forkserver.Popen):
            _before(popen, "_launch", self._starts)
        process.replace(os, "_exit", _exit_of(os.getpid()))
        process.replace(atexit, "register", _without_the_scripts(atexit.register))

    def close(self) -> None:
        """Note that the script has ended: it is no longer watched."""
        global _watched
        if not self._planned and self._error is None:
            self._error = not_converted("the script has ended without a step", "", self._minimized_alone)
        self._is_closed, _watched = True, None
        process.put_back()

    def result(self) -> list[Planned]:
        if self._error is not None:
            raise self._error
        return self._planned

    def planned(self, plan: CommPlan) -> None:
        self._planned.append(Planned(plan, session.current().profile or Profile(), script_line()))

    def ended_with(self, error: BaseException) -> None:
        """Note the error with which the script has ended before anything had to end it."""
        if self._planned:
            if not isinstance(error, SystemExit):
                logger.warning(
                    f"after its minimize the script ended with {type(error).__name__}: {error}; startup programs are "
                    "not run here. Programs that it would have converted later are not shown"
                )
        elif self._minimized_alone:
            what = f"the script ended with {type(error).__name__}: {error}"
            self._error = not_converted(what, "", self._minimized_alone)
        elif isinstance(error, SystemExit):
            self._error = ConversionError(f"the script ended (exit {error.code}) before optimizer.minimize was called")
        elif paddle.distributed.fleet.fleet._role_maker is not None and not session.is_open():
            name = type(error).__name__
            self._error = not_converted(f"the script uses Paddle's own fleet, and ended with {name}: {error}"[:300])
        else:
            raise error

    def leaves(self) -> None:
        """``fleet.shutdown``: what follows is no longer watched."""
        if not self._is_closed and self._planned:
            self._stop()

    def writes(self, what: str) -> None:
        """Called when something is about to be written, or a program to be started."""
        if self._planned and not self._refused:
            logger.info(f"ended at {script_line()}, before it writes ({what}); what it converts later is not shown")
        if self._refused or self._planned or self._minimized_alone:
            self._step(f"{script_line()} writes ({what})")

    def starts_python(self) -> NoReturn:
        """Ranks or another script, in a process that is not watched (a fork is)."""
        if not self._planned and self._error is None:
            self._error = ConversionError(
                f"{script_line()} starts another Python process, in which plan does not watch what is trained and "
                "saved, and has converted no program before. plan has ended the script there: nothing was trained or "
                "saved. Plan for the script, or call the function, that this process would run"
            )
        self._stop()

    def _starts(self, _: Any, started: Any) -> None:
        """A process of multiprocessing that is no fork. Pools and loaders have workers that serve the script."""
        target = getattr(started, "_target", None)
        if not getattr(target, "__module__", "").startswith(("multiprocessing.", "concurrent.", "paddle.io.")):
            self.starts_python()

    def _minimizes(self, *_: Any) -> None:
        self._minimized_alone = self._minimized_alone or script_line()

    def _run(self, original: Any, executor: Any, program: Any = None, feed: Any = None, fetch_list: Any = None,
             *arguments: Any, **named: Any) -> Any:  # fmt: skip
        alone = _updates_alone(program)
        has_begun = self._refused or self._planned or self._minimized_alone
        if alone or has_begun or not session.is_open():
            if alone or feed or fetch_list:
                self._minimized_alone = self._minimized_alone or alone
                self._step(f"{script_line()} runs a program")
            if has_begun:  # a startup program
                return []
        return original(executor, program, feed, fetch_list, *arguments, **named)

    def _runs_dataset(self, original: Any, *_: Any, **__: Any) -> None:
        del original
        self._step(f"{script_line()} runs a program")

    def _step(self, what: str) -> NoReturn:
        """The script begins what is not done here."""
        if not self._planned and self._error is None:
            self._error = not_converted(what, "plan", self._minimized_alone)
        self._stop()

    def _stop(self) -> NoReturn:
        self._refused += 1
        if self._refused > _MOST_REFUSED:
            logger.error(f"{script_line()} catches what ends the script, again and again: use `except Exception`")
            _EXIT(ConversionError.exit_code)
        raise _Over


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A class's attribute that gets the instance, unlike a partial function."""
    return lambda *arguments, **named: function(*arguments, **named)


def _exit_of(process_id: int) -> Callable[[int], NoReturn]:
    """``os._exit``, which would end the command before it has shown anything; that of child processes stays."""

    def leave(status: int) -> NoReturn:
        if os.getpid() != process_id:
            _EXIT(status)
        raise SystemExit(status)

    return leave


def _without_the_scripts(register: Callable[..., Any]) -> Callable[..., Any]:
    """``atexit.register`` for all but the script, whose functions would save after it is no longer watched."""

    def registered(function: Any, *arguments: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        is_library = caller.startswith((os.path.dirname(os.__file__) + os.sep, "<frozen")) or "-packages" in caller
        return register(function, *arguments, **named) if is_library or _is_ours() else function

    return registered


_EXIT = os._exit
_MOST_REFUSED = 1000
_SAVES = (
    (paddle, "save"),
    (paddle.framework.io, "save"),
    (paddle.static, "save"),
    (paddle.static, "save_inference_model"),
    (paddle.jit, "save"),
    (paddle.base.core, "serialize_pir_program"),
    (paddle.base.core, "save_func"),
    (paddle.base.core, "save_combine_func"),
)
"""Functions of Paddle that save, whatever their names: the last three write in C++, which no audit hook sees."""
_WRITES = frozenset(
    "os.mkdir os.remove os.rmdir os.rename os.truncate os.link os.symlink os.system shutil.rmtree shutil.move "
    "subprocess.Popen".split()
)
_STARTS = frozenset("os.system os.exec os.posix_spawn os.spawn subprocess.Popen".split())
_PYTHON = re.compile(
    r"(?:^|[;&|(]\s*|\b(?:env|exec|nohup|time|timeout \S+)\s+|-c\s+|\b(?:mpirun|mpiexec|srun)\s.*\s)"
    r"(?:\w+=\S*\s+)*['\"]?(?:\S*/)?(?:python[0-9.]*|fleet_train|fleetrun)(?=\s|$)(?!\s+(?:-V|--version|-m pip)\b)"
)
"""A command that starts Python, at a place of a shell's line where a command stands."""
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_watched: _Watched | None = None


@cache
def _listen_for_writes() -> None:
    """Add the audit hook, once per process: it cannot be removed."""
    sys.addaudithook(_on_audit)


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event in _STARTS and _PYTHON.search(_command(arguments)) and not _is_ours():
        _watched.starts_python()
    if _watched is None or (event != "open" and event not in _WRITES):
        return
    path = str(arguments[0]) if arguments else ""
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _TO_WRITE):
        return
    # Modules that are imported are compiled into files, and output may go to a device.
    if isinstance(arguments[0], int) or "__pycache__" in path or path.startswith(("/dev/", "/proc/")):
        return
    _watched.writes(path)


def _command(arguments: tuple[Any, ...]) -> str:
    """What a process is started with: a shell's line, or a program and its arguments."""
    words = arguments[1] if len(arguments) > 1 else arguments[0]
    given = [words] if isinstance(words, (str, bytes, os.PathLike)) else words
    return " ".join(map(os.fsdecode, given))


def _is_ours() -> bool:
    """Whether a loader of this package starts a worker: what it starts is no rank."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("fleet_train.data.", "fleet_train.compat.")):
            return True
        frame = frame.f_back
    return False


class _ImaginedJob(Job):
    """Rank 0 of a job whose other ranks do not exist; checks between ranks always pass."""

    def __init__(self, cluster: Cluster, network: Network, watched: _Watched) -> None:
        super().__init__(cluster, paddle.CPUPlace())
        self.network, self.network_source = network, "on paper"
        self._script = watched

    def barrier(self, name: str, timeout_seconds: float | None = None) -> None:
        """Waits for no rank."""

    def all_gather(self, name: str, value: Any, timeout_seconds: float | None = None) -> dict[int, Any]:
        del name, timeout_seconds
        return dict.fromkeys(range(self.world_size), value)

    def broadcast(self, name: str, value: Any, source: int = 0, timeout_seconds: float | None = None) -> Any:
        del name, source, timeout_seconds
        return value

    def compare(self, name: str, value: Any, timeout_seconds: float | None = None) -> Variants:
        del name, value, timeout_seconds
        return []

    def reduce(self, values: Array, op: str) -> Array:
        refuse_unreducible(values, op)
        return values * self.world_size if op == "sum" else values.copy()

    def carries_out(self, plan: CommPlan) -> bool:
        self._script.planned(plan)
        return False

    def leave(self) -> None:
        self._script.leaves()
        super().leave()
