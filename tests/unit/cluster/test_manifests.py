"""The manifests of tools/examples/cluster are valid by the published schemas, and each pod finds its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubernetes.client
import kubernetes_validate
import pytest
import yaml
from kubeflow.training import models
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from fleet_train.cluster.engines import detect
from fleet_train.errors import MISTAKES, Preempted
from fleet_train.launch.request import FaultPolicy, LaunchRequest
from tests.support.cluster_files import FOLDER, request_of

KINDS = ("job", "paddlejob", "trainjob")
NAME = "my-training"
HOSTS = {
    "job": tuple(f"{NAME}-{pod}.{NAME}" for pod in range(2)),
    "paddlejob": tuple(f"{NAME}-worker-{pod}" for pod in range(2)),
    "trainjob": tuple(f"{NAME}-node-0-{pod}.{NAME}" for pod in range(2)),
}


def text_of(kind: str) -> str:
    return (FOLDER / f"{kind}.yaml").read_text()


def documents_of(kind: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(kind)))


def pod_of(kind: str) -> dict[str, Any]:
    """The spec of a pod: the one that is written, or what the TrainJob's controller makes of its parts."""
    spec = documents_of(kind)[-1]["spec"]
    if kind == "job":
        return dict(spec["template"]["spec"])
    if kind == "paddlejob":
        return dict(spec["paddleReplicaSpecs"]["Worker"]["template"]["spec"])
    trainer, patched = spec["trainer"], patch_of(spec)
    (mounts,) = patched.pop("containers")
    container = {name: trainer[name] for name in ("image", "command", "args", "env")}
    container |= {"name": "node", "resources": trainer["resourcesPerNode"], "volumeMounts": mounts["volumeMounts"]}
    return {**patched, "containers": [container]}


def patch_of(spec: dict[str, Any]) -> dict[str, Any]:
    """What a TrainJob changes of its runtime's pods."""
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    return dict(job["template"]["spec"]["template"]["spec"])


