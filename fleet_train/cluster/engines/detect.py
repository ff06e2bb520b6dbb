"""The engine that started this process, and its variables; the innermost one if there are several."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fleet_train.cluster.engines import kubernetes, mpi, slurm, torchrun
from fleet_train.cluster.engines.started import Started
from fleet_train.errors import ClusterError

ENGINE = "FLEET_TRAIN_ENGINE"

Reader = Callable[[Mapping[str, str]], Started | None]
# The innermost first: an engine further down may have started one further up. That RANK and WORLD_SIZE come after
# MPI and Slurm is the one exception: scripts export them next to MASTER_ADDR, with the same numbers or old ones.
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
    """This process's place by its engine's variables; None if there is no engine.

    ``asked``: one of `CHOICES`; None: FLEET_TRAIN_ENGINE, else ``auto``. Raises ClusterError if variables
    contradict each other, or if the requested engine has set none.
    """
    choice = asked or environ.get(ENGINE, "").strip() or "auto"
    if choice not in CHOICES:
        raise ClusterError(f"{ENGINE}={choice} is not one of {', '.join(CHOICES)}")
    if choice == "none" or "FLEET_TRAIN_STORE" in environ:  # a rank of our launcher: the innermost of all
        return None
    if choice == "auto" and "TORCHELASTIC_RUN_ID" in environ:
        return torchrun.read(environ)  # its agent started this very process, whatever engine is outside
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
    """The message for a process that trains alone although Slurm allocated several nodes; "" otherwise."""
    nodes = 0 if "FLEET_TRAIN_STORE" in environ else slurm.allocated_nodes(environ)
    if nodes < 2:
        return ""
    return (
        f"this process trains alone: Slurm allocated {nodes} nodes to the job, but srun did not start this "
        "command; write srun before it to use them"
    )


def _refuse_contradiction(first: Started, by_hand: Started | None) -> None:
    """RANK and WORLD_SIZE that contradict those of an MPI or Slurm task: one of the two must be wrong."""
    if by_hand is not None and (by_hand.index, by_hand.count) != (first.index, first.count):
        raise ClusterError(
            f"RANK={by_hand.index} of WORLD_SIZE={by_hand.count}, but {first.engine} says that this is process "
            f"{first.index} of {first.count}; unset RANK and WORLD_SIZE, or choose one: {ENGINE}=torchrun, or the "
            "other's name (launch: --engine)"
        )
