"""Which engine has started this process, and what it says; the nearest one where there are several."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleet_train.cluster.engines import kubernetes, mpi, slurm, torchrun
from fleet_train.cluster.engines.started import Started
from fleet_train.errors import ClusterError

ENGINE = "FLEET_TRAIN_ENGINE"

Reader = Callable[[Mapping[str, str]], Started | None]
# The nearest first: who is further down may have started who is further up, inside it. That RANK and WORLD_SIZE stand
# behind MPI and Slurm is the one exception: scripts export them next to MASTER_ADDR, with the same numbers or old ones.
_READERS: tuple[tuple[str, Reader], ...] = (
    ("mpi", mpi.read_open_mpi),
    ("mpi", mpi.read_hydra),
    ("slurm", slurm.read),
    ("torchrun", torchrun.read),
    ("kubernetes", kubernetes.read_indexed_job),
    ("kubernetes", kubernetes.read_train_job),
    ("kubernetes", kubernetes.read_paddle_job),
    ("kubernetes", kubernetes.read_paddle_operator),
)
CHOICES = ("auto", "none", *dict.fromkeys(name for name, _ in _READERS))


def detect(environ: Mapping[str, str], asked: str | None = None) -> Started | None:
    """This process's place by its engine's variables; None where there is no engine.

    ``asked``: one of `CHOICES`; None: FLEET_TRAIN_ENGINE, else ``auto``. Raises ClusterError where variables
    contradict each other, and where the engine asked for has set none.
    """
    choice = asked or environ.get(ENGINE, "").strip() or "auto"
    if choice not in CHOICES:
        raise ClusterError(f"{ENGINE}={choice} is not one of {', '.join(CHOICES)}")
    if choice == "none" or "FLEET_TRAIN_STORE" in environ:  # that is a rank of our launcher: the nearest of all
        return None
    if choice == "auto" and "TORCHELASTIC_RUN_ID" in environ:
        return torchrun.read(environ)  # the agent has started this very process, whatever it runs in
    first = next((each for name, read in _READERS if choice in ("auto", name) and (each := read(environ))), None)
    if first is None:
        if choice == "auto":
            return None
        raise ClusterError(
            f"--engine {choice} ({ENGINE}): none of its variables is set here, so this process was not started by it; "
            "leave the choice out"
        )
    if choice == "auto":
        _refuse_contradiction(first, torchrun.read(environ))
    return first


def alone_in_allocation(environ: Mapping[str, str]) -> str:
    """What to say to a process that trains alone while Slurm has given it several nodes; "" elsewhere."""
    nodes = 0 if "FLEET_TRAIN_STORE" in environ else slurm.allocated_nodes(environ)
    if nodes < 2:
        return ""
    return (
        f"this process trains alone: Slurm has allocated {nodes} nodes to the job, but srun has not started this "
        "command; write srun before it to use them"
    )


def _refuse_contradiction(first: Started, by_hand: Started | None) -> None:
    """RANK and WORLD_SIZE beside a task of MPI or Slurm, with other numbers, mean that one of the two is not meant."""
    if by_hand is not None and (by_hand.index, by_hand.count) != (first.index, first.count):
        raise ClusterError(
            f"RANK={by_hand.index} of WORLD_SIZE={by_hand.count}, but {first.engine} says that this is process "
            f"{first.index} of {first.count}; unset RANK and WORLD_SIZE, or say which holds: {ENGINE}=torchrun, or the "
            "other's name (launch: --engine)"
        )
