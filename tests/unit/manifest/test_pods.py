"""Manifests are valid by the published schemas, and each pod finds its place and runs the script as given."""

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
from fleet_train.launch.request import FaultPolicy, LaunchRequest
from tests.support.manifests import (
    AWKWARD,
    EVERYTHING,
    command_line,
    manifests,
    pod_of,
    request_of,
    told_by_the_controller,
    written,
)

KINDS = ("job", "paddlejob", "trainjob")
HOSTS = {
    "job": tuple(f"digits-{pod}.digits" for pod in range(3)),
    "paddlejob": tuple(f"digits-worker-{pod}" for pod in range(3)),
    "trainjob": tuple(f"digits-node-0-{pod}.digits" for pod in range(3)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [(), EVERYTHING], ids=["bare", "everything"])
def test_every_pod_finds_its_place(kind: str, more: tuple[str, ...]) -> None:
    documents = manifests(kind, "--nodes=3", "--name=digits", *more, "train.py")
    for pod in range(3):
        found = detect(told_by_the_controller(kind, documents, pod))
        assert found is not None
        assert (found.index, found.count, found.hosts) == (pod, 3, HOSTS[kind])
        assert found.port == (29500 if kind == "trainjob" else 6170)
        assert found.processes in (None, 2 if more else 1)
    port = () if kind == "trainjob" else ("--port=7100",)
    alone = detect(told_by_the_controller(kind, manifests(kind, "--nodes=1", *port, "train.py"), 0))
    assert alone is not None
    assert (alone.index, alone.count, alone.port) == (0, 1, 29500 if kind == "trainjob" else 7100)


def launched(kind: str, *words: str) -> LaunchRequest:
    (container,) = pod_of(kind, manifests(kind, "--nodes=2", *words))["containers"]
    return request_of(command_line(container, {}))


SET = ("--set=nccl_comm_num=2", "--set", "recompute_checkpoints=[a, b]")


@pytest.mark.parametrize("kind", KINDS)
def test_the_launch_of_a_pod(kind: str) -> None:
    faults = FaultPolicy(max_restarts=3)
    assert launched(kind, "--gpus=8", "train.py", "--epochs", "3") == LaunchRequest(
        ("train.py", "--epochs", "3"), processes_per_node=8, join_timeout_seconds=900.0, faults=faults
    )
    flags = [word for word in EVERYTHING if "workdir" not in word]
    request = launched(kind, *flags, *SET, "-m", "my.train", "-m")
    assert (request.command, request.is_module, request.strategy) == (("my.train", "-m"), True, "multi_node")
    assert request.settings == ("nccl_comm_num=2", "recompute_checkpoints=[a, b]")
    assert (request.processes_per_node, request.join_timeout_seconds) == (2, 600.0)
    faults = request.faults
    assert (faults.max_restarts, faults.min_nodes, faults.grace_seconds) == (5, 2, 45.0)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_and_values_reach_the_script_as_they_are(kind: str) -> None:
    given = {f"V{number}": value for number, value in enumerate(AWKWARD)}
    flags = [f"--env={name}={value}" for name, value in given.items()]
    documents = manifests(kind, "--nodes=2", *flags, "train.py", *AWKWARD)
    (container,) = pod_of(kind, documents)["containers"]
    told = told_by_the_controller(kind, documents, 1)
    assert request_of(command_line(container, told)).command == ("train.py", *AWKWARD)
    assert {name: told[name] for name in given} == given


def test_a_trainjob_starts_in_the_folder_that_it_has_no_field_for() -> None:
    (container,) = pod_of("trainjob", manifests("trainjob", "--nodes=2", "--workdir=/a b", "train.py"))["containers"]
    words = command_line(container, {})
    assert words[:8] == ["sh", "-c", 'cd "$0" && exec "$@"', "/a b", "python", "-m", "fleet_train", "launch"]


@pytest.mark.parametrize(
    ("kind", "taken"), [("job", "FLEET_TRAIN_NNODES"), ("paddlejob", "PADDLE_MASTER"), ("trainjob", "PET_NNODES")]
)
def test_the_engines_variables_are_not_the_users_to_set(kind: str, taken: str) -> None:
    with pytest.raises(AssertionError, match=f"{taken}=...: the engine's variables are set by this manifest"):
        manifests(kind, "--nodes=2", f"--env={taken}=5", "train.py")


VERSIONS = ("1.29", kubernetes_validate.latest_version())
SHAPES = pytest.mark.parametrize("more", [["--shm=0"], EVERYTHING], ids=["bare", "everything"])


@SHAPES
@pytest.mark.parametrize("kind", KINDS)
def test_the_pods_of_each_kind_are_valid_and_a_jobs_service_too(kind: str, more: list[str]) -> None:
    documents = manifests(kind, "--nodes=3", *more, "train.py")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod_of(kind, documents)}
    kinds = [document["kind"] for document in documents]
    assert (kinds == ["Service", "Job"]) == (kind == "job")
    for version in VERSIONS:
        for document in [pod, *(documents if kind == "job" else ())]:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_jobs_failure_policy_keeps_the_rules_that_no_schema_has() -> None:
    """kubernetes ``pkg/apis/batch/validation``: validatePodFailurePolicy, validateJobSpec."""
    _, job = manifests("job", "--nodes=3", "train.py")
    spec = job["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a failure policy asks for it
    assert spec["podReplacementPolicy"] == "Failed"  # the only one beside a failure policy
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    assert 0 <= spec["maxFailedIndexes"] <= spec["completions"]  # is allowed beside backoffLimitPerIndex only
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {}).get("values", [])
        assert codes == sorted(set(codes))
        assert 0 not in codes
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)


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


