"""``fleet_train.spawn``: call a function in several ranks on this machine, and return their results."""

from __future__ import annotations

import inspect
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fleet_train.cluster.cluster import DEFAULT_JOIN_TIMEOUT_SECONDS
from fleet_train.cluster.engines import detect
from fleet_train.cluster.network import free_port
from fleet_train.cluster.store.access import SECRET, SECRET_FILE
from fleet_train.errors import ClusterError
from fleet_train.launch.node import look_around
from fleet_train.launch.prepare import prepare
from fleet_train.launch.request import LaunchRequest
from fleet_train.spawning import shipping
from fleet_train.spawning.launching import run
from fleet_train.spawning.outcome import results
from fleet_train.spawning.shipping import name_of, shown


def spawn(
    train: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 2,
    *,
    strategy: Any = None,
    log_dir: str | os.PathLike[str] | None = None,
    join_timeout_seconds: float = DEFAULT_JOIN_TIMEOUT_SECONDS,
) -> list[Any]:
    """Call ``train(*args)`` in ``nprocs`` ranks on this machine; returns their results, by rank.

    The ranks are new processes: ``train`` may be defined in a notebook or a script, and joins its job by
    ``fleet.init`` as under the launcher. This process does not join. The output of rank 0 is shown immediately.
    ``strategy``: a profile's name or path, a `DistributedStrategy` or a `Profile`: the default of the ranks' ``fleet``.
    ``log_dir``: a folder for ``workerlog.N``, the output of each rank. ``join_timeout_seconds`` bounds ``fleet.init``.

    Raises RankFailed with the rank that failed first and its traceback; LinkFailed if the ranks could not communicate
    and none is to blame; Preempted if the ranks have stopped gracefully because they were asked to; ClusterError and
    ProfileError for invalid calls. Ctrl-C stops all ranks.
    """
    refuse_within_a_rank(os.environ)
    arguments = check_call(train, args)
    check_ranks(nprocs, look_around(os.environ).gpus)
    timeout_seconds = check_seconds("join_timeout_seconds", join_timeout_seconds)
    profile = profile_of(strategy)
    body = shipping.ship(train, arguments, profile)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="fleet_train.")) if log_dir is None else log_dir)
        greeting, *answers = (stack.enter_context(shipping.created()) for _ in range(1 + nprocs))
        shipping.write(greeting, _greeting(train, answers) | {"call": body, "keeps_logs": log_dir is not None})
        request = request_of(shipping.path_of(greeting), nprocs, logs, timeout_seconds)
        environ = environ_of(os.environ)
        launch = prepare(request, environ, profile)
        if launch.environment.kept:
            names = ", ".join(launch.environment.kept)
            show(f"fleet_train: {names}: the environment's value is used, not the profile's; unset it to use that\n")
        ended = run(launch, environ, show)
        returned = results(ended, [shipping.read(answer) for answer in answers], log_dir is not None)
    return [shipping.unship(result) for result in returned]


def request_of(greeting: str, nprocs: int, logs: Path, join_timeout_seconds: float) -> LaunchRequest:
    """The launch of ranks of this machine, with an address (all of 127.0.0.0/8 are this machine's), a port and a name
    of their own, so that two spawns cannot interfere."""
    host = f"127.{'.'.join(str(1 + secrets.randbelow(254)) for _ in range(3))}"
    return LaunchRequest(
        command=("fleet_train.spawning.rank_main", greeting),
        is_module=True,
        hosts=(host,),
        started_port=free_port(host) - nprocs,  # the job store's is the one behind the ranks'
        processes_per_node=nprocs,
        log_dir=logs.absolute(),
        log_flag="log_dir",
        join_timeout_seconds=join_timeout_seconds,
        job_id=f"spawn-{secrets.token_hex(6)}",
        run=secrets.token_hex(8),
    )


