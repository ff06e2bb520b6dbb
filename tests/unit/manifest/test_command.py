"""``python -m fleet_train manifest``: help, files, errors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleet_train.cli.manifest import command
from fleet_train.errors import ClusterError
from tests.support.manifests import IMAGE, manifests, pod_of, written

KINDS = ("slurm", "job", "paddlejob", "trainjob")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def needed(kind: str) -> list[str]:
    return [kind, "--nodes=2", *([] if kind == "slurm" else [IMAGE])]


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_the_examples_of_the_help_work(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    helped = run(*kind.split(), "--help")
    text = re.sub(r"\\\n\s*", " ", helped.output)
    examples = [line for line in text.splitlines() if "python -m fleet_train manifest" in line and "--nodes" in line]
    assert helped.exit_code == 0
    assert examples
    for example in examples:
        made = run(*shlex.split(example)[4:])
        assert made.exit_code == 0, made.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_not_overwritten_without_force(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "made"
    made = run(*needed(kind), f"--output={path}", "train.py")
    first = path.read_text()
    assert (made.exit_code, made.stdout, first) == (0, "", written(*needed(kind), "train.py"))
    assert made.stderr.endswith(f"start it with: {'sbatch' if kind == 'slurm' else 'kubectl apply -f'} {path}\n")
    again = run(*needed(kind), f"--output={path}", "other.py")
    assert (again.exit_code, path.read_text()) == (2, first)
    assert f"{path} exists; --force overwrites it" in again.stderr
    forced = run(*needed(kind), f"--output={path}", "--force", "other.py")
    assert (forced.exit_code, path.read_text()) == (0, written(*needed(kind), "other.py"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["made"]


def test_a_place_that_cannot_be_written_to_is_named_and_a_link_not_written_through(tmp_path: Path) -> None:
    result = run(*needed("job"), f"--output={tmp_path / 'none' / 'made'}", "train.py")
    assert isinstance(result.exception, ClusterError)
    assert re.search("--output .* cannot be written: No such file or directory; choose", str(result.exception))
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    made = run(*needed("job"), f"--output={tmp_path / 'link'}", "train.py")
    assert made.exit_code == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--launch_flags=--min_node=2"], "--min_nodes"),
        (["--launch_flags=--ips=a,b"], "--cluster_node_ips is not allowed"),
        (["--launch_flags=--dry-run"], "--dry_run is not allowed"),
        (["--launch_flags=other.py"], "the script and its arguments go at the end"),
        (["--launch_flags='a"], "No closing quotation"),
        (["--nodes=0"], "0 is not in the range"),
        (["--image=a b"], "is not an image"),
        (["--shm=8Gi", "--memory=8Gi"], "--shm=8Gi is not below --memory=8Gi"),
        (["--volume=a:/x", "--volume=b:/x/"], "something else is mounted at /x/ already"),
        (["--volume=a:/dev/shm"], "something else is mounted at /dev/shm"),
        (["--volume=a:/x", "--volume=a:/y:ro"], "a is given with and without :ro"),
        (["--workdir=here"], "is not an absolute path"),
        (["--set=nccl_comm_num=99"], "--set: nccl_comm_num: given 99; allowed: a whole number, 1 to 16, or auto"),
    ],
)
def test_mistakes_are_seen_before_anything_waits_for_machines(flags: list[str], said: str) -> None:
    result = run(*needed("job"), *flags, "train.py")
    assert result.exit_code != 0
    assert said in result.output + str(result.exception)
    assert "apiVersion" not in result.output


def test_each_kind_counts_its_own_names() -> None:
    for kind, most in (("job", 61), ("paddlejob", 54), ("trainjob", 48)):
        assert run(*needed(kind), f"--name={'x' * most}", "train.py").exit_code == 0
        assert f"shorten it to {most}" in str(run(*needed(kind), f"--name={'x' * (most + 1)}", "train.py").exception)


@pytest.mark.parametrize("kind", ["job", "paddlejob", "trainjob"])
def test_a_pod_has_time_to_save_and_to_report(kind: str) -> None:
    for grace, flags in ((30, []), (300, ["--grace_seconds=300"])):
        pod = pod_of(kind, manifests(kind, "--nodes=2", *flags, "train.py"))
        assert f"--grace_seconds={grace}" in pod["containers"][0]["args"]
        assert pod["terminationGracePeriodSeconds"] >= grace + 15  # docs/faults.md: more than 10 above


def test_trainer_2_2_has_no_field_for_that_and_limits_arguments() -> None:
    old = ["--trainer_version=2.2", "--nodes=2"]
    (container,) = pod_of("trainjob", manifests("trainjob", *old, "train.py"))["containers"]
    assert "--grace_seconds=10" in container["args"]  # of the 30 s that a pod has by itself
    refused = run("trainjob", *old, IMAGE, "--grace_seconds=11", "train.py")
    assert "give --grace_seconds=10 or less, or use Trainer 2.3" in str(refused.exception)
    result = run(*needed("trainjob"), "train.py", *map(str, range(200)))
    assert "a TrainJob's args are at most 128 words" in str(result.exception)
    assert run(*needed("job"), "train.py", *map(str, range(200))).exit_code == 0


def test_what_a_job_does_when_a_pod_ends() -> None:
    _, job = manifests("job", "--nodes=3", "--max_retries=4", "train.py")
    rules = job["spec"]["podFailurePolicy"]["rules"]

    def action(exit_code: int, evicted: bool = False) -> str:
        for rule in rules:
            codes = rule.get("onExitCodes", {}).get("values", [])
            if exit_code in codes or (evicted and "onPodConditions" in rule):
                return str(rule["action"])
        return "Count"

    assert {action(code, evicted=True) for code in (1, 2, 12, 137, 143)} == {"Ignore"}
    assert action(12) == "Ignore"
    assert [code for code in range(1, 256) if action(code) == "FailJob"] == [2, 3, 4, 7, 9, 10, 13, 14]
    # Counted: an own error, other launchers that were lost (11) or are of an earlier start (5, 6, 8), signals.
    assert {action(code) for code in (1, 5, 6, 8, 11, 137, 143)} == {"Count"}
    assert (job["spec"]["backoffLimitPerIndex"], job["spec"]["maxFailedIndexes"]) == (4, 0)


def test_the_service_is_that_of_the_jobs_pods() -> None:
    service, job = manifests("job", "--nodes=3", "--namespace=team-a", "--name=digits", "train.py")
    assert service["metadata"] == job["metadata"] == {"name": "digits", "namespace": "team-a"}
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "digits"}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert job["spec"]["template"]["spec"]["subdomain"] == "digits"


@pytest.mark.parametrize("kind", ["job", "paddlejob", "trainjob"])
def test_resources_and_volumes(kind: str) -> None:
    flags = "--gpus=4 --gpu_resource=amd.com/gpu --cpu=32 --memory=256Gi --shm=8Gi".split()
    volumes = ["--volume=team.data:/data:ro", "--volume=runs:/runs", "--volume=runs:/more"]
    pod = pod_of(kind, manifests(kind, "--nodes=2", *flags, *volumes, "train.py"))
    (container,) = pod["containers"]
    wanted = {"cpu": "32", "memory": "256Gi", "amd.com/gpu": "4"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    assert [(one["name"], one["mountPath"], one.get("readOnly", False)) for one in container["volumeMounts"]] == [
        ("shared-memory", "/dev/shm", False),
        ("claim-0", "/data", True),
        ("claim-1", "/runs", False),
        ("claim-1", "/more", False),
    ]
    assert pod["volumes"] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "claim-0", "persistentVolumeClaim": {"claimName": "team.data", "readOnly": True}},
        {"name": "claim-1", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    pod = pod_of(kind, manifests(kind, "--nodes=2", "--shm=0", "train.py"))
    assert "volumes" not in pod
    assert not pod["containers"][0].get("volumeMounts")
    if kind != "trainjob":
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