def told_by_the_controller(kind: str, pod: int) -> dict[str, str]:
    """All variables of pod number ``pod``: those of the manifest, and those that its controller adds.

    Sources: kubernetes.io "Indexed Job"; training-operator ``paddlepaddle/envvar.go``; trainer ``torch/torch.go``.
    """
    job, (container,) = documents_of(kind)[-1], pod_of(kind)["containers"]
    name, spec = job["metadata"]["name"], job["spec"]
    told = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    if kind == "job":
        return told | {"JOB_COMPLETION_INDEX": str(pod), "HOSTNAME": f"{name}-{pod}"}
    if kind == "paddlejob":
        assert [one["name"] for one in container["env"] if "valueFrom" in one] == ["POD_NAME"]
        (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == "master"]
        host = "10.1.2.3" if pod == 0 else f"{name}-worker-0"
        nodes = str(spec["paddleReplicaSpecs"]["Worker"]["replicas"])
        told |= {"PADDLE_JOB_ID": name, "PADDLE_NNODES": nodes, "PADDLE_MASTER": f"{host}:{port}"}
        return told | {"POD_NAME": f"{name}-worker-{pod}", "HOSTNAME": "a-machine"}
    trainer = spec["trainer"]
    told |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    return told | {
        "PET_NODE_RANK": str(pod),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_finds_its_place(kind: str) -> None:
    for pod in range(2):
        found = detect(told_by_the_controller(kind, pod))
        assert found is not None
        assert (found.index, found.count, found.hosts) == (pod, 2, HOSTS[kind])
        assert found.port == (29500 if kind == "trainjob" else 6170)
        assert found.processes in (None, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_launch_of_a_pod(kind: str) -> None:
    pod = pod_of(kind)
    (container,) = pod["containers"]
    command = ("train.py", "--data=/data", "--output_dir=/runs/first")
    request = request_of([*container["command"], *container["args"]])
    assert request == LaunchRequest(
        command, processes_per_node=4, join_timeout_seconds=900.0, faults=FaultPolicy(max_restarts=3)
    )
    assert pod["terminationGracePeriodSeconds"] == request.faults.grace_seconds + 20
    # Requests equal limits: a pod is not the first to be evicted.
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["nvidia.com/gpu"] == "4"


@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_of_each_kind_are_valid_and_a_jobs_service_too(kind: str) -> None:
    documents = documents_of(kind)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod_of(kind)}
    kinds = [document["kind"] for document in documents]
    assert (kinds == ["Service", "Job"]) == (kind == "job")
    for version in ("1.29", kubernetes_validate.latest_version()):
        for document in [pod, *(documents if kind == "job" else ())]:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_jobs_failure_policy_keeps_the_rules_that_no_schema_has() -> None:
    """kubernetes ``pkg/apis/batch/validation``: validatePodFailurePolicy, validateJobSpec."""
    _, job = documents_of("job")
    spec = job["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a failure policy asks for it
    assert spec["podReplacementPolicy"] == "Failed"  # the only one beside a failure policy
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert 0 <= spec["maxFailedIndexes"] <= spec["completions"]  # is allowed beside backoffLimitPerIndex only
    evicted, *others = spec["podFailurePolicy"]["rules"]
    assert (evicted["action"], "onExitCodes" in evicted) == ("Ignore", False)
    # A ClusterError (5, 6) or a difference between nodes (8) may be a pod that started while the others were still
    # those of an earlier start: such a failure is counted and retried.
    codes = [(rule["action"], rule["onExitCodes"]["values"]) for rule in others]
    assert codes == [("Ignore", [Preempted.exit_code]), ("FailJob", sorted(MISTAKES))]
    (container,) = spec["template"]["spec"]["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in others} == {container["name"]}


def test_the_pods_of_a_job_have_the_names_of_its_service() -> None:
    service, job = documents_of("job")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == NAME


# Kubeflow's PaddleJob v1: the models of its SDK, and Kubernetes' own below them.


def mistakes(value: Any, kind: str, path: str = "") -> Iterator[str]:
    """What is no field of a model, or has another type than its field."""
    plain = {"str": str, "int": int, "bool": bool, "object": object, "float": (int, float)}
    if found := re.fullmatch(r"list\[(.+)\]|dict\(str, (.+)\)", kind):
        if not isinstance(value, list if found[1] else dict):
            yield f"{path} is no {kind}"
        elif found[1]:
            for number, one in enumerate(value):
                yield from mistakes(one, found[1], f"{path}[{number}]")
        else:
            for name, one in value.items():
                yield from mistakes(one, found[2], f"{path}.{name}")
    elif kind in plain:
        if not isinstance(value, plain[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{path}={value!r} is no {kind}"
    else:
        model = getattr(models, kind, None) or getattr(kubernetes.client, kind)
        names = {json: attribute for attribute, json in model.attribute_map.items()}
        for name, one in value.items():
            if name not in names:
                yield f"{path}.{name} is no field of {kind}"
            else:
                yield from mistakes(one, model.openapi_types[names[name]], f"{path}.{name}")


def test_a_paddlejob_has_its_fields_and_keeps_what_its_webhook_asks_for() -> None:
    """training-operator ``pkg/webhooks/paddlepaddle``, ``paddlepaddle_types.go``."""
    (job,) = documents_of("paddlejob")
    assert list(mistakes(job, "KubeflowOrgV1PaddleJob")) == []
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PaddleJob")
    (kind, worker), *others = job["spec"]["paddleReplicaSpecs"].items()
    assert (kind, others, worker["restartPolicy"]) == ("Worker", [], "OnFailure")
    assert job["spec"]["runPolicy"]["backoffLimit"] == 6 * worker["replicas"] + 1
    (container,) = worker["template"]["spec"]["containers"]
    assert (container["name"], [port["name"] for port in container["ports"]]) == ("paddle", ["master"])
    assert "restartPolicy" not in worker["template"]["spec"]  # the operator warns of it


def test_a_trainjob_has_its_fields_and_keeps_what_its_webhook_asks_for() -> None:
    """The models of its SDK leave out what they do not know; trainer ``torch.go`` (reserved names), ``jobset.go``
    (node's variables, the patches' job and container)."""
    (job,) = documents_of("trainjob")
    model = TrainerV1alpha1TrainJob.from_dict(job)
    assert model is not None
    assert model.to_dict() == job
    (patch,) = job["spec"]["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9/._-]+", patch["manager"])
    (container,) = patch_of(job["spec"])["containers"]
    assert (container["name"], sorted(container)) == ("node", ["name", "volumeMounts"])
    assert not [one for one in job["spec"]["trainer"]["env"] if one["name"].startswith("PET_")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_means_the_same_to_every_reader_of_yaml(kind: str) -> None:
    """Unquoted, 1e-3 is a text to PyYAML and a number to Kubernetes, which then refuses the manifest."""
    for one in (event for event in yaml.parse(text_of(kind)) if isinstance(event, yaml.ScalarEvent)):
        is_name = re.fullmatch(r"(--)?[A-Za-z/].*", one.value) and one.value.lower() not in ("y", "n", "yes", "no")
        assert one.style == '"' or is_name or re.fullmatch(r"\d+", one.value), one.value


@pytest.mark.parametrize("kind", KINDS)
def test_the_comment_says_what_to_edit_and_how_to_submit_watch_pause_and_stop(kind: str) -> None:
    head, _, body = text_of(kind).partition("apiVersion")
    assert all(line.startswith("#") for line in head.splitlines())
    for word in ("submit", "watch", "pause", "stop"):
        assert re.search(rf"^# {word} +kubectl ", head, re.MULTILINE)
    counts = {"job": "completions: parallelism: FLEET_TRAIN_NNODES", "paddlejob": "replicas: backoffLimit:"}
    own = "image: train.py claimName: --nproc_per_node= cpu: memory: nvidia.com/gpu:"
    for word in f"{own} {counts.get(kind, 'numNodes: numProcPerNode:')}".split():
        found = re.findall(rf"^(?! *#).*{re.escape(word)}.*(?:\n *value: .*)?", body, re.MULTILINE)
        assert found, word
        assert all("# edit" in lines for lines in found), word
