"""Kubeflow's TrainJob v2. Source: kubeflow/trainer 2.2 and 2.3, ``pkg/apis/trainer/v1alpha1/trainjob_types.go``,
``pkg/runtime/framework/plugins/torch/torch.go``, ``plugins/jobset/jobset.go``, ``manifests/base/runtimes``.
"""

from __future__ import annotations

from typing import Any

from fleet_train.errors import ClusterError
from fleet_train.manifest.checks import Training, about, about_ends, check_name, check_subdomain, paragraph, rows
from fleet_train.manifest.pods import END_SECONDS, Pods, command, to_yaml

VERSIONS = ("2.3", "2.2")
KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_JOB = _CONTAINER = "node"
"""The runtime's job, and its container, that the trainer's fields apply to."""
_MANAGER = "fleet-train/manifest"
_DEFAULT_PERIOD_SECONDS = 30
# JobSet gives a pod's name six characters more than its host name has.
_POD_SUFFIX = "-xxxxx"
_MOST_WORDS = 128


def train_job(
    training: Training,
    pods: Pods,
    runtime: str = "torch-distributed",
    runtime_kind: str = KINDS[0],
    version: str = VERSIONS[0],
) -> str:
    """``version``: of Kubeflow Trainer. Raises ClusterError."""
    check_name("--name", pods.name, f"-node-0-{training.nodes - 1}{_POD_SUFFIX}")
    check_subdomain("--runtime", runtime)
    period = _period(training, version)
    trainer: dict[str, Any] = {
        "image": pods.image,
        **_command(training, pods.working_folder),
        "env": pods.variables(RESERVED),
        "numNodes": training.nodes,
        "numProcPerNode": training.processes,
    }
    if resources := pods.resources():
        trainer["resourcesPerNode"] = resources
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": runtime_kind, "name": runtime},
        "trainer": trainer,
    }
    if patch := {**period, **_patch(pods)}:
        template = {"spec": {"template": {"spec": patch}}}
        jobs = {"template": {"spec": {"replicatedJobs": [{"name": _JOB, "template": template}]}}}
        spec["runtimePatches"] = [{"manager": _MANAGER, "trainingRuntimeSpec": jobs}]
    job = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": pods.metadata(), "spec": spec}
    return to_yaml(_comment(training, pods, runtime, version), job)


def _command(training: Training, working_folder: str | None) -> dict[str, Any]:
    """A TrainJob has no field for the folder that its program starts in."""
    words = training.launch()
    if working_folder is not None:
        words = ["sh", "-c", 'cd "$0" && exec "$@"', working_folder, *words]
    made = command(words)
    if len(made["args"]) > _MOST_WORDS:
        raise ClusterError(
            f"a TrainJob's args are at most {_MOST_WORDS} words, and the script's with the launcher's are "
            f"{len(made['args'])}; put the script's arguments into a file that it reads"
        )
    return made


def _period(training: Training, version: str) -> dict[str, int]:
    if version != VERSIONS[-1]:
        return {"terminationGracePeriodSeconds": training.grace_seconds + END_SECONDS}
    most = _DEFAULT_PERIOD_SECONDS - END_SECONDS
    if training.grace_seconds > most:
        raise ClusterError(
            f"--grace_seconds={training.grace_seconds}: a TrainJob of Kubeflow Trainer 2.2 cannot request more than "
            f"the {_DEFAULT_PERIOD_SECONDS} s that Kubernetes gives a pod to end, of which {END_SECONDS} s are the "
            f"launcher's; give --grace_seconds={most} or less, or use Trainer 2.3"
        )
    return {}


def _patch(pods: Pods) -> dict[str, Any]:
    if not pods.sources():
        return {}
    container = {"name": _CONTAINER, "volumeMounts": pods.mounts()}
    return {"volumes": pods.sources(), "containers": [container]}


def _comment(training: Training, pods: Pods, runtime: str, version: str) -> list[str]:
    kubectl, name, nodes = pods.kubectl(), pods.name, training.nodes
    first = f"jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
    suspend = '{"spec":{"suspend":true}}'
    commands = {
        "submit": f"{kubectl} apply -f FILE",
        "watch": f"{kubectl} get trainjob {name}\n{kubectl} logs -f -l {first}",
        "pause": f"{kubectl} patch trainjob {name} --type merge -p '{suspend}'   (false: resume)",
        "stop": f"{kubectl} delete trainjob {name}",
    }
    return [
        *about(training, f"TrainJob {name}, for Kubeflow Trainer {version}"),
        *rows(commands),
        *about_ends(training, END_SECONDS),
        *paragraph(
            f"Why a runtime for PyTorch: {runtime} starts any program. Its policy `torch` only gives each pod its "
            f"place: PET_MASTER_ADDR ({name}-node-0-0.{name}), PET_MASTER_PORT, PET_NNODES, PET_NODE_RANK, "
            "PET_NPROC_PER_NODE. The launcher reads these; torchrun is not started, and the image needs no PyTorch."
        ),
        *paragraph(
            "runtimePatches are for what a TrainJob has no fields of its own for: volumes, /dev/shm, the time to end. "
            "They belong to the runtime's job and container, which are both called node."
        ),
        *paragraph(
            "What happens when a pod ends depends on the runtime. With torch-distributed a container is restarted "
            "in place, also after exit code 12, until the restarts of all containers reach the backoffLimit of "
            f"its Job, which is 6 unless the runtime sets it; each restart of the training counts {nodes}. Your own "
            "runtime can set more (--runtime NAME --runtime_kind TrainingRuntime). Before that, the launchers "
            f"restart the ranks {training.max_restarts} times themselves."
        ),
    ]
