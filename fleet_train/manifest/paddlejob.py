"""Kubeflow's PaddleJob v1. Source: kubeflow/training-operator 1.9, ``pkg/apis/kubeflow.org/v1``, ``pkg/core/job.go``,
``pkg/controller.v1/paddlepaddle/envvar.go``, ``pkg/webhooks/paddlepaddle``.
"""

from __future__ import annotations

from typing import Any

from fleet_train.manifest.checks import Training, about, about_ends, check_name, paragraph, rows
from fleet_train.manifest.pods import END_SECONDS, Pods, to_yaml

CONTAINER, PORT = "paddle", "master"
"""The names by which the operator finds the container and the port for the pods' variables."""
RESERVED = ("PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_JOB_ID", "POD_NAME", "POD_IP_DUMMY")


def paddle_job(training: Training, pods: Pods, retries: int = 6) -> str:
    """``retries``: how often all pods are restarted after a failure. Raises ClusterError."""
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
    """The operator sums the restarts of all containers, and one failure of the job restarts each; the job has failed
    when the sum *reaches* the limit."""
    return nodes * retries + 1


def _comment(training: Training, pods: Pods, retries: int) -> list[str]:
    kubectl, name, nodes = pods.kubectl(), pods.name, training.nodes
    suspend = '{"spec":{"runPolicy":{"suspend":true}}}'
    commands = {
        "submit": f"{kubectl} apply -f FILE",
        "watch": f"{kubectl} get paddlejob {name}\n{kubectl} logs -f {name}-worker-0",
        "pause": f"{kubectl} patch paddlejob {name} --type merge -p '{suspend}'   (false: resume)",
        "stop": f"{kubectl} delete paddlejob {name}",
    }
    return [
        *about(training, f"PaddleJob {name}, for Kubeflow's training operator (v1)"),
        *rows(commands),
        *about_ends(training, END_SECONDS),
        *paragraph(
            "How the pods find each other: the operator creates a service per pod and sets PADDLE_MASTER (worker 0 "
            f"and the port called {PORT}), PADDLE_NNODES and PADDLE_JOB_ID, but no rank. That is the number in the "
            f"pod's name, {name}-worker-I, which POD_NAME gives even if the host name is the machine's."
        ),
        *paragraph(
            "What happens when a pod ends: its container is restarted in place (restartPolicy OnFailure), also "
            "after exit code 12; an evicted pod is replaced. With the operator's policy ExitCode, 12 would "
            f"end the job. backoffLimit counts restarts of containers, of which each restart of the training has "
            f"{nodes}: the job fails after {retries} restarts. Before a failed rank is reported to the operator, the "
            f"launchers restart the ranks {training.max_restarts} times themselves."
        ),
    ]
