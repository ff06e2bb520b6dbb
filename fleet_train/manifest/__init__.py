"""Files that start a training on an engine: a batch script for Slurm, manifests for Kubernetes. Arguments -> text.

Nothing is looked up and nothing is started. The variables that the engine then gives to each pod or task are read by
``fleet_train.cluster.engines``, so the script and its launch need no extra flags.
"""

from fleet_train.manifest.checks import Training
from fleet_train.manifest.kubernetes import Pods, Volume, indexed_job, paddle_job, train_job
from fleet_train.manifest.slurm import Batch, batch_script

__all__ = ["Batch", "Pods", "Training", "Volume", "batch_script", "indexed_job", "paddle_job", "train_job"]