def environ_of(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with a secret of this spawn's own."""
    others = {name: value for name, value in environ.items() if name not in (SECRET, SECRET_FILE)}
    return others | {SECRET: secrets.token_hex(24)}


def show(text: str) -> None:
    """Write to the Python-level stdout, which in a notebook is the cell's output and not a file descriptor."""
    stream = sys.stdout
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        pass  # the reader is gone; the job continues


def refuse_within_a_rank(environ: Mapping[str, str]) -> None:
    """Raise ClusterError if this process is a rank itself, of any launcher."""
    if shipping.loading:
        module, place = _caller()
        raise shipping.CalledWhileImported(
            f"fleet_train.spawn is called at the top level of {module} ({place}), which every rank imports to find "
            f'{shipping.loading}; put the call below `if __name__ == "__main__":`, or into a function'
        )
    number = environ.get("PADDLE_TRAINER_ID", "")
    if environ.get("FLEET_TRAIN_STORE") or environ.get("PADDLE_TRAINERS_NUM", "1") not in ("", "1"):
        raise ClusterError(
            f"fleet_train.spawn was called in rank {number or '?'} of a job, and a rank cannot start ranks; "
            "call it from a script or a notebook that no launcher has started, or call the function itself here"
        )
    started = detect(environ)
    if started is not None and started.count > 1:
        raise ClusterError(
            f"fleet_train.spawn was called in process {started.index} of {started.count} that {started.engine} has "
            "started, each of which would start a separate job; call fleet.init in them instead, or set "
            "FLEET_TRAIN_ENGINE=none if that is intended"
        )


def _caller() -> tuple[str, str]:
    """(module, file:line) of the code that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("fleet_train."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?")), f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _greeting(train: Callable[..., Any], answers: Sequence[int]) -> dict[str, Any]:
    """Sent to the ranks with the function: where modules are found, the source of cells for tracebacks, and the files
    for their answers."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return {
        "train": shipping.name_of(train),
        "path": path,
        "argv": [str(word) for word in sys.argv],
        "sources": shipping.sources(),
        "answers": [shipping.path_of(answer) for answer in answers],
    }


_MOST_RANKS = 1024


def check_call(train: Any, args: Any) -> tuple[Any, ...]:
    """The arguments as a tuple. Raises ClusterError if ``train(*args)`` cannot be called."""
    if not callable(train):
        raise ClusterError(
            f"fleet_train.spawn was given {train!r}, which is not a function; give the function itself, as in "
            "spawn(train), not what it returns, as in spawn(train())"
        )
    name = name_of(train)
    if inspect.iscoroutinefunction(train) or inspect.isgeneratorfunction(train):
        raise ClusterError(
            f"{name} is an async function or a generator; spawn takes a function that trains and returns"
        )
    if not isinstance(args, (tuple, list)):
        raise ClusterError(f"args={args!r} is not a tuple; one argument is written as args=(value,)")
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # written in C: the call itself will raise
        return tuple(args)
    try:
        signature.bind(*args)
    except TypeError as error:
        raise ClusterError(
            f"{name}{signature} cannot be called with args={_counted(args)}: {error}{_wants_its_rank(signature, args)}"
        ) from None
    return tuple(args)


def _counted(args: Any) -> str:
    return "()" if not args else f"({', '.join(type(value).__name__ for value in args)}{',' if len(args) == 1 else ''})"


def _wants_its_rank(signature: inspect.Signature, args: Any) -> str:
    """A hint for functions written for ``torch.multiprocessing.spawn``, which passes the rank first."""
    try:
        signature.bind(0, *args)
    except TypeError:
        return ""
    return "; spawn passes a function its args and no rank: get it from fleet.worker_index() or PADDLE_TRAINER_ID"


def check_ranks(nprocs: Any, gpus: Sequence[str] | None) -> None:
    """Raise ClusterError for an invalid number; ``gpus``: the visible ones, None on a build without GPU code."""
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise ClusterError(f"nprocs={nprocs!r} is not a whole number; it is how many ranks to start on this machine")
    if nprocs < 1:
        raise ClusterError(f"nprocs={nprocs} is too few; give 1 or more, the number of ranks to start on this machine")
    if nprocs > _MOST_RANKS:
        raise ClusterError(f"nprocs={nprocs} is more than the limit of {_MOST_RANKS} ranks on one machine")
    if gpus and nprocs > len(gpus):
        raise ClusterError(
            f"nprocs={nprocs}, but the visible GPUs are {','.join(gpus)} ({len(gpus)}): there is one rank per GPU; see "
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


def check_seconds(name: str, value: Any) -> float:
    """A bound in seconds. Raises ClusterError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1_000_000:
        raise ClusterError(f"{name}={value!r} is not a number of seconds above 0, up to 1000000")
    return float(value)


def profile_of(strategy: Any) -> Any:
    """The profile; None for None. Raises ProfileError, and ClusterError for anything but a strategy."""
    if strategy is None:
        return None
    from fleet_train.convert.strategy import DistributedStrategy
    from fleet_train.profile import Profile, load_profile

    if isinstance(strategy, (str, os.PathLike)):
        return load_profile(os.fspath(strategy))
    if isinstance(strategy, Profile):
        return strategy
    if isinstance(strategy, DistributedStrategy):
        return strategy.to_profile()
    if type(strategy).__name__ == "DistributedStrategy":  # Paddle's own
        return DistributedStrategy.from_stock(strategy).to_profile()
    raise ClusterError(
        f"strategy={shown(strategy)}: it takes a profile's name (fleet_train profiles lists them), the path "
        "of a YAML file, or a fleet_train.DistributedStrategy"
    )
