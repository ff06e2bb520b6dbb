"""Kubeflow's PaddleJob v1. Source: kubeflow/training-operator 1.9, ``pkg/apis/kubeflow.org/v1``, ``pkg/core/job.go``,
``pkg/controller.v1/paddlepaddle/envvar.go``, ``pkg/webhooks/paddlepaddle``.
"""

from __future__ import annotations

from typing import Any

from fleet_train.manifest.checks import check_name
from fleet_train.manifest.pods import END_SECONDS, Pods, about
from fleet_train.manifest.training import Training
from fleet_train.manifest.yaml_text import to_yaml

CONTAINER, PORT = "paddle", "master"
"""By these names the operator finds the container and the port that it tells the pods of."""
RESERVED = ("PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_JOB_ID", "POD_NAME", "POD_IP_DUMMY")


def paddle_job(training: Training, pods: Pods, retries: int = 6) -> str:
    """``retries``: how often all pods are started again after a failure. Raises ClusterError."""
    check_name("--name", pods.name, f"-worker-{training.nodes - 1}")
    env = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *pods.variables(RESERVED),
    ]
    pod = pods.pod(CONTAINER, training, training.launch(), env)
    pod["containers"][0]["ports"] = [{"name": PORT, "containerPort": pods.port}]
    worker = {
        "replicas": training.nodes,
        "restartPolicy": "OnFailure",
        "template": {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}, "spec": pod},
    }
    spec: dict[str, Any] = {
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": backoff_limit(training.nodes, retries)},
        "paddleReplicaSpecs": {"Worker": worker},
    }
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PaddleJob", "metadata": pods.metadata(), "spec": spec}
    return to_yaml(_comment(training, pods, retries), job)


def backoff_limit(nodes: int, retries: int) -> int:
    """The operator adds up the restarts of all containers, and one failure of the job restarts each; the job has
    failed when the sum *reaches* the limit."""
    return nodes * retries + 1


def _comment(training: Training, pods: Pods, retries: int) -> list[str]:
    kubectl, name = pods.kubectl(), pods.name
    return [
        *about(training, f"A PaddleJob {name} of Kubeflow's training operator (v1)"),
        f"submit   {kubectl} apply -f FILE",
        f"watch    {kubectl} logs -f {name}-worker-0",
        f"         {kubectl} get paddlejob {name}",
        f"pause    {kubectl} patch paddlejob {name} --type merge -p '{{\"spec\":{{\"runPolicy\":{{\"suspend\":true}}}}}}'",
        f"stop     {kubectl} delete paddlejob {name}",
        "",
        "Pause, stop, an eviction or a drained machine: the pod gets SIGTERM, all ranks save their state at the same",
        f"step and every launcher ends with exit code 12, within --grace_seconds={training.grace_seconds};",
        f"terminationGracePeriodSeconds leaves {END_SECONDS} s beyond that. To go on from there the script loads its",
        "newest checkpoint when there is one (the reference trainer: --resume), from a volume that all pods mount.",
        "",
        "How the pods find each other: the operator makes a service for each pod, and tells PADDLE_MASTER (worker 0 and",
        f"the port called {PORT}), PADDLE_NNODES and PADDLE_JOB_ID, but no rank: that is the number of the pod's name,",
        f"{name}-worker-I, which POD_NAME tells also where the host name is the machine's.",
        "",
        "What happens when a pod ends: restartPolicy OnFailure starts its container again in place, also after exit code",
        "12; a pod that is evicted is made anew. The operator knows no list of exit codes that would fit (with its policy",
        f"ExitCode, 12 ends the job), so backoffLimit bounds both: {retries} restarts of all {training.nodes} containers, and one",
        "more container. Before the operator hears of a failure, the launchers start the ranks again"
        f" {training.max_restarts} times themselves.",
    ]
