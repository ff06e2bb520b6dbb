"""Mistakes in a call of ``spawn`` that can be found before a process starts."""

from __future__ import annotations

import inspect
from typing import Any

from fleet_train.errors import ClusterError
from fleet_train.launch.spec.machine import Machine
from fleet_train.spawning.shipping import name_of

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


def check_ranks(nprocs: Any, machine: Machine) -> tuple[str, ...] | None:
    """The devices of the ranks; None on a build without GPU code. Raises ClusterError for an invalid number."""
    if isinstance(nprocs, bool) or not isinstance(nprocs, int):
        raise ClusterError(f"nprocs={nprocs!r} is not a whole number; it is how many ranks to start on this machine")
    if nprocs < 1:
        raise ClusterError(f"nprocs={nprocs} is too few; give 1 or more, the number of ranks to start on this machine")
    if nprocs > _MOST_RANKS:
        raise ClusterError(f"nprocs={nprocs} is more than the limit of {_MOST_RANKS} ranks on one machine")
    if not machine.gpus:
        return None
    if nprocs > len(machine.gpus):
        raise ClusterError(
            f"nprocs={nprocs}, but the visible GPUs are {','.join(machine.gpus)} ({len(machine.gpus)}): there is one "
            "rank per GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return machine.gpus[:nprocs]


def check_seconds(name: str, value: Any) -> float:
    """A bound in seconds. Raises ClusterError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1_000_000:
        raise ClusterError(f"{name}={value!r} is not a number of seconds above 0, up to 1000000")
    return float(value)
