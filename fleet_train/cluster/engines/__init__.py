"""Who started this process: Slurm, MPI, an operator of Kubernetes, torchrun's variables. One place, from a plain dict.

An engine inside another one is the nearer: ``mpirun`` in a batch script of Slurm, a pod's launcher below an operator.
"""

from fleet_train.cluster.engines.detect import CHOICES, alone_in_allocation, detect
from fleet_train.cluster.engines.started import Started

__all__ = ["CHOICES", "Started", "alone_in_allocation", "detect"]
