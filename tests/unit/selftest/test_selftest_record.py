"""A selftest's record can be sent in: it names no machine."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from fleet_train.cluster.cluster import Cluster, assign
from fleet_train.selftest import record
from fleet_train.selftest.options import FAIL, OK, Options, Result, chosen
from fleet_train.selftest.ranks import Where, is_rank, request_of
from fleet_train.selftest.supervisor import command_of

CLUSTER = Cluster(assign(["10.0.0.1", "gpu-a.example.org"], 2, 6170), 0)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("rank 1 (10.0.0.1:6171) is gone", "rank 1 (node 0) is gone"),
        ("rank 3 (gpu-a.example.org:6171) is gone", "rank 3 (node 1) is gone"),
        ("peer_str = [10.0.0.1]:28808", "peer_str = [node 0]:28808"),
        ("from 10.0.0.11 and 192.168.7.7:80", "from <address> and <address>:80"),
        (f"on {socket.gethostname()}", "on <host>"),
        (f"{Path.home()}/x", "~/x"),
        ("paddle 3.3.1 after 1.5 s", "paddle 3.3.1 after 1.5 s"),
    ],
)
def test_texts_lose_their_names(text: str, clean: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert record.without_names(text, CLUSTER) == clean


def test_record_and_page(tmp_path: Path) -> None:
    results = [
        Result("devices", "backend", OK, "gloo", 0.1),
        Result("faults", "a rank is killed", FAIL, "rank 3 (gpu-a.example.org:6171) | said\nnothing", 2.0, {"x": 1}),
    ]
    made = record.make(CLUSTER, Options(), [record.facts()] * 2, results, 3.0)
    path = record.write(tmp_path / "new", made)
    assert path.name == f"{made['circumstances']['date'][:10]}-selftest-gloo-2x2.json"
    assert json.loads(path.read_text()) == made
    assert (made["failures"], made["exit_code"]) == (["a rank is killed"], 1)
    assert "| a rank is killed | FAIL | 2.0 | rank 3 (node 1) \\| said nothing |" in path.with_suffix(".md").read_text()
    assert "example.org" not in path.read_text()


def test_a_package_that_was_installed_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.fleet_train, "__file__", str(tmp_path / "site-packages/fleet_train/__init__.py"))
    made = record.make(CLUSTER, Options(), [record.facts()] * 2, [], 3.0)
    assert "commit" not in made["circumstances"]
    versions = record.write(tmp_path, made).with_suffix(".md").read_text().split("- Versions: ")[1].splitlines()[0]
    assert versions.endswith(f"fleet_train {record.fleet_train.__version__}.")


def test_command_says_what_was_asked_and_not_where() -> None:
    assert record.command_of(Options()) == "python -m fleet_train selftest"
    asked = chosen(["faults", "devices"], [], quick=True)
    assert record.command_of(asked) == "python -m fleet_train selftest --only devices --only faults --quick"


def test_backend_is_paddles_build_or_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "installed_paddle", lambda: ("paddlepaddle-gpu", "3.3.1"))
    assert record.backend_of({}) == "nccl"
    assert record.backend_of({"PADDLE_DISTRI_BACKEND": "gloo"}) == "gloo"
    monkeypatch.setattr(record, "installed_paddle", lambda: ("paddlepaddle", "3.3.1"))
    assert record.backend_of({}) == "gloo"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"PADDLE_LOCAL_RANK": "0"}, True),
        ({"PADDLE_RANK_IN_NODE": "0"}, True),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1"}, True),
        ({"PADDLE_TRAINER_ENDPOINTS": "a:1,b:1", "PADDLE_TRAINERS": "a,b"}, False),  # a pod of PaddleCloud
    ],
)
def test_a_rank_is_distinguished_from_a_shell(environ: dict[str, str], expected: bool) -> None:
    assert is_rank(environ) is expected


def test_our_launcher_is_asked_for_the_same_checks(tmp_path: Path) -> None:
    options = chosen([], ["overlap", "profiles"], quick=True)
    command = command_of(options, tmp_path / "out")
    request = request_of(command, Where(ips="10.0.0.1,10.0.0.2", nproc=3), tmp_path / "outcome")
    assert request.is_module
    assert request.hosts == ("10.0.0.1", "10.0.0.2")
    assert request.processes_per_node == 3
    words = list(request.command)
    skipped = [words[place + 1] for place, word in enumerate(words) if word == "--skip"]
    assert chosen([], skipped, "--quick" in words) == options
    assert request_of(command, Where(), tmp_path).processes_per_node == 2