@SHAPES
def test_paddlejob(more: list[str]) -> None:
    (job,) = manifests("paddlejob", "--nodes=3", *more, "train.py")
    assert list(mistakes(job, "KubeflowOrgV1PaddleJob")) == []
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PaddleJob")


def test_a_paddlejob_keeps_what_its_webhook_asks_for() -> None:
    """training-operator ``pkg/webhooks/paddlepaddle``, ``paddlepaddle_types.go``."""
    (job,) = manifests("paddlejob", "--nodes=3", "train.py")
    (kind, worker), *others = job["spec"]["paddleReplicaSpecs"].items()
    assert (kind, others, worker["restartPolicy"]) == ("Worker", [], "OnFailure")
    (container,) = worker["template"]["spec"]["containers"]
    assert (container["name"], [port["name"] for port in container["ports"]]) == ("paddle", ["master"])
    assert "restartPolicy" not in worker["template"]["spec"]  # the operator warns of it


# Kubeflow's TrainJob v2: the models of its SDK, which leave out what they do not know.


@SHAPES
@pytest.mark.parametrize("version", ["2.3", "2.2"])
def test_trainjob(version: str, more: list[str]) -> None:
    more = [word for word in more if "grace" not in word]
    (job,) = manifests("trainjob", "--nodes=3", f"--trainer_version={version}", *more, "train.py")
    model = TrainerV1alpha1TrainJob.from_dict(job)
    assert model is not None
    assert model.to_dict() == job
    assert ("terminationGracePeriodSeconds" in str(job)) == (version == "2.3")


def test_a_trainjob_keeps_what_its_webhook_asks_for() -> None:
    """trainer ``torch.go`` (reserved names), ``jobset.go`` (node's variables, the patches' job and container)."""
    (job,) = manifests("trainjob", "--nodes=3", *EVERYTHING, "train.py")
    (patch,) = job["spec"]["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9/._-]+", patch["manager"])
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert (replicated["name"], sorted(container)) == ("node", ["name", "volumeMounts"])
    assert not [one for one in job["spec"]["trainer"]["env"] if one["name"].startswith("PET_")]


# What no schema sees.


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_means_the_same_to_every_reader_of_yaml(kind: str) -> None:
    """Unquoted, 1e-3 is a text to PyYAML and a number to Kubernetes, which then refuses the manifest."""
    words = ("1e-3", "0o17", "12:30", "y", "No", "null", "~", "1_000", ".inf", "2026-11-23")
    text = written(
        kind, "--nodes=2", "--image=i:1", *[f"--env=V{i}={one}" for i, one in enumerate(words)], "a.py", *words
    )
    scalars = [event for event in yaml.parse(text) if isinstance(event, yaml.ScalarEvent)]
    assert len([one for one in scalars if one.style == '"' and one.value in words]) == 2 * len(words)
    for one in scalars:
        name = re.fullmatch(r"(--)?[A-Za-z/].*", one.value) and one.value.lower() not in ("y", "n", "yes", "no", "null")
        assert one.style == '"' or name or re.fullmatch(r"\d+", one.value), one.value


@pytest.mark.parametrize("kind", KINDS)
def test_the_comment_says_how_to_submit_watch_pause_and_stop(kind: str) -> None:
    text = written(kind, "--nodes=2", "--image=i:1", "--namespace=team-a", "train.py")
    head = text.partition("apiVersion")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in ("submit", "watch", "pause", "stop"):
        assert re.search(rf"^# {word} +kubectl -n team-a ", head, re.MULTILINE)
