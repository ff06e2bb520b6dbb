"""The common parts of a training's pods, for every controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.errors import ClusterError
from fleet_train.manifest.checks import (
    Training,
    check_cpu,
    check_environment,
    check_label,
    check_memory,
    check_path,
    check_subdomain,
)

END_SECONDS = 20
"""After --grace_seconds: notifying the other nodes, stopping remaining processes, writing the report."""
SHARED_MEMORY = "/dev/shm"
# The words of the command line that are the interpreter's and the launcher's; the rest are its arguments.
_COMMAND_WORDS = 4


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
            "terminationGracePeriodSeconds": training.grace_seconds + END_SECONDS,
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
