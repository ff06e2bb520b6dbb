"""Manifests as the command writes them, and the environment that an engine makes of them."""

from __future__ import annotations

import re
from typing import Any

import yaml
from click.testing import CliRunner

from fleet_train.cli import launch
from fleet_train.cli.manifest import command
from fleet_train.launch.request import LaunchRequest

IMAGE = "--image=registry.local/train:1"
EVERYTHING = (
    "--gpus=4 --processes=2 --cpu=32 --memory=256Gi --shm=8Gi --namespace=team-a --volume=datasets:/data:ro "
    "--volume=runs:/runs --volume=runs:/more --env=LR=1e-3 --env=EMPTY= --workdir=/work --strategy=multi_node "
    "--grace_seconds=45 --max_restarts=5 --join_timeout=600 --launch_flags=--min_nodes=2"
).split()
"""Every flag that has an effect on the fields of a pod."""
# Whatever a shell, Kubernetes or YAML could take for something else.
AWKWARD = (
    "it's", '"quoted"', "$HOME", "$(FLEET_TRAIN_MASTER)", "$(POD_NAME)", "$$(x)", "$$", "$", "a  b", "", "1e-3",
    "0o7", "12:30:45", "yes", "null", "~", "-", "--", "#no comment", "a: b", "{a: 1}", "[1]", "*x", "&x",
    "!tag", "%", "@", "`id`", "\\n", "one\ntwo", "tab\there", "\u00e9\u4e2d", "trailing ", "-m", "--help",
    "0x1f", "1_000", ".inf", "<<", "=", "2026-11-23", "|", ">", "?",
)  # fmt: skip


def written(kind: str, *arguments: str) -> str:
    """What the command prints; fails with its output when it does not succeed."""
    result = CliRunner().invoke(command, [kind, *arguments])
    assert result.exit_code == 0, result.output or result.exception
    return result.output


def manifests(kind: str, *arguments: str) -> list[dict[str, Any]]:
    image = () if any(word.startswith("--image") for word in arguments) else (IMAGE,)
    return list(yaml.safe_load_all(written(kind, *image, *arguments)))


def pod_of(kind: str, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of a pod: the one that is written, or what the TrainJob's controller makes of its parts."""
    spec = documents[-1]["spec"]
    if kind == "job":
        return dict(spec["template"]["spec"])
    if kind == "paddlejob":
        return dict(spec["paddleReplicaSpecs"]["Worker"]["template"]["spec"])
    trainer = spec["trainer"]
    container = {name: trainer[name] for name in ("image", "command", "args", "env")}
    container |= {"name": "node", "resources": trainer.get("resourcesPerNode", {})}
    patched: dict[str, Any] = {}
    for patch in spec.get("runtimePatches", []):
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        patched = dict(job["template"]["spec"]["template"]["spec"])
        (mounts,) = patched.pop("containers", [{}])
        container["volumeMounts"] = mounts.get("volumeMounts", [])
    return {**patched, "containers": [container]}


def expanded(text: str, variables: dict[str, str]) -> str:
    """Kubernetes' expansion of commands, arguments and values (k8s.io/kubernetes/third_party/forked/golang/expansion):
    ``$$`` is ``$``, ``$(NAME)`` the variable, which stays as it is when it is not set."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def environment(container: dict[str, Any], fields: dict[str, str]) -> dict[str, str]:
    """A container's variables. ``fields``: what the downward API says of its pod."""
    made: dict[str, str] = {}
    for one in container.get("env", []):
        if "valueFrom" in one:
            made[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            made[one["name"]] = expanded(one["value"], made)
    return made


def told_by_the_controller(kind: str, documents: list[dict[str, Any]], pod: int) -> dict[str, str]:
    """All variables of pod number ``pod``: those of the manifest, and those that its controller adds.

    Sources: kubernetes.io "Indexed Job"; training-operator ``paddlepaddle/envvar.go``; trainer ``torch/torch.go``.
    """
    job = documents[-1]
    name, spec = job["metadata"]["name"], job["spec"]
    (container,) = pod_of(kind, documents)["containers"]
    if kind == "job":
        return environment(container, {}) | {"JOB_COMPLETION_INDEX": str(pod), "HOSTNAME": f"{name}-{pod}"}
    if kind == "paddlejob":
        worker = spec["paddleReplicaSpecs"]["Worker"]
        (port,) = [one["containerPort"] for one in container["ports"] if one["name"] == "master"]
        host = "10.1.2.3" if pod == 0 else f"{name}-worker-0"
        told = {"PYTHONUNBUFFERED": "0", "PADDLE_JOB_ID": name, "PADDLE_NNODES": str(worker["replicas"])}
        told |= {"PADDLE_MASTER": f"{host}:{port}", "HOSTNAME": f"{name}-worker-{pod}"}
        return environment(container, {"metadata.name": f"{name}-worker-{pod}"}) | told
    trainer = spec["trainer"]
    told = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    told |= {"PET_NODE_RANK": str(pod), "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500"}
    return environment(container, {}) | told


def command_line(container: dict[str, Any], variables: dict[str, str]) -> list[str]:
    return [expanded(word, variables) for word in [*container["command"], *container["args"]]]


def request_of(words: list[str]) -> LaunchRequest:
    """What the launcher reads of its command line."""
    assert words[:4] == ["python", "-m", "fleet_train", "launch"]
    context = launch.command.make_context("launch", words[4:])
    flags: dict[str, Any] = {name: value for name, value in context.params.items() if name != "dry_run"}
    return launch.read_request(**flags)
