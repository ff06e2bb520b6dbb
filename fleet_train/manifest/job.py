"""A Kubernetes Job with ``completionMode: Indexed``, and the headless service that gives its pods names.

Sources: kubernetes.io "Job" (Indexed completion mode, Backoff limit per index, Pod failure policy, Pod replacement
policy) and "Job with Pod-to-Pod Communication". Kubernetes 1.29 is the first version with all of it enabled.
"""

from __future__ import annotations

from typing import Any

from fleet_train.errors import (
    CheckpointError,
    ConversionError,
    DataError,
    NotFinite,
    NotSaved,
    PaddleUnusable,
    Preempted,
    ProfileError,
)
from fleet_train.manifest.checks import Training, about, about_ends, check_name, paragraph, rows
from fleet_train.manifest.pods import END_SECONDS, Pods, to_yaml

CONTAINER = "train"
RESERVED = ("FLEET_TRAIN_MASTER", "FLEET_TRAIN_NNODES", "FLEET_TRAIN_NODE_RANK", "JOB_COMPLETION_INDEX")
_USAGE = 2
# A ClusterError (5, 6) or a difference between nodes (8) may be a pod that started while the others were still those of
# an earlier start: such a failure is counted and retried.
MISTAKES = sorted(
    {_USAGE}
    | {
        kind.exit_code
        for kind in (PaddleUnusable, ProfileError, ConversionError, CheckpointError, DataError, NotFinite, NotSaved)
    }
)
"""Exit codes after which another start would fail again."""


def indexed_job(training: Training, pods: Pods, retries: int = 6) -> str:
    """Service and Job. ``retries``: how often Kubernetes restarts a failed pod. Raises ClusterError."""
    check_name("--name", pods.name, f"-{training.nodes - 1}")
    return to_yaml(_comment(training, pods, retries), _service(pods), _job(training, pods, retries))


def _service(pods: Pods) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": pods.name},
        },
    }


def _job(training: Training, pods: Pods, retries: int) -> dict[str, Any]:
    own = {
        "FLEET_TRAIN_MASTER": f"{pods.name}-0.{pods.name}:{pods.port}",
        "FLEET_TRAIN_NNODES": str(training.nodes),
    }
    env = pods.variables(RESERVED, own)
    pod = {
        "restartPolicy": "Never",
        "subdomain": pods.name,
        **pods.pod(CONTAINER, training, training.launch(), env),
    }
    spec = {
        "completionMode": "Indexed",
        "completions": training.nodes,
        "parallelism": training.nodes,
        "backoffLimitPerIndex": retries,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _rules()},
        "template": {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.metadata(), "spec": spec}


def _rules() -> list[dict[str, Any]]:
    """The first matching rule decides; a failure without a match is counted."""

    def exits(codes: list[int]) -> dict[str, Any]:
        return {"containerName": CONTAINER, "operator": "In", "values": codes}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": exits([Preempted.exit_code])},
        {"action": "FailJob", "onExitCodes": exits(MISTAKES)},
    ]


def _comment(training: Training, pods: Pods, retries: int) -> list[str]:
    kubectl, name, restarts = pods.kubectl(), pods.name, training.max_restarts
    label = f"batch.kubernetes.io/job-name={name}"
    commands = {
        "submit": f"{kubectl} apply -f FILE",
        "watch": f"{kubectl} get pods -l {label}\n"
        f"{kubectl} logs -f -l {label},batch.kubernetes.io/job-completion-index=0",
        "pause": f'{kubectl} patch job {name} -p \'{{"spec":{{"suspend":true}}}}\'   (false: resume)',
        "stop": f"{kubectl} delete job,service {name}",
    }
    ends = {
        "  evicted, or exit code 12": "a new pod replaces it, elsewhere; this is not counted",
        f"  exit code {', '.join(map(str, MISTAKES))}": "the Job fails at once: a restart would fail again",
        "  any other": f"it is restarted, at most {retries} times for each index (backoffLimitPerIndex);\n"
        "then the whole Job fails (maxFailedIndexes: 0)",
    }
    return [
        *about(training, f"Indexed Job {name}"),
        *rows(commands),
        *about_ends(training, END_SECONDS),
        *paragraph(
            f"How the pods find each other: pod I has the index I (JOB_COMPLETION_INDEX) and the host name {name}-I. "
            f"`subdomain` and the service of that name make {name}-I.{name} resolvable, with publishNotReadyAddresses "
            "as soon as the pod exists. FLEET_TRAIN_MASTER and FLEET_TRAIN_NNODES give the rest."
        ),
        "What happens when a pod ends (Kubernetes 1.29 or later):",
        *rows(ends, 34),
        *paragraph(
            "podReplacementPolicy: Failed starts a new pod only after the old one has ended: names stay unique. "
            f"Before a failed rank is reported to Kubernetes, the launchers restart the ranks {restarts} times."
        ),
    ]
