"""The manifests are valid by the published schemas of Kubernetes and Kubeflow's operators."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import kubernetes.client
import kubernetes_validate
import pytest
import yaml
from kubeflow.training import models
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests.support.manifests import EVERYTHING, manifests, pod_of, written

VERSIONS = ("1.29", "1.31", "1.33", kubernetes_validate.latest_version())
SHAPES = pytest.mark.parametrize("more", [["--shm=0"], EVERYTHING], ids=["bare", "everything"])


def strictly(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@SHAPES
@pytest.mark.parametrize("version", VERSIONS)
def test_service_and_job(version: str, more: list[str]) -> None:
    service, job = manifests("job", "--nodes=3", *more, "train.py")
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    strictly(service, version)
    strictly(job, version)


@SHAPES
@pytest.mark.parametrize("kind", ["job", "paddlejob", "trainjob"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_each(kind: str, version: str, more: list[str]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}}
    strictly({**pod, "spec": pod_of(kind, manifests(kind, "--nodes=3", *more, "train.py"))}, version)


def test_a_misspelled_field_would_be_seen() -> None:
    _, job = manifests("job", "--nodes=3", "train.py")
    job["spec"]["podReplacementPolcy"] = "Failed"
    with pytest.raises(kubernetes_validate.ValidationError, match="podReplacementPolcy"):
        strictly(job, VERSIONS[0])


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


def test_a_paddlejobs_misspelled_field_would_be_seen() -> None:
    (job,) = manifests("paddlejob", "--nodes=3", "train.py")
    wrong = copy.deepcopy(job)
    wrong["spec"]["runPolicy"]["backoffLimit"] = "7"
    worker = wrong["spec"]["paddleReplicaSpecs"]["Worker"]
    worker["template"]["spec"]["containers"][0]["arg"] = []
    assert list(mistakes(wrong, "KubeflowOrgV1PaddleJob")) == [
        ".spec.runPolicy.backoffLimit='7' is no int",
        ".spec.paddleReplicaSpecs.Worker.template.spec.containers[0].arg is no field of V1Container",
    ]


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


def test_a_trainjobs_misspelled_field_would_be_seen() -> None:
    (job,) = manifests("trainjob", "--nodes=3", "train.py")
    wrong = copy.deepcopy(job)
    wrong["spec"]["trainer"]["numNode"] = 3
    model = TrainerV1alpha1TrainJob.from_dict(wrong)
    assert model is not None
    assert model.to_dict() == job
    wrong["spec"]["trainer"]["numNodes"] = "3"
    with pytest.raises(ValueError, match="numNodes"):
        TrainerV1alpha1TrainJob.from_dict(wrong)


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


@pytest.mark.parametrize("kind", ["job", "paddlejob", "trainjob"])
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


@pytest.mark.parametrize("kind", ["job", "paddlejob", "trainjob"])
def test_the_comment_says_how_to_submit_watch_pause_and_stop(kind: str) -> None:
    text = written(kind, "--nodes=2", "--image=i:1", "--namespace=team-a", "train.py")
    head = text.partition("apiVersion")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in ("submit", "watch", "pause", "stop"):
        assert re.search(rf"^# {word} +kubectl -n team-a ", head, re.MULTILINE)
    assert max(len(line) for line in head.splitlines() if "kubectl" not in line) <= 120
