"""Each pod finds its rank from its manifest and its controller, and runs the script as given."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("kind", ["job", "paddlejob"])
def test_the_first_port_is_the_one_asked_for(kind: str) -> None:
    documents = manifests(kind, "--nodes=2", "--port=7100", "train.py")
    ports = [found.port for pod in range(2) if (found := detect(told_by_the_controller(kind, documents, pod)))]
    assert ports == [7100, 7100]


@pytest.mark.parametrize("kind", KINDS)
def test_one_pod_is_a_job_of_its_own(kind: str) -> None:
    found = detect(told_by_the_controller(kind, manifests(kind, "--nodes=1", "train.py"), 0))
    assert found is not None
    assert (found.index, found.count) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_launch_of_a_pod(kind: str) -> None:
    documents = manifests(kind, "--nodes=2", "--gpus=8", "train.py", "--epochs", "3")
    (container,) = pod_of(kind, documents)["containers"]
    faults = FaultPolicy(max_restarts=3)
    assert request_of(command_line(container, {})) == LaunchRequest(
        ("train.py", "--epochs", "3"), processes_per_node=8, join_timeout_seconds=900.0, faults=faults
    )


SET = ("--set=nccl_comm_num=2", "--set", "recompute_checkpoints=[a, b]")


@pytest.mark.parametrize("kind", KINDS)
def test_the_launch_of_a_pod_with_every_flag(kind: str) -> None:
    documents = manifests(
        kind, "--nodes=2", *[word for word in EVERYTHING if "workdir" not in word], *SET, "-m", "my.train", "-m"
    )
    (container,) = pod_of(kind, documents)["containers"]
    request = request_of(command_line(container, {}))
    assert (request.command, request.is_module, request.strategy) == (("my.train", "-m"), True, "multi_node")
    assert request.settings == ("nccl_comm_num=2", "recompute_checkpoints=[a, b]")
    assert (request.processes_per_node, request.join_timeout_seconds) == (2, 600.0)
    faults = request.faults
    assert (faults.max_restarts, faults.min_nodes, faults.grace_seconds) == (5, 2, 45.0)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_reach_the_script_as_they_are(kind: str) -> None:
    documents = manifests(kind, "--nodes=2", "train.py", *AWKWARD)
    (container,) = pod_of(kind, documents)["containers"]
    for pod in range(2):
        words = command_line(container, told_by_the_controller(kind, documents, pod))
        assert request_of(words).command == ("train.py", *AWKWARD)


@pytest.mark.parametrize("kind", KINDS)
def test_values_reach_the_environment_as_they_are(kind: str) -> None:
    given = {f"V{number}": value for number, value in enumerate(AWKWARD)}
    flags = [f"--env={name}={value}" for name, value in given.items()]
    told = told_by_the_controller(kind, manifests(kind, "--nodes=2", *flags, "train.py"), 1)
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
