"""Detects what started this process: Slurm, MPI, a Kubernetes operator, torchrun's variables. Read from a plain dict.

If one engine runs inside another, the inner one is used: ``mpirun`` in a Slurm batch script, a launcher in a pod.
"""

from fleet_train.cluster.engines.detect import CHOICES, alone_in_allocation, detect
from fleet_train.cluster.engines.started import Started

__all__ = ["CHOICES", "Started", "alone_in_allocation", "detect"]
