"""Manifests for Kubernetes: an indexed Job, Kubeflow's PaddleJob (v1) and TrainJob (v2).

Sources: kubernetes.io "Job" (Indexed completion mode, Backoff limit per index, Pod failure policy, Pod replacement
policy) and "Job with Pod-to-Pod Communication"; kubeflow/training-operator 1.9, ``pkg/apis/kubeflow.org/v1``,
``pkg/core/job.go``, ``pkg/controller.v1/paddlepaddle/envvar.go``, ``pkg/webhooks/paddlepaddle``; kubeflow/trainer 2.2
and 2.3, ``pkg/apis/trainer/v1alpha1/trainjob_types.go``, ``pkg/runtime/framework/plugins/torch/torch.go``,
``plugins/jobset/jobset.go``, ``manifests/base/runtimes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fleet_train import timeouts
from fleet_train.errors import MISTAKES, ClusterError, Preempted
from fleet_train.manifest.checks import (
    Training,
    about,
    check_cpu,
    check_environment,
    check_label,
    check_memory,
    check_name,
    check_path,
    check_subdomain,
    paragraph,
    rows,
)

SHARED_MEMORY = "/dev/shm"
# The words of the command line that are the interpreter's and the launcher's; the rest are its arguments.
_COMMAND_WORDS = 4
# A ClusterError (5, 6) or a difference between nodes (8) may be a pod that started while the others were still those of
# an earlier start: such a failure is counted and retried.
_FAILS_AGAIN = sorted(MISTAKES)
_NO_SIDECAR = {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}}


def indexed_job(training: Training, pods: Pods, retries: int = 6) -> str:
    """A Job with ``completionMode: Indexed``, and the headless service that gives its pods names. Kubernetes 1.29 is
    the first version with all of it enabled. ``retries``: how often a failed pod is restarted. Raises ClusterError.
    """
    name, container, label = pods.name, "train", {"batch.kubernetes.io/job-name": pods.name}
    check_name("--name", name, f"-{training.nodes - 1}")
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": label}
    own = {"FLEET_TRAIN_MASTER": f"{name}-0.{name}:{pods.port}", "FLEET_TRAIN_NNODES": str(training.nodes)}
    env = pods.variables((*own, "FLEET_TRAIN_NODE_RANK", "JOB_COMPLETION_INDEX"), own)

    def exits(codes: list[int]) -> dict[str, Any]:
        return {"containerName": container, "operator": "In", "values": codes}

    spec = {
        "completionMode": "Indexed",
        "completions": training.nodes,
        "parallelism": training.nodes,
        "backoffLimitPerIndex": retries,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        # The first matching rule decides; a failure without a match is counted.
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": exits([Preempted.exit_code])},
                {"action": "FailJob", "onExitCodes": exits(_FAILS_AGAIN)},
            ]
        },
        "template": {
            **_NO_SIDECAR,
            "spec": {"restartPolicy": "Never", "subdomain": name, **pods.pod(container, training, env)},
        },
    }
    ends = {
        "  evicted, or exit code 12": "a new pod replaces it, elsewhere; this is not counted",
        f"  exit code {', '.join(map(str, _FAILS_AGAIN))}": "the Job fails at once: a restart would fail again",
        "  any other": f"it is restarted, at most {retries} times for each index (backoffLimitPerIndex);\n"
        "then the whole Job fails (maxFailedIndexes: 0)",
    }
    selected = f"-l batch.kubernetes.io/job-name={name}"
    commands = {
        "watch": f"get pods {selected}\nlogs -f {selected},batch.kubernetes.io/job-completion-index=0",
        "pause": f'patch job {name} -p \'{{"spec":{{"suspend":true}}}}\'   (false: resume)',
        "stop": f"delete job,service {name}",
    }
    comment = [
        *_comment_head(training, pods, f"Indexed Job {name}", commands),
        *paragraph(
            f"How the pods find each other: pod I has the index I (JOB_COMPLETION_INDEX) and the host name {name}-I. "
            f"`subdomain` and the service of that name make {name}-I.{name} resolvable, with publishNotReadyAddresses "
            "as soon as the pod exists. FLEET_TRAIN_MASTER and FLEET_TRAIN_NNODES give the rest."
        ),
        "What happens when a pod ends (Kubernetes 1.29 or later):",
        *rows(ends, 34),
        *paragraph(
            "podReplacementPolicy: Failed starts a new pod only after the old one has ended: names stay unique. Before "
            f"a failed rank is reported to Kubernetes, the launchers restart the ranks {training.max_restarts} times."
        ),
    ]
    return _to_yaml(comment, _document("v1", "Service", pods, service), _document("batch/v1", "Job", pods, spec))


def paddle_job(training: Training, pods: Pods, retries: int = 6) -> str:
    """Kubeflow's PaddleJob. ``retries``: how often all pods are restarted after a failure. Raises ClusterError."""
    name, nodes = pods.name, training.nodes
    check_name("--name", name, f"-worker-{nodes - 1}")
    # The names by which the operator finds the container and the port for the pods' variables.
    container, port = "paddle", "master"
    env = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *pods.variables(("PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_JOB_ID", "POD_NAME", "POD_IP_DUMMY")),
    ]
    pod = pods.pod(container, training, env)
    pod["containers"][0]["ports"] = [{"name": port, "containerPort": pods.port}]
    worker = {"replicas": nodes, "restartPolicy": "OnFailure", "template": {**_NO_SIDECAR, "spec": pod}}
    spec = {
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": backoff_limit(nodes, retries)},
        "paddleReplicaSpecs": {"Worker": worker},
    }
    suspend = '{"spec":{"runPolicy":{"suspend":true}}}'
    commands = {
        "watch": f"get paddlejob {name}\nlogs -f {name}-worker-0",
        "pause": f"patch paddlejob {name} --type merge -p '{suspend}'   (false: resume)",
        "stop": f"delete paddlejob {name}",
    }
    comment = [
        *_comment_head(training, pods, f"PaddleJob {name}, for Kubeflow's training operator (v1)", commands),
        *paragraph(
            "How the pods find each other: the operator creates a service per pod and sets PADDLE_MASTER (worker 0 "
            f"and the port called {port}), PADDLE_NNODES and PADDLE_JOB_ID, but no rank. That is the number in the "
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
    return _to_yaml(comment, _document("kubeflow.org/v1", "PaddleJob", pods, spec))


def backoff_limit(nodes: int, retries: int) -> int:
    """The operator sums the restarts of all containers, and one failure of the job restarts each; the job has failed
    when the sum *reaches* the limit."""
    return nodes * retries + 1


VERSIONS = ("2.3", "2.2")
KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")
_PET = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_NODE = "node"
"""The runtime's job, and its container, that the trainer's fields apply to."""
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
    """Kubeflow's TrainJob. ``version``: of Kubeflow Trainer. Raises ClusterError."""
    name, nodes = pods.name, training.nodes
    check_name("--name", name, f"-node-0-{nodes - 1}{_POD_SUFFIX}")
    check_subdomain("--runtime", runtime)
    patch: dict[str, Any] = _period(training, version)
    trainer: dict[str, Any] = {
        "image": pods.image,
        **_command(training, pods.working_folder),
        "env": pods.variables(_PET),
        "numNodes": nodes,
        "numProcPerNode": training.processes,
    }
    if resources := pods.resources():
        trainer["resourcesPerNode"] = resources
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": runtime_kind, "name": runtime},
        "trainer": trainer,
    }
    if sources := pods.sources():
        patch |= {"volumes": sources, "containers": [{"name": _NODE, "volumeMounts": pods.mounts()}]}
    if patch:
        job = {"name": _NODE, "template": {"spec": {"template": {"spec": patch}}}}
        runtime_spec = {"template": {"spec": {"replicatedJobs": [job]}}}
        spec["runtimePatches"] = [{"manager": "fleet-train/manifest", "trainingRuntimeSpec": runtime_spec}]
    first = f"jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
    suspend = '{"spec":{"suspend":true}}'
    commands = {
        "watch": f"get trainjob {name}\nlogs -f -l {first}",
        "pause": f"patch trainjob {name} --type merge -p '{suspend}'   (false: resume)",
        "stop": f"delete trainjob {name}",
    }
    comment = [
        *_comment_head(training, pods, f"TrainJob {name}, for Kubeflow Trainer {version}", commands),
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
    return _to_yaml(comment, _document("trainer.kubeflow.org/v1alpha1", "TrainJob", pods, spec))


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


def _period(training: Training, version: str) -> dict[str, Any]:
    if version != VERSIONS[-1]:
        return {"terminationGracePeriodSeconds": training.grace_seconds + timeouts.POD_END_SECONDS}
    most = _DEFAULT_PERIOD_SECONDS - timeouts.POD_END_SECONDS
    if training.grace_seconds > most:
        raise ClusterError(
            f"--grace_seconds={training.grace_seconds}: a TrainJob of Kubeflow Trainer 2.2 cannot request more than "
            f"the {_DEFAULT_PERIOD_SECONDS} s that Kubernetes gives a pod to end, of which {timeouts.POD_END_SECONDS} "
            f"s are the launcher's; give --grace_seconds={most} or less, or use Trainer 2.3"
        )
    return {}


def _document(version: str, kind: str, pods: Pods, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": pods.name, **({"namespace": pods.namespace} if pods.namespace else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _comment_head(training: Training, pods: Pods, what: str, commands: dict[str, str]) -> list[str]:
    """The first paragraphs of the comment: what it is, kubectl's commands, what happens to pods that must stop."""
    kubectl = f"kubectl -n {pods.namespace}" if pods.namespace else "kubectl"
    lines = {name: "\n".join(f"{kubectl} {line}" for line in text.split("\n")) for name, text in commands.items()}
    return [
        *about(training, what),
        *rows({"submit": f"{kubectl} apply -f FILE", **lines}),
        *paragraph(
            "When a pod must stop (an eviction, a drained machine, pause, stop) it gets SIGTERM. All ranks then save "
            f"their state after the same step, within --grace_seconds={training.grace_seconds}, and every launcher "
            f"ends with exit code 12; {timeouts.POD_END_SECONDS} s are left for that. To continue from there, the "
            "script loads its newest checkpoint, if any (the reference trainer: --resume), from a volume that all pods "
            "mount."
        ),
    ]


# The common parts of a training's pods, for every controller.


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim and where it is mounted."""

    claim: str
    path: str
    read_only: bool = False

    @classmethod
    def read(cls, text: str) -> Volume:
        """``CLAIM:/path`` or ``CLAIM:/path:ro``. Raises ClusterError."""
        claim, _, rest = text.partition(":")
        path, _, mode = rest.partition(":")
        if not claim or not path or mode not in ("", "ro"):
            raise ClusterError(
                f"--volume={text[:120]!r} is not CLAIM:/path or CLAIM:/path:ro, the name of a PersistentVolumeClaim of "
                "the namespace and where to mount it; write for example --volume datasets:/data:ro"
            )
        return cls(check_subdomain("--volume", claim), check_path("--volume", path), mode == "ro")


@dataclass(frozen=True)
class Pods:
    """One pod per node. None and empty: not requested."""

    name: str
    image: str
    namespace: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0
    """Per pod."""
    gpu_resource: str = "nvidia.com/gpu"
    shared_memory: str | None = "1Gi"
    """Size of /dev/shm. None: the container runtime's default, usually 64 MB."""
    volumes: tuple[Volume, ...] = ()
    environment: tuple[str, ...] = ()
    """``NAME=VALUE`` each."""
    working_folder: str | None = None
    port: int = 6170

    def __post_init__(self) -> None:
        if not self.image or any(letter.isspace() for letter in self.image):
            raise ClusterError(
                f"--image={self.image!r} is not an image; write for example --image registry.local/train:1"
            )
        if self.namespace is not None:
            check_label("--namespace", self.namespace)
        if self.cpu is not None:
            check_cpu(self.cpu)
        memory = None if self.memory is None else check_memory("--memory", self.memory)
        shared = None if self.shared_memory is None else check_memory("--shm", self.shared_memory)
        if memory is not None and shared is not None and shared >= memory:
            raise ClusterError(
                f"--shm={self.shared_memory} is not below --memory={self.memory}: the content of /dev/shm counts as "
                "memory of the container; request more memory or less of /dev/shm"
            )
        if self.working_folder is not None:
            check_path("--workdir", self.working_folder)
        _refuse_nested([SHARED_MEMORY, *(volume.path for volume in self.volumes)])
        read_only = {volume.claim for volume in self.volumes if volume.read_only}
        if both := read_only & {volume.claim for volume in self.volumes if not volume.read_only}:
            raise ClusterError(f"--volume: {min(both)} is given with and without :ro; give one of the two")

    def resources(self) -> dict[str, Any]:
        """Requests equal limits: such pods are evicted last when a machine is short of memory."""
        wanted: dict[str, str] = {}
        if self.cpu:
            wanted["cpu"] = self.cpu
        if self.memory:
            wanted["memory"] = self.memory
        if self.gpus:
            wanted[self.gpu_resource] = str(self.gpus)
        return {"requests": wanted, "limits": wanted} if wanted else {}

    def variables(self, reserved: Iterable[str], own: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """The manifest's own variables, then the requested ones; values are unchanged."""
        given = check_environment(self.environment, reserved)
        pairs = {"PYTHONUNBUFFERED": "1", **(own or {}), **given}
        return [{"name": name, "value": literal(value)} for name, value in pairs.items()]

    def mounts(self) -> list[dict[str, Any]]:
        mounts: list[dict[str, Any]] = []
        if self.shared_memory:
            mounts.append({"name": "shared-memory", "mountPath": SHARED_MEMORY})
        names = self._names()
        for volume in self.volumes:
            read_only = {"readOnly": True} if volume.read_only else {}
            mounts.append({"name": names[volume.claim], "mountPath": volume.path, **read_only})
        return mounts

    def sources(self) -> list[dict[str, Any]]:
        """The pod's volumes, each claim once."""
        sources: list[dict[str, Any]] = []
        if self.shared_memory:
            memory = {"medium": "Memory", "sizeLimit": self.shared_memory}
            sources.append({"name": "shared-memory", "emptyDir": memory})
        for claim, name in self._names().items():
            read_only = any(volume.read_only for volume in self.volumes if volume.claim == claim)
            source = {"claimName": claim, **({"readOnly": True} if read_only else {})}
            sources.append({"name": name, "persistentVolumeClaim": source})
        return sources

    def _names(self) -> dict[str, str]:
        """Claim -> name of the volume, which is a label, while a claim's name may be longer and have dots."""
        claims = dict.fromkeys(volume.claim for volume in self.volumes)
        return {claim: f"claim-{number}" for number, claim in enumerate(claims)}

    def pod(self, name: str, training: Training, env: list[dict[str, Any]]) -> dict[str, Any]:
        """The spec of a pod with one container of this name, which runs the launcher."""
        container: dict[str, Any] = {"name": name, "image": self.image, **command(training.launch())}
        if self.working_folder:
            container["workingDir"] = self.working_folder
        container["env"] = env
        if resources := self.resources():
            container["resources"] = resources
        if mounts := self.mounts():
            container["volumeMounts"] = mounts
        spec: dict[str, Any] = {
            # Training communicates only with its own pods; variables such as MASTER_PORT that are derived from names
            # of services would be mistaken for an engine's.
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": training.grace_seconds + timeouts.POD_END_SECONDS,
            "containers": [container],
        }
        return {**spec, **({"volumes": self.sources()} if self.sources() else {})}


def command(words: Sequence[str]) -> dict[str, Any]:
    """A container's ``command`` and ``args``, which run exactly these words."""
    literals = [literal(word) for word in words]
    return {"command": literals[:_COMMAND_WORDS], "args": literals[_COMMAND_WORDS:]}


def literal(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in commands, arguments and values, and ``$$`` by ``$``: escape both."""
    return text.replace("$", "$$")


def _refuse_nested(paths: Sequence[str]) -> None:
    for i, path in enumerate(paths):
        for other in paths[:i]:
            if path.rstrip("/") == other.rstrip("/") or path == "/":
                raise ClusterError(f"--volume: something else is mounted at {path} already; choose another path")


# YAML parsers differ in what they treat as a number or a boolean (1e-3, 0o7, 12:30, y, no): only texts that are
# neither in any of them stay unquoted.
_PLAIN = re.compile(r"(?:--)?[A-Za-z/][A-Za-z0-9_./@=+-]*", re.ASCII)
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class _Dumper(yaml.SafeDumper):
    """Writes YAML that PyYAML and Kubernetes parse identically."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _NOT_TEXT
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def _to_yaml(comment: list[str], *documents: dict[str, Any]) -> str:
    """A comment, which ends with an empty line, then the documents, keys in the given order."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment[:-1])
    bodies = (
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True) for document in documents
    )
    return head + "---\n".join(bodies)
